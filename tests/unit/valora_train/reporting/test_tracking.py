"""MLflow: which run holds what, how runs end, what errors say; attempts below a fusion's run."""

import json
import re
import shutil
import signal
import sqlite3
import time
from contextlib import suppress
from functools import partial
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import mlflow
import pytest
from filelock import FileLock
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException
from mlflow.store.db import utils as store
from PIL import Image
from rich.console import Console
from sqlalchemy.orm import Session

from tests.support.stores import new_store
from tests.unit.valora_train.fusion.test_plan import DECISIONS, PACKING, START
from tests.unit.valora_train.reporting.test_texts import DOMAINS, result
from valora_train.errors import TrackingError, UnreachableError
from valora_train.fusion.decision import HeadOnlyDecision, attempts_as_json
from valora_train.fusion.state import FusionState
from valora_train.metrics.per_class import choice_report
from valora_train.reporting import tracking
from valora_train.reporting.fusion_report import FusionReport, run_of
from valora_train.reporting.progress import Display
from valora_train.reporting.tracking import FUSION, connect, find_run, open_run, teacher_run
from valora_train.reporting.ui import latest_fusions, main
from valora_train.settings import DomainSettings, PathSettings, Settings, TaskSettings, as_dict
from valora_train.stage import Span


@pytest.fixture
def paths(tmp_path, monkeypatch):
    """An empty store, and the folder of all stages; artifacts go into the working directory."""
    monkeypatch.chdir(tmp_path)
    return PathSettings(work=str(tmp_path / "work"), tracking=new_store(tmp_path))


def begun(paths, key="a1"):
    """A fusion's run that its process leaves running."""
    connect(paths, "valora/detection")
    run = mlflow.start_run(tags={FUSION: key}, run_name=f"run {key}")
    mlflow.tracking.fluent._active_run_stack.get().clear()
    return run.info.run_id


def status(run):
    return mlflow.get_run(run).info.status


def teacher_runs(client):
    experiment = client.get_experiment_by_name("valora/teachers")
    return client.search_runs([experiment.experiment_id])


def test_runs_of_killed_stages_are_ended_whatever_stage_they_are_of(paths, tmp_path):
    work = tmp_path / "work"
    work.mkdir()
    runs = {key: begun(paths, key) for key in ("killed", "running", "elsewhere")}
    foreign = MlflowClient().create_run(mlflow.create_experiment("mine")).info.run_id
    for name in ("fuse-detection-killed", "fuse-detection-running"):
        (work / f"{name}.lock").touch()
    with FileLock(work / "fuse-detection-running.lock"):
        connect(paths, "valora/teachers")
    assert {key: status(run) for key, run in runs.items()} == {
        "killed": "KILLED", "running": "RUNNING", "elsewhere": "RUNNING",
    }  # fmt: skip
    assert status(foreign) == "RUNNING"


@pytest.mark.parametrize("signals", [1, 2])
def test_a_signal_in_a_transaction_is_heard_after_it(paths, monkeypatch, request, signals):
    # A shell starts what runs in its background with SIGINT ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    heard, commit = [], Session.commit

    def interrupted(session):
        for _ in range(signals):
            signal.raise_signal(signal.SIGINT)
        heard.append("later")
        return commit(session)

    with (
        pytest.raises(KeyboardInterrupt),
        teacher_run(paths, "cat", "a", {}),
        monkeypatch.context() as patch,
        tracking.storing(),
    ):
        patch.setattr(Session, "commit", interrupted)
        mlflow.set_tag("a", "b")
    assert heard == (["later"] if signals == 1 else [])  # the second one is not held back
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    (run,) = teacher_runs(MlflowClient())
    assert run.info.status == "KILLED"
    assert run.data.tags.get("a") == ("b" if signals == 1 else None)


def test_links_land_on_the_run_under_model_training(paths, monkeypatch):
    run = begun(paths)
    experiment = mlflow.get_experiment_by_name("valora/detection").experiment_id
    assert find_run(run) == (
        f"http://127.0.0.1:5000/#/experiments/{experiment}/runs/{run}?workflowType=machine_learning"
    )
    assert find_run("0" * 32) is None
    info = SimpleNamespace(info=SimpleNamespace(experiment_id="7"))
    monkeypatch.setattr(mlflow, "get_run", lambda _: info)
    monkeypatch.setattr(mlflow, "get_tracking_uri", lambda: "https://me:secret@mlflow.example/")
    assert find_run("x").startswith("https://***@mlflow.example/#/experiments/7/runs/x?")


def test_classes_are_metrics_a_table_and_a_picture(paths):
    connect(paths, "valora/detection")
    labels, many = ["white blood cell", "n/a?", "..", "ünder"], [f"class {n}" for n in range(60)]
    truth = [labels[place] for place in (0, 0, 1, 2, 3)]
    report = choice_report([labels[place] for place in (0, 1, 1, 2, 3)], truth, labels)
    with open_run("a", {}) as few_run:
        tracking.log_classes("cells", report.as_json())
    with open_run("b", {}) as many_run:
        tracking.log_classes("birds", choice_report(many, many, many).as_json())
    few, many = mlflow.get_run(few_run).data, mlflow.get_run(many_run).data
    figures = {"recall/cells/white blood cell": 0.5, "precision/cells/n_a_": 0.5}
    assert few.metrics.items() >= (figures | {"f1/cells/ünder": 1.0}).items()
    assert not [key for key in few.metrics if key.startswith("ap/")]
    client = MlflowClient()
    table = json.loads(Path(client.download_artifacts(few_run, "classes/cells.json")).read_text())
    assert table["columns"] == ["class", "support", "precision", "recall", "f1", "ap"]
    assert table["data"][0] == ["white blood cell", 2, 1.0, 0.5, 0.6667, ""]
    shown = [{"path": "classes/cells.json", "type": "table"}]
    assert json.loads(few.tags["mlflow.loggedArtifacts"]) == shown
    assert [one.path for one in client.list_artifacts(few_run, "pictures")]
    assert not many.metrics and not client.list_artifacts(many_run, "pictures")


@pytest.mark.parametrize(
    ("damage", "message"),
    [("newer", "another version of MLflow"), ("database or disk is full", "free some space"),
     ("database is locked", "stop the other program that uses it")],
)  # fmt: skip
def test_a_store_that_cannot_be_used_is_one_sentence(paths, tmp_path, damage, message, monkeypatch):
    def fail(*_, **__):
        raise MlflowException(f"(sqlite3.OperationalError) {damage}")

    file = shutil.copy(tmp_path / "mlflow.db", tmp_path / f"{damage}.db")
    if damage == "newer":
        with sqlite3.connect(file) as database:
            database.execute("UPDATE alembic_version SET version_num = 'fffffffffff1'")
    else:
        monkeypatch.setattr(MlflowClient, "search_model_versions", fail)
        monkeypatch.setattr(mlflow, "set_experiment", fail)
    bad = PathSettings(work=paths.work, tracking=f"sqlite:///{file}")
    register = partial(tracking.register_bundle, "r", "n", file, {}, {})
    for use in (lambda: connect(bad, "x"), register):
        with pytest.raises(TrackingError, match=message) as caught:
            use()
        assert "\n" not in str(caught.value) and str(file) in str(caught.value)


def test_a_store_whose_making_was_cut_off_is_made_by_the_next_run(tmp_path, monkeypatch):
    paths = PathSettings(work=str(tmp_path / "work"), tracking=f"sqlite:///{tmp_path}/mlflow.db")
    with monkeypatch.context() as patch, pytest.raises(TrackingError, match="free some space"):
        patch.setattr(store, "_upgrade_db", mock.Mock(side_effect=OSError("no space left")))
        tracking.try_store(paths, "valora/own")
    tracking.try_store(paths, "valora/own")
    assert {path.name for path in tmp_path.iterdir()} == {"work", "mlflow.db"}


def test_a_folder_that_moved_finds_its_files(tmp_path, monkeypatch):
    before, after = tmp_path / "before", tmp_path / "after"
    before.mkdir()
    monkeypatch.chdir(before)
    new_store(before)
    for folder in (before, after):
        given = PathSettings(work=str(folder / "work"), tracking=f"sqlite:///{folder}/mlflow.db")
        if folder == after:
            before.rename(after)
            monkeypatch.chdir(after)
        connect(given, "valora/detection")
        if folder == before:
            with open_run("fusion", {}) as run:
                mlflow.log_text("kept", "note.txt")
                tracking.register_bundle(run, "own", Path("mlflow.db"), {}, {})
    assert mlflow.artifacts.load_text(f"runs:/{run}/note.txt") == "kept"
    (version,) = MlflowClient().search_model_versions(f"run_id = '{run}'")
    assert Path(version.source).is_relative_to(after)
    with open_run("another", {}) as other:
        mlflow.log_text("kept", "note.txt")
    assert Path(mlflow.get_run(other).info.artifact_uri).is_relative_to(after)


def test_a_curve_is_seen_while_it_grows(paths, monkeypatch):
    monkeypatch.setenv("MLFLOW_ASYNC_LOGGING_BUFFERING_SECONDS", "1")
    monkeypatch.setattr("getpass.getuser", lambda: {}["getpwuid(): uid not found: 12345"])
    connect(paths, "valora/detection")
    client = MlflowClient()
    with open_run("a", {}) as run, tracking.curve() as add:
        add(1, {"loss": 3.0, "lr": 0.1})
        assert not client.get_metric_history(run, "loss")  # gathered: no step waits for the store
        add(2, {"loss": 2.0, "lr": 0.2})
        deadline = time.monotonic() + 20
        while not client.get_metric_history(run, "loss") and time.monotonic() < deadline:
            time.sleep(0.1)
        assert len(client.get_metric_history(run, "loss")) == 2
        for step in range(3, 203):
            add(step, {"loss": 1.0 / step, "lr": 0.2})
    history = client.get_metric_history(run, "loss")
    assert sorted(entry.step for entry in history) == list(range(1, 203))
    assert client.get_run(run).data.metrics["lr"] == 0.2


def test_a_teacher_has_a_run_that_an_interrupted_training_continues(paths, monkeypatch):
    options = {"kind": "yolo", "options": {"epochs": 4}}
    with pytest.raises(KeyboardInterrupt), teacher_run(paths, "person", "k1", options) as log:
        log(1, {"loss": 2.0, "lr": 0.1})
        raise KeyboardInterrupt
    mlflow.flush_async_logging()
    (run,) = teacher_runs(MlflowClient())
    assert (run.info.run_name, run.info.status) == ("teach person", "KILLED")
    assert run.data.metrics == {"loss": 2.0, "lr": 0.1}
    with teacher_run(paths, "person", "k1", options) as log:
        log(2, {"loss": 1.5, "lr": 0.05})
    (run,) = teacher_runs(MlflowClient())
    assert (run.info.status, run.data.metrics) == ("FINISHED", {"loss": 1.5, "lr": 0.05})
    assert run.data.params == {"kind": "yolo", "options.epochs": "4"}
    history = MlflowClient().get_metric_history(run.info.run_id, "loss")
    assert [(entry.step, entry.value) for entry in history] == [(1, 2.0), (2, 1.5)]
    with pytest.raises(ValueError, match="broken"), teacher_run(paths, "person", "k2", options):
        raise ValueError("broken")
    assert sorted(run.info.status for run in teacher_runs(MlflowClient())) == ["FAILED", "FINISHED"]

    # A failing store does not hide why a training failed.
    def fail(*_):
        raise MlflowException("the store is gone")

    monkeypatch.setattr(MlflowClient, "set_terminated", fail)
    for error, message in ((ValueError("too few samples"), "too few"), (None, "store is gone")):
        with pytest.raises((ValueError, TrackingError), match=message):  # noqa: SIM117
            with teacher_run(paths, "person", "k3", {}):
                if error:
                    raise error


def test_a_server_that_is_lost_is_not_waited_for_again(paths, monkeypatch):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "5")
    tracking.use_store("http://me:secret@127.0.0.1:9")
    message = r"http://\*\*\*@127\.0\.0\.1:9 .*refused"
    with pytest.raises(TrackingError, match=message), tracking.storing():
        mlflow.get_run("1" * 32)
    began = time.monotonic()
    with suppress(TrackingError), tracking.storing():  # as the process ends
        mlflow.get_run("1" * 32)
    assert time.monotonic() - began < 1


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
def test_passwords_of_stores_are_kept_nowhere(given, shown):
    settings = Settings(paths=PathSettings(tracking=given))
    assert as_dict(settings)["paths"]["tracking"] == shown  # in bundles and runs


@pytest.fixture
def report(paths, tmp_path, monkeypatch):
    """Makes reports of the same fusion, as processes that continue each other have them."""
    monkeypatch.setattr("valora_train.reporting.fusion_report.digest", str)
    monkeypatch.setattr(FusionReport, "contact_sheet", lambda *_: Image.new("RGB", (9, 9)))
    domains = {name: DomainSettings(name=name, labels=[name]) for name in START}
    task = TaskSettings(name="detection", type="detection")
    settings = Settings(task=task, domains=domains, paths=paths)
    state = FusionState(tmp_path, {})
    folders = {name: (Path(f"taught-{name}"), Path(f"labelled-{name}")) for name in START}

    def made(key="a1"):
        display = Display(Console(file=StringIO()))
        made = FusionReport(display, None, dict.fromkeys(START, 0.5), folders)
        now = time.time_ns()
        before = [Span("teach person", now - 3_000_000_000, now - 1_000_000_000)]
        return made, made.running(settings, key, state, before)

    made.settings = settings
    return made


def outcome(decision):
    now = time.time_ns()
    inside = (Span("train", now - 2000, now - 1000), Span("evaluate person", now - 1000, now))
    span = Span(decision.attempt.name, now - 2000, now)
    return SimpleNamespace(decision=decision, seconds=2.0, evaluations={}, span=span, spans=inside)


def nested(parent):
    found = mlflow.search_runs(output_format="list", search_all_experiments=True)
    below = [run for run in found if run.data.tags.get("mlflow.parentRunId") == parent]
    return {run.info.run_name: run for run in below}


def records(decisions):
    return lambda: attempts_as_json(decisions, PACKING)


def test_every_attempt_is_a_nested_run_and_the_parent_shows_what_was_kept(report, tmp_path):
    shown, running = report()
    with running:
        for count, decision in enumerate(DECISIONS, 1):
            shown.records = records(DECISIONS[:count])
            with shown.attempt(decision.attempt) as on_step:
                on_step(1, 2, 0.5, {"lr": 0.1})
                shown.attempted(outcome(decision))
            plan = SimpleNamespace(decisions=DECISIONS[:count])
            shown.log_progress(plan)
            if count == 2:
                metrics = mlflow.get_run(shown.run_id).data.metrics
                assert metrics["accuracy/person"] == 0.95  # 0.91 was rolled back
                assert "accuracy/bicycle" not in metrics
        Image.new("RGB", (9, 9)).save(tmp_path / "plate.png")
        shown.placed_without_adapter(HeadOnlyDecision("plate", 0.4, False, "a reason"), tmp_path)
        shown.finish(result())
    parent, runs = mlflow.get_run(shown.run_id), nested(shown.run_id)
    kept = DOMAINS["bicycle"]["accuracy"]["val"]
    assert parent.data.metrics["accuracy/bicycle"] == kept
    assert parent.data.metrics["images_per_second/people_count"] == 140.0
    assert parent.data.tags["mlflow.note.content"].startswith("**3 domains in 2 adapters**")
    names = [f"{one.attempt.name} ({one.verdict})" for one in DECISIONS]
    names[2] = "03 bicycle + vehicle → adapter-2 (committed, vehicle rolled back)"
    assert list(runs)[::-1] == [*names, "plate (no adapter)"]
    back = runs["02 bicycle → adapter-1 (rolled back)"]
    assert back.data.metrics == {
        "accuracy/person": 0.91, "accuracy/bicycle": 0.85, "required/person": 0.5,
        "required/bicycle": 0.5, "loss": 0.5, "lr": 0.1, "seconds": 2.0, "steps": 1.0,
    }  # fmt: skip
    assert back.data.tags["valora.decision"] == "rolled back"
    # What became of its domain later is said, too.
    assert "bicycle went to adapter-1 with attempt 07" in back.data.tags["mlflow.note.content"]
    uses = [(one.dataset.name, one.tags[0].value) for one in back.inputs.dataset_inputs]
    assert sorted(uses) == [
        ("bicycle (labelled)", "validation"), ("bicycle (taught)", "training"),
        ("person (labelled)", "validation"), ("person (taught)", "rehearsal"),
    ]  # fmt: skip
    assert {name for name, run in runs.items() if run.info.status == "FAILED"} == {
        "05 plate → adapter-3 (unreachable)", "plate (no adapter)",
    }  # fmt: skip


def test_what_is_out_of_reach_fails_with_its_reason_and_can_continue(report):
    shown, running = report()
    with pytest.raises(UnreachableError), running:
        raise UnreachableError("person misses its requirement")
    run = mlflow.get_run(shown.run_id)
    assert run.info.status == "FAILED"
    assert run.data.tags["mlflow.note.content"] == "person misses its requirement"
    (trace,) = mlflow.search_traces(return_type="list")
    assert trace.info.state == "ERROR"
    assert trace.data.spans[0].status.description == "person misses its requirement"
    again, running = report()
    with running:
        assert again.run_id == shown.run_id


@pytest.mark.parametrize("lost", ["nothing", "run", "experiment"])
def test_a_run_that_the_store_lost_is_logged_anew(report, tmp_path, lost):
    shown, running = report("0123")
    with running:
        pass
    fused = tmp_path / "fuse-detection-0123"
    (fused / "pictures").mkdir(parents=True)
    Image.new("RGB", (9, 9)).save(fused / "pictures" / "bicycle.png")
    if lost == "run":
        mlflow.delete_run(shown.run_id)
    elif lost == "experiment":
        mlflow.delete_experiment(mlflow.get_run(shown.run_id).info.experiment_id)
    run = run_of(report.settings, fused, result(mlflow_run_id=shown.run_id))
    assert status(run) == "FINISHED"
    assert (run == shown.run_id) == (lost != "run")  # with an experiment its runs come back
    if lost == "run":
        assert mlflow.get_run(run).data.metrics["adapters"] == 2
        pictures = [one.path for one in MlflowClient().list_artifacts(run, "pictures")]
        assert pictures == ["pictures/bicycle.png"]
    assert run_of(report.settings, fused, result(mlflow_run_id="gone")) == run


def test_without_a_run_nothing_is_logged_but_attempts_are_timed(report, tmp_path):
    shown, _ = report()
    shown.records = records(DECISIONS[:1])
    with shown.attempt(DECISIONS[0].attempt) as on_step:
        for step in range(1, 42):
            time.sleep(0.02 if step > 30 else 0)  # up to 30, steps of a checkpoint are repeated
            on_step(step, 100, 0.5, {})
        shown.attempted(outcome(DECISIONS[0]))
    (rate,) = re.findall(r"100 steps × (\S+) s =", shown.display.console.file.getvalue())
    assert 0.02 <= float(rate) < 1
    shown.log_baselines({"teacher": {"person": 0.9}})
    shown.finish(result())
    assert not list(tmp_path.glob("mlruns"))


def test_links_name_the_latest_fusions(report, monkeypatch, capsys, paths):
    started = []
    monkeypatch.setattr("os.execv", lambda _, command: started.append(command))
    given = ["--port", "5055", "--backend-store-uri", paths.tracking]
    main(given)
    assert "no fusion has run in this folder yet" in capsys.readouterr().out
    runs = []
    for key in ("a1", "a2"):
        shown, running = report(key)
        with running, shown.attempt(DECISIONS[0].attempt):
            runs.append(shown.run_id)
    mlflow.create_experiment("something else")
    ((experiment, name, address),) = latest_fusions()
    assert (experiment, name) == ("valora/detection", "detection · rehearsal · seed 0")
    assert runs[-1] in address
    main(given)
    assert address.replace(":5000", ":5055") in capsys.readouterr().out
    assert "--port 5055" in " ".join(started[-1])


def test_the_trace_has_a_span_for_every_stage_and_attempt(report):
    shown, running = report()
    with running:
        shown.records = records(DECISIONS)
        with shown.training("without LoRA: person"):
            pass
        for decision in DECISIONS[:1]:  # of an earlier process
            shown.resumed([decision], [0.0])
        for decision in DECISIONS[1:]:
            with shown.attempt(decision.attempt) as on_step:
                on_step(7, 9, 0.5, {})
                shown.attempted(outcome(decision))
        shown.finish(result())
    (trace,) = mlflow.search_traces(return_type="list")
    assert trace.info.trace_metadata["mlflow.sourceRun"] == shown.run_id
    assert mlflow.get_run(shown.run_id).data.tags["valora.trace"] == trace.info.trace_id
    root, *_ = trace.data.spans
    assert root.name == "fuse detection" and root.inputs == {"required": dict.fromkeys(START, 0.5)}
    names = [one.name for one in trace.data.spans if one.parent_id == root.span_id]
    attempts = [
        ("" if one.verdict == "committed" else f"{one.verdict}: ") + one.attempt.name
        for one in DECISIONS
    ]
    attempts[2] = f"vehicle rolled back: {attempts[2]}"
    assert names == ["teach person", attempts[0], "without LoRA: person", *attempts[1:]]
    for decision, name in zip(DECISIONS, attempts, strict=True):
        (span,) = (one for one in trace.data.spans if one.name == name)
        committed = decision.verdict == "committed"
        assert span.status.status_code == ("OK" if committed else "ERROR")
        assert span.attributes["reason"] == decision.reason
        reached = {key: one["accuracy"] for key, one in span.attributes["domains"].items()}
        assert reached == dict(decision.accuracy)
        inside = [one for one in trace.data.spans if one.parent_id == span.span_id]
        if decision is DECISIONS[0]:  # of whose process nothing more is known
            assert [one.name for one in inside] == ["decide"]
            continue
        assert [one.name for one in inside] == ["train", "evaluate person", "decide"]
        assert span.attributes["steps"] == 7 and span.attributes["peak_memory_gb"] > 0
        missed = inside[1].status.status_code == "ERROR"
        assert missed == ("person" in decision.below)
