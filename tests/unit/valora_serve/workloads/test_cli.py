"""The command `valora-sim`: its table, its files and its messages."""

import json

import pytest

from valora_serve.orchestrator.registry import POLICIES
from valora_serve.workloads import traces
from valora_serve.workloads.cli import MEASURED, main


def test_command_prints_a_table_and_writes_files(tmp_path, capsys):
    out = tmp_path / "out.json"
    arguments = ["--rates", "4", "--skews", "0.3", "0.8", "--duration", "1"]
    assert main([*arguments, "--json", str(out)]) == 0
    text = capsys.readouterr().out
    assert "costs from an H200" in text and "unmerge_only" in text
    rows = json.loads(out.read_text())
    assert len(rows) == 2 * len(POLICIES)
    assert {row["skew"] for row in rows} == {0.3, 0.8}


def test_command_replays_files_and_explains(tmp_path, capsys):
    path, decisions, row = tmp_path / "t.JSONL", tmp_path / "d.txt", {"prompt": 256, "output": 200}
    rows = [row | {"arrival": n / 10, "adapter": f"[/a{n % 3}]"} for n in range(20)]
    path.write_text("\n".join(map(json.dumps, rows)))
    arguments = ["--trace", str(path), "--policies", "cost", "--decision-trace", str(decisions)]
    assert main([*arguments, "--shares"]) == 0
    assert "[/a2]" in capsys.readouterr().out
    lines = decisions.read_text().splitlines()
    assert len(lines) > 100
    assert all(any(mode in line for mode in ("merged", "mixture", "unmerged")) for line in lines)


@pytest.mark.parametrize("name", traces.GENERATORS)
def test_command_generates_every_workload(name, tmp_path):
    out = tmp_path / "out.json"
    arguments = ["--workload", name, "--policies", "slora", "--rates", "3", "--duration", "2"]
    assert main([*arguments, "--requests", "20", "--json", str(out)]) == 0
    (row,) = json.loads(out.read_text())
    assert row["finished"] == row["requests"] > 0
    assert row["rate"] == (None if name == "at_once" else 3)
    assert row["skew"] == (1.0 if name == "slora" else 0.6)


def test_replicas_are_compared(tmp_path, capsys):
    arguments = [
        "--workload", "slora", "--adapters", "30", "--slots", "8", "--rates", "10", "--per-replica",
        "--duration", "4", "--replicas", "1", "3", "--router", "random",
    ]  # fmt: skip
    assert main([*arguments, "affinity", "--json", str(tmp_path / "one.json")]) == 0
    text = capsys.readouterr().out
    assert "costs from an H200" in text and "Each replica" in text and "× one" in text
    rows = json.loads((tmp_path / "one.json").read_text())
    assert [(r["replicas"], r["router"]) for r in rows] == [
        (n, name) for n in (1, 3) for name in ("random", "affinity")
    ]
    for row in rows:
        assert row["policy"] == "cost" and row["finished"] == row["requests"]
        assert len(row["per_replica"]) == row["replicas"]
        for name in ("requests", "loads", "steps"):
            assert sum(one[name] for one in row["per_replica"]) == row[name]
        assert 0 < row["balance"] <= 1 and 0 < row["fairness"] <= 1
    assert rows[2]["requests"] == pytest.approx(3 * rows[0]["requests"], rel=0.3)
    assert main([*arguments, "--json", str(tmp_path / "two.json")]) == 0
    again = json.loads((tmp_path / "two.json").read_text())
    for row in (*rows, *again):
        del row["computed_in"]
    assert rows[::2] == again


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("--trace t.csv", "line 2: arrival: Field required"),
        ("--decision-trace d.txt", "one policy"),
        ("--policies fifo", "unknown policy 'fifo': choose one of algorithm1, "),
        ("--replicas 0", "at least 1 replica, not 0"),
        ("--replicas 2 --router near", "unknown router 'near': choose one of affinity"),
        ("--replicas 2 --slots 1", "slots: expected at least 2, got 1"),
        ("--router least --decision-trace d", "--decision-trace is for one machine"),
        ("--replicas 2 --costs none.json", "none.json"),
        ("--max-requests 0", "max_requests: expected at least 1, got 0"),
        ("--answer-limit 0", "answer_limit: expected at least 1, got 0"),
        *((f"--rates {rate}", "rates: expected more than 0") for rate in ("-1", "nan", "inf")),
        ("--workload at_once --requests -4", "requests: expected more than 0"),
        ("--latency-limit -1", "latency_limit: expected more than 0"),
        ("--seed -1", "seed: expected 0 or more, got -1"),
        ("--shares typo=3 --policies cost", "the workload has no adapter 'typo', but"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_one_sentence(given, said, tmp_path, monkeypatch, capsys):
    (tmp_path / "t.csv").write_text("when,what\n1,2\n")
    monkeypatch.chdir(tmp_path)
    assert main([*given.split(), "--duration", "1"]) == 1
    (told,) = capsys.readouterr().err.splitlines()
    assert told.startswith("valora-sim: ") and said in told
    assert [file.name for file in tmp_path.iterdir()] == ["t.csv"]


def test_policies_and_systems_may_have_costs_of_their_own(tmp_path):
    costs, out = tmp_path / "mine.json", tmp_path / "out.json"
    content = json.loads((MEASURED / "static.json").read_text())
    costs.write_text(json.dumps(content | {"machine": "mine"}))
    few = ["--duration", "2", "--rates", "4", "--json", str(out)]
    assert main([*few, "--systems", "slora", "ours", "--policies", f"slora={costs}", "slora"]) == 0
    rows = {row["policy"]: row["token_latency"] for row in json.loads(out.read_text())}
    assert [*rows] == ["slora, static", "ours, atmm", f"slora={costs}", "slora"]
    assert main([*few, "--policies", "slora", "--costs", str(costs)]) == 0
    (alone,) = json.loads(out.read_text())
    assert rows["slora, static"] == rows[f"slora={costs}"] == alone["token_latency"]
    assert len({*rows.values()}) == 3


@pytest.mark.parametrize("more", [[], ["--replicas", "2"]])
def test_shares_are_simulated_with_policies_that_keep_them(more, tmp_path, capsys):
    """The table of the others looked as if they had not been kept."""
    few = ["--duration", "1", "--rates", "4", "--adapters", "2", "--shares", "base=2", *more]
    assert main([*few, "--policies", "cost", "dlora"]) == 1
    assert "valora-sim: --shares: policy dlora keeps no shares" in capsys.readouterr().err
    out = tmp_path / "out.json"
    assert main([*few, "--json", str(out)]) == 0
    found = {row["policy"] for row in json.loads(out.read_text())}
    without = {"merge_only", "dlora", "algorithm1", "algorithm1_published"}
    assert found == ({"cost"} if more else set(POLICIES) - without)
