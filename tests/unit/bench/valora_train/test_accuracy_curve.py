"""The curve of accuracy against domains in an adapter, and the table of ways to serve them."""

import sys

import pytest

from tests.bench.valora_train import accuracy_curve
from tests.bench.valora_train.bench_compare import Way, rows_of
from tests.bench.valora_train.bench_oracle import size_rows
from tests.bench.valora_train.oracle_table import Measured, OracleTable
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
    write_json(tmp_path / "fusion.json", {"attempts": attempts})
    accuracy_curve.main()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "| domains | mean | a | b | d |"
    assert lines[2:5] == [
        "| 1 | 0.900 | 0.900 |  |  |", "| 2 | 0.750 | 0.800 | 0.700 |  |",
        "| 2 | 0.850 | 0.800 |  | 0.900 |",
    ]  # fmt: skip
    assert (tmp_path / "a.png").stat().st_size > 1000


def test_shares_of_dedicated_adapters():
    reached = {"a": 0.8, "b": 0.5}, {"a": 0.6, "b": 0.6}
    groups = {frozenset(name): {name: Measured(0, reached[0][name])} for name in "ab"}
    groups[frozenset("ab")] = {name: Measured(0, of) for name, of in reached[1].items()}
    table = OracleTable("t", ["a", "b"], {"a": 1, "b": 1}, groups={0: groups})
    assert size_rows(table) == ["1.000 (1.000)", "0.975 (0.750)"]


@pytest.mark.parametrize(
    ("seeds", "worst"), [([0.9], "0.900"), ([0.9, 0.8], "0.850 (0.800–0.900)")]
)
def test_one_seed_has_no_spread(seeds, worst):
    found = {"joint": [Way(1, [share, 1.0], 1, 2.0, None, "cpu") for share in seeds]}
    assert rows_of(found)[0][2] == worst
