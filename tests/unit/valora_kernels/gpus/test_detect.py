"""The record of a GPU that nobody registered, read from the driver."""

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from valora_kernels.gpus.detect import gpu_of
from valora_kernels.gpus.registry import GPUS
from valora_kernels.lookup import LookupMode, choose
from valora_kernels.project import project_tiling
from valora_kernels.tiling import Shape

SHAPE = Shape(4096, 4096, 1, 64, 4096, 4.0)


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    gpu_of.cache_clear()
    yield
    gpu_of.cache_clear()


@pytest.mark.parametrize("capability", [(8, 0), (9, 0)])
def test_a_gpu_without_a_record_is_read_from_the_driver(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capability: tuple[int, int]
) -> None:
    properties = SimpleNamespace(
        multi_processor_count=108,
        shared_memory_per_block_optin=163 << 10,
        major=capability[0],
        minor=capability[1],
    )
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA Abacus 80GB")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    with caplog.at_level("WARNING"):
        gpu = gpu_of(torch.device("cuda"))
        assert gpu_of(torch.device("cuda")) is gpu
    assert caplog.text.count("NVIDIA Abacus 80GB has no record") == 1
    assert (gpu.processors, gpu.shared_memory, gpu.capability) == (108, 152 << 10, capability)
    assert gpu.table is not None
    assert gpu.table.name == "nvidia_abacus_80gb.json"
    assert gpu.direct == GPUS["nvidia_h200"].direct
    assert choose(gpu, SHAPE).mode is LookupMode.DEFAULT
    # Our own base products need the shared memory of GPUs of compute capability 9 and 10.
    assert (project_tiling(gpu, 64, (4096,)) is not None) is (capability[0] == 9)
