"""The steps of a training of a small model, which continues from its checkpoint after a kill."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from valora_data.checkpoint import Checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from valora_teachers.base import OnEpoch

CHECKPOINT = "checkpoint"
LOOK_SHARE = 0.05
"""Largest share of a training's time for looks at the validation split."""
LOOK_SAMPLES = 64
"""Largest number of samples that a look reads."""


@dataclass(slots=True)
class TrainingStep:
    """One step.

    Attributes:
        number: Number of the step, from 1.
        chosen: (batch,) int64, indices of the samples.
        loss: The loss, which whoever takes the step sets.
    """

    number: int
    chosen: Tensor
    loss: float = math.nan


class Progress:
    """Draws the batches of a training and writes its checkpoints.

    What follows a checkpoint is what would have followed, to the bit.

    Args:
        folder: Folder of the checkpoint.
        training: What is trained.
        parts: Everything that a step changes, by name: objects with `state_dict` and
            `load_state_dict`.
        rng: Generator of the batches and of whatever else is drawn.
        on_epoch: Called after each epoch, see `base.OnEpoch`.
        look: Returns figures of the validation split, which `on_epoch` gets, too. It is called
            after an epoch as long as it takes a twentieth of the time at most, and changes nothing.

    Attributes:
        mean: Mean loss of the last epoch.
    """

    def __init__(
        self,
        folder: Path,
        training: str,
        parts: Mapping[str, Any],
        rng: torch.Generator,
        on_epoch: OnEpoch | None,
        look: Callable[[], Mapping[str, float]] | None = None,
    ) -> None:
        self._checkpoint = Checkpoint(folder / CHECKPOINT)
        self._training = training
        self._parts = parts
        self._rng = rng
        self._on_epoch = on_epoch
        self._look = look
        self._looked = self._last_look = 0.0  # seconds
        self._start = time.monotonic()
        self._losses: list[float] = []
        self.mean = math.nan

    @property
    def spent(self) -> float:
        """Seconds of training before this process."""
        return self._checkpoint.spent

    def steps(self, epochs: int, samples: int, batch: int) -> Iterator[TrainingStep]:
        """Yield the steps that are left.

        Samples that do not fill a batch are left out of an epoch; they come in another one.

        Args:
            epochs: Passes over the samples.
            samples: Number of samples.
            batch: Samples per step.
        """
        training = f"{self._training}: {epochs} epochs of {samples} by {batch}"
        per_epoch = samples // batch
        done, order = self._restore(training)
        while done < epochs * per_epoch:
            place = done % per_epoch
            if place == 0:
                order = torch.randperm(samples, generator=self._rng)
                self._losses = []
            step = TrainingStep(done + 1, order[place * batch : (place + 1) * batch])
            yield step
            self._losses.append(step.loss)
            done += 1
            if done % per_epoch == 0:
                self.mean = sum(self._losses) / per_epoch
                if self._on_epoch is not None:
                    figures = self._figures() | self._validated()
                    self._on_epoch(done // per_epoch, epochs, self.mean, figures)
            self._checkpoint.save(training, partial(self._state, done, order))

    def _figures(self) -> dict[str, float]:
        schedule = self._parts.get("schedule")
        return {} if schedule is None else {"lr": float(schedule.get_last_lr()[0])}

    def _validated(self) -> dict[str, float]:
        now = time.monotonic()
        if self._look is None or (
            self._looked + self._last_look > LOOK_SHARE * (now - self._start)
        ):
            return {}
        found = dict(self._look())
        self._last_look = time.monotonic() - now
        self._looked += self._last_look
        return found

    def finish(self) -> None:
        """Delete the checkpoint."""
        self._checkpoint.discard()

    def _state(self, done: int, order: Tensor) -> dict[str, Any]:
        return {
            "done": done,
            "order": order,
            "losses": self._losses,
            "mean": self.mean,
            "random": [self._rng.get_state(), torch.get_rng_state()],
            "parts": {name: part.state_dict() for name, part in self._parts.items()},
        }

    def _restore(self, training: str) -> tuple[int, Tensor]:
        """The number of steps before the checkpoint, and the order of samples in its epoch."""
        saved = self._checkpoint.load(training)
        if saved is None:
            return 0, torch.empty(0, dtype=torch.int64)
        for name, part in self._parts.items():
            part.load_state_dict(saved["parts"][name])
        own, common = saved["random"]
        self._rng.set_state(own)
        torch.set_rng_state(common)
        self._losses, self.mean = saved["losses"], saved["mean"]
        return saved["done"], saved["order"]
