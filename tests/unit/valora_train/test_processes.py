"""How many processes prepare domains side by side."""

import pytest

from valora_train import processes


@pytest.mark.parametrize(
    ("asked", "device", "waiting", "expected"),
    [(0, "cpu", 6, 3), (0, "cpu", 0, 1), (0, "cuda:1", 6, 1), (5, "cpu", 6, 5), (5, "cpu", 4, 4)],
)
def test_one_for_each_core_and_none_without_work(asked, device, waiting, expected, monkeypatch):
    monkeypatch.setattr(processes, "usable_cores", lambda: 3)
    assert processes.preparing_processes(asked, device, waiting) == expected


def test_few_on_many_cores(monkeypatch):
    monkeypatch.setattr(processes, "usable_cores", lambda: 64)
    assert processes.preparing_processes(0, "cpu", 37) == processes.MAX_PROCESSES == 4
