"""The curve of accuracy against domains in an adapter."""

import sys

import pytest

from tests.bench.valora_train import accuracy_curve
from valora_train.stage import write_json

ATTEMPTS = [
    ("adapter-1", {"a": 0.9}), ("adapter-1", {"a": 0.8, "b": 0.7}),
    ("adapter-1", {"a": None}),  # diverged
    ("adapter-1", {"a": 0.8, "d": 0.9}), ("adapter-2", {"c": 0.95}),
]  # fmt: skip


def test_command(tmp_path, monkeypatch, capsys):
    given = ["curve", str(tmp_path), "--picture", str(tmp_path / "a.png")]
    monkeypatch.setattr(sys, "argv", given)
    with pytest.raises(SystemExit, match="holds no fusion"):
        accuracy_curve.main()
    attempts = [{"adapter": adapter, "accuracy": found} for adapter, found in ATTEMPTS]
    packing = {"adapter-1": ["a", "b"], "adapter-2": ["c"]}
    write_json(tmp_path / "fusion.json", {"packing": packing, "attempts": attempts})
    accuracy_curve.main()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "| domains | mean | a | b | d |"
    assert lines[2:5] == [
        "| 1 | 0.900 | 0.900 |  |  |", "| 2 | 0.750 | 0.800 | 0.700 |  |",
        "| 2 | 0.850 | 0.800 |  | 0.900 |",
    ]  # fmt: skip
    assert lines[-1] == "1.5 domains per adapter here, 4 in the paper"
    assert (tmp_path / "a.png").stat().st_size > 1000
