"""Fusions, merged adapters and elastic weights as trials."""

from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch

from tests.support.trial_inputs import trial_inputs
from valora_data.schema import Split
from valora_train.trials.bench import Bench
from valora_train.trials.inputs import read_inputs
from valora_train.trials.methods import ewc, merge
from valora_train.trials.methods.registry import METHODS
from valora_train.trials.pool import run_trials
from valora_train.trials.store import Trial, TrialStore

NAMES = ("sky", "apple")


@pytest.fixture
def inputs(tmp_path, random_llava, one_thread):
    return trial_inputs(tmp_path / "in", random_llava)


def found(inputs, tmp_path, trial):
    tmp_path.mkdir(exist_ok=True)
    bench = Bench(read_inputs(inputs))
    bench.start(trial.seed, tmp_path)
    return bench, METHODS[trial.method]().run(bench, trial)


def fusion(required, **options):
    asked = {"strategy": "rehearsal", "order": "given", "head_only": False, **options}
    return Trial("fusion", tuple(required), 3, {
        "fusion": asked, "required": {k: [v, 0.0, 1.0] for k, v in required.items()},
    })  # fmt: skip


def test_a_fusion_packs_by_its_requirements(inputs, tmp_path):
    _, easy = found(inputs, tmp_path / "a", fusion({"sky": 1e-6, "apple": 1e-6}))
    kept = easy.accuracy
    if all(one["val"] > 0 for one in kept.values()):
        assert {k: tuple(v) for k, v in easy.adapters.items()} == {"adapter-1": NAMES}
    _, none = found(inputs, tmp_path / "b", fusion({"sky": 1.0, "apple": 1.0}))
    assert set(none.facts["unreachable"]) == set(NAMES)
    assert none.attempts == len(none.facts["verdicts"]) >= 2
    assert set(none.accuracy) == set(NAMES)


def test_a_domain_alone_takes_its_dedicated_adapter(inputs, tmp_path):
    """The fusion asks for what the dedicated adapter reaches: another training may miss it."""
    store = TrialStore(tmp_path / "out")
    (alone,) = run_trials(inputs, [Trial("joint", ("sky",), 3)], store)
    trial = fusion({"sky": alone["accuracy"]["sky"]["val"]})

    def packed(scratch, **options):
        scratch.mkdir()
        bench = Bench(read_inputs(inputs), store)
        bench.start(trial.seed, scratch)
        bench.trainer.train = Mock(wraps=bench.trainer.train)
        asked = replace(trial, options={**trial.options, **options})
        found = METHODS["fusion"]().run(bench, asked)
        return found.accuracy, bench.trainer.train.call_count

    assert packed(tmp_path / "takes", dedicated=True) == (alone["accuracy"], 0)
    assert packed(tmp_path / "trains")[1] == 1


@pytest.mark.slow
def test_a_fusion_that_was_killed_goes_on(inputs, tmp_path):
    trial = fusion({"sky": 1e-6, "apple": 1e-6, "leaf": 1e-6})
    _, whole = found(inputs, tmp_path / "whole", trial)
    state = tmp_path / "killed"
    state.mkdir()
    bench = Bench(read_inputs(inputs))
    bench.start(trial.seed, state)
    trained = []

    def stop(*_, **__):
        if len(trained) == 1:
            raise KeyboardInterrupt
        trained.append(1)

    with pytest.raises(KeyboardInterrupt), pytest.MonkeyPatch.context() as patch:
        patch.setattr("valora_train.fusion.packing.Packing.record", spy(stop))
        METHODS["fusion"]().run(bench, trial)
    _, again = found(inputs, state, trial)
    assert again.adapters == whole.adapters
    assert again.accuracy == whole.accuracy


def spy(call):
    from valora_train.fusion.packing import Packing

    real = Packing.record

    def record(self, outcome):
        call()
        real(self, outcome)

    return record


def test_merging_starts_from_the_dedicated_adapters(inputs, tmp_path):
    bench, one = found(inputs, tmp_path, Trial("merge", NAMES, 2))
    store = TrialStore(tmp_path / "out")
    alone = run_trials(inputs, [Trial("joint", (name,), 2) for name in NAMES], store)
    for row in alone:
        (name,) = row["domains"]
        assert one.accuracy[name] == row["accuracy"][name]
    assert set(one.facts["variants"]) == set(merge.COMBINATIONS)
    for variant in one.facts["variants"].values():
        assert set(variant["accuracy"]) == set(NAMES)
        assert {round(v["weight"], 4) for v in variant["accuracy"].values()} <= {0.5, 0.7071, 1.0}
    assert bench.trainer.adapters == NAMES  # the merged ones are gone


def test_merging_one_adapter_by_svd_changes_nothing(inputs, tmp_path):
    bench, _ = found(inputs, tmp_path, Trial("joint", ("sky",), 2))
    trainer, adapters = bench.trainer, bench.lmm.adapters
    head = trainer.heads("adapter-1")["sky"]
    before = trainer.evaluate("adapter-1", "sky", Split.TEST, head)
    adapters.merge("copy", ["adapter-1"], 1.0, "svd", 0.5, 0)
    after = trainer.evaluate("copy", "sky", Split.TEST, head)
    for one, other in zip(before.predictions, after.predictions, strict=True):
        for box, same in zip(one.answer.boxes, other.answer.boxes, strict=True):
            assert box.xyxy == pytest.approx(same.xyxy, abs=1e-2)


def test_the_penalty_is_the_gradient_of_its_closed_form():
    weights = {"a": torch.nn.Parameter(torch.tensor([1.0, 2.0]))}
    fisher = {"a": torch.tensor([1.0, 3.0])}  # of mean 2
    pull = ewc._Pull(weights, fisher, 10.0)
    with torch.no_grad():
        weights["a"] += torch.tensor([0.5, -0.25])
    moved = weights["a"].detach().clone().requires_grad_()
    penalty = (10.0 / 2 * (fisher["a"] / 2) * (moved - torch.tensor([1.0, 2.0])) ** 2).sum()
    penalty.backward()
    weights["a"].grad = torch.tensor([0.125, 0.25])
    pull()
    assert torch.allclose(weights["a"].grad, moved.grad + torch.tensor([0.125, 0.25]))


def test_a_strong_penalty_keeps_the_weights_that_matter(inputs, tmp_path):
    def distance(strength):
        bench = Bench(read_inputs(inputs))
        states = []
        real = bench.trainer.squared_gradients

        def remember(adapter, name, batches):
            states.append({k: v.detach().clone() for k, v in
                           bench.lmm.adapters.parameters(adapter).items()})  # fmt: skip
            fisher = real(adapter, name, 2)
            return {key: torch.ones_like(value) for key, value in fisher.items()}

        bench.trainer.squared_gradients = remember
        bench.start(5, tmp_path)
        ewc.ElasticWeights().run(bench, Trial("ewc", NAMES, 5, {"strength": strength}))
        first, second = states
        return float(sum((first[key] - second[key]).square().sum() for key in first))

    assert distance(1e9) < distance(0.0)


def test_fisher_information_is_positive_and_changes_nothing(inputs, tmp_path):
    bench, _ = found(inputs, tmp_path, Trial("joint", ("sky",), 2))
    weights = bench.lmm.adapters.parameters("adapter-1")
    before = {key: value.detach().clone() for key, value in weights.items()}
    fisher = bench.trainer.squared_gradients("adapter-1", "sky", 3)
    assert fisher.keys() == before.keys()
    assert all((value >= 0).all() for value in fisher.values())
    assert sum(float(value.sum()) for value in fisher.values()) > 0
    assert all(torch.equal(weights[key], value) for key, value in before.items())
