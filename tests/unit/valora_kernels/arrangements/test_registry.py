"""Arrangements of other packages: computed, searched for and named in tables without a change."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.support.lora_cases import assert_near, make_case
from valora_kernels.arrangements.registry import ARRANGEMENTS, arrangement
from valora_kernels.atmm import atmm, shape_of
from valora_kernels.gpus.registry import GPUS
from valora_kernels.lookup import LookupMode, TilingTable, choose
from valora_kernels.registry import UnknownNameError
from valora_kernels.search import Search
from valora_kernels.tiling import Case, ProjectionGroup, Tiling

Install = Callable[[str, str, str], str]

IN_TORCH = """
from valora_kernels.arrangements.base import Arrangement
from valora_kernels.reference import atmm_reference
from valora_kernels.tiling import Tiling

class InTorch(Arrangement):
    name = "in_torch"

    def launch(self, tiling, ys, x, weights, batch, *, add=True):
        if not add:
            for y in ys:
                y.zero_()
        atmm_reference(ys, x, weights, batch)

    def candidates(self, group, rows, adapters, gpu):
        return [Tiling(self.name)]

extension = InTorch
"""


def test_an_arrangement_of_another_package_computes(installed: Install) -> None:
    installed("valora.arrangements", "in_torch", IN_TORCH)
    case = make_case(19, [8, 16, 24], 64, (64, 32), dtype=torch.float32, device="cpu")
    want = case.expected()
    atmm(case.ys, case.x, case.weights, case.batch, tiling=Tiling("in_torch"))
    for one, other in zip(case.ys, want, strict=True):
        assert_near(one, other)


def test_the_search_tries_it_and_a_table_may_choose_it(
    installed: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from valora_kernels import search as module

    installed("valora.arrangements", "in_torch", IN_TORCH)
    monkeypatch.setattr(module, "call_of", lambda step, tiling, work, one: tiling)
    monkeypatch.setattr(
        module, "replay_times", lambda calls, **_: [float(calls[0].arrangement != "in_torch")]
    )
    monkeypatch.setattr(module, "_compile", lambda job: None)
    monkeypatch.setattr(module, "workload", lambda *_: type("Work", (), {"sets": [None]}))
    gpu = replace(GPUS["nvidia_h200"], table=tmp_path / "table.json")
    group = ProjectionGroup(4096, (4096,), 64)
    search = Search(gpu, tmp_path / "journal", compilers=1)
    search.full(group, [Case(64, 4)], module.Progress(1))
    shape = group.shape(64, 4)
    TilingTable(gpu, [(shape, search.found[shape][0][1])]).save(tmp_path / "table.json")
    assert choose(gpu, shape).tiling == Tiling("in_torch")
    assert choose(gpu, replace(shape, rows=70)).mode is LookupMode.NEAREST


def test_unknown_arrangements_are_refused_and_the_known_ones_listed(installed: Install) -> None:
    installed("valora.arrangements", "in_torch", IN_TORCH)
    known = "choose one of dense, fused, in_torch, shrink_expand"
    case = make_case(5, [8], 64, (64,), dtype=torch.float32, device="cpu")
    before = case.ys[0].clone()
    with pytest.raises(UnknownNameError, match=f"unknown arrangement 'sideways': {known}"):
        atmm(case.ys, case.x, case.weights, case.batch, tiling=Tiling("sideways"))
    assert torch.equal(case.ys[0], before)
    assert shape_of(case.weights, case.batch).rank == 16


def test_a_class_is_registered_under_its_own_name(installed: Install) -> None:
    installed("valora.arrangements", "elsewhere", IN_TORCH)
    with pytest.raises(UnknownNameError, match="class whose name is 'in_torch'"):
        arrangement("elsewhere")


def test_a_broken_package_and_a_taken_name_change_nothing(installed: Install) -> None:
    installed("valora.arrangements", "broken", "import no_such_module")
    installed("valora.arrangements", "fused", IN_TORCH)
    with pytest.raises(UnknownNameError, match=r"'broken' .* cannot be imported"):
        arrangement("broken")
    assert ARRANGEMENTS["fused"].__module__ == "valora_kernels.arrangements.fused"
    assert list(ARRANGEMENTS) == ["shrink_expand", "fused", "dense", "broken"]
