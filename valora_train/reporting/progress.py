"""The terminal: a live line for the work in progress, and a line for each finished step."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from multiprocessing.connection import Connection
from typing import Any

from rich import progress as bars
from rich.console import Console

Step = Callable[..., None]
"""Shows a step: its number, that of all steps, the loss, and further figures by name."""

RATES = {"lr", "head_lr"}
LOG_WIDTH = 120  # characters, where the output is not a terminal
SHOWN_SECONDS = 0.2  # between two steps that are shown
MAX_RELAYED = 1000  # characters of a line


class Display:
    """Shows progress, or finished steps alone; jobs have names, and `messages` are relayed."""

    def __init__(
        self,
        console: Console | None = None,
        job: str | None = None,
        messages: Connection[Any, Any] | None = None,
    ) -> None:
        self.console = console or Console(quiet=messages is not None)
        self._job = "" if job is None else f"[dim]{job:>20}[/] "
        self._messages = messages
        if not self.console.is_terminal:
            self.console.width = LOG_WIDTH
        self._live = bars.Progress(
            bars.TextColumn("[bold]{task.fields[stage]:>8}[/] {task.description}"),
            bars.BarColumn(bar_width=24),
            bars.MofNCompleteColumn(),
            bars.TextColumn("{task.fields[note]}"),
            bars.TimeElapsedColumn(),
            bars.TextColumn("left"),
            bars.TimeRemainingColumn(),
            console=self.console,
            transient=True,
            disable=not self.console.is_terminal or job is not None,
        )
        self._keys = count()
        self._tasks: dict[Any, bars.TaskID] = {}

    @contextmanager
    def __call__(self) -> Iterator[Display]:
        """Show the live line within a `with` block."""
        with self._live:
            yield self

    @contextmanager
    def work(self, stage: str, what: str) -> Iterator[Step]:
        """Show a piece of work of a stage in the live line; yields what shows its steps."""
        key, shown = (os.getpid(), next(self._keys)), 0.0
        seen: dict[str, float] = {}  # accuracies stay in the line until the next ones

        def on_step(step: int, steps: int, loss: float, given: Any = None) -> None:
            nonlocal shown
            figures: Mapping[str, float] = given or {}
            seen.update({name: value for name, value in figures.items() if name != "head_lr"})
            if (now := time.monotonic()) - shown >= SHOWN_SECONDS or figures.keys() - RATES:
                shown = now
                note = " ".join([f"loss {loss:.3f}", *(_short(*item) for item in seen.items())])
                self._show("step", key, step, steps, note)

        self._show("begin", key, stage, what)
        try:
            yield on_step
        finally:
            self._show("end", key)

    def done(self, stage: str, what: str, seconds: float | None = None) -> None:
        """Write what a stage has done and how long that took; None if it was up to date."""
        took = "up to date" if seconds is None else f"{seconds:.1f} s"
        self.note(stage, f"{what}  [dim]{took}[/]")

    def note(self, stage: str, what: str) -> None:
        """Write a line that reports no finished step."""
        self._show("note", None, stage, what)

    def _show(self, kind: str, key: Any, *facts: Any) -> None:
        if self._messages is not None:
            self._messages.send((kind, key, *(str(one)[:MAX_RELAYED] for one in facts)))
        elif kind == "note":
            line = f"{self._job}[bold]{facts[0]:>8}[/] {facts[1]}"
            self.console.print(line, highlight=False, soft_wrap=True)
        elif kind == "begin":
            stage, what = facts
            self._tasks[key] = self._live.add_task(what, stage=stage, note="", total=None)
        elif kind == "step":
            step, steps, note = float(facts[0]), float(facts[1]), facts[2]
            self._live.update(self._tasks[key], completed=step, total=steps, note=note)
        else:
            self._live.remove_task(self._tasks.pop(key))


def _short(name: str, value: float) -> str:
    """A figure in the live line, e.g. ``lr 0.0012`` or ``person 0.812``."""
    return f"lr {value:.2g}" if name == "lr" else f"{name.rpartition('/')[2]} {value:.3f}"


@contextmanager
def relay(display: Display) -> Iterator[Connection[Any, Any]]:
    """Show in one display what several processes do; yields what their `Display` takes."""

    def show() -> None:
        while (message := received.recv()) is not None:
            display._show(*message)

    # Not a queue: a process that is ended while it writes would leave its lock closed. What is
    # written at once to a pipe, up to 4 kB, stays in one piece.
    received, messages = multiprocessing.Pipe(duplex=False)
    thread = threading.Thread(target=show, daemon=True)
    thread.start()
    try:
        yield messages
    finally:
        messages.send(None)
        thread.join(timeout=5)
        messages.close()


@contextmanager
def stopwatch() -> Iterator[Callable[[], float]]:
    """Yield a function that returns the seconds since the `with` block began."""
    start = time.monotonic()
    yield lambda: time.monotonic() - start
