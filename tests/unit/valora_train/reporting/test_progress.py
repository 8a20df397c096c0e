"""What several processes do is shown in the display of the process that started them."""

import multiprocessing
from io import StringIO

import pytest
from rich.console import Console

from valora_train.reporting import progress
from valora_train.reporting.progress import Display, relay


class Recorded(Display):
    """Records what it is told."""

    def __init__(self):
        super().__init__(Console(file=StringIO()))
        self.shown = []

    def _show(self, kind, key, *facts):
        self.shown.append((key, kind, *facts))
        super()._show(kind, key, *facts)


def train(messages, name):
    display = Display(messages=messages)
    with display.work("teach", name) as step:
        step(1, 7, 0.5, {"validation loss": 2.5})
    display.done("teach", name)


def test_steps_and_lines_of_other_processes_are_shown():
    shown = Recorded()
    context = multiprocessing.get_context("fork")  # others would import for seconds
    with relay(shown) as messages:
        jobs = [context.Process(target=train, args=(messages, name)) for name in ("a", "b")]
        for job in jobs:
            job.start()
        for job in jobs:
            job.join()
    for name in ("a", "b"):
        (key,) = {one[0] for one in shown.shown if one[-1] == name and one[0]}
        assert [one[1:] for one in shown.shown if one[0] == key] == [
            ("begin", "teach", name), ("step", "1", "7", "loss 0.500 validation loss 2.500"),
            ("end",),
        ]  # fmt: skip
        assert (None, "note", "teach", f"{name}  [dim]up to date[/]") in shown.shown
    assert "   teach a  up to date" in shown.console.file.getvalue()
    with pytest.raises(ZeroDivisionError), shown.work("data", "a"):  # what fails leaves nothing
        raise ZeroDivisionError
    assert not shown._live.tasks


def test_steps_are_shown_now_and_then_and_those_with_figures_always(monkeypatch):
    shown = Recorded()
    times = iter([10.0, 10.1, 10.3, 10.35])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(times))
    with shown.work("fuse", "x") as step:
        monkeypatch.setattr(shown._live, "get_time", lambda: 0.0)
        step(1, 9, 0.9, {"lr": 0.1})
        step(2, 9, 0.8, {"lr": 0.2})
        step(3, 9, 0.7, {"lr": 0.3})
        step(4, 9, 0.6, {"lr": 0.4, "validation/x": 0.25})
        monkeypatch.undo()
    steps = [one[2:] for one in shown.shown if one[1] == "step"]
    assert [one[0] for one in steps] == [1, 3, 4]
    assert steps[-1][-1] == "loss 0.600 lr 0.4 x 0.250"
