"""Sweeps: what jobs return, and that they lie below one parent run."""

import sys
from pathlib import Path

import pytest
from mlflow import MlflowClient

from tests.support.helpers import coloured_squares
from tests.support.stores import new_store
from tests.unit.valora_train.test_cli import write_coco
from valora_train import cli
from valora_train.reporting.sweep import figures_of, sweep_table
from valora_train.stage import write_json


def test_figures_are_of_validation(tmp_path):
    domains = {
        "a": {"accuracy": {"val": 0.9, "test": 0.1}, "required": 0.8},
        "b": {"accuracy": {"val": 0.5, "test": 0.99}, "required": 0.7},
    }
    result = {"domains": domains, "packing": {"adapter-1": ["a", "b"]}, "attempts": [1, 2, 3],
              "seconds": [60.0, 30.0], "mlflow_run_id": "r"}  # fmt: skip
    write_json(tmp_path / "fusion.json", result)
    found = figures_of(tmp_path)
    assert found["worst_margin"] == pytest.approx(-0.2)
    assert found["accuracy"] == pytest.approx(0.7)
    assert (found["adapters"], found["attempts"], found["met"]) == (1, 3, 1)
    assert (found["minutes"], found["run"]) == (1.5, "r")


def test_the_table_shows_what_differs():
    jobs = {
        "10": {"overrides": {"task": "own", "lr": "2"}, "figures": {"adapters": 2, "run": "x"}},
        "9": {"overrides": {"task": "own", "lr": "1"}, "figures": {"adapters": 3, "run": "y"}},
    }
    assert sweep_table(jobs) == (["job", "lr", "adapters"], [[9, "1", 3], [10, "2", 2]])


@pytest.mark.slow
def test_jobs_lie_below_a_parent_with_a_table(tmp_path, monkeypatch, one_thread):
    monkeypatch.chdir(tmp_path)
    assert coloured_squares(1, 1, "cat")
    given = write_coco(tmp_path / "cats", count=60)
    more = ["command=fuse", "domains.cat.teacher=labels", "train.steps=2", "train.probe_steps=2",
            "fusion.unreachable=keep", "fusion.head_only=false", "train.threads=1",
            f"paths.tracking={new_store(tmp_path)}"]  # fmt: skip
    monkeypatch.setattr(sys, "argv", ["valora-train", "-m", *given, *more, "train.seed=3,5"])
    cli.main()
    client = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    experiment = client.get_experiment_by_name("valora/own")
    runs = client.search_runs([experiment.experiment_id])
    (parent,) = [run for run in runs if "valora.study" in run.data.tags]
    below = [r for r in runs if r.data.tags.get("mlflow.parentRunId") == parent.info.run_id]
    assert {run.data.params["train.seed"] for run in below} == {"3", "5"}
    assert parent.info.status == "FINISHED"
    path = client.download_artifacts(parent.info.run_id, "jobs.json", str(tmp_path))
    assert '"train.seed"' in Path(path).read_text()
