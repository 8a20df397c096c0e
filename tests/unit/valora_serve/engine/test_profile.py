"""Costs are measured once, saved, and used by the policy."""

from functools import partial
from shutil import copytree, rmtree

import pytest
import torch

from tests.support.engine_reference import add_requests, finish, make_engine, question, serve
from valora_kernels.metadata import NONE
from valora_serve.engine import profile
from valora_serve.engine.sizing import machine_name
from valora_serve.model.preparation import PROMPT, Preparation
from valora_serve.orchestrator.cost_model import load_or_estimate

pytestmark = pytest.mark.usefixtures("one_thread")


def test_costs_are_measured_once(base, adapters, tmp_path, monkeypatch):
    monkeypatch.setattr(profile, "measure", partial(profile.measure, seconds=0.0))
    options = {"profile": True, "cost_folder": str(tmp_path), "policy": "valora"}
    engine = make_engine(base, {"a": adapters["a"]}, **options)
    before = engine.policy
    add_requests(engine, question("one"))
    profile.ensure_costs(engine)
    assert engine.policy is before  # there was a request
    finish(engine)
    profile.ensure_costs(engine)
    assert engine.cost.measured
    assert engine.policy is not before
    saved = load_or_estimate(tmp_path, machine_name(engine.device), base)
    assert saved.measured
    stats = engine.stats()
    assert (stats.switches, stats.merged_adapter, stats.pages_kv) == (0, None, 0)
    measured = engine.cost
    profile.ensure_costs(engine)
    assert engine.cost is measured


def test_costs_that_cannot_be_saved_are_used_all_the_same(base, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(profile, "measure", partial(profile.measure, seconds=0.0))
    (tmp_path / "costs").touch()  # nobody, not even root, makes folders in it
    engine = make_engine(base, profile=True, cost_folder=str(tmp_path))
    profile.ensure_costs(engine)
    assert engine.cost.measured
    (said,) = [record.getMessage() for record in caplog.records if "costs" in record.getMessage()]
    assert str(tmp_path) in said
    assert "--cost-folder" in said


@pytest.mark.parametrize(
    "limits",
    [
        {"max_adapters": 1},
        {"max_tokens": 16, "chunk": 16, "max_requests": 64},
        {"max_tokens": 66, "chunk": 16, "prompt_graphs": True, "max_adapters": 2},
    ],
)
def test_measured_steps_keep_the_limits(base, adapters, limits):
    engine = make_engine(base, adapters, policy="valora", **limits)
    runner, settings = engine.runner, engine.settings
    if settings.prompt_graphs:  # there was no memory for the larger one
        runner.give_up(Preparation(PROMPT, runner.captured_prompts[-1], 0))
    ran, step = [], runner.step

    def noting(works, merged):
        ran.append(works)
        return step(works, merged)

    runner.step = noting
    assert profile.measure(engine) is not None
    assert max(len(works) for works in ran) <= settings.max_requests
    assert max(sum(work.count for work in works) for works in ran) <= settings.max_tokens
    distinct = [len({work.adapter for work in works} - {NONE}) for works in ran]
    assert max(distinct) == min(len(adapters), settings.max_adapters)


def test_an_adapter_whose_file_is_gone_is_left_out(base, adapters, tmp_path):
    folders = {name: tmp_path / name for name in "ab"}
    for name, folder in folders.items():
        copytree(adapters[name], folder)
    engine = make_engine(base, folders, host_bytes=0)
    rmtree(folders["a"])
    found = profile.measure(engine, seconds=0.0)
    assert found is not None and found.measured
    assert engine.stats().on_device == ("b",)


def test_an_engine_serves_without_costs(base, adapters, monkeypatch):
    made = make_engine(base, {"a": adapters["a"]}, profile=True, policy="valora")
    before, times = made.cost, []

    def fail(engine, works):
        times.append(engine.merge_state.adapter)
        if times[-1] is None:
            return 1.0
        raise torch.OutOfMemoryError("too little")

    monkeypatch.setattr(profile, "_time", fail)
    serve(made, question("one", "a", tokens=3))
    assert times[-1] is not None and made.cost is before
    stats = made.stats()
    assert (stats.merged_adapter, stats.pages_kv, stats.switches) == (None, 0, 0)
