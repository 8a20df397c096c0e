"""Sweeps: jobs that fail under each launcher, what jobs return, and their parent run."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
from mlflow import MlflowClient

from tests.support import tiny_sweep
from tests.support.detection_sets import coco_domain
from tests.support.stores import new_store
from valora_train import cli
from valora_train.reporting.sweep import figures_of, sweep_table
from valora_train.stage import write_json
from valora_train.sweeps import SWEEP

ROOT = Path(__file__).parents[3]
RAY = ["hydra/launcher=ray", "hydra.launcher.num_gpus=0"]
LAUNCHERS = {
    "joblib": ["hydra/launcher=joblib", "hydra.launcher.n_jobs=2"],
    "submitit": ["hydra/launcher=submitit_local", "hydra.launcher.gpus_per_node=2"],
    "ray": RAY,
}


@pytest.fixture
def sweep(tmp_path, monkeypatch, capfd):
    """Runs a sweep that fails, `here` or in another process; gives its lines on stderr."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{os.environ.get('PYTHONPATH', '')}")
    for name in (SWEEP, "HYDRA_FULL_ERROR"):  # which it sets
        monkeypatch.setenv(name, "")
    (tmp_path / "settings").mkdir()
    (tmp_path / "settings" / "config.yaml").write_text(tiny_sweep.CONFIG)

    def run(*arguments, here=False):
        given = [f"{tmp_path}/settings", "-m", *arguments]
        if here:
            monkeypatch.setattr(sys, "argv", ["tiny_sweep", *given[1:]])
            with pytest.raises(SystemExit) as ended:
                tiny_sweep.main(given[0])
            return [*capfd.readouterr().err.splitlines(), ended.value.code]
        command = [sys.executable, "-m", "tests.support.tiny_sweep", *given]
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
        assert done.returncode == 1
        return done.stderr.strip().splitlines()

    return run


def written(folder):
    return {p.stem: ast.literal_eval(p.read_text()) for p in folder.glob("*.txt")}


@pytest.mark.parametrize(
    "launcher", ["basic", *(pytest.param(name, marks=pytest.mark.slow) for name in LAUNCHERS)]
)
def test_the_others_end_when_a_job_fails(launcher, sweep, tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    given = [*LAUNCHERS.get(launcher, []), "name=a,b,c", "+do={b:refuse,c:write_late}"]
    said = sweep(*given, here=launcher == "basic")
    assert "b is refused: choose another" in said[-1]
    assert not any("Traceback" in line for line in said)
    found = written(tmp_path)
    assert set(found) == {"a", "c"}
    assert {one["cwd"] for one in found.values()} == {str(tmp_path)}
    assert len({one["sweep"] for one in found.values()}) == 1
    if launcher in ("basic", "joblib"):  # the others give jobs the GPUs that they ask for
        assert {one["gpus"] for one in found.values()} == {"3"}


@pytest.mark.slow
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_job_that_is_killed(launcher, sweep, tmp_path):
    said = sweep(*LAUNCHERS[launcher], "name=a,b", "+do={a:die,b:write_late}")
    assert said[-1].startswith("error: ") and "run the same command again" in said[-1]
    assert set(written(tmp_path)) == (set() if launcher == "joblib" else {"b"})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (["hydra/launcher=ray", "hydra.launcher.address=127.0.0.1:1"], "cannot be joined"),
        ([*RAY, "+hydra.launcher.resources.camera=2"],
         "no machine of the Ray cluster has 1 CPU, 2 camera for a job: correct"),
    ],
)  # fmt: skip
def test_launchers_that_cannot_start(given, sentence, sweep, tmp_path):
    said = sweep(*given, "name=a,b")
    assert said[-1].startswith("error: ") and sentence in said[-1]
    assert not any("Traceback" in line for line in said)
    assert not written(tmp_path)


def test_a_missing_library_is_named(sweep, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    said = sweep("hydra/launcher=ray", "name=a,b", here=True)
    assert said[-1] == "error: hydra/launcher=ray needs Ray: pip install 'valora[cluster]'"


def test_figures_are_of_validation_and_the_table_shows_what_differs(tmp_path):
    domains = {
        "a": {"accuracy": {"val": 0.9, "test": 0.1}, "required": 0.8},
        "b": {"accuracy": {"val": 0.5, "test": 0.99}, "required": 0.7},
    }
    result = {"domains": domains, "packing": {"adapter-1": ["a", "b"]}, "attempts": [1, 2, 3],
              "seconds": [60.0, 30.0], "mlflow_run_id": "r"}  # fmt: skip
    write_json(tmp_path / "fusion.json", result)
    assert figures_of(tmp_path) == {
        "worst_margin": pytest.approx(-0.2), "accuracy": pytest.approx(0.7), "adapters": 1,
        "attempts": 3, "met": 1, "minutes": 1.5, "run": "r",
    }  # fmt: skip
    jobs = {
        "10": {"overrides": {"task": "own", "lr": "2"}, "figures": {"adapters": 2, "run": "x"}},
        "9": {"overrides": {"task": "own", "lr": "1"}, "figures": {"adapters": 3, "run": "y"}},
    }
    assert sweep_table(jobs) == (["job", "lr", "adapters"], [[9, "1", 3], [10, "2", 2]])


@pytest.mark.parametrize("store", ["http://me:secret@host:9/x", "sqlite:///other.db"])
def test_no_password_is_left_on_the_disk(tmp_path, monkeypatch, store, valora_train):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "another")
    used = []

    def run(settings, *_, **__):
        used.append(settings.paths.tracking or os.environ["MLFLOW_TRACKING_URI"])
        return {}

    monkeypatch.setattr(cli, "run", run)
    valora_train("-m", "task=detection", f"paths.tracking='{store}'", "train.seed=1,2")
    assert used == [store] * 2
    left = [file.read_text() for file in tmp_path.rglob("*.yaml")]
    assert left and not any("secret" in text for text in left)


@pytest.mark.slow
def test_jobs_lie_below_a_parent_with_a_table(tmp_path, valora_train, random_llava):
    given = coco_domain(tmp_path / "cats", count=60)
    more = ["command=fuse", "domains.cat.teacher=labels", "train.steps=2", "train.probe_steps=2",
            "fusion.unreachable=keep", "fusion.head_only=false", "train.threads=1",
            f"model.id={random_llava}", "train=default",
            f"paths.tracking={new_store(tmp_path)}"]  # fmt: skip
    valora_train("-m", *given, *more, "train.seed=3,5")
    client = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    experiment = client.get_experiment_by_name("valora/own")
    runs = client.search_runs([experiment.experiment_id])
    (parent,) = [run for run in runs if "valora.study" in run.data.tags]
    below = [r for r in runs if r.data.tags.get("mlflow.parentRunId") == parent.info.run_id]
    assert {run.data.params["train.seed"] for run in below} == {"3", "5"}
    assert parent.info.status == "FINISHED"
    path = client.download_artifacts(parent.info.run_id, "jobs.json", str(tmp_path))
    assert '"train.seed"' in Path(path).read_text()
