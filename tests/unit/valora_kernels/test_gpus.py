"""The records of GPUs: which describes a device, and what it decides."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from tests.support.lora_cases import make_case
from valora_kernels.arrangements import default_tiling
from valora_kernels.atmm import shape_of, table_choice
from valora_kernels.gpus import H100, H200, Gpu, gpu_of, recorded
from valora_kernels.lookup import TilingTable, choose, using
from valora_kernels.project import project_tiling
from valora_kernels.tiling import Shape, Tiling

SHAPE = Shape(4096, 4096, 1, 64, 4096, 4.0)
EXAMPLE = Gpu("Example GPU", ("Example GPU*", "cpu"), 8, 48 << 10, (9, 0))


@pytest.fixture(autouse=True)
def _fresh():
    gpu_of.cache_clear()
    yield
    gpu_of.cache_clear()


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("NVIDIA H200", H200), ("nvidia h200", H200), ("NVIDIA H200 NVL", H100),
        ("NVIDIA H100 80GB HBM3", H100), ("NVIDIA GH200 480GB", H100), ("NVIDIA H100 PCIe", None),
    ],
)  # fmt: skip
def test_records_describe_devices_by_name(name, found):
    assert recorded(name) is found


def test_a_record_of_another_package_decides_what_is_chosen(installed):
    installed("valora.gpus", "example", f"from {__name__} import EXAMPLE as extension")
    assert EXAMPLE is gpu_of(torch.device("cpu")) is recorded("Example GPU 16 GB")
    large = Tiling("fused", 64, 128, 128, 0, stages=4)
    small = Tiling("shrink_expand", 16, 64, 64, 512, 16, gather=True)
    case = make_case(64, [64, 8], 64, (64,), dtype=torch.float32, device="cpu")
    entries = [(shape_of(case.weights, case.batch), small), (replace(SHAPE, rows=4000), large)]
    with using(TilingTable(EXAMPLE, entries)):
        assert table_choice(case.weights, case.batch) == small
        # The nearest one does not fit into 48 KB; on an H200 it does.
        assert choose(EXAMPLE, SHAPE).arrangement == "shrink_expand"
    assert TilingTable(H200, entries).look_up(SHAPE) == large
    assert project_tiling(EXAMPLE, 64, (4096,)) is None
    assert project_tiling(EXAMPLE, 4, (4096,), lora=False) is None


@pytest.mark.parametrize("capability", [(8, 0), (9, 0)])
def test_a_gpu_without_a_record_is_read_from_the_driver(monkeypatch, caplog, capability):
    memory = {"shared_memory_per_block_optin": 163 << 10, "multi_processor_count": 108}
    properties = SimpleNamespace(major=capability[0], minor=capability[1], **memory)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA Abacus 80GB")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    with caplog.at_level("WARNING"):
        gpu = gpu_of(torch.device("cuda"))
        assert gpu_of(torch.device("cuda")) is gpu
    assert caplog.text.count("NVIDIA Abacus 80GB has no record") == 1
    assert (gpu.processors, gpu.shared_memory, gpu.capability) == (108, 152 << 10, capability)
    assert gpu.table is not None
    assert gpu.table.name == "nvidia_abacus_80gb.json"
    assert choose(gpu, SHAPE) == default_tiling(SHAPE)
    # Our own base products need the shared memory of GPUs of compute capability 9 and 10.
    assert (project_tiling(gpu, 64, (4096,)) is not None) is (capability[0] == 9)
