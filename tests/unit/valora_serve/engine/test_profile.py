"""Costs are measured once, saved, and used by the policy."""

from functools import partial
from pathlib import Path

import pytest

from tests.support.engine_reference import add_requests, finish, make_engine, question
from valora_serve.engine import profile
from valora_serve.engine.sizing import machine_name
from valora_serve.orchestrator.cost_model import load_or_estimate

pytestmark = pytest.mark.usefixtures("one_thread")


def test_costs_are_measured_once(
    base: str, adapters: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_costs_that_cannot_be_saved_are_used_all_the_same(
    base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(profile, "measure", partial(profile.measure, seconds=0.0))
    (tmp_path / "costs").touch()  # nobody, not even root, makes folders in it
    engine = make_engine(base, profile=True, cost_folder=str(tmp_path))
    profile.ensure_costs(engine)
    assert engine.cost.measured
    (said,) = [record.getMessage() for record in caplog.records if "costs" in record.getMessage()]
    assert str(tmp_path) in said
    assert "--cost-folder" in said


def test_nothing_is_measured_without_the_setting(base: str) -> None:
    engine = make_engine(base)
    profile.ensure_costs(engine)
    assert not engine.cost.measured
