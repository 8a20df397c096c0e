"""The search for the fastest tilings: its candidates, its rounds, and how it continues."""

import json
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from valora_kernels.arrangements.fused import Fused
from valora_kernels.arrangements.registry import arrangement
from valora_kernels.arrangements.shrink_expand import ShrinkExpand
from valora_kernels.gpus.registry import GPUS
from valora_kernels.lookup import TilingTable
from valora_kernels.search import (
    ADAPTERS,
    FEWER,
    ROWS,
    InputError,
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


def test_a_journal_whose_last_line_is_cut_off_is_continued(tmp_path: Path) -> None:
    journal = tmp_path / "table.partial.jsonl"
    first = Search(H200, journal, compilers=1)
    first.keep(SHAPE, [(7.5, FEW)])
    first.keep(LARGE, [(9.0, MANY)])
    journal.write_text(journal.read_text()[:-30])
    second = Search(H200, journal, compilers=1)
    assert second.found == {SHAPE: [(7.5, FEW)]}
    second.keep(LARGE, [(8.0, MANY)])
    found = Search(H200, journal, compilers=1).found
    assert found == {SHAPE: [(7.5, FEW)], LARGE: [(8.0, MANY)]}


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text.replace('"adapters"', '"tenants"'),
        lambda text: text.replace(H200.name, "another GPU"),
        lambda _: "[]\n",
    ],
)
def test_a_journal_of_another_kind_is_refused(tmp_path: Path, change: Callable[[str], str]) -> None:
    journal = tmp_path / "table.partial.jsonl"
    Search(H200, journal, compilers=1).keep(SHAPE, [(7.5, FEW)])
    journal.write_text(change(journal.read_text()))
    with pytest.raises(InputError, match=r"cannot be continued \(.*\): delete it to begin anew"):
        Search(H200, journal, compilers=1)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "name a --model or a --shape"),
        (["--model", "8b"], "--model 8b: No such file or directory: name a config.json, or one of"),
        (["--model", "none.json"], "--model none.json: this is no JSON: name a model's config"),
        (["--model", "list.json"], "--model list.json: this is no JSON object: name a model's"),
        (["--model", "few.json"], "few.json: it has no num_attention_heads, where .*use --shape"),
        (["--model", "zero.json"], "zero.json: num_attention_heads is 0, where a model's config"),
        (["--model", "odd.json"], "odd.json: expected widths that 8 divides, got 60"),
        (["--shape", "4096"], "--shape 4096: write in:out"),
        (["--shape", "64:a"], "--shape 64:a: write in:out"),
        (["--shape", "64:8,8,8,8"], "expected at most 3 outputs, got 4"),
        (["--shape", "64:0"], "expected widths that 8 divides, got 0"),
        (["--shape", "64:64", "--ranks", "16", "-8"], "--ranks: expected powers of two .*got -8"),
        (["--shape", "64:64", "--ranks", "24"], "--ranks: expected powers of two .*got 24"),
        (["--shape", "64:64", "--compilers", "0"], "--compilers: expected at least 1, got 0"),
        (
            ["--shape", "64:64", "--output", "list.json/t"],
            "list.json: File exists: name a file .*--output",
        ),
        (["--shape", "64:64", "--output", "list.json"], "list.json: no tiling table .*--output"),
        (["--shape", "64:64", "--output", "."], "is a folder: name a file with --output"),
    ],
)
def test_what_it_cannot_measure_is_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    said: str,
) -> None:
    """In one sentence, before anything is measured or written."""
    from valora_kernels import search as module

    sizes = {"hidden_size": 60, "num_attention_heads": 4, "intermediate_size": 96}
    files = {
        "none.json": "nothing",
        "list.json": "[1]",
        "few.json": json.dumps({"text_config": None, "hidden_size": 64}),
        "zero.json": json.dumps(sizes | {"num_attention_heads": 0}),
        "odd.json": json.dumps(sizes | {"num_key_value_heads": None}),
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["valora-tile", *arguments])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(module, "gpu_of", lambda _: replace(H200, table=tmp_path / "table.json"))
    with pytest.raises(SystemExit) as ended:
        module.main()
    assert ended.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert re.search(said, last), last
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(files)


def test_shapes_that_nothing_computes_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole table was lost at the end, as no candidate of one shape compiled."""
    from valora_kernels import search as module

    table = tmp_path / "new" / "table.json"

    def run(search: Search, *_: object) -> module.Progress:
        search.keep(SHAPE, [(7.5, FEW)])
        search.keep(LARGE, [])
        return module.Progress(2)

    monkeypatch.setattr(module, "_run", run)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(module, "gpu_of", lambda _: H200)
    given = ["valora-tile", "--shape", "64:64", "--compilers", "1", "--output", str(table)]
    monkeypatch.setattr(sys, "argv", given)
    module.main()
    assert TilingTable.load(table, H200).entries == {SHAPE: FEW}
    assert [path.name for path in table.parent.iterdir()] == ["table.json"]
