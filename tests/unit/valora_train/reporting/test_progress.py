"""What several processes do is shown in the display of the process that started them."""

import multiprocessing
from contextlib import contextmanager
from io import StringIO

import pytest
from rich.console import Console

from valora_train.reporting import progress
from valora_train.reporting.progress import Display, Relay, RelayedDisplay


class Recorded(Display):
    """Records what it is told."""

    def __init__(self):
        super().__init__(Console(file=StringIO()))
        self.said = []

    @contextmanager
    def work(self, stage, what):
        self.said.append(("begin", stage, what))
        yield lambda step, steps, loss, figures: self.said.append(
            (what, step, steps, loss, figures)
        )
        self.said.append(("end", what))

    def note(self, stage, what):
        self.said.append((stage, what))


def train(messages, name):
    display = RelayedDisplay(messages)
    with display.work("teach", name) as step:
        step(1, 7, 0.5, {"validation loss": 2.5})
    display.done("teach", name)


def test_steps_and_lines_of_other_processes_are_shown():
    shown = Recorded()
    context = multiprocessing.get_context("spawn")
    with Relay(shown) as relay:
        jobs = [context.Process(target=train, args=(relay.messages, name)) for name in ("a", "b")]
        for job in jobs:
            job.start()
        for job in jobs:
            job.join()
    for name in ("a", "b"):
        assert [one for one in shown.said if name in one or f"{name}  " in one[-1]] == [
            ("begin", "teach", name), (name, 1, 7, 0.5, {"validation loss": 2.5}), ("end", name),
            ("teach", f"{name}  [dim]up to date[/]"),
        ]  # fmt: skip


def test_what_fails_or_is_cut_off_leaves_nothing_in_the_live_line(monkeypatch):
    shown = Recorded()
    with Relay(shown) as relay:
        display = RelayedDisplay(relay.messages)
        with pytest.raises(ZeroDivisionError), display.work("data", "a"):
            raise ZeroDivisionError
        display.work("data", "killed").__enter__()
    assert shown.said == [
        ("begin", "data", "a"), ("end", "a"), ("begin", "data", "killed"), ("end", "killed"),
    ]  # fmt: skip


def test_steps_are_sent_now_and_then_and_those_with_figures_always(monkeypatch):
    shown = Recorded()
    times = iter([10.0, 10.1, 10.3, 10.35])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(times))
    with Relay(shown) as relay, RelayedDisplay(relay.messages).work("fuse", "x") as step:
        step(1, 9, 0.9, {"lr": 0.1})
        step(2, 9, 0.8, {"lr": 0.2})
        step(3, 9, 0.7, {"lr": 0.3})
        step(4, 9, 0.6, {"lr": 0.4, "validation/x": 0.25})
    assert [one[1] for one in shown.said if one[0] == "x"] == [1, 3, 4]
