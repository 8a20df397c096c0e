"""The search for the fastest tilings: its candidates, its rounds, and how it continues."""

import json
import re
import sys
from dataclasses import replace

import pytest
import torch

from tests.support.cases import others_slow
from tests.support.lora_cases import assert_near, make_case
from valora_kernels import search as module
from valora_kernels.arrangements import (
    arrangements,
    expands,
    fits,
    fused_tilings,
    refit,
    shrinks,
)
from valora_kernels.atmm import atmm
from valora_kernels.gpus import H200
from valora_kernels.lookup import TilingTable
from valora_kernels.reference import atmm_reference
from valora_kernels.search import ADAPTERS, FEWER, ROWS, Search, cases_of, first_cases
from valora_kernels.tiling import Arrangement, Case, ProjectionGroup, Shape, Tiling

NOTHING = TilingTable(H200, [])
GROUP = ProjectionGroup(4096, (4096,), 64)
CASES = [Case(64, 1), Case(1024, 16), Case(4096, 4), Case(1024, 8, first=True)]


@pytest.fixture
def clock(monkeypatch):
    """A made-up clock, by which tiles of 32 rows and 128 columns are the fastest."""
    timed = []

    def times(calls, **_):
        step, tiling = calls[0]
        timed.append(step)
        slow = (tiling.rows != 32) + 0.1 * (tiling.outputs != 128) + 0.01 * tiling.gather
        slow -= 5 * (tiling.arrangement == "in_torch")
        return [10.0 + slow + 0.001 * (tiling.split != 1024)]

    monkeypatch.setattr(module, "replay_times", times)
    monkeypatch.setattr(module, "call_of", lambda step, tiling, work, one: (step, tiling))
    monkeypatch.setattr(module, "run_once", lambda job: None)
    monkeypatch.setattr(module, "workload", lambda *_, **__: type("Work", (), {"sets": [None]}))
    return timed


@pytest.mark.parametrize("rank", others_slow([64], [16, 64, 128]))
def test_search_has_candidates_for_every_shape(rank):
    group = ProjectionGroup(4096, (4096,), rank)
    for rows, adapters, _ in cases_of(ROWS, ADAPTERS) + first_cases(ROWS, H200):
        first = shrinks(group, rows, adapters, H200)
        assert first
        assert len(set(first)) == len(first)
        second = [t for one in first for t in expands(one, group, rows, adapters, H200)]
        assert second
        assert all(-(-4096 // tiling.split) <= 16 for tiling in second)
        for tiling in fused_tilings(group, rows, adapters, H200):
            assert fits(tiling, group.shape(rows, adapters), H200)
    assert set(FEWER) <= set(cases_of(ROWS, ADAPTERS))


def test_search_finds_the_fastest_passes_it_on_and_continues(tmp_path, clock):
    other, file = ProjectionGroup(11008, (4096,), 64), tmp_path / "table.json"
    search = Search(NOTHING, file, compilers=1)
    search.full(GROUP, CASES)
    search.derived(other, CASES)
    for case in CASES:
        best = search.table.entries[GROUP.shape(*case)]
        assert (best.rows, best.outputs) == (32, 128)
        assert search.table.entries[other.shape(*case)] == refit(best, 4096, 11008)
    assert search.done == 2 * len(CASES)
    clock.clear()
    again = Search(TilingTable.load(file, H200), file, compilers=1)
    assert again.table.entries == search.table.entries
    again.full(GROUP, CASES)
    again.derived(other, CASES)
    assert not clock


def test_shapes_that_nothing_computes_are_left_out(tmp_path, monkeypatch, clock):
    monkeypatch.setattr(module, "run_once", lambda job: "too large" if job.first else None)
    search = Search(NOTHING, tmp_path / "table.json", compilers=1)
    search.full(GROUP, CASES)
    assert search.table.entries.keys() == {GROUP.shape(*case) for case in CASES[:-1]}


def in_torch(tiling, *given, add=True):
    atmm_reference(*given)


def searched(time, *_):
    return time("all", [Tiling("in_torch")], 3)


IN_TORCH = Arrangement(in_torch, lambda *_: 0, lambda *_: 1, searched)


@pytest.fixture
def added(installed):
    installed("valora.arrangements", "in_torch", f"from {__name__} import IN_TORCH as extension")
    arrangements.cache_clear()
    yield
    arrangements.cache_clear()


@pytest.mark.usefixtures("added")
def test_an_arrangement_of_another_package_computes_and_is_searched(tmp_path, clock):
    case = make_case(19, [8, 16, 24], 64, (64, 32), dtype=torch.float32, device="cpu")
    want = case.expected()
    atmm(case.ys, case.x, case.weights, case.batch, tiling=Tiling("in_torch"))
    for one, other in zip(case.ys, want, strict=True):
        assert_near(one, other)
    with pytest.raises(ValueError, match=r"'sideways': choose one of in_torch, shrink_expand, "):
        atmm(case.ys, case.x, case.weights, case.batch, tiling=Tiling("sideways"))
    search = Search(NOTHING, tmp_path / "table.json", compilers=1)
    search.full(GROUP, [Case(64, 4)])
    table, shape = TilingTable.load(search.file, H200), GROUP.shape(64, 4)
    assert table.entries == {shape: Tiling("in_torch")}
    assert table.look_up(replace(shape, rows=70)) == Tiling("in_torch")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "name a --model or a --shape"),
        (["--model", "8b"], "--model: 8b: .*No such file .*name a model's config.json, one of 7b"),
        (["--model", "few.json"], "few.json: num_attention_heads is None, .*use --shape"),
        (["--model", "odd.json"], "odd.json: expected widths that 8 divides, got 60"),
        (["--model", "list.json"], "list.json: maximum recursion depth .*use --shape"),
        (["--shape", "4096"], "--shape: 4096: .*write in:out"),
        (["--shape", "64:8,8,8,8"], "expected at most 3 outputs, got 4"),
        (["--shape", "64:64", "--ranks", "16", "24"], "--ranks: invalid choice: 24 .*16, 32"),
        (["--shape", "64:64", "--output", "list.json/t"], "list.json.*name another file"),
        (["--shape", "64:64", "--output", "list.json"], "list.json: no tiling table .*--output"),
        (["--shape", "64:64", "--output", "."], "name another file with --output"),
    ],
)
def test_what_it_cannot_measure_is_refused(tmp_path, monkeypatch, capsys, arguments, said):
    """In one sentence, before anything is measured or written."""
    sizes = {"hidden_size": 60, "num_attention_heads": 4, "intermediate_size": 96}
    files = {
        "list.json": "[" * 9999,
        "few.json": json.dumps({"text_config": None, "hidden_size": 64}),
        "odd.json": json.dumps(sizes | {"num_key_value_heads": None}),
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["valora-tile", *arguments])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(module, "gpu_of", lambda _: H200)
    with pytest.raises(SystemExit) as ended:
        module.main()
    assert ended.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert re.search(said, last), last
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(files)


@pytest.mark.parametrize("again", [False, True])
def test_the_command_adds_to_the_table_and_continues(tmp_path, monkeypatch, clock, again):
    path, one, two = tmp_path / "table.json", GROUP.shape(1, 1), GROUP.shape(4, 1)
    old, other = Tiling("shrink_expand", 16), Shape(64, 64, 1, 16, 1, 1.0)
    TilingTable(H200, [(one, old), (other, old)]).save(path)
    TilingTable(H200, [(two, old)]).save(tmp_path / "table.partial.json")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(module, "gpu_of", lambda _: H200)
    monkeypatch.setattr(module, "ROWS", (1, 4))
    monkeypatch.setattr(module, "ADAPTERS", (1, 4))
    given = ["--shape", "4096:4096", "--ranks", "64", "--compilers", "1", "--output", str(path)]
    monkeypatch.setattr(sys, "argv", ["valora-tile", *given, *["--again"] * again])
    module.main()
    table = TilingTable.load(path, H200)
    assert table.entries[other] == table.entries[two] == old
    assert (table.entries[one] == old) is not again
    assert GROUP.shape(4, 4) in table.entries
    assert [file.name for file in tmp_path.iterdir()] == ["table.json"]
