"""Weights & Biases beside MLflow: its local files hold the values that MLflow's store holds."""

import os

import pytest
import wandb as library
from mlflow import MlflowClient
from PIL import Image

from tests.support.stores import new_store
from tests.support.wandb_files import read_runs
from tests.unit.valora_train.fusion.test_history import DECISIONS, PACKING, REQUIREMENTS, START
from valora_train.errors import SettingsError
from valora_train.fusion.history import History
from valora_train.reporting.tracking import TeacherRun, Tracker
from valora_train.trackers import relay, wandb
from valora_train.trackers.relay import check_trackers
from valora_train.trackers.wandb import WandbTracker

TRIED = DECISIONS[:3]
BARS = {name: requirement.required for name, requirement in REQUIREMENTS.items()}


@pytest.fixture
def uri(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setattr(relay, "_MADE", {})
    monkeypatch.setattr(relay, "_GIVEN_UP", set())
    yield new_store(tmp_path)
    library.teardown()  # it remembers the folder


def begun(uri, also=("wandb",)):
    tracker = Tracker(uri, "valora/detection", "a1", also)
    tracker._monitor_system = lambda resume: None  # no thread
    tracker.start("six · seed 3", {"train": {"lr": 0.25, "seed": 3}}, "packs **six**", None)
    return tracker


def of_mlflow(client, run):
    found = client.get_run(run)
    history = {
        key: sorted((row.step, row.value) for row in client.get_metric_history(run, key))
        for key in found.data.metrics
    }
    return found, history


@pytest.mark.slow
def test_a_fusion_is_in_both(uri, tmp_path):
    client = MlflowClient(uri)
    tracker = begun(uri)
    told = History(REQUIREMENTS, START).told(DECISIONS, PACKING)
    for decision in TRIED:
        run = tracker.start_attempt(decision.attempt, BARS, [], "tries")
        for step in (7, 11, 19):
            run.curve.add(step, {"loss": 1 / (step + decision.attempt.number), "rate": step / 8})
        sheet = Image.new("RGB", (9, 5), "red")
        run.finish(decision, 2.5, {"cat": sheet}, {"detail/ece": 0.125}, {})
    curve = tracker.curve()
    curve.add(300, {"memory": 0.75})
    curve.finish()
    tracker.log_metrics({"adapters": 2.0})  # a smaller step than the one before
    tracker.log_summary(TRIED, [1.5] * len(TRIED), BARS, told[: len(TRIED)])
    tracker.finish("FINISHED", "packed")
    parent = tracker.run_id
    with (
        pytest.raises(ValueError, match="broken"),
        TeacherRun(uri, "cat", "t1", {"epochs": 5}, ["wandb"]) as taught,
    ):
        taught.add(1, {"loss": 0.5})
        raise ValueError("broken")

    library.teardown()  # its process writes the rest
    runs = read_runs(tmp_path)
    known = [
        run
        for experiment in client.search_experiments(filter_string="name LIKE 'valora/%'")
        for run in client.search_runs([experiment.experiment_id])
    ]
    assert {run.info.run_id for run in known} == set(runs)
    assert len(known) == len(TRIED) + 2
    for run in known:
        ours, history = of_mlflow(client, run.info.run_id)
        found = runs[run.info.run_id]
        logged = {key: sorted(rows) for key, rows in found.history.items() if key in history}
        assert logged == history
        assert found.name == ours.info.run_name
        assert found.exit_code == (0 if ours.info.status == "FINISHED" else 1)
        assert {key: found.config[key] for key in ours.data.params} == ours.data.params
    assert runs[parent].config["train.lr"] == "0.25"
    assert (runs[parent].project, runs[parent].notes) == ("valora-detection", "packed")
    assert any(key.startswith("steps.json") for key in runs[parent].history)
    attempts = [run for key, run in runs.items() if run.group == parent and key != parent]
    assert len(attempts) == len(TRIED)
    assert {run.config["valora.decision"] for run in attempts} == {
        str(decision.verdict) for decision in TRIED
    }
    assert all("pictures/cat.png/path" in run.history for run in attempts)


def test_an_interrupted_fusion_goes_on_in_both(uri, tmp_path, monkeypatch):
    first = begun(uri)
    first.log_metrics({"accuracy": 0.25}, 1)
    first.finish("KILLED")
    library.teardown()  # as in another process, a second later at least: W&B names folders by it
    monkeypatch.setattr(relay, "_MADE", {})
    monkeypatch.setenv("WANDB_DIR", str(tmp_path / "again"))
    again = begun(uri)
    again.log_metrics({"accuracy": 0.5}, 2)
    again.finish("FINISHED")
    library.teardown()
    (before,) = read_runs(tmp_path).items()
    (after,) = read_runs(tmp_path / "again").items()
    assert before[0] == after[0] == first.run_id == again.run_id
    assert (before[1].history["accuracy"], before[1].exit_code) == ([(1, 0.25)], 1)
    assert (after[1].history["accuracy"], after[1].exit_code) == ([(2, 0.5)], 0)


def test_a_tracker_that_fails_ends_no_training(uri, tmp_path, monkeypatch, capsys):
    def fail(*_):
        raise OSError("no space\nleft")

    tracker = begun(uri)
    monkeypatch.setattr(WandbTracker, "log_metrics", fail)
    tracker.log_metrics({"accuracy": 0.25})
    tracker.log_metrics({"accuracy": 0.5})
    tracker.finish("FINISHED")
    assert MlflowClient(uri).get_run(tracker.run_id).data.metrics["accuracy"] == 0.5
    said = capsys.readouterr().err.splitlines()
    assert said == ["wandb is told nothing more (OSError: no space left); MLflow has everything"]


@pytest.mark.parametrize("mode", ["online", "offline"])
def test_what_is_missing_is_said_before_any_work(mode, tmp_path, monkeypatch):
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("WANDB_MODE", mode)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("wandb.setup", lambda: _Setup(mode))
    if mode == "online":
        with pytest.raises(SettingsError, match=r"no API key .* WANDB_MODE=offline"):
            check_trackers(["wandb"])
        (tmp_path / "none").write_text("machine wandb.example login user password key\n")
        check_trackers(["wandb"])
        (tmp_path / "none").write_text("machine other.example login user password key\n")
        monkeypatch.setenv("WANDB_API_KEY", "key")
    check_trackers(["wandb"])
    monkeypatch.setattr(wandb.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SettingsError, match=r"pip install 'valora\[wandb\]'"):
        check_trackers(["wandb"])
    with pytest.raises(SettingsError, match="unknown tracker 'wanb': choose one of wandb"):
        check_trackers(["wanb"])


class _Setup:
    def __init__(self, mode):
        self.settings = self
        self.mode, self.base_url = mode, "https://wandb.example"
