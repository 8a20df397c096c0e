"""What MLflow is told: where a run is, how the experiment opens, what a run reads."""

import json
from pathlib import Path

import pytest
from mlflow import MlflowClient

from valora_train.fusion.decision import Attempt
from valora_train.metrics.per_class import choice_report
from valora_train.reporting.tracking import (
    DataSet,
    Tracker,
    find_run,
    latest_fusions,
    run_address,
)


@pytest.fixture
def uri(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)  # where artifacts go
    return f"sqlite:///{tmp_path}/mlflow.db"


def started(uri: str, task: str = "detection", key: str = "a1") -> Tracker:
    tracker = Tracker(uri, f"valora/{task}", key)
    tracker._monitor_system = lambda resume: None  # no thread
    tracker.start(f"{task} run", {"train": {"lr": 0.1}}, "note", None)
    return tracker


def test_the_link_lands_on_the_run_under_model_training(uri: str) -> None:
    tracker = started(uri)
    experiment = MlflowClient(uri).get_experiment_by_name("valora/detection").experiment_id
    assert tracker.link == (
        f"http://127.0.0.1:5000/#/experiments/{experiment}/runs/{tracker.run_id}"
        "?workflowType=machine_learning"
    )
    assert find_run(uri, tracker.run_id) == tracker.link
    assert find_run(uri, "0" * 32) is None
    assert run_address("https://mlflow.example/", "7", "x").startswith(
        "https://mlflow.example/#/experiments/7/runs/x?"
    )


@pytest.mark.parametrize("tags", [{}, {"mlflow.experimentKind": "genai_development_inferred"}])
def test_experiments_that_exist_get_the_kind_too(uri: str, tags: dict[str, str]) -> None:
    client = MlflowClient(uri)
    client.create_experiment("valora/video", tags=tags)
    started(uri, "video")
    started(uri, "counting")
    for task in ("video", "counting"):
        found = client.get_experiment_by_name(f"valora/{task}")
        assert found.tags["mlflow.experimentKind"] == "custom_model_development"


def test_an_attempt_has_its_data_sets(uri: str) -> None:
    tracker = started(uri)
    attempt = Attempt(3, "cat", "adapter-1", ("dog",), True)
    data_sets = [
        DataSet("cat (taught)", "d1", Path("one"), "training"),
        DataSet("dog (taught)", "d2", Path("two"), "rehearsal"),
        DataSet("dog (labelled)", "d3", Path("three"), "validation"),
    ]
    run = tracker.start_attempt(attempt, {"cat": 0.5, "dog": 0.5}, data_sets)
    found = MlflowClient(uri).get_run(run._id).inputs.dataset_inputs
    assert {(item.dataset.name, item.dataset.digest, item.tags[0].value) for item in found} == {
        ("cat (taught)", "d1", "training"),
        ("dog (taught)", "d2", "rehearsal"),
        ("dog (labelled)", "d3", "validation"),
    }


def test_the_latest_fusion_of_every_task_comes_first(uri: str) -> None:
    first, second = started(uri, key="a1"), started(uri, key="a2")
    attempt = Attempt(1, "cat", "adapter-1", (), True)
    second.start_attempt(attempt, {"cat": 0.5}, [])
    third = started(uri, "video")
    MlflowClient(uri).create_experiment("something else")
    assert latest_fusions(uri) == [
        ("valora/video", "video run", third.link),
        ("valora/detection", "detection run", second.link),
    ]
    assert first.run_id != second.run_id


def test_classes_are_metrics_a_table_and_a_picture(uri: str) -> None:
    tracker = started(uri)
    labels = ["white blood cell", "n/a?", "..", "ünder"]
    truth = [labels[place] for place in (0, 0, 1, 2, 3)]
    report = choice_report([labels[place] for place in (0, 1, 1, 2, 3)], truth, labels)
    tracker.log_classes("cells", report)
    client = MlflowClient(uri)
    run = client.get_run(tracker.run_id)
    assert run.data.metrics["recall/cells/white blood cell"] == 0.5
    assert run.data.metrics["precision/cells/n_a_"] == 0.5
    assert run.data.metrics["f1/cells/ünder"] == 1.0
    assert not [key for key in run.data.metrics if key.startswith("ap/")]
    table = json.loads(
        Path(client.download_artifacts(run.info.run_id, "classes/cells.json")).read_text()
    )
    assert table["columns"] == ["class", "support", "precision", "recall", "f1", "ap"]
    assert table["data"][0] == ["white blood cell", 2, 1.0, 0.5, 0.6667, ""]
    shown = json.loads(run.data.tags["mlflow.loggedArtifacts"])
    assert shown == [{"path": "classes/cells.json", "type": "table"}]
    pictures = [item.path for item in client.list_artifacts(run.info.run_id, "pictures")]
    assert pictures == ["pictures/cells-confusion.png"]


def test_of_many_classes_there_is_a_table_alone(uri: str) -> None:
    tracker = started(uri)
    labels = [f"class {number}" for number in range(60)]
    tracker.log_classes("birds", choice_report(labels, labels, labels))
    client = MlflowClient(uri)
    run = client.get_run(tracker.run_id)
    assert not run.data.metrics
    assert [item.path for item in client.list_artifacts(run.info.run_id)] == [
        "classes",
        "config.yaml",
    ]
