"""Look-up of tilings: exact, nearest, default; the table's file."""

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from valora_kernels.arrangements.registry import arrangement
from valora_kernels.gpus.detect import generic
from valora_kernels.gpus.registry import GPUS
from valora_kernels.lookup import LookupMode, TilingTable, choose, table_of
from valora_kernels.registry import UnknownNameError
from valora_kernels.search import PRESETS, groups_of_model
from valora_kernels.tiling import Shape, Tiling

H200 = GPUS["nvidia_h200"]
SHAPE = Shape(4096, 4096, 1, 64, 64, 16.0)
LARGE = Shape(4096, 4096, 1, 64, 4096, 4.0)
FEW = Tiling("shrink_expand", 16, 64, 256, 512, 64, gather=True)
MANY = Tiling("fused", 64, 128, 64, 0, parts=2)


def test_modes() -> None:
    table = TilingTable(H200, [(SHAPE, FEW), (LARGE, MANY)])
    assert table.look_up(SHAPE) == (choice := table.look_up(SHAPE))
    assert (choice.tiling, choice.mode) == (FEW, LookupMode.EXACT)
    near = table.look_up(replace(SHAPE, rows=70))
    assert (near.tiling, near.mode) == (FEW, LookupMode.NEAREST)
    assert table.look_up(replace(LARGE, rows=3000)).tiling == MANY
    assert TilingTable(H200, []).look_up(SHAPE).mode is LookupMode.DEFAULT
    unmeasured = generic(
        "a GPU that nobody measured", processors=80, shared_memory=100 << 10, capability=(8, 0)
    )
    assert choose(unmeasured, SHAPE).mode is LookupMode.DEFAULT


def test_where_lora_comes_first_tilings_are_measured_apart() -> None:
    """Other tilings are taken only where none of the same kind is anywhere near."""
    first = replace(LARGE, rows=1024, adapters=8.0, first=True)
    table = TilingTable(H200, [(replace(first, first=False), FEW), (first, MANY)])
    assert table.look_up(first).tiling == MANY
    assert table.look_up(replace(first, rows=900, adapters=7.0)).tiling == MANY
    assert table.look_up(replace(first, first=False)).tiling == FEW
    assert table.look_up(replace(first, rows=900, adapters=7.0, first=False)).tiling == FEW
    short = replace(first, adapters=128.0)  # 8 rows each
    table = TilingTable(H200, [(replace(short, first=False), FEW), (first, MANY)])
    assert table.look_up(short).tiling == FEW


def test_other_input_widths_are_cut_into_as_many_parts() -> None:
    way = arrangement("shrink_expand")
    assert way.refit(FEW, 4096, 4096) is FEW
    assert way.refit(FEW, 4096, 11008).split == 1536  # 8 parts, a multiple of the step of 256
    assert -(-11008 // way.refit(FEW, 4096, 11008).split) == 8
    assert arrangement("fused").refit(MANY, 4096, 11008) is MANY


def test_what_does_not_fit_is_not_taken() -> None:
    """What a small rank allows may need more shared memory than there is at a large one."""
    greedy = Tiling("fused", 64, 128, 128, 0, stages=4)
    table = TilingTable(H200, [(LARGE, greedy), (SHAPE, FEW)])
    assert table.look_up(replace(LARGE, rows=4000)).tiling == greedy
    other = table.look_up(replace(LARGE, rank=256))
    assert other.tiling == FEW
    assert (
        TilingTable(H200, [(LARGE, greedy)]).look_up(replace(LARGE, rank=256)).mode
        is LookupMode.DEFAULT
    )


def test_a_tiling_that_leaves_processors_idle_is_passed_over() -> None:
    """132 processors: 128 tiles of 64 rows keep them busy, 136 take twice as long."""
    coarse, fine = (Tiling("fused", tile, 128, 128, 0, stages=4) for tile in (64, 16))
    full = replace(LARGE, rows=8192, adapters=1.0)
    half = replace(full, rows=6000)
    table = TilingTable(H200, [(full, coarse), (half, fine)])
    assert table.look_up(replace(full, rows=8000)).tiling == coarse
    assert table.look_up(replace(full, rows=8704)).tiling == fine


def test_tables_survive_the_disk(tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    TilingTable(H200, [(SHAPE, FEW), (LARGE, MANY)]).save(path, torch="2.11")
    again = TilingTable.load(path, H200)
    assert again.entries == {SHAPE: FEW, LARGE: MANY}
    assert json.loads(path.read_text())["torch"] == "2.11"
    other = replace(H200, name="another GPU")
    with pytest.raises(ValueError, match="expected the table of another GPU, got one of NVIDIA"):
        TilingTable.load(path, other)
    path.write_text('{"version": 99}')
    with pytest.raises(ValueError, match=r"expected version 2, got 99: delete it, and measure"):
        TilingTable.load(path, H200)


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text[:-20],
        lambda text: text.replace('"adapters"', '"tenants"'),
        lambda text: text.replace('"warps"', '"waves"'),
        lambda text: text.replace('"tilings"', '"tiles"'),
        lambda _: "[1]",
    ],
)
def test_what_is_no_table_is_said(tmp_path: Path, change: Callable[[str], str]) -> None:
    path = tmp_path / "gpu.json"
    TilingTable(H200, [(SHAPE, FEW)]).save(path)
    path.write_text(change(path.read_text()))
    with pytest.raises(ValueError, match=r"gpu\.json: no tiling table \(.*measure it again with"):
        TilingTable.load(path, H200)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("sideways", "unknown arrangement 'sideways': choose one of dense, fused, shrink_expand"),
        ("dense", "no table may choose the arrangement 'dense'"),
    ],
)
def test_a_table_names_only_arrangements_that_it_may(
    tmp_path: Path, name: str, message: str
) -> None:
    path = tmp_path / "gpu.json"
    TilingTable(H200, [(SHAPE, FEW), (LARGE, Tiling(name))]).save(path)
    with pytest.raises(UnknownNameError, match=message) as raised:
        table_of(replace(H200, table=path))
    assert str(path) in str(raised.value)


@pytest.mark.parametrize("name", sorted(GPUS))
def test_shipped_tables_hold_up(name: str) -> None:
    gpu = GPUS[name]
    table = table_of(gpu)
    assert table.entries
    for shape, tiling in table.entries.items():
        assert arrangement(tiling.arrangement).fits(tiling, shape, gpu)
        assert table.look_up(shape).mode is LookupMode.EXACT


def test_h200_table_covers_the_models() -> None:
    table = table_of(H200)
    for preset in PRESETS.values():
        for before, after in groups_of_model(preset):
            for rank in (16, 32, 64, 128):
                shape = Shape(before, sum(after), len(after), rank, 64, 16.0)
                choice = table.look_up(shape)
                assert choice.mode is not LookupMode.DEFAULT
                assert arrangement(choice.tiling.arrangement).fits(choice.tiling, shape, H200)


def test_look_up_needs_no_torch() -> None:
    script = "import sys; import valora_kernels.lookup; sys.exit('torch' in sys.modules)"
    kernels = str(Path(__file__).parents[3] / "kernels")
    assert subprocess.run([sys.executable, "-c", script], cwd=kernels, check=False).returncode == 0
