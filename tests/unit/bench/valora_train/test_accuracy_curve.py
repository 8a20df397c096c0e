"""The curve of accuracy against domains in an adapter."""

import sys

import pytest

from tests.bench.valora_train import accuracy_curve
from valora_train.stage import write_json

RESULT = {
    "packing": {"adapter-1": ["a", "b"], "adapter-2": ["c"]},
    "attempts": [
        {"adapter": "adapter-1", "accuracy": {"a": 0.9}},
        {"adapter": "adapter-1", "accuracy": {"a": 0.8, "b": 0.7}},
        {"adapter": "adapter-1", "accuracy": {"a": 0.5, "b": 0.6, "c": 0.4}},
        {"adapter": "adapter-1", "accuracy": {"a": None}},  # diverged
        {"adapter": "adapter-1", "accuracy": {"a": 0.8, "d": 0.9}},
        {"adapter": "adapter-2", "accuracy": {"c": 0.95}},
    ],
}


def test_command(tmp_path, monkeypatch, capsys):
    folder = tmp_path / "fuse-x-0123"
    folder.mkdir()
    given = ["curve", str(folder), "--picture", str(tmp_path / "a.png")]
    monkeypatch.setattr(sys, "argv", given)
    with pytest.raises(SystemExit, match="holds no fusion"):
        accuracy_curve.main()
    write_json(folder / "fusion.json", RESULT)
    accuracy_curve.main()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "| domains | mean | a | b | c | d |"
    assert lines[2:6] == [
        "| 1 | 0.900 | 0.900 |  |  |  |",
        "| 2 | 0.750 | 0.800 | 0.700 |  |  |",
        "| 3 | 0.500 | 0.500 | 0.600 | 0.400 |  |",
        "| 2 | 0.850 | 0.800 |  |  | 0.900 |",
    ]
    assert lines[-1] == "1.5 domains per adapter here, 4 in the paper"
    assert (tmp_path / "a.png").stat().st_size > 1000
    monkeypatch.setattr(sys, "argv", [*given, "--adapter", "adapter-2"])
    accuracy_curve.main()
    assert "| 1 | 0.950 | 0.950 |" in capsys.readouterr().out
