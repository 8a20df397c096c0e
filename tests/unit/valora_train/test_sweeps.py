"""Sweeps: what Optuna searches, and that jobs lie below one parent run."""

import sys
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from mlflow import MlflowClient
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

from tests.support.helpers import coloured_squares
from tests.support.stores import new_store
from tests.unit.valora_train.test_cli import write_coco
from valora_train import cli
from valora_train.errors import SettingsError
from valora_train.reporting.sweep import figures_of, sweep_table
from valora_train.stage import write_json
from valora_train.sweeps import OptunaSweeper, split_overrides


def test_overrides_with_several_values_are_searched():
    given = OverridesParser.create().parse_overrides(
        [
            "task=own", "train.lr=tag(log,interval(1e-4,1e-2))", "train.steps=int(interval(10,90))",
            "train.lora.rank=4,8", "train.batch_size=range(8,25,8)", "+x.y=[1,2]", "a=choice(b,c)",
        ]
    )  # fmt: skip
    fixed, searched = split_overrides(given)
    assert fixed == ["task=own", "+x.y=[1,2]"]
    assert searched == {
        "train.lr": FloatDistribution(1e-4, 1e-2, log=True),
        "train.steps": IntDistribution(10, 90),
        "train.lora.rank": CategoricalDistribution(["4", "8"]),
        "train.batch_size": IntDistribution(8, 24, step=8),
        "a": CategoricalDistribution(["b", "c"]),
    }


class Launcher:
    """Runs no job, but returns a parabola of its setting."""

    def __init__(self):
        self.jobs = []

    def launch(self, jobs, initial_job_idx):
        assert initial_job_idx == len(self.jobs)
        self.jobs += jobs
        found = [float(job[-1].partition("=")[2]) for job in jobs]
        return [Returned({"worst_margin": -((x - 0.3) ** 2), "adapters": x}) for x in found]


class Returned:
    def __init__(self, value):
        self.return_value = value


def sweeper(launcher, **changed):
    options = {
        "trials": 25, "side_by_side": 4, "objective": "worst_margin", "direction": "maximize",
        "seed": 0, "storage": None, "study": None, **changed,
    }  # fmt: skip
    made = OptunaSweeper(**options)
    made._launcher = launcher
    made.hydra_context = type("Context", (), {"config_loader": None})()
    return made


def test_the_search_finds_the_best(capsys):
    launcher = Launcher()
    sweeper(launcher).sweep(["task=own", "train.lr=interval(0.0,1.0)"])
    assert len(launcher.jobs) == 25
    assert all(job[0] == "task=own" for job in launcher.jobs)
    said = capsys.readouterr().out
    assert said.startswith("best worst_margin of 25 jobs: ")
    assert float(said.rpartition("=")[2]) == pytest.approx(0.3, abs=0.1)
    sweeper(Launcher(), objective="adapters", direction="minimize").sweep(["a=interval(0.0,1.0)"])
    assert float(capsys.readouterr().out.rpartition("=")[2]) < 0.1


@pytest.mark.parametrize(
    ("changed", "arguments", "message"),
    [
        ({"objective": "beauty"}, ["a=1,2"], "sweeper.objective=beauty is unknown: choose from"),
        ({"direction": "up"}, ["a=1,2"], "sweeper.direction=up is unknown"),
        ({"trials": 0}, ["a=1,2"], "sweeper.trials must be at least 1, got 0"),
        ({}, ["a=1"], "needs a setting to search"),
        ({"objective": "met"}, ["a=1,2"], "returns no met to optimise"),
    ],
)
def test_mistakes_are_one_sentence(changed, arguments, message):
    with pytest.raises(SettingsError, match=message):
        sweeper(Launcher(), **changed).sweep(arguments)


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
@pytest.mark.parametrize("how", ["basic", "optuna"])
def test_jobs_lie_below_a_parent_with_a_table(how, tmp_path, monkeypatch, capfd, one_thread):
    monkeypatch.chdir(tmp_path)
    assert coloured_squares(1, 1, "cat")
    given = write_coco(tmp_path / "cats", count=60)
    more = ["command=fuse", "domains.cat.teacher=labels", "train.steps=2", "train.probe_steps=2",
            "fusion.unreachable=keep", "fusion.head_only=false", "train.threads=1",
            f"paths.tracking={new_store(tmp_path)}"]  # fmt: skip
    swept = ["train.seed=3,5"] if how == "basic" else [
        "hydra/sweeper=optuna", "hydra.sweeper.trials=2", "train.seed=int(interval(3,4))",
    ]  # fmt: skip
    monkeypatch.setattr(sys, "argv", ["valora-train", "-m", *given, *more, *swept])
    cli.main()
    out = capfd.readouterr().out
    assert ("best worst_margin of 2 jobs" in out) == (how == "optuna")
    client = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    experiment = client.get_experiment_by_name("valora/own")
    runs = client.search_runs([experiment.experiment_id])
    (parent,) = [run for run in runs if "valora.study" in run.data.tags]
    below = [r for r in runs if r.data.tags.get("mlflow.parentRunId") == parent.info.run_id]
    assert len({run.data.params["train.seed"] for run in below}) == len(below) >= 1
    assert parent.info.status == "FINISHED"
    path = client.download_artifacts(parent.info.run_id, "jobs.json", str(tmp_path))
    assert '"train.seed"' in Path(path).read_text() or len(below) == 1
