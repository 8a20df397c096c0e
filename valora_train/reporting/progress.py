"""What the terminal shows: one live line for the work in hand, one line for each that is done."""

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


WIDTH = 120  # of a log file


class Display:
    """The terminal; where there is none, only finished lines are written.

    Args:
        console: Where to write.
        job: Which of several jobs at work side by side this is; then there is no live line.
    """

    def __init__(self, console: Console | None = None, job: str | None = None) -> None:
        self.console = console or Console()
        self._job = "" if job is None else f"[dim]{job:>20}[/] "
        if not self.console.is_terminal:
            self.console.width = WIDTH
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
        """Show live progress within a `with` block."""
        with self._live:
            yield self

    @contextmanager
    def work(self, stage: str, what: str) -> Iterator[Step]:
        """Show a piece of work; gives a function to call with step, number of steps and loss."""
        task = self._live.add_task(what, stage=stage, note="", total=None)

        def on_step(step: int, steps: int, loss: float) -> None:
            self._live.update(task, completed=step, total=steps, note=f"loss {loss:.3f}")

        try:
            yield on_step
        finally:
            self._live.remove_task(task)

    def done(self, stage: str, what: str, seconds: float | None = None) -> None:
        """Write a finished line.

        Args:
            stage: Name of the stage.
            what: What was done, with its result.
            seconds: How long it took; None if it was there already.
        """
        took = "[dim]up to date[/]" if seconds is None else f"[dim]{seconds:.1f} s[/]"
        line = f"{self._job}[bold]{stage:>8}[/] {what}  {took}"
        self.console.print(line, highlight=False, soft_wrap=True)


@contextmanager
def stopwatch() -> Iterator[Callable[[], float]]:
    """Gives a function that says how many seconds have passed."""
    start = time.monotonic()
    yield lambda: time.monotonic() - start
