"""Prepares an engine: what the first requests need before they come, the rest between them."""

import contextlib
import logging
import time
from collections.abc import Iterator, Sequence

import torch

from valora_serve.errors import StoppedError
from valora_serve.model.runner import ModelRunner
from valora_serve.model.work import KERNELS, Preparation

log = logging.getLogger(__name__)

PAUSE = 10.0  # times the time that it takes until more of what steps miss is prepared
# Seconds for attention's kernels once others are compiled: to load, but not to compile them.
PATIENCE = 10.0
PROGRESS_SECONDS = 5.0  # seconds between two messages about the progress


class WarmUp:
    """Graphs and kernels of an engine; a `lazy` start leaves all but the likeliest for later."""

    def __init__(self, terms: Sequence[int], *, lazy: bool) -> None:
        self.seconds: dict[str, float] = {}  # that each phase of the start took, by its name
        self.done = 0  # number of preparations that are done
        self.left: dict[Preparation, None] = {}  # preparations that are left, the next one first
        self._terms, self._lazy = terms, lazy
        self.interrupted = False  # whether `start` is to end after what it prepares now
        self._next = 0.0  # when the next preparation that overlaps with requests may begin

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time that a block takes to a phase of the start."""
        start = time.monotonic()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - start

    def start(self, runner: ModelRunner) -> None:
        """Prepare what serving waits for; all of it unless the rest is left for later."""
        first, rest = runner.preparations(self._terms)
        self.left.clear()  # the runner has it, too
        self.left |= dict.fromkeys([*first, *rest])
        self.done, told = 0, time.monotonic()
        waited = first if self._lazy else tuple(self.left)
        with self.phase("kernels"):
            runner.compile_together(waited, PATIENCE if self._lazy else None)
        for one in waited:
            if self.interrupted:
                raise StoppedError("the start was interrupted")
            if one in self.left:
                self._prepare(runner, one)
            if time.monotonic() - told > PROGRESS_SECONDS:
                told = time.monotonic()
                log.info("start-up: %s", self)
        if self.done:
            log.info("start-up: %s", self)
        parts = (f"{name} {seconds:.1f} s" for name, seconds in self.seconds.items())
        log.info("start-up took: %s", ", ".join(parts))

    def __str__(self) -> str:
        return f"{self.done} of {self.done + len(self.left)} graphs and kernels prepared"

    def prepare_next(self, runner: ModelRunner) -> bool:
        """Prepare one thing more while there are no requests; False if nothing is left."""
        self._follow(runner)
        if not self.left:
            return False
        self._prepare(runner, next(iter(self.left)))
        if not self.left:
            log.info("start-up: %s", self)
        return True

    def prepare_missed(self, runner: ModelRunner) -> None:
        """Capture the graph that a step has missed, unless that would slow down the requests."""
        self._follow(runner)
        start = time.monotonic()
        if self.left and start >= self._next and (missed := runner.next_missed()) is not None:
            self._prepare(runner, missed)
            now = time.monotonic()
            self._next = now + PAUSE * (now - start)

    def _follow(self, runner: ModelRunner) -> None:
        """Prepare graphs again once the attention backend takes over that was being compiled."""
        if runner.adopt():
            total = self.done + len(self.left)
            kernels = [one for one in self.left if one.kind == KERNELS]
            graphs = [one for some in runner.preparations(self._terms) for one in some]
            self.left.clear()
            self.left |= dict.fromkeys(one for one in graphs if one.kind != KERNELS)
            self.left |= dict.fromkeys(kernels)
            self.done = max(0, total - len(self.left))

    def _prepare(self, runner: ModelRunner, wanted: Preparation) -> None:
        """Prepare one thing, or give it up where there is no memory for it."""
        gone = [wanted]
        with self.phase("kernels" if wanted.kind == KERNELS else "graphs"):
            try:
                if runner.prepare(wanted):
                    self.done += 1
                else:
                    gone = [one for one in self.left if one.kind == wanted.kind]
            except torch.OutOfMemoryError:
                log.warning(
                    "no memory for a graph of %s steps with %d rows: they run without one; a "
                    "smaller `memory` leaves more room", wanted.kind, wanted.size,
                )  # fmt: skip
                runner.give_up(wanted)
                gone = [one for one in self.left if one[:2] == wanted[:2]]
        for one in gone:
            self.left.pop(one, None)
