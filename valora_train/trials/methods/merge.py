"""Dedicated adapters, merged into one by PEFT without training."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from valora_train.trials.bench import DivergedError, diverged
from valora_train.trials.methods.base import Found, Method

if TYPE_CHECKING:
    from collections.abc import Mapping

    from valora_train.settings import TrainSettings
    from valora_train.trials.bench import Bench
    from valora_train.trials.store import Trial

MERGED = "merged"
COMBINATIONS = ("linear", "ties", "dare_linear", "dare_ties", "svd")
"""How adapters are combined, in PEFT's terms."""
DENSITY = 0.5
"""Share of the weights that TIES and DARE keep."""


class Merge(Method):
    """Trains a dedicated adapter for every domain, and merges them in each of PEFT's ways.

    Heads stay as they are, but for their calibration. Every adapter has the same weight: of 1 / n,
    1 / √n and 1, the one with which the worst domain keeps the largest share of its dedicated
    adapter on validation.
    """

    def run(self, bench: Bench, trial: Trial) -> Found:
        """Train, merge, and measure; `variants` holds what each way of merging reaches."""
        start = time.monotonic()
        trainer = bench.trainer
        alone: dict[str, Mapping[str, Any]] = {}
        heads = {}
        for name in trial.domains:
            trainer.open(name, trial.seed)
            try:
                trainer.train(
                    name, (name,), held=(), rehearse=False, seed=trial.seed, on_step=bench.on_step
                )
                bench.check_finite(name)
                alone[name] = bench.measure(name, name)
            except DivergedError:
                return Found(diverged(trial.domains), {name: (name,) for name in trial.domains})
            heads[name] = trainer.heads(name).get(name)
        count = len(trial.domains)
        trained = time.monotonic() - start
        variants = {}
        for combination in COMBINATIONS:
            start = time.monotonic()
            best: dict[str, Mapping[str, Any]] = {}
            for weight in sorted({1 / count, count**-0.5, 1.0}):
                bench.lmm.adapters.merge(
                    MERGED, trial.domains, weight, combination, DENSITY, trial.seed
                )
                found: dict[str, Mapping[str, Any]] = {
                    name: bench.measure(MERGED, name, heads[name]) | {"weight": round(weight, 4)}
                    for name in trial.domains
                }
                bench.lmm.adapters.remove(MERGED)
                if not best or worst_share(found, alone) > worst_share(best, alone):
                    best = found
            took = trained + time.monotonic() - start
            variants[combination] = {"accuracy": best, "seconds": round(took, 2)}
        return Found(
            alone,
            {name: (name,) for name in trial.domains},
            attempts=count,
            facts={"variants": variants},
        )

    def steps(self, train: TrainSettings, domains: int) -> int:
        """Steps of all dedicated adapters; merging costs about half as much again."""
        return round(1.5 * domains * train.steps_for(1, 0))


def worst_share(
    found: Mapping[str, Mapping[str, Any]], alone: Mapping[str, Mapping[str, Any]]
) -> float:
    """The least share, over domains, of what their dedicated adapters reach on validation."""
    return min(
        float(one["val"] or 0.0) / max(float(alone[name]["val"] or 0.0), 1e-9)
        for name, one in found.items()
    )
