"""When an attempt looks at the validation split while it trains."""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from valora_train.settings import TrainSettings

MIN_LOOK = 4  # samples of a domain, fewer of which say nothing about its accuracy


class Watch:
    """Says when an attempt looks at the validation split, within a share of its time.

    Args:
        settings: Number of looks, of samples, and their share of the time.
        steps: Steps of the attempt.
        done: Steps that an interrupted process has done.
        domains: Domains that are looked at.
        slowness: Forward passes for each answer.

    Attributes:
        domains: Domains that are looked at.
        points: Steps after which it looks.
        samples: Samples of each domain.
    """

    def __init__(
        self, settings: TrainSettings, steps: int, done: int, domains: list[str], slowness: int
    ) -> None:
        self.domains = domains
        looks = settings.validations
        self._share = settings.validation_share
        # A training step costs about three forward passes of a batch.
        passes = 3 * self._share * steps * settings.batch_size
        bound = int(passes / (max(looks, 1) * len(domains) * slowness))
        self.samples = min(settings.validation_samples, bound)
        enough = self.samples >= MIN_LOOK
        evenly = {round(steps * n / (looks + 1)) for n in range(1, looks + 1)} if enough else set()
        self.points = evenly - {0, steps}
        self._steps, self._left = steps, steps - done
        self._began = time.monotonic()
        self._spent = self._last = 0.0

    def due(self, step: int) -> bool:
        """Whether there is time to look after a step."""
        trained = self._left - (self._steps - step)  # steps of this process
        per_step = (time.monotonic() - self._began - self._spent) / trained
        return self._spent + self._last <= self._share * per_step * self._steps

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Count the time of a look."""
        start = time.monotonic()
        yield
        self._last = time.monotonic() - start
        self._spent += self._last
