"""Where trials run: the base model with a trainer, loaded once in each process."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from valora_data.schema import Split
from valora_train.fusion.facts import TRIAL_THREADS
from valora_train.fusion.loading import LazyMapping, load_domain, make_deterministic
from valora_train.fusion.trainer import Trainer
from valora_train.model.lmm import Lmm
from valora_train.trials.oracle import JOINT
from valora_train.trials.store import Trial

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from torch import nn

    from valora_train.fusion.packing import DedicatedAdapter
    from valora_train.fusion.samples import DomainData
    from valora_train.trials.inputs import TrialInputs
    from valora_train.trials.store import TrialStore


class DivergedError(Exception):
    """Training made the loss or the weights infinite or NaN."""


class Bench:
    """The base model and a trainer for the domains of some inputs.

    Args:
        inputs: Settings, domains and samples.
        store: Results and adapters of earlier trials, if there are any.

    Attributes:
        inputs: Settings, domains and samples.
        lmm: The base model.
        trainer: Trains and measures.
        scratch: Folder for files of the running trial.
    """

    scratch: Path

    def __init__(self, inputs: TrialInputs, store: TrialStore | None = None) -> None:
        make_deterministic(TRIAL_THREADS)
        self.inputs = inputs
        self._store = store
        settings = inputs.settings
        self.lmm = Lmm(settings.model, settings.train.lora)
        train = replace(settings.train, threads=TRIAL_THREADS)
        self.trainer = Trainer(self.lmm, LazyMapping(inputs.domains, self._load), train)

    def _load(self, name: str) -> DomainData:
        inputs = self.inputs
        return load_domain(
            inputs.settings,
            inputs.domain(name),
            inputs.domains[name].requirement.required,
            self.lmm,
            lambda part: inputs.read(name, part),
        )

    def dedicated(self, domains: Sequence[str], seed: int) -> dict[str, DedicatedAdapter]:
        """The dedicated adapters that were trained before and are kept here, by domain.

        Args:
            domains: Names of the domains.
            seed: Seed of their training.
        """
        if self._store is None:
            return {}
        keys = {name: self.inputs.key(Trial(JOINT, (name,), seed)) for name in domains}
        kept = {name: self._store.dedicated(key) for name, key in keys.items()}
        return {name: adapter for name, adapter in kept.items() if adapter is not None}

    def on_step(self, step: int, steps: int, loss: float) -> None:
        """Look at a step of a training.

        Args:
            step: The step, from 1.
            steps: Number of steps.
            loss: Its loss.

        Raises:
            DivergedError: If the loss is not finite.
        """
        if not math.isfinite(loss):
            raise DivergedError

    def start(self, seed: int, scratch: Path) -> None:
        """Begin a trial as in a new process: no adapters, and random numbers from its seed.

        Args:
            seed: Seed of the trial.
            scratch: Folder for its files.
        """
        self.scratch = scratch
        for name in self.trainer.adapters:
            self.trainer.close(name)
        torch.manual_seed(seed)

    def check_finite(self, adapter: str) -> None:
        """Raise `DivergedError` if a weight of an adapter is infinite or NaN."""
        tensors = [*self.lmm.adapters.parameters(adapter).values()]
        tensors += [p for head in self.trainer.heads(adapter).values() for p in head.parameters()]
        if not all(tensor.isfinite().all() for tensor in tensors):
            raise DivergedError

    def measure(
        self, adapter: str | None, domain: str, head: nn.Module | None = None
    ) -> dict[str, Any]:
        """Accuracy of a domain on validation, by which its head is calibrated, then on test.

        Returns:
            `val` and `test`; their 95 % intervals as `val_ci95` and `test_ci95`; and further
            metrics, such as `test_map`.
        """
        found: dict[str, Any] = {}
        for split in (Split.VAL, Split.TEST):
            got = self.trainer.evaluate(adapter, domain, split, head)
            found[str(split)] = got.accuracy
            found[f"{split}_ci95"] = list(got.interval)
            found |= {f"{split}_{key}": value for key, value in got.details.items()}
        return {key: _finite(value) for key, value in found.items()}

    @property
    def requirements(self) -> dict[str, Any]:
        """What each domain must reach (`Requirement`), by name."""
        return {name: item.requirement for name, item in self.inputs.domains.items()}


def diverged(domains: Sequence[str]) -> dict[str, dict[str, None]]:
    """What is measured of a training that diverged: nothing."""
    return {name: {"val": None, "test": None} for name in domains}


def _finite(value: Any) -> Any:
    """JSON knows no NaN."""
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return value if math.isfinite(value) else None
