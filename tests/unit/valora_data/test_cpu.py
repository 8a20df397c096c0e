"""How many cores a process may use, by its affinity and by its container's limit."""

import os

import pytest

from valora_data import cpu


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 8), ({"cpu.max": ""}, 8), ({"cpu.max": "max 100000\n"}, 8),
        ({"cpu.max": "300000 100000\n"}, 3), ({"cpu.max": "150000 100000\n"}, 2),
        ({"cpu.max": "20000 100000\n"}, 1), ({"cpu.max": "6400000 100000\n"}, 8),
    ],
)  # fmt: skip
def test_cores_of_a_container(tmp_path, monkeypatch, files, expected):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(cpu, "CGROUP", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    assert cpu.usable_cores() == expected
    monkeypatch.delattr(os, "sched_getaffinity")  # a system that knows no affinity
    monkeypatch.setattr(cpu, "CGROUP", tmp_path / "none")
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert cpu.usable_cores() == 1
