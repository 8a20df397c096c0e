"""The terminal: a live line for the work in progress, and a line for each finished step."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from contextlib import ExitStack, contextmanager
from itertools import count
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from multiprocessing.connection import Connection
    from typing import Any, Self

    class Step(Protocol):
        """Called with step, number of steps, loss, and further figures by name."""

        def __call__(
            self, step: int, steps: int, loss: float, figures: Mapping[str, float] = ...
        ) -> None:
            """Show a step."""


NO_FIGURES: Mapping[str, float] = MappingProxyType({})
LOG_WIDTH = 120  # characters, where the output is not a terminal
RELAYED_SECONDS = 0.2  # between two steps of a piece of work that reach another process


MOST_RELAYED = 1000  # characters of a line from another process


class Display:
    """Shows progress; where the output is not a terminal, only finished steps are written.

    Args:
        console: The console to write to; standard output by default.
        job: Name of this job among several that run in parallel; such jobs have no live line.
    """

    def __init__(self, console: Console | None = None, job: str | None = None) -> None:
        self.console = console or Console()
        self._job = "" if job is None else f"[dim]{job:>20}[/] "
        if not self.console.is_terminal:
            self.console.width = LOG_WIDTH
        self._live = Progress(
            TextColumn("[bold]{task.fields[stage]:>8}[/] {task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self.console,
            transient=True,
            disable=not self.console.is_terminal or job is not None,
        )

    @contextmanager
    def __call__(self) -> Iterator[Display]:
        """Show the live line within a `with` block."""
        with self._live:
            yield self

    @contextmanager
    def work(self, stage: str, what: str) -> Iterator[Step]:
        """Show a step of work in the live line.

        Args:
            stage: Name of the stage.
            what: Description of the work.

        Yields:
            A function to call with step, number of steps, and loss.
        """
        task = self._live.add_task(what, stage=stage, note="", total=None)
        seen: dict[str, float] = {}  # accuracies stay in the line until the next ones

        def on_step(
            step: int, steps: int, loss: float, figures: Mapping[str, float] = NO_FIGURES
        ) -> None:
            seen.update({key: value for key, value in figures.items() if key != "head_lr"})
            note = " ".join([f"loss {loss:.3f}", *(_short(*item) for item in seen.items())])
            self._live.update(task, completed=step, total=steps, note=note)

        try:
            yield on_step
        finally:
            self._live.remove_task(task)

    def done(self, stage: str, what: str, seconds: float | None = None) -> None:
        """Write the line of a finished step.

        Args:
            stage: Name of the stage.
            what: What was done, and the result.
            seconds: Duration in seconds; None if the stage was up to date.
        """
        took = "[dim]up to date[/]" if seconds is None else f"[dim]{seconds:.1f} s[/]"
        self.note(stage, f"{what}  {took}")

    def note(self, stage: str, what: str) -> None:
        """Write a line that reports no finished step.

        Args:
            stage: Name of the stage.
            what: The text.
        """
        line = f"{self._job}[bold]{stage:>8}[/] {what}"
        self.console.print(line, highlight=False, soft_wrap=True)


class RelayedDisplay(Display):
    """Shows what this process does in the display of the process that started it.

    Args:
        messages: Where that process's `Relay` reads.
    """

    def __init__(self, messages: Connection[Any, Any]) -> None:
        super().__init__(Console(quiet=True))
        self._messages = messages
        self._numbers = count()

    @contextmanager
    def work(self, stage: str, what: str) -> Iterator[Step]:
        """Show a step of work there, see `Display.work`."""
        key = (os.getpid(), next(self._numbers))
        shown = 0.0

        def on_step(
            step: int, steps: int, loss: float, figures: Mapping[str, float] = NO_FIGURES
        ) -> None:
            nonlocal shown
            now = time.monotonic()
            if now - shown >= RELAYED_SECONDS or figures.keys() - {"lr", "head_lr"}:
                shown = now
                self._messages.send(("step", key, (step, steps, loss, dict(figures))))

        self._messages.send(("begin", key, (stage, what)))
        try:
            yield on_step
        finally:
            self._messages.send(("end", key, ()))

    def note(self, stage: str, what: str) -> None:
        """Write a line there."""
        self._messages.send(("note", None, (stage, what[:MOST_RELAYED])))


class Relay:
    """Shows in one display, within a `with` block, what several processes do.

    Args:
        display: The display.

    Attributes:
        messages: Argument of each process's `RelayedDisplay`.
    """

    def __init__(self, display: Display) -> None:
        self._display = display
        # Not a queue: a process that is ended while it writes would leave its lock closed. What is
        # written at once to a pipe, up to 4 kB, stays in one piece.
        self._received, self.messages = multiprocessing.Pipe(duplex=False)
        self._thread = threading.Thread(target=self._show, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.messages.send(None)
        self._thread.join(timeout=5)
        self.messages.close()

    def _show(self) -> None:
        begun: dict[Any, tuple[ExitStack, Step]] = {}
        while (message := self._received.recv()) is not None:
            kind, key, facts = message
            if kind == "note":
                self._display.note(*facts)
            elif kind == "begin":
                work = ExitStack()
                begun[key] = work, work.enter_context(self._display.work(*facts))
            elif kind == "step":
                begun[key][1](*facts)
            else:
                begun.pop(key)[0].close()
        for work, _ in begun.values():
            work.close()


def _short(name: str, value: float) -> str:
    """A figure in the live line, e.g. ``lr 0.0012`` or ``person 0.812``."""
    return f"lr {value:.2g}" if name == "lr" else f"{name.rpartition('/')[2]} {value:.3f}"


@contextmanager
def stopwatch() -> Iterator[Callable[[], float]]:
    """Yield a function that returns the seconds since the `with` block began."""
    start = time.monotonic()
    yield lambda: time.monotonic() - start
