"""The terminal: a live line for the work in progress, and a line for each finished step."""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

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
    from collections.abc import Callable, Iterator

    Step = Callable[[int, int, float], None]

LOG_WIDTH = 120  # characters, where the output is not a terminal


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

        def on_step(step: int, steps: int, loss: float) -> None:
            self._live.update(task, completed=step, total=steps, note=f"loss {loss:.3f}")

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


@contextmanager
def stopwatch() -> Iterator[Callable[[], float]]:
    """Yield a function that returns the seconds since the `with` block began."""
    start = time.monotonic()
    yield lambda: time.monotonic() - start
