"""The command `valora-sim`: its table, its files and its messages."""

import json

import numpy as np
import pytest

from valora_serve.orchestrator.registry import POLICIES
from valora_serve.workloads import traces
from valora_serve.workloads.cli import main


def test_command_prints_a_table_and_writes_files(tmp_path, capsys):
    out, plot = tmp_path / "out.json", tmp_path / "out.png"
    pytest.importorskip("matplotlib")
    arguments = ["--rates", "4", "--skews", "0.3", "0.8", "--duration", "3"]
    assert main([*arguments, "--json", str(out), "--plot", str(plot)]) == 0
    text = capsys.readouterr().out
    assert "not measured" in text and "unmerge_only" in text
    rows = json.loads(out.read_text())
    assert len(rows) == 2 * len(POLICIES)
    assert {row["skew"] for row in rows} == {0.3, 0.8}
    assert plot.stat().st_size > 1000


def test_command_replays_files_and_explains(tmp_path, capsys):
    path, decisions = tmp_path / "t.jsonl", tmp_path / "d.txt"
    traces.write(path, traces.poisson(10, 2, adapters=3, skew=0.5))
    arguments = ["--trace", str(path), "--policies", "cost", "--decision-trace", str(decisions)]
    assert main(arguments) == 0
    assert "cost" in capsys.readouterr().out
    lines = decisions.read_text().splitlines()
    assert len(lines) > 100
    assert all(any(mode in line for mode in ("merged", "mixture", "unmerged")) for line in lines)


def test_command_says_what_is_wrong(tmp_path, capsys):
    path = tmp_path / "t.csv"
    path.write_text("when,what\n1,2\n")
    assert main(["--trace", str(path)]) == 1
    assert "has no column 'timestamp'" in capsys.readouterr().err
    assert main(["--rates", "-1"]) == 1
    assert main(["--decision-trace", str(tmp_path / "d.txt")]) == 1
    assert "one policy" in capsys.readouterr().err
    assert main(["--policies", "fifo"]) == 1
    assert "unknown policy 'fifo': choose one of cost, dlora" in capsys.readouterr().err


@pytest.mark.parametrize("name", traces.GENERATORS)
def test_command_generates_every_workload(name, tmp_path):
    out = tmp_path / "out.json"
    arguments = ["--workload", name, "--policies", "slora", "--rates", "3", "--duration", "2"]
    assert main([*arguments, "--requests", "20", "--json", str(out)]) == 0
    (row,) = json.loads(out.read_text())
    assert row["finished"] == row["requests"] > 0
    assert row["rate"] == (None if name == "at_once" else 3)
    assert row["skew"] == (1.0 if name == "slora" else 0.6)


def test_a_latency_limit_counts_as_slo(tmp_path):
    out = tmp_path / "out.json"
    arguments = ["--policies", "slora", "--rates", "3", "--duration", "2", "--json", str(out)]
    assert main([*arguments, "--latency-limit", "1e-6"]) == 0
    (row,) = json.loads(out.read_text())
    assert np.isclose(row["attainment"], 0)
