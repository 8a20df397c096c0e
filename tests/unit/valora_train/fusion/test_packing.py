"""Attempts on a trainer that only counts: commit, roll back, close, resume from disk."""

from types import SimpleNamespace

import pytest
import torch

from valora_train.errors import UnreachableError
from valora_train.fusion.decision import Verdict
from valora_train.fusion.packing import Packing, check_reachable, make_plan
from valora_train.fusion.state import FusionState
from valora_train.model.team import Team
from valora_train.settings import FusionSettings

REQUIRED = {"a": 0.5, "b": 0.5, "c": 0.5}
HEAD_ONLY = {name: {"val": 0.2, "test": 0.2} for name in REQUIRED}


class CountingTrainer:
    """An adapter's only weight is the number of trainings it has seen; accuracies are given."""

    def __init__(self, accuracy):
        self.accuracy = accuracy
        self.weights = {}
        self.trained = []

    @property
    def adapters(self):
        return tuple(self.weights)

    def open(self, adapter, seed):
        self.weights[adapter] = 0.0

    def close(self, adapter):
        del self.weights[adapter]

    def train(self, adapter, domain, *, held, rehearse, seed, on_step, checkpoint):
        self.weights[adapter] += 1
        self.trained.append((adapter, domain, seed))
        on_step(1, 1, 0.5)

    def evaluate(self, adapter, domain, split):
        return SimpleNamespace(accuracy=self.accuracy[len(self.trained)][domain])

    def snapshot(self, adapter):
        return {"weight": torch.tensor([self.weights[adapter]])}

    def restore(self, adapter, state):
        self.weights[adapter] = float(state["weight"])


# By number of the attempt: b breaks a and gets its own adapter, which c joins.
ACCURACY = {
    1: {"a": 0.9},
    2: {"a": 0.3, "b": 0.9},
    3: {"b": 0.9},
    4: {"b": 0.8, "c": 0.7},
}


def start(folder, accuracy=ACCURACY, **fusion):
    settings = FusionSettings(**({"strategy": "paper", "margin": 0.0} | fusion))
    plan = make_plan(settings, REQUIRED, HEAD_ONLY, 0, None)
    trainer, state = CountingTrainer(accuracy), FusionState(folder, HEAD_ONLY)
    return plan, trainer, state, Packing(plan, trainer, state, 3, Team(), None)


def play(plan, packing, stop_after=None):
    verdicts = []
    while (attempt := plan.next()) is not None and len(verdicts) != stop_after:
        outcome = packing.run(attempt, lambda *_: None)
        packing.record(outcome)
        verdicts.append(outcome.decision.verdict)
    return verdicts


def test_a_rollback_restores_what_was_committed(tmp_path):
    plan, trainer, state, packing = start(tmp_path)
    committed, rolled_back = Verdict.COMMITTED, Verdict.ROLLED_BACK
    assert play(plan, packing) == [committed, rolled_back, committed, committed]
    assert plan.packing == {"adapter-1": ("a",), "adapter-2": ("b", "c")}
    assert trainer.weights == {"adapter-1": 1, "adapter-2": 2}
    assert [seed for _, _, seed in trainer.trained] == [3001, 3002, 3003, 3004]
    assert state.told == list(ACCURACY.values())
    assert state.snapshots == {
        "adapter-1": "adapter-1-01.safetensors", "adapter-2": "adapter-2-04.safetensors",
    }  # fmt: skip


@pytest.mark.parametrize("cut", range(5))
def test_a_fusion_is_resumed_after_any_attempt(tmp_path, cut):
    plan, trainer, _, packing = start(tmp_path)
    play(plan, packing, stop_after=cut)
    if attempt := plan.next():  # killed before the decision is recorded: the attempt is repeated
        packing.run(attempt, lambda *_: None)
    later = {number - cut: accuracy for number, accuracy in ACCURACY.items()}
    plan, trainer, state, packing = start(tmp_path, later)
    assert packing.resume() == cut
    play(plan, packing)
    assert plan.packing == {"adapter-1": ("a",), "adapter-2": ("b", "c")}
    assert trainer.weights == {"adapter-1": 1, "adapter-2": 2}
    assert state.told == list(ACCURACY.values())


@pytest.mark.parametrize("keep", [False, True])
def test_an_unreachable_domain_is_closed_or_kept_with_a_flag(tmp_path, keep):
    accuracy = {1: {"a": 0.1}, 2: {"b": 0.9}, 3: {"b": 0.8, "c": 0.7}}
    plan, trainer, state, packing = start(
        tmp_path, accuracy, unreachable="keep" if keep else "fail"
    )
    assert play(plan, packing)[0] is Verdict.UNREACHABLE
    names = {"adapter-1", "adapter-2"} if keep else {"adapter-1"}
    assert set(trainer.weights) == set(state.snapshots) == names
    with pytest.raises(UnreachableError, match=r"a \(reached 0\.100, required 0\.500\)"):
        check_reachable(plan, REQUIRED)
