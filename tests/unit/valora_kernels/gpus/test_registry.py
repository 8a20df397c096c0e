"""Records of GPUs: the built-in ones, and those of other packages."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch

from tests.support.lora_cases import make_case
from valora_kernels.arrangements.registry import arrangement
from valora_kernels.atmm import shape_of, table_choice
from valora_kernels.gpus.detect import gpu_of
from valora_kernels.gpus.registry import GPUS, recorded
from valora_kernels.lookup import TilingTable, choose, is_measured, using
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
    TilingTable(gpu, entries).save(gpu.table)
    assert table_choice(case.weights, case.batch) == SMALL
    # The nearest one does not fit into 48 KB; on an H200 it does.
    assert choose(gpu, SHAPE).tiling.arrangement == "shrink_expand"
    assert TilingTable(GPUS["nvidia_h200"], entries).look_up(SHAPE).tiling == LARGE
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
    with pytest.raises(UnknownNameError, match="unknown GPU 'abacus': choose one of nvidia_h100"):
        GPUS["abacus"]


@pytest.mark.parametrize(
    ("name", "found"), [("NVIDIA H200", True), ("nvidia h200", True), ("NVIDIA H200 NVL", False)]
)
def test_records_describe_devices_by_name(name: str, found: bool) -> None:
    assert (recorded(name) is GPUS["nvidia_h200"]) is found


@pytest.mark.parametrize(
    ("name", "found"),
    [("NVIDIA H100 80GB HBM3", True), ("NVIDIA GH200 480GB", True), ("NVIDIA H100 PCIe", False)],
)
def test_gpus_with_the_same_chip_take_its_tilings(name: str, found: bool) -> None:
    gpu, measured = recorded(name), GPUS["nvidia_h200"]
    assert (gpu is GPUS["nvidia_h100"]) is found
    if gpu is None:
        return
    assert not is_measured(gpu)
    for shape in (SHAPE, replace(SHAPE, rows=77), Shape(11008, 4096, 1, 64, 300, 7.0)):
        assert choose(gpu, shape) == choose(measured, shape)
    own = Tiling("fused", 32, 64, 64, 0)
    with using(TilingTable(gpu, [(SHAPE, own)])):
        assert choose(gpu, SHAPE).tiling == own
        assert choose(measured, SHAPE).tiling != own
        other = replace(SHAPE, rows=64)  # not measured on this one yet
        assert choose(gpu, other) == choose(measured, other)
