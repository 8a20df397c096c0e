"""Attempts on a trainer that only counts: commit, roll back, resume, and be taken over later."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from tests.unit.valora_train.fusion.test_plan import Scripted
from valora_train.errors import StageError
from valora_train.fusion.decision import Verdict
from valora_train.fusion.packing import DedicatedAdapter, Packing, make_plan
from valora_train.fusion.plan import FusionPlan
from valora_train.fusion.requirement import Requirement
from valora_train.fusion.resume_cache import ResumeCache
from valora_train.fusion.state import HEAD_ONLY, SNAPSHOTS, STATE, FusionState
from valora_train.fusion.strategies.base import Proposal
from valora_train.fusion.trainer import DivergedError
from valora_train.settings import FusionSettings
from valora_train.stage import Stage

REQUIRED = {"a": 0.5, "b": 0.5, "c": 0.5}
WITHOUT = {name: {"val": 0.2, "test": 0.2} for name in REQUIRED}


class CountingTrainer:
    """An adapter's only weight is the number of trainings it has seen; accuracies are given."""

    def __init__(self, accuracy):
        self.accuracy, self.weights, self.in_adapter, self.trained = accuracy, {}, {}, []

    @property
    def adapters(self):
        return tuple(self.weights)

    def open(self, adapter, seed):
        self.weights[adapter] = 0.0
        self.in_adapter[adapter] = []

    def close(self, adapter):
        del self.weights[adapter], self.in_adapter[adapter]

    def heads(self, adapter):
        return dict.fromkeys(self.in_adapter[adapter])

    def train(self, adapter, new, *, held, rehearse, seed, on_step, checkpoint):
        self.weights[adapter] += 1
        self.in_adapter[adapter] += list(new)
        self.trained.append((adapter, ", ".join(new), seed))

    def evaluate(self, adapter, domain, split):
        return SimpleNamespace(accuracy=self.accuracy[len(self.trained)][domain])

    def snapshot(self, adapter):
        heads = {f"head/{name}/x": torch.zeros(1) for name in self.in_adapter[adapter]}
        return {"lora/weight": torch.tensor([self.weights[adapter]]), **heads}

    def restore(self, adapter, state):
        self.weights[adapter] = float(state["lora/weight"])
        self.in_adapter[adapter] = [key.split("/")[1] for key in state if key.startswith("head/")]


# By number of the attempt: b breaks a and gets its own adapter, which c joins.
ACCURACY = {1: {"a": 0.9}, 2: {"a": 0.3, "b": 0.9}, 3: {"b": 0.9}, 4: {"b": 0.8, "c": 0.7}}


def start(folder, accuracy=ACCURACY, **fusion):
    settings = FusionSettings(**({"strategy": "paper", "margin": 0.0} | fusion))
    requirements = {n: Requirement(r, settings.margin) for n, r in REQUIRED.items()}
    plan = make_plan(settings, requirements, WITHOUT, 0, None)
    trainer, state = CountingTrainer(accuracy), FusionState(folder, WITHOUT)
    return plan, trainer, state, Packing(plan, trainer, state, 3, None)


def play(plan, packing, stop_after=None):
    verdicts = []
    while (attempt := plan.next()) is not None and len(verdicts) != stop_after:
        outcome = packing.run(attempt)
        packing.record(outcome)
        verdicts.append(outcome.decision.verdict)
    return verdicts


def test_a_rollback_restores_what_was_committed(tmp_path):
    plan, trainer, state, packing = start(tmp_path)
    committed = Verdict.COMMITTED
    assert play(plan, packing) == [committed, Verdict.ROLLED_BACK, committed, committed]
    assert plan.packing == {"adapter-1": ("a",), "adapter-2": ("b", "c")}
    assert trainer.weights == {"adapter-1": 1, "adapter-2": 2}
    assert [seed for _, _, seed in trainer.trained] == [3001, 3002, 3003, 3004]
    assert state.accuracies == list(ACCURACY.values())
    assert state.snapshots == {
        "adapter-1": "adapter-1-01.safetensors", "adapter-2": "adapter-2-04.safetensors",
    }  # fmt: skip


def test_a_domain_alone_takes_the_adapter_that_it_was_trained_in(tmp_path):
    accuracy = {0: {"a": 0.9}, 1: {"a": 0.3, "b": 0.9}, 2: ACCURACY[4]}
    plan, trainer, state, _ = start(tmp_path, accuracy)
    kept = {
        name: {"lora/weight": torch.tensor([weight]), f"head/{name}/x": torch.zeros(1)}
        for name, weight in (("a", 40.0), ("b", 70.0))
    }
    dedicated = {name: DedicatedAdapter(f"key of {name}", partial(kept.get, name)) for name in kept}
    packing = Packing(plan, trainer, state, 3, None, dedicated)
    play(plan, packing)
    assert plan.packing == {"adapter-1": ("a",), "adapter-2": ("b", "c")}
    assert [attempt[:2] for attempt in trainer.trained] == [("adapter-1", "b"), ("adapter-2", "c")]
    assert trainer.weights == {"adapter-1": 40, "adapter-2": 71}
    assert state.accuracies == list(ACCURACY.values())
    keys = [facts["dedicated"] for facts in state.attempts]
    assert keys == ["key of a", None, "key of b", None]
    *_, again = start(tmp_path)
    again.resume()
    assert again.taken == packing.taken == {1, 3}


@pytest.mark.parametrize("reached", [0.1, 0.2])
def test_what_lora_does_not_improve_is_left_without_an_adapter(tmp_path, reached):
    accuracy = {1: {"a": reached}, 2: {"b": 0.9}, 3: {"b": 0.8, "c": 0.7}}
    plan, trainer, state, packing = start(tmp_path, accuracy)
    assert play(plan, packing)[0] is Verdict.UNREACHABLE
    assert plan.packing == {"adapter-1": ("b", "c")}
    assert set(trainer.weights) == set(state.snapshots) == {"adapter-1"}
    decision = plan.head_only["a"]
    assert (decision.accuracy, decision.met) == (0.2, False)
    assert decision.reason == (
        f"a {reached:.3f} < 0.500 (required 0.500), {0.5 - reached:.3f} below, even alone, and "
        "0.200 without LoRA: takes no adapter"
    )


# b misses beside a and c, and is left out; then it gets an adapter of its own, which c and a leave
# the first one for: proposals, accuracies, and the heads in each adapter afterwards.
JOINT = [
    Proposal(("a", "b", "c")), Proposal(("b",)), Proposal(("c",), "adapter-2"),
    Proposal(("a",), "adapter-2"),
]  # fmt: skip
JOINT_ACCURACY = {
    1: {"a": 0.9, "b": 0.45, "c": 0.8}, 2: {"b": 0.7}, 3: {"b": 0.65, "c": 0.6},
    4: {"b": 0.6, "c": 0.7, "a": 0.55},
}  # fmt: skip
JOINT_HEADS = [
    {"adapter-1": ["a", "c"]}, {"adapter-1": ["a", "c"], "adapter-2": ["b"]},
    {"adapter-1": ["a"], "adapter-2": ["b", "c"]}, {"adapter-2": ["b", "c", "a"]},
]  # fmt: skip


@pytest.mark.parametrize("cut", range(5))
def test_heads_of_domains_that_are_left_out_or_move_are_dropped(tmp_path, cut):
    def start_scripted(accuracy):
        plan = FusionPlan({name: Requirement(0.5) for name in REQUIRED}, Scripted(*JOINT))
        trainer, state = CountingTrainer(accuracy), FusionState(tmp_path, WITHOUT)
        return plan, trainer, state, Packing(plan, trainer, state, 3, None)

    plan, trainer, state, packing = start_scripted(JOINT_ACCURACY)
    for number in range(1, cut + 1):
        packing.record(packing.run(plan.next()))
        assert trainer.in_adapter == JOINT_HEADS[number - 1]
        assert set(state.snapshots) == set(plan.packing)
    if attempt := plan.next():  # killed before the decision is recorded: the attempt is repeated
        packing.run(attempt)
    # Another process goes on from the disk and comes to the same end.
    later = {number - cut: accuracy for number, accuracy in JOINT_ACCURACY.items()}
    plan, trainer, state, packing = start_scripted(later)
    assert packing.resume() == cut
    assert trainer.in_adapter == (JOINT_HEADS[cut - 1] if cut else {})
    play(plan, packing)
    assert trainer.in_adapter == JOINT_HEADS[-1]
    assert plan.packing == {"adapter-2": ("b", "c", "a")}
    assert state.accuracies == list(JOINT_ACCURACY.values())
    assert [file.name for file in (tmp_path / SNAPSHOTS).iterdir()] == ["adapter-2-04.safetensors"]


class DivergingTrainer(CountingTrainer):  # from attempt 2 on
    def train(self, adapter, new, **options):
        super().train(adapter, new, **options)
        if len(self.trained) > 1:
            self.weights[adapter] = float("nan")
            raise DivergedError


@pytest.mark.parametrize("head_only", [True, False])
def test_training_that_diverges_is_a_decision(tmp_path, head_only):
    plan, _, state, _ = start(tmp_path, head_only=head_only)
    trainer = DivergingTrainer({1: {"a": 0.9}})
    packing = Packing(plan, trainer, state, 3, None)
    verdicts = play(plan, packing)
    assert verdicts == [Verdict.COMMITTED, *[Verdict.ROLLED_BACK, Verdict.UNREACHABLE] * 2]
    assert trainer.weights == {"adapter-1": 1}, "restored, and nothing broken is kept"
    assert plan.packing == {"adapter-1": ("a",)}
    assert plan.unreachable == {"b": 0.2, "c": 0.2}
    assert all("diverged" in decision.reason for decision in plan.head_only.values())
    # A process that goes on from the disk decides the same.
    again, _, _, packing = start(tmp_path, head_only=head_only)
    assert packing.resume() == 5
    assert again.decisions[1].reason == plan.decisions[1].reason
    assert (again.packing, again.head_only) == (plan.packing, plan.head_only)


def test_a_state_is_read_back(tmp_path):
    state = FusionState(tmp_path, {"a": {"val": 0.5, "test": 0.4}})
    state.accuracies.append({"a": 0.9})
    state.seconds.append(1.5)
    state.mlflow_run_id = "run"
    tensors = {
        "head/sky/b": torch.tensor(2.0), "head/apple/a": torch.ones(2, 3, dtype=torch.bfloat16),
        "lora/z": torch.arange(4), "head/sky/a": torch.zeros(0),
    }  # fmt: skip
    state.write_snapshot("adapter-1", 1, tensors)
    state.save()
    again = FusionState(tmp_path, {"b": {"val": 0.1, "test": 0.1}})
    assert again.head_only == {"a": {"val": 0.5, "test": 0.4}}
    assert (again.accuracies, again.seconds, again.mlflow_run_id) == ([{"a": 0.9}], [1.5], "run")
    found = again.read_snapshot("adapter-1")
    assert list(found) == list(tensors)
    assert all(torch.equal(found[key], value) for key, value in tensors.items())


@pytest.mark.parametrize("file", [STATE, f"{SNAPSHOTS}/adapter-1-01.safetensors"])
def test_damage_names_the_folder_to_delete(tmp_path, file):
    state = FusionState(tmp_path, {})
    state.write_snapshot("adapter-1", 1, {"lora/x": torch.arange(3.0)})
    state.save()
    path = tmp_path / file
    content = path.read_bytes()
    for damaged in (b"", content[:-3], content[:-3] + b"?" + content[-2:], None):
        path.unlink()
        if damaged is not None:
            path.write_bytes(damaged)
        elif file == STATE:
            return  # a fusion that has not begun
        with pytest.raises(StageError, match=f"damaged .*: delete {tmp_path} and run"):
            FusionState(tmp_path, {}).read_snapshot("adapter-1")


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
