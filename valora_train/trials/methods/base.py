"""The seam of methods: what a trial trains and measures."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from valora_train.settings import TrainSettings
    from valora_train.trials.bench import Bench
    from valora_train.trials.store import Trial


@dataclass(frozen=True)
class Found:
    """What a trial found.

    Attributes:
        accuracy: Measurements of every domain (see `Bench.measure`), by name.
        adapters: The domains of every adapter that is left, by its name; domains that are in none
            are answered by a head on the base model.
        attempts: Trainings of an adapter.
        facts: Further results, as JSON values.
        snapshot: The adapter of a domain alone (`Trainer.snapshot`), which a fusion may take.
    """

    accuracy: Mapping[str, Mapping[str, Any]]
    adapters: Mapping[str, Sequence[str]] = field(default_factory=dict)
    attempts: int = 1
    facts: Mapping[str, Any] = field(default_factory=dict)
    snapshot: Mapping[str, Tensor] | None = None


class Method(ABC):
    """What a trial trains and measures. Every method is a subclass without arguments."""

    @abstractmethod
    def run(self, bench: Bench, trial: Trial) -> Found:
        """Train and measure the domains of a trial; the bench holds no adapter yet.

        Args:
            bench: The model and the trainer.
            trial: The trial.
        """

    def steps(self, train: TrainSettings, domains: int) -> int:
        """Optimiser steps that a trial takes, about, for its remaining time.

        Args:
            train: Settings of training.
            domains: Number of its domains.
        """
        return train.steps_for(domains, 0)
