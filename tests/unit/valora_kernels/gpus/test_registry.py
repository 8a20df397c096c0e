"""Records of GPUs: built-in, of other packages, and read from the driver where there is none."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from tests.support.lora_cases import make_case
from valora_kernels.arrangements.registry import arrangement
from valora_kernels.atmm import shape_of, table_choice
from valora_kernels.gpus.detect import gpu_of
from valora_kernels.gpus.registry import GPUS, recorded
from valora_kernels.lookup import LookupMode, Table, choose
from valora_kernels.project import product_tiling, project_tiling
from valora_kernels.registry import UnknownNameError
from valora_kernels.tiling import Shape, Tiling

Install = Callable[[str, str, str], str]

EXAMPLE = """
from pathlib import Path

from valora_kernels.gpus.base import Gpu

extension = Gpu(
    name="Example GPU",
    patterns=("Example GPU*", "cpu"),
    processors=8,
    shared_memory=48 << 10,
    capability=(9, 0),
    table=Path(__file__).with_suffix(".json"),  # valora-tile writes it
)
"""

SHAPE = Shape(4096, 4096, 1, 64, 4096, 4.0)
LARGE = Tiling("fused", 64, 128, 128, 0, stages=4)
SMALL = Tiling("shrink_expand", 16, 64, 64, 512, 16, gather=True)


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    gpu_of.cache_clear()
    yield
    gpu_of.cache_clear()


def test_a_record_of_another_package_decides_what_is_chosen(installed: Install) -> None:
    installed("valora.gpus", "example", EXAMPLE)
    gpu = recorded("Example GPU 16 GB")
    assert gpu is not None
    assert gpu is GPUS["example"] is gpu_of(torch.device("cpu"))
    assert gpu.table is not None
    case = make_case(64, [64, 8], 64, (64,), dtype=torch.float32, device="cpu")
    shape = shape_of(case.weights, case.batch)
    entries = [(shape, SMALL), (replace(SHAPE, rows=4000), LARGE)]
    Table(gpu, entries).save(gpu.table)
    assert table_choice(case.weights, case.batch) == SMALL
    # The nearest one does not fit into 48 KB; on an H200 it does.
    assert choose(gpu, SHAPE).tiling.arrangement == "shrink_expand"
    assert Table(GPUS["nvidia_h200"], entries).look_up(SHAPE).tiling == LARGE
    assert project_tiling(gpu, 64, (4096,)) is None
    assert product_tiling(gpu, 4, 4096) is None


def test_fewer_processors_take_more_rounds(installed: Install) -> None:
    """128 tiles fill 132 processors once and 8 processors many times; finer ones end sooner."""
    installed("valora.gpus", "small", EXAMPLE)
    example, h200 = GPUS["small"], GPUS["nvidia_h200"]
    full = replace(SHAPE, rows=8192, adapters=1.0)
    tile = Tiling("fused", 64, 64, 64, 0, stages=2)
    assert arrangement("fused").rounds(tile, full, h200) == 1
    assert arrangement("fused").rounds(tile, full, example) == 16


def test_unknown_gpus_are_refused_by_name_and_the_known_ones_listed() -> None:
    with pytest.raises(UnknownNameError, match="unknown GPU 'abacus': choose one of nvidia_h200"):
        GPUS["abacus"]


@pytest.mark.parametrize(
    ("name", "found"), [("NVIDIA H200", True), ("nvidia h200", True), ("NVIDIA H200 NVL", False)]
)
def test_records_describe_devices_by_name(name: str, found: bool) -> None:
    assert (recorded(name) is GPUS["nvidia_h200"]) is found


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


def test_the_h200_computes_few_rows_by_own_products() -> None:
    gpu = GPUS["nvidia_h200"]
    for rows, outputs, tile in (
        (16, (4096,), (16, 32)),
        (17, (4224,), (64, 32)),
        (64, (4096, 4096, 4096), (64, 64)),
        (128, (4096,), (64, 64)),
        (256, (4096,), (64, 128)),
        (1024, (4096,), (128, 256)),
    ):
        tiling = project_tiling(gpu, rows, outputs)
        assert tiling is not None
        assert (tiling.rows, tiling.outputs, tiling.fold) == (*tile, rows == 1024)
    assert project_tiling(gpu, 16, (1024, 1024)) is None  # too few columns
    assert project_tiling(gpu, 257, (4096,)) is None
    assert project_tiling(gpu, 200, (12288,)) is None  # y is too large
    assert project_tiling(gpu, 1024, (2048, 2048)) is None
    assert product_tiling(gpu, 16, 8192) != product_tiling(gpu, 16, 4096) is not None
    assert product_tiling(gpu, 17, 8192) is product_tiling(gpu, 0, 8192) is None
