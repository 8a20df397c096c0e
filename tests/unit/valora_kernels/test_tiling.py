"""Look-up of tilings: exact, nearest, default; the table's file; what the search would try."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from valora_kernels.search import (
    ADAPTERS,
    FEWER,
    PRESETS,
    ROWS,
    Group,
    Search,
    cases_of,
    expands,
    groups_of_model,
    shrinks,
    single_kernels,
)
from valora_kernels.tiling import (
    SHARED_MEMORY,
    TABLES,
    Kind,
    Mode,
    Shape,
    Table,
    Tiling,
    choose,
    refit,
    shared_memory,
    table_path,
)

SHAPE = Shape(4096, 4096, 1, 64, 64, 16.0)
LARGE = Shape(4096, 4096, 1, 64, 4096, 4.0)
FEW = Tiling(Kind.PAIR, 16, 64, 256, 512, 64, gather=True)
MANY = Tiling(Kind.ROWS, 64, 128, 64, 0, parts=2)


def test_modes() -> None:
    table = Table("some GPU", [(SHAPE, FEW), (LARGE, MANY)])
    assert table.look_up(SHAPE) == (choice := table.look_up(SHAPE))
    assert (choice.tiling, choice.mode) == (FEW, Mode.EXACT)
    near = table.look_up(replace(SHAPE, rows=70))
    assert (near.tiling, near.mode) == (FEW, Mode.NEAREST)
    assert table.look_up(replace(LARGE, rows=3000)).tiling == MANY
    assert Table("some GPU", []).look_up(SHAPE).mode is Mode.DEFAULT
    assert choose("a GPU that nobody measured", SHAPE).mode is Mode.DEFAULT


def test_other_input_widths_are_cut_into_as_many_parts() -> None:
    assert refit(FEW, 4096, 4096) is FEW
    assert refit(FEW, 4096, 11008).split == 1536  # 8 parts, a multiple of the step of 256
    assert -(-11008 // refit(FEW, 4096, 11008).split) == 8
    assert refit(MANY, 4096, 11008) is MANY


def test_what_does_not_fit_is_not_taken() -> None:
    """What a small rank allows may need more shared memory than there is at a large one."""
    greedy = Tiling(Kind.ROWS, 64, 128, 128, 0, stages=4)
    table = Table("some GPU", [(LARGE, greedy), (SHAPE, FEW)])
    assert table.look_up(replace(LARGE, rows=4000)).tiling == greedy
    other = table.look_up(replace(LARGE, rank=256))
    assert other.tiling == FEW
    assert (
        Table("some GPU", [(LARGE, greedy)]).look_up(replace(LARGE, rank=256)).mode is Mode.DEFAULT
    )


def test_a_tiling_that_leaves_processors_idle_is_passed_over() -> None:
    """132 processors: 128 tiles of 64 rows keep them busy, 136 take twice as long."""
    coarse, fine = (Tiling(Kind.ROWS, tile, 128, 128, 0, stages=4) for tile in (64, 16))
    full = replace(LARGE, rows=8192, adapters=1.0)
    half = replace(full, rows=6000)
    table = Table("some GPU", [(full, coarse), (half, fine)])
    assert table.look_up(replace(full, rows=8000)).tiling == coarse
    assert table.look_up(replace(full, rows=8704)).tiling == fine


def test_tables_survive_the_disk(tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    Table("some GPU", [(SHAPE, FEW), (LARGE, MANY)]).save(path, torch="2.11")
    again = Table.load(path)
    assert again.gpu == "some GPU"
    assert again.entries == {SHAPE: FEW, LARGE: MANY}
    assert json.loads(path.read_text())["torch"] == "2.11"
    path.write_text('{"version": 99}')
    with pytest.raises(ValueError, match="expected version 1, got 99"):
        Table.load(path)


@pytest.mark.parametrize("path", sorted(TABLES.glob("*.json")), ids=lambda path: path.stem)
def test_shipped_tables_hold_up(path: Path) -> None:
    table = Table.load(path)
    assert table_path(table.gpu) == path
    for shape, tiling in table.entries.items():
        assert shared_memory(tiling, shape.rank) <= SHARED_MEMORY
        assert table.look_up(shape).mode is Mode.EXACT


def test_h200_table_covers_the_models() -> None:
    table = Table.load(table_path("NVIDIA H200"))
    for preset in PRESETS.values():
        for before, after in groups_of_model(preset):
            for rank in (16, 32, 64, 128):
                shape = Shape(before, sum(after), len(after), rank, 64, 16.0)
                choice = table.look_up(shape)
                assert choice.mode is not Mode.DEFAULT
                assert shared_memory(choice.tiling, rank) <= SHARED_MEMORY


def test_look_up_needs_no_torch() -> None:
    script = "import sys; import valora_kernels.tiling; sys.exit('torch' in sys.modules)"
    kernels = str(Path(__file__).parents[3] / "kernels")
    assert subprocess.run([sys.executable, "-c", script], cwd=kernels, check=False).returncode == 0


@pytest.mark.parametrize("rank", [16, 64, 128])
def test_search_has_candidates_for_every_shape(rank: int) -> None:
    group = Group(4096, (4096,), rank)
    for rows, adapters in cases_of(ROWS, ADAPTERS):
        first = shrinks(group, rows, adapters)
        assert first
        assert len(set(first)) == len(first)
        second = [t for tiling in first for t in expands(tiling, group, rows, adapters)]
        assert second
        for tiling in [*second, *single_kernels(group, rows, adapters)]:
            assert tiling.kind is Kind.ROWS or -(-4096 // tiling.split) <= 16
    assert set(FEWER) <= set(cases_of(ROWS, ADAPTERS))


def test_projections_of_a_model() -> None:
    config = {
        "text_config": {
            "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
            "intermediate_size": 96,
        }
    }  # fmt: skip
    assert groups_of_model(config) == [
        (64, (64,)), (64, (32,)), (64, (64, 32, 32)), (64, (96,)), (64, (96, 96)), (96, (64,)),
    ]  # fmt: skip


def test_search_finds_the_fastest_and_passes_it_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a made-up clock, by which tiles of 32 rows and 128 columns are the fastest."""
    from valora_kernels import search as module

    def clock(calls: list[tuple[str, Tiling]], **_: object) -> list[float]:
        _, tiling = calls[0]
        slow = (tiling.rows != 32) + 0.1 * (tiling.outputs != 128) + 0.01 * tiling.gather
        return [10.0 + slow + 0.001 * (tiling.split != 1024)]

    monkeypatch.setattr(module, "replay_times", clock)
    monkeypatch.setattr(module, "call_of", lambda step, tiling, work, one: (step, tiling))
    monkeypatch.setattr(module, "_compile", lambda job: None)
    monkeypatch.setattr(module, "workload", lambda *_: type("Work", (), {"sets": [None]}))
    search = Search(tmp_path / "journal", compilers=1)
    first, other = Group(4096, (4096,), 64), Group(11008, (4096,), 64)
    cases = [(64, 1), (1024, 16), (4096, 4)]
    bar = module.Progress(2 * len(cases))
    search.full(first, cases, bar)
    search.derived(other, first, cases, bar)
    for case in cases:
        best = search.found[first.shape(*case)][0][1]
        assert (best.rows, best.outputs) == (32, 128)
        assert search.found[other.shape(*case)][0][1] == refit(best, 4096, 11008)
    assert Search(tmp_path / "journal", compilers=1).found == search.found
    assert bar.done == bar.total


def test_search_continues_where_it_stopped(tmp_path: Path) -> None:
    journal = tmp_path / "table.partial.jsonl"
    first = Search(journal, compilers=1)
    first.keep(SHAPE, [(7.5, FEW), (9.0, MANY)])
    assert Search(journal, compilers=1).found == {SHAPE: [(7.5, FEW), (9.0, MANY)]}
    again = Search(journal, compilers=1, known={LARGE: MANY, SHAPE: MANY})
    assert again.found == {LARGE: [(0.0, MANY)], SHAPE: [(7.5, FEW), (9.0, MANY)]}
