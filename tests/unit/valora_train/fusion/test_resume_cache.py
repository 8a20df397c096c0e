"""A fusion takes over the attempts of an earlier one, as far as it would make the same."""

from dataclasses import replace

import pytest
import torch

from tests.unit.valora_train.fusion.test_packing import CountingTrainer, play
from valora_train.fusion.packing import DedicatedAdapter, Packing, make_plan
from valora_train.fusion.requirement import Requirement
from valora_train.fusion.resume_cache import ResumeCache
from valora_train.fusion.state import HEAD_ONLY, FusionState
from valora_train.settings import FusionSettings
from valora_train.stage import Stage

REQUIRED = {"a": 0.5, "b": 0.5, "c": 0.5}
ALONE = {"val": 0.2, "test": 0.1}
SETTINGS = FusionSettings(strategy="first_fit", margin=0.0)


def reached(adapter, domains):
    """What an attempt reaches: b breaks a, c fits beside either."""
    spoilt = {"a", "b"} <= set(domains)
    return {name: 0.3 if spoilt and name == "a" else 0.9 - 0.1 * len(domains) for name in domains}


class OracleTrainer(CountingTrainer):
    def evaluate(self, adapter, domain, split):
        self.accuracy = {len(self.trained): reached(adapter, self.in_adapter[adapter])}
        return super().evaluate(adapter, domain, split)


def stage_of(required, steps=3, data="1", test="1"):
    settings = {
        "model": {}, "heads": {}, "train": {"steps": steps}, "fusion": {},
        "domains": [{"name": name, "required": least} for name, least in required.items()],
    }  # fmt: skip
    inputs = {"base": "x"} | {f"{name}/val": data if name == "c" else "0" for name in required}
    inputs |= {f"{name}/test": test if name == "b" else "0" for name in required}
    return Stage("fuse-all", 4, settings, inputs, resumable=True)


def fuse(work, required, settings=SETTINGS, stop_after=None, dedicated=None, **stage):
    """Return what was trained, what was measured without LoRA, and the plan in the end."""
    made = stage_of(required, **stage)
    folder = made.partial(work)
    folder.mkdir(parents=True, exist_ok=True)
    state = FusionState(folder, {})
    earlier = ResumeCache(made, work, folder)
    earlier.take_head_only(state)
    measured = [name for name in required if name not in state.head_only]
    for name in measured:
        (folder / HEAD_ONLY).mkdir(exist_ok=True)
        for kind in ("json", "png"):
            (folder / HEAD_ONLY / f"{name}.{kind}").write_text("{}")
        state.head_only[name] = ALONE
    state.save()
    requirements = {name: Requirement(least, settings.margin) for name, least in required.items()}

    def new_plan():
        return make_plan(settings, requirements, state.head_only, 0, None)

    if not state.accuracies:
        earlier.take_attempts(new_plan, state, dedicated)
    plan, trainer = new_plan(), OracleTrainer({})
    packing = Packing(plan, trainer, state, 0, None, dedicated)
    packing.resume()
    play(plan, packing, stop_after)
    return [(adapter, name) for adapter, name, _ in trainer.trained], measured, plan


def test_training_begins_at_the_first_decision_that_differs(tmp_path):
    fuse(tmp_path, REQUIRED)
    # c misses its target beside a now, and beside b.
    trained, _, plan = fuse(tmp_path, REQUIRED | {"c": 0.75})
    assert plan.packing == {"adapter-1": ("a",), "adapter-2": ("b",), "adapter-3": ("c",)}
    # The snapshot of adapter-1 before c joined it is gone: c is tried there again, and before.
    assert trained[-1] == ("adapter-3", "c")
    alone, _, fresh = fuse(tmp_path / "alone", REQUIRED | {"c": 0.75})
    assert fresh.packing == plan.packing
    assert [d.accuracy for d in fresh.decisions] == [d.accuracy for d in plan.decisions]
    assert len(trained) <= len(alone)


def test_what_was_out_of_reach_is_taken_over_when_less_is_asked(tmp_path):
    hard = REQUIRED | {"b": 0.95}
    first, _, plan = fuse(tmp_path, hard, stop_after=3)
    assert plan.unreachable == {"b": pytest.approx(0.8)}
    assert first == [("adapter-1", "a"), ("adapter-1", "b"), ("adapter-2", "b")]
    trained, _, plan = fuse(tmp_path, REQUIRED)
    assert trained == [("adapter-1", "c")]
    assert plan.packing == {"adapter-1": ("a", "c"), "adapter-2": ("b",)}


def test_other_requirements_and_test_images_train_nothing_again(tmp_path):
    first, measured, _ = fuse(tmp_path, REQUIRED)
    assert (len(first), measured) == (4, ["a", "b", "c"])
    packing = {"adapter-1": ("a", "c"), "adapter-2": ("b",)}
    # Accuracy without LoRA is measured on test, too.
    for required, test, measured in ((REQUIRED | {"c": 0.6}, "1", []), (REQUIRED, "2", ["b"])):
        *found, plan = fuse(tmp_path, required, test=test)
        assert (found, plan.packing) == ([[], measured], packing)


def test_domains_come_and_go(tmp_path):
    two = {name: REQUIRED[name] for name in ("a", "b")}
    fuse(tmp_path, two)
    assert fuse(tmp_path, REQUIRED)[:2] == ([("adapter-1", "c")], ["c"])
    # Without c, all is there; without a, another adapter holds b.
    assert fuse(tmp_path, two | {"b": 0.55})[0] == []
    assert fuse(tmp_path, {"b": 0.5, "c": 0.5})[0] == [("adapter-1", "b"), ("adapter-1", "c")]


def test_only_the_same_training_is_taken_over(tmp_path):
    whole = fuse(tmp_path, REQUIRED)[0]
    assert fuse(tmp_path, REQUIRED, steps=4)[:2] == (whole, ["a", "b", "c"])
    assert fuse(tmp_path, REQUIRED, data="2")[:2] == (whole, ["c"])  # which changed adapter-1
    # Alone in its adapter, a is trained alike by both strategies; b beside it is not.
    fuse(tmp_path / "other", REQUIRED, stop_after=2)
    rehearsal = replace(SETTINGS, strategy="rehearsal")
    trained = fuse(tmp_path / "other", REQUIRED | {"a": 0.45}, rehearsal)[0]
    assert [name for _, name in trained] == ["b", "b", "c"]


def test_a_dedicated_adapter_is_taken_before_an_earlier_attempt(tmp_path):
    asked = iter((0.5, 0.45, 0.4, 0.35, 0.3))

    def trained_and_weight(key=None, weight=0.0):
        required = {"a": next(asked)}
        state = {"lora/weight": torch.tensor([weight]), "head/a/x": torch.zeros(1)}
        dedicated = {"a": DedicatedAdapter(key, lambda: state)} if key else None
        trained = fuse(tmp_path, required, dedicated=dedicated)[0]
        folder = stage_of(required).partial(tmp_path)
        return trained, float(FusionState(folder, {}).read_snapshot("adapter-1")["lora/weight"])

    assert trained_and_weight() == ([("adapter-1", "a")], 1.0)
    assert trained_and_weight("first", 5.0) == ([], 5.0)
    assert trained_and_weight("first", 6.0) == ([], 5.0)  # of one key, as in the fusion before
    assert trained_and_weight("second", 7.0) == ([], 7.0)
    assert trained_and_weight() == ([], 1.0)


def test_damaged_neighbours_are_passed_over(tmp_path):
    whole = fuse(tmp_path, REQUIRED)[0]
    for item in tmp_path.iterdir():
        (item / "state.json").write_text("{")
        (item / "made_of.json").write_text("[")
    assert fuse(tmp_path, REQUIRED | {"c": 0.61})[0] == whole
