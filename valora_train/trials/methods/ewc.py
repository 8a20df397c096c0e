"""Elastic weight consolidation: one adapter learns all domains in turn, kept from forgetting.

Kirkpatrick et al., Overcoming catastrophic forgetting in neural networks (PNAS 2017): a weight that
earlier domains need, by the Fisher information of their losses, is pulled back to its value.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from valora_train.trials.bench import DivergedError, diverged
from valora_train.trials.methods.base import Found, Method

if TYPE_CHECKING:
    from torch import Tensor, nn

    from valora_train.settings import TrainSettings
    from valora_train.trials.bench import Bench
    from valora_train.trials.store import Trial

ADAPTER = "adapter-1"
BATCHES = 32
"""Batches from which the Fisher information is estimated."""
STRENGTH = "strength"


class ElasticWeights(Method):
    """Trains the domains one after the other in one adapter, on the new domain's samples alone.

    The option `strength` is the weight of the penalty ½ · strength · Σ F (θ − θ*)², where F is
    divided by its mean, so that it has no unit.
    """

    def run(self, bench: Bench, trial: Trial) -> Found:
        """Train all domains in their order, then measure them."""
        trainer = bench.trainer
        trainer.open(ADAPTER, trial.seed)
        strength = float(trial.options[STRENGTH])
        held: list[str] = []
        fisher: dict[str, Tensor] = {}
        try:
            for name in trial.domains:
                weights = bench.lmm.adapters.parameters(ADAPTER)
                pull = _Pull(weights, fisher, strength)
                with trainer.before_each_step(ADAPTER, pull):
                    trainer.train(
                        ADAPTER, (name,), held=held, rehearse=False, seed=trial.seed,
                        on_step=bench.on_step,
                    )  # fmt: skip
                bench.check_finite(ADAPTER)
                # A head that is not trained later keeps its calibration.
                bench.measure(ADAPTER, name)
                found = trainer.squared_gradients(ADAPTER, name, BATCHES)
                fisher = {key: fisher.get(key, 0.0) + value for key, value in found.items()}
                held.append(name)
            accuracy: dict[str, Any] = {name: bench.measure(ADAPTER, name) for name in held}
        except DivergedError:
            accuracy = diverged(trial.domains)
        return Found(accuracy, {ADAPTER: trial.domains}, attempts=len(trial.domains))

    def steps(self, train: TrainSettings, domains: int) -> int:
        """Steps of all domains."""
        return domains * train.steps_for(1, 0)


class _Pull:
    """Adds the gradient of the penalty before an optimiser step."""

    def __init__(
        self, weights: dict[str, nn.Parameter], fisher: dict[str, Tensor], strength: float
    ) -> None:
        self._weights = weights
        self._before = {key: weight.detach().clone() for key, weight in weights.items()}
        count = sum(value.numel() for value in fisher.values())
        mean = sum(float(value.sum()) for value in fisher.values()) / max(count, 1)
        self._factors = {key: strength * value / mean for key, value in fisher.items() if mean > 0}

    def __call__(self) -> None:
        with torch.no_grad():
            for key, factor in self._factors.items():
                weight = self._weights[key]
                if weight.grad is not None:
                    weight.grad += factor * (weight - self._before[key])
