"""Look-up of tilings: exact, nearest, default; the table's file."""

import json
from dataclasses import replace

import pytest

from valora_kernels.arrangements import default_tiling, fits
from valora_kernels.gpus import GPUS, H200, generic
from valora_kernels.lookup import TilingTable, choose, table_of
from valora_kernels.tiling import Shape, Tiling

SHAPE = Shape(4096, 4096, 1, 64, 64, 16.0)
LARGE = Shape(4096, 4096, 1, 64, 4096, 4.0)
FEW = Tiling("shrink_expand", 16, 64, 256, 512, 64, gather=True)
MANY = Tiling("fused", 64, 128, 64, 0, parts=2)


def test_modes():
    table = TilingTable(H200, [(SHAPE, FEW), (LARGE, MANY)])
    assert table.look_up(SHAPE) == table.look_up(replace(SHAPE, rows=70)) == FEW
    assert table.look_up(replace(LARGE, rows=3000)) == MANY
    unmeasured = generic(
        "a GPU that nobody measured", processors=80, shared_memory=100 << 10, capability=(8, 0)
    )
    assert choose(unmeasured, SHAPE) == default_tiling(SHAPE)


def test_where_lora_comes_first_tilings_are_measured_apart():
    """Other tilings are taken only where none of the same kind is anywhere near."""
    first = replace(LARGE, rows=1024, adapters=8.0, first=True)
    table = TilingTable(H200, [(replace(first, first=False), FEW), (first, MANY)])
    for rows, adapters in ((1024, 8.0), (900, 7.0)):
        near = replace(first, rows=rows, adapters=adapters)
        assert table.look_up(near) == MANY
        assert table.look_up(replace(near, first=False)) == FEW
    short = replace(first, adapters=128.0)  # 8 rows each
    table = TilingTable(H200, [(replace(short, first=False), FEW), (first, MANY)])
    assert table.look_up(short) == FEW


def test_what_does_not_fit_is_not_taken():
    """What a small rank allows may need more shared memory than there is at a large one."""
    greedy = Tiling("fused", 64, 128, 128, 0, stages=4)
    table = TilingTable(H200, [(LARGE, greedy), (SHAPE, FEW)])
    assert table.look_up(replace(LARGE, rows=4000)) == greedy
    wide = replace(LARGE, rank=256)
    assert table.look_up(wide) == FEW
    assert TilingTable(H200, [(LARGE, greedy)]).look_up(wide) == default_tiling(wide)


def test_a_tiling_that_leaves_processors_idle_is_passed_over():
    """132 processors: 128 tiles of 64 rows keep them busy, 136 take twice as long."""
    coarse, fine = (Tiling("fused", tile, 128, 128, 0, stages=4) for tile in (64, 16))
    full = replace(LARGE, rows=8192, adapters=1.0)
    half = replace(full, rows=6000)
    table = TilingTable(H200, [(full, coarse), (half, fine)])
    assert table.look_up(replace(full, rows=8000)) == coarse
    assert table.look_up(replace(full, rows=8704)) == fine


def test_tables_survive_the_disk(tmp_path):
    path = tmp_path / "new" / "gpu.json"
    TilingTable(H200, [(SHAPE, FEW), (LARGE, MANY)]).save(path, torch="2.11")
    assert TilingTable.load(path, H200).entries == {SHAPE: FEW, LARGE: MANY}
    assert json.loads(path.read_text())["torch"] == "2.11"
    assert [file.name for file in path.parent.iterdir()] == ["gpu.json"]


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text[:-20],
        *(lambda text, pair=pair: text.replace(*pair) for pair in (
            ('"adapters"', '"tenants"'), ('"warps"', '"waves"'), ('"tilings"', '"tiles"'),
            ('"version": 2', '"version": 99'), ('"shrink_expand"', '"sideways"'),
            (H200.name, "another GPU"),
        )),
        *(lambda _, text=text: text for text in ("[1]", "[" * 9999, "\udcff")),
    ],
)  # fmt: skip
def test_what_is_no_table_is_refused(tmp_path, change):
    path = tmp_path / "gpu.json"
    TilingTable(H200, [(SHAPE, FEW)]).save(path)
    path.write_text(change(path.read_text()), errors="surrogateescape")
    with pytest.raises(ValueError, match=r"gpu\.json: no tiling table of .*measure it again with"):
        table_of(replace(H200, table=path))


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name)
def test_shipped_tables_hold_up(gpu):
    table = table_of(gpu)
    assert table.entries
    for shape, tiling in table.entries.items():
        assert fits(tiling, shape, gpu)
        assert table.look_up(shape) == tiling
