"""All domains of a trial jointly in one fresh adapter, and one without LoRA."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from valora_data.checkpoint import Checkpoint
from valora_train.trials.bench import DivergedError, diverged
from valora_train.trials.methods.base import Found, Method

if TYPE_CHECKING:
    from collections.abc import Mapping

    from valora_train.settings import TrainSettings
    from valora_train.trials.bench import Bench
    from valora_train.trials.store import Trial

ADAPTER = "adapter-1"
CHECKPOINT = "checkpoint"


class Joint(Method):
    """Trains all domains jointly in a fresh adapter: with one domain, its dedicated adapter."""

    def run(self, bench: Bench, trial: Trial) -> Found:
        """Train and measure; a training that diverged reaches nothing."""
        trainer = bench.trainer
        trainer.open(ADAPTER, trial.seed)
        checkpoint = Checkpoint(
            bench.scratch / CHECKPOINT, bench.inputs.settings.train.checkpoint_seconds
        )
        try:
            trainer.train(
                ADAPTER,
                trial.domains,
                held=(),
                rehearse=False,
                seed=trial.seed,
                on_step=bench.on_step,
                checkpoint=checkpoint,
            )
            bench.check_finite(ADAPTER)
            accuracy = {name: bench.measure(ADAPTER, name) for name in trial.domains}
        except DivergedError:
            return Found(diverged(trial.domains), {ADAPTER: trial.domains})
        alone = trainer.snapshot(ADAPTER) if len(trial.domains) == 1 else None
        return Found(accuracy, {ADAPTER: trial.domains}, snapshot=alone)


class HeadOnly(Method):
    """Trains a head on the frozen base model; the model itself answers where there is none."""

    def run(self, bench: Bench, trial: Trial) -> Found:
        """Train a head for each domain and measure it."""
        accuracy: dict[str, Mapping[str, Any]] = {}
        for name in trial.domains:
            try:
                head = bench.trainer.train_head_only(name, trial.seed, bench.on_step)
            except DivergedError:
                accuracy |= diverged((name,))
                continue
            accuracy[name] = bench.measure(None, name, head)
        return Found(accuracy, attempts=0)

    def steps(self, train: TrainSettings, domains: int) -> int:
        """Steps of a head cost a small part of those of an adapter."""
        return domains * train.probe_steps // 4
