"""The search for the fastest tilings: its candidates, its rounds, and how it continues."""

from pathlib import Path

import pytest

from valora_kernels.arrangements.fused import Fused
from valora_kernels.arrangements.registry import arrangement
from valora_kernels.arrangements.shrink_expand import ShrinkExpand
from valora_kernels.gpus.registry import GPUS
from valora_kernels.search import (
    ADAPTERS,
    FEWER,
    ROWS,
    Search,
    cases_of,
    first_cases,
    groups_of_model,
)
from valora_kernels.tiling import Case, ProjectionGroup, Shape, Tiling

H200 = GPUS["nvidia_h200"]
SHAPE = Shape(4096, 4096, 1, 64, 64, 16.0)
LARGE = Shape(4096, 4096, 1, 64, 4096, 4.0)
FEW = Tiling("shrink_expand", 16, 64, 256, 512, 64, gather=True)
MANY = Tiling("fused", 64, 128, 64, 0, parts=2)


@pytest.mark.parametrize("rank", [16, 64, 128])
def test_search_has_candidates_for_every_shape(rank: int) -> None:
    group = ProjectionGroup(4096, (4096,), rank)
    steps, single = ShrinkExpand(), Fused()
    for rows, adapters, _ in cases_of(ROWS, ADAPTERS) + first_cases(ROWS, H200):
        first = steps.shrinks(group, rows, adapters, H200)
        assert first
        assert len(set(first)) == len(first)
        second = steps.candidates(group, rows, adapters, H200)
        assert second
        assert all(-(-4096 // tiling.split) <= 16 for tiling in second)
        for tiling in single.candidates(group, rows, adapters, H200):
            assert single.fits(tiling, group.shape(rows, adapters), H200)
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
    search = Search(H200, tmp_path / "journal", compilers=1)
    first, other = ProjectionGroup(4096, (4096,), 64), ProjectionGroup(11008, (4096,), 64)
    cases = [Case(64, 1), Case(1024, 16), Case(4096, 4), Case(1024, 8, first=True)]
    bar = module.Progress(2 * len(cases))
    search.full(first, cases, bar)
    search.derived(other, first, cases, bar)
    for case in cases:
        best = search.found[first.shape(*case)][0][1]
        assert (best.rows, best.outputs) == (32, 128)
        way = arrangement(best.arrangement)
        assert search.found[other.shape(*case)][0][1] == way.refit(best, 4096, 11008)
    assert Search(H200, tmp_path / "journal", compilers=1).found == search.found
    assert bar.done == bar.total


def test_where_lora_comes_first_no_adapter_has_too_many_rows() -> None:
    group = ProjectionGroup(64, (48, 16), 16)
    assert group.shape(*Case(1024, 2, first=True)) == Shape(64, 64, 2, 16, 1024, 8.0, first=True)
    assert group.shape(*Case(1024, 16, first=True)).adapters == 16
    assert [case.adapters for case in first_cases((128, 256, 4096), H200)] == [2, 32]


def test_search_continues_where_it_stopped(tmp_path: Path) -> None:
    journal = tmp_path / "table.partial.jsonl"
    first = Search(H200, journal, compilers=1)
    first.keep(SHAPE, [(7.5, FEW), (9.0, MANY)])
    assert Search(H200, journal, compilers=1).found == {SHAPE: [(7.5, FEW), (9.0, MANY)]}
    again = Search(H200, journal, compilers=1, known={LARGE: MANY, SHAPE: MANY})
    assert again.found == {LARGE: [(0.0, MANY)], SHAPE: [(7.5, FEW), (9.0, MANY)]}
