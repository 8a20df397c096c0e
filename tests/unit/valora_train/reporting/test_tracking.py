"""What MLflow is told: where a run is, how the experiment opens, what a run reads."""

import json
import signal
import sqlite3
from pathlib import Path
from types import SimpleNamespace

import pytest
from filelock import FileLock
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session

from tests.support.stores import new_store
from tests.unit.valora_train.fusion.test_history import DECISIONS, PACKING, REQUIREMENTS, START
from tests.unit.valora_train.reporting.test_domain_table import DOMAINS
from tests.unit.valora_train.reporting.test_fusion_report import result
from valora_train.errors import TrackingError
from valora_train.fusion.decision import Attempt
from valora_train.fusion.history import History
from valora_train.metrics.per_class import choice_report
from valora_train.reporting.fusion_report import FusionReport, log_result
from valora_train.reporting.mlflow_store import Store, end_open_runs, run_address
from valora_train.reporting.tracking import (
    TEACHERS,
    DataSet,
    TeacherRun,
    Tracker,
    end_stale_runs,
    find_run,
    latest_fusions,
    register_bundle,
)
from valora_train.settings import PathSettings, Settings, as_dict


@pytest.fixture
def uri(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)  # where artifacts go
    return new_store(tmp_path)


def started(uri: str, task: str = "detection", key: str = "a1") -> Tracker:
    tracker = Tracker(uri, f"valora/{task}", key)
    tracker._monitor_system = lambda resume: None  # no thread
    tracker.start(f"{task} run", {"train": {"lr": 0.1}}, "note", None)
    return tracker


def test_runs_of_killed_stages_are_ended_whatever_stage_they_are_of(
    uri: str, tmp_path: Path
) -> None:
    client, work = MlflowClient(uri), tmp_path / "work"
    work.mkdir()
    end_stale_runs(uri, str(work))  # no experiment yet
    fused = {key: started(uri, key=key).run_id for key in ("killed", "running", "elsewhere")}
    taught = {key: TeacherRun(uri, "cat", key, {})._id for key in ("taught", "teaching")}
    for name in ("fuse-detection-killed", "fuse-detection-running", "teach-cat-taught"):
        (work / f"{name}.lock").touch()
    foreign = client.create_run(client.create_experiment("mine")).info.run_id
    with FileLock(work / "fuse-detection-running.lock"), FileLock(work / "teach-cat-teaching.lock"):
        end_stale_runs(uri, str(work))
    status = {run: client.get_run(run).info.status for run in [*fused.values(), *taught.values()]}
    assert status == {
        fused["killed"]: "KILLED", fused["running"]: "RUNNING", fused["elsewhere"]: "RUNNING",
        taught["taught"]: "KILLED", taught["teaching"]: "RUNNING",
    }  # fmt: skip
    assert client.get_run(foreign).info.status == "RUNNING"


def test_a_signal_while_a_run_is_begun_is_heard_once_the_run_is_known(
    uri: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    create = MlflowClient.create_run
    # A shell starts what runs in its background with SIGINT ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))

    def interrupted(self: MlflowClient, *arguments: object, **options: object) -> object:
        signal.raise_signal(signal.SIGINT)
        return create(self, *arguments, **options)

    monkeypatch.setattr(MlflowClient, "create_run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        TeacherRun(uri, "cat", "a", {})
    (run,) = MlflowClient(uri).search_runs(["1"])
    assert run.info.status == "RUNNING"
    end_open_runs()
    assert MlflowClient(uri).get_run(run.info.run_id).info.status == "KILLED"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("signals", [1, 2])
def test_a_signal_in_a_transaction_is_heard_after_it(
    uri: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, signals: int
) -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    run, steps = TeacherRun(uri, "cat", "a", {}), []
    commit = Session.commit

    def interrupted(self: Session) -> None:
        for _ in range(signals):
            signal.raise_signal(signal.SIGINT)
        steps.append("heard later")
        commit(self)

    with monkeypatch.context() as patched:
        patched.setattr(Session, "commit", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run._client.set_tag(run._id, "a", "b")
    assert steps == (["heard later"] if signals == 1 else [])  # the second one is not held back
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    end_open_runs()
    ended = MlflowClient(uri).get_run(run._id)
    assert ended.info.status == "KILLED"
    assert ended.data.tags.get("a") == ("b" if signals == 1 else None)


def test_a_locked_database_prints_no_traceback(
    uri: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = TeacherRun(uri, "cat", "a", {})

    def locked(_: Session) -> None:
        raise OperationalError("COMMIT", {}, sqlite3.OperationalError("database is locked"))

    with monkeypatch.context() as patched:
        patched.setattr(Session, "commit", locked)
        with pytest.raises(TrackingError, match="stop the other program that uses it"):
            run._client.set_tag(run._id, "a", "b")
    assert not caplog.records


def test_what_has_ended_is_not_ended_again(uri: str) -> None:
    with TeacherRun(uri, "cat", "a", {}):
        pass
    kept = started(uri)
    kept.finish("FAILED")
    begun = started(uri, key="b2")
    end_open_runs()
    end_open_runs()
    client = MlflowClient(uri)
    assert client.get_run(kept.run_id).info.status == "FAILED"
    assert client.get_run(begun.run_id).info.status == "KILLED"
    (taught,) = client.search_runs([client.get_experiment_by_name(TEACHERS).experiment_id])
    assert taught.info.status == "FINISHED"


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
    attempt = Attempt(3, ("cat",), "adapter-1", ("dog",), True)
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


def test_descriptions_of_attempts_follow_what_becomes_of_their_domains(uri: str) -> None:
    tracker = started(uri)
    runs = [
        tracker.start_attempt(Attempt(number, ("cat",), "adapter-1", (), True), {"cat": 0.5}, [])
        for number in (1, 2)
    ]
    client = MlflowClient(uri)

    def notes() -> list[str]:
        return [client.get_run(run._id).data.tags["mlflow.note.content"] for run in runs]

    assert notes() == ["", ""]
    tracker.describe_attempts({1: "cat waits"})
    assert notes() == ["cat waits", ""]
    written: list[str] = []
    real = tracker._client.set_tag
    tracker._client.set_tag = lambda run, key, text: (written.append(run), real(run, key, text))
    tracker.describe_attempts({1: "cat waits", 2: "x" * 9000})
    assert written == [runs[1]._id]  # what is as it was is not written again
    assert notes() == ["cat waits", "x" * 8000]
    again = Tracker(uri, "valora/detection", "a1")  # of a process that continues
    again._monitor_system = lambda resume: None
    again.start("name", {}, "note", None)
    again.describe_attempts({1: "cat went on", 2: "cat stays"})
    assert notes() == ["cat went on", "cat stays"]


def test_the_table_of_steps_says_what_fell_and_where_domains_went(uri: str) -> None:
    tracker = started(uri)
    told = History(REQUIREMENTS, START).told(DECISIONS, PACKING)
    seconds = [float(number) for number in range(len(DECISIONS))]
    tracker.log_summary(DECISIONS, seconds, dict.fromkeys(REQUIREMENTS, 0.8), told)
    client = MlflowClient(uri)
    table = json.loads(Path(client.download_artifacts(tracker.run_id, "steps.json")).read_text())
    rows = [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]
    assert rows[1]["decision"] == "rolled back"
    assert rows[1]["reason"].startswith("person fell from 0.950 to 0.910, 0.010 below its bar")
    assert rows[1]["went"] == "bicycle went to adapter-1 with attempt 07"
    assert rows[2]["decision"] == "committed in part"


def test_the_latest_fusion_of_every_task_comes_first(uri: str) -> None:
    first, second = started(uri, key="a1"), started(uri, key="a2")
    attempt = Attempt(1, ("cat",), "adapter-1", (), True)
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
    tracker.log_classes("cells", report.as_json())
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
    tracker.log_classes("birds", choice_report(labels, labels, labels).as_json())
    client = MlflowClient(uri)
    run = client.get_run(tracker.run_id)
    assert not run.data.metrics
    assert [item.path for item in client.list_artifacts(run.info.run_id)] == [
        "classes",
        "config.yaml",
    ]


def status(uri: str, run_id: str) -> str:
    return MlflowClient(uri).get_run(run_id).info.status


def test_runs_of_killed_processes_do_not_stay_running(uri: str) -> None:
    killed = started(uri)
    attempt = Attempt(2, ("person",), "adapter-1", (), False)
    nested = killed.start_attempt(attempt, {"person": 0.8}, [])
    other = started(uri, key="b2")
    again = Tracker(uri, "valora/detection", "a1")
    again._monitor_system = lambda resume: None
    assert again.start("name", {}, "note", None) == killed.run_id
    assert status(uri, nested._id) == "KILLED"
    assert status(uri, killed.run_id) == status(uri, other.run_id) == "RUNNING"


@pytest.mark.parametrize("lost", ["database", "run", "experiment"])
def test_a_run_that_the_store_lost_is_not_found_and_begun_anew(
    uri: str, tmp_path: Path, lost: str
) -> None:
    tracker = started(uri)
    tracker.finish("FINISHED")
    assert tracker.find(tracker.run_id) == tracker.run_id == tracker.find("gone")
    client = MlflowClient(uri)
    if lost == "run":
        client.delete_run(tracker.run_id)
    elif lost == "experiment":
        client.delete_experiment(tracker._experiment)
    else:
        uri = f"sqlite:///{tmp_path}/other.db"
    again = Tracker(uri, "valora/detection", "a1")
    again._monitor_system = lambda resume: None
    if lost != "experiment":  # with an experiment its runs come back
        assert again.find(tracker.run_id) is None
    run = again.start("name", {"a": 1}, "note", tracker.run_id)
    again.log_metrics({"x": 1.0})
    again.finish("FINISHED")
    assert status(uri, run) == "FINISHED"
    assert again.find(tracker.run_id) is not None


@pytest.mark.parametrize(
    ("damage", "said"),
    [("garbage", "it is damaged: move it away"), ("newer", "another version of MLflow"),
     ("locked", "stop the other program that uses it")],
)  # fmt: skip
def test_a_store_that_cannot_be_used_is_one_sentence(
    uri: str, tmp_path: Path, damage: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    started(uri).finish("FINISHED")
    file = tmp_path / ("mlflow.db" if damage == "locked" else "damaged.db")
    bad = f"sqlite:///{file}"
    if damage == "garbage":
        file.write_bytes(b"SQLite format 3\0" + b"x" * 4096)
    elif damage == "newer":
        file.write_bytes((tmp_path / "mlflow.db").read_bytes())
        with sqlite3.connect(file) as database:
            database.execute("UPDATE alembic_version SET version_num = 'fffffffffff1'")
    else:

        def lock(*_: object, **__: object) -> None:
            raise MlflowException("(sqlite3.OperationalError) database is locked")

        monkeypatch.setattr(MlflowClient, "get_experiment_by_name", lock)
        monkeypatch.setattr(MlflowClient, "search_model_versions", lock)
    with pytest.raises(TrackingError, match=said) as caught:
        Tracker(bad, "valora/detection", "a1")
    assert "\n" not in str(caught.value)
    assert str(file) in str(caught.value)
    with pytest.raises(TrackingError, match=said):
        register_bundle(bad, "run", "name", tmp_path, {})


def test_a_user_without_a_name(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> str:
        raise KeyError("getpwuid(): uid not found: 12345")

    monkeypatch.setattr("getpass.getuser", fail)
    assert MlflowClient(uri).get_run(started(uri).run_id).data.tags["mlflow.user"] == "unknown"


def test_a_curve_is_seen_while_it_grows(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tracker = started(uri)
    client = MlflowClient(uri)

    def stored() -> int:
        return len(client.get_metric_history(tracker.run_id, "loss"))

    curve = tracker.curve()
    curve.add(1, {"loss": 3.0, "lr": 0.1})
    assert stored() == 0  # gathered: a step does not wait for the store
    curve._next = 0.0
    curve.add(2, {"loss": 2.0, "lr": 0.2})
    for operations in curve._sent:
        operations.wait()
    assert stored() == 2
    for step in range(3, 1203):
        curve.add(step, {"loss": 1.0 / step})
    curve.finish()
    history = client.get_metric_history(tracker.run_id, "loss")
    assert sorted(entry.step for entry in history) == list(range(1, 1203))
    assert client.get_run(tracker.run_id).data.metrics["lr"] == 0.2


def test_a_teacher_has_a_run_that_an_interrupted_training_continues(uri: str) -> None:
    options = {"kind": "yolo", "options": {"epochs": 4}}
    with pytest.raises(KeyboardInterrupt), TeacherRun(uri, "person", "k1", options) as first:
        first.add(1, {"loss": 2.0, "lr": 0.1})
        raise KeyboardInterrupt
    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name(TEACHERS)
    assert experiment is not None

    def runs() -> list[tuple[str, str, dict[str, float]]]:
        found = client.search_runs([experiment.experiment_id])
        return [(run.info.run_name, run.info.status, run.data.metrics) for run in found]

    assert runs() == [("teach person", "KILLED", {"loss": 2.0, "lr": 0.1})]
    with TeacherRun(uri, "person", "k1", options) as second:
        second.add(2, {"loss": 1.5, "lr": 0.05})
    assert runs() == [("teach person", "FINISHED", {"loss": 1.5, "lr": 0.05})]
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.data.params == {"kind": "yolo", "options.epochs": "4"}
    history = client.get_metric_history(run.info.run_id, "loss")
    assert [(entry.step, entry.value) for entry in history] == [(1, 2.0), (2, 1.5)]
    with pytest.raises(ValueError, match="broken"), TeacherRun(uri, "person", "k2", options):
        raise ValueError("broken")
    assert sorted(status for _, status, _ in runs()) == ["FAILED", "FINISHED"]
    assert latest_fusions(uri) == []


def test_a_failing_store_does_not_hide_why_a_training_failed(
    uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = TeacherRun(uri, "person", "k1", {})

    def fail(*_: object) -> None:
        raise TrackingError("the store is gone")

    monkeypatch.setattr(run._client, "set_terminated", fail, raising=False)
    with pytest.raises(ValueError, match="too few samples"), run:
        raise ValueError("too few samples")
    with pytest.raises(TrackingError, match="the store is gone"), run:
        pass


def test_the_parent_run_shows_what_was_kept(uri: str) -> None:
    tracker, client = started(uri), MlflowClient(uri)
    report = FusionReport(tracker, None, None, dict.fromkeys(START, 0.5), {})
    for count in (1, 2):
        decisions = DECISIONS[:count]
        report.follow(lambda some=decisions: History(REQUIREMENTS, START).told(some, PACKING))
        report.log_progress(
            SimpleNamespace(decisions=decisions), SimpleNamespace(seconds=[1.0] * count)
        )
    shown = client.get_run(tracker.run_id).data.metrics
    assert shown["accuracy/person"] == 0.95  # 0.91 was rolled back
    assert "accuracy/bicycle" not in shown
    log_result(tracker, result(seconds=[1.0, 1.0]))
    shown = client.get_run(tracker.run_id).data.metrics
    assert shown["accuracy/bicycle"] == DOMAINS["bicycle"]["accuracy"]["val"]


def test_a_server_that_is_lost_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    store = Store("http://me:secret@127.0.0.1:9")
    with pytest.raises(TrackingError, match=r"http://\*\*\*@127\.0\.0\.1:9 .*refused") as first:
        store.get_run("1")
    with pytest.raises(TrackingError) as second:  # as the process ends
        store.set_terminated("1", "KILLED")
    assert second.value is first.value


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("http://me:pass@host:5/x", "http://***@host:5/x"),
        ("postgresql+psycopg2://me:p/a@ss@host/x", "postgresql+psycopg2://***@host/x"),
        ("https://token@host", "https://***@host"),
        ("mysql://host/x?user=me&password=pass&ssl=1", "mysql://host/x?user=me&password=***&ssl=1"),
        ("mssql:///?odbc_connect=Pwd%3Dpass%3BX", "mssql:///?odbc_connect=Pwd%3D***%3BX"),
        ("sqlite:////home/a@b/x.db", "sqlite:////home/a@b/x.db"),
    ],
)  # fmt: skip
def test_passwords_of_stores_are_kept_nowhere(given: str, shown: str) -> None:
    settings = Settings(paths=PathSettings(tracking=given))
    assert as_dict(settings)["paths"]["tracking"] == shown  # in bundles and runs
    assert run_address(given, "1", "2").startswith(shown if "http" in given else "http://127.0.0.1")
