"""The curve of accuracy against domains in an adapter."""

import sys

import pytest

from valora_train.reporting import accuracy_curve as curve
from valora_train.stage import write_json

RESULT = {
    "packing": {"adapter-1": ["a", "b"], "adapter-2": ["c"]},
    "attempts": [
        {"adapter": "adapter-1", "accuracy": {"a": 0.9}},
        {"adapter": "adapter-1", "accuracy": {"a": 0.8, "b": 0.7}},
        {"adapter": "adapter-1", "accuracy": {"a": 0.5, "b": 0.6, "c": 0.4}},
        {"adapter": "adapter-2", "accuracy": {"c": 0.95}},
    ],
}


def test_points_are_the_attempts_on_an_adapter():
    points = curve.curve_points(RESULT)
    assert [point.held for point in points] == [1, 2, 3]
    assert [point.mean for point in points] == pytest.approx([0.9, 0.75, 0.5])
    assert [point.held for point in curve.curve_points(RESULT, "adapter-2")] == [1]
    assert curve.domains_per_adapter(RESULT) == 1.5
    assert curve.curve_table(points).splitlines()[2:] == [
        "| 1 | 0.900 | 0.900 |  |  |",
        "| 2 | 0.750 | 0.800 | 0.700 |  |",
        "| 3 | 0.500 | 0.500 | 0.600 | 0.400 |",
    ]


def test_a_domain_that_was_rolled_back_has_its_column():
    attempts = [*RESULT["attempts"], {"adapter": "adapter-1", "accuracy": {"a": 0.8, "d": 0.9}}]
    lines = curve.curve_table(curve.curve_points({"attempts": attempts})).splitlines()
    assert lines[0] == "| domains | mean | a | b | c | d |"
    assert lines[-2:] == [
        "| 3 | 0.500 | 0.500 | 0.600 | 0.400 |  |",
        "| 2 | 0.850 | 0.800 |  |  | 0.900 |",
    ]


def test_command(tmp_path, monkeypatch, capsys):
    folder = tmp_path / "fuse-x-0123"
    folder.mkdir()
    monkeypatch.setattr(sys, "argv", ["curve", str(folder), "--picture", str(tmp_path / "a.png")])
    assert curve.main() == 1
    assert "holds no fusion.json" in capsys.readouterr().err
    write_json(folder / "fusion.json", RESULT)
    assert curve.main() == 0
    assert "1.5 domains per adapter here, 4 in the paper" in capsys.readouterr().out
    assert (tmp_path / "a.png").stat().st_size > 1000
