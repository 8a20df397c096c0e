"""MLflow's store and its runs, found by tags; errors that say what to do."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import mlflow
from alembic.util import CommandError
from filelock import FileLock
from mlflow.entities import Metric, Param, Run
from mlflow.exceptions import MlflowException
from sqlalchemy import create_engine
from sqlalchemy import text as sql
from sqlalchemy.exc import SQLAlchemyError

from valora_train.errors import TrackingError, without_passwords
from valora_train.reporting.pictures import confusion_matrix
from valora_train.settings import PathSettings
from valora_train.stage import RECORD, read_json, was_killed

Curve = Callable[[int, Mapping[str, float]], None]  # logs the figures of a step

FUSION, ATTEMPT, HEAD_ONLY = "valora.fusion", "valora.attempt", "valora.head_only"
TEACHER, STAGE = "valora.teacher", "valora.stage"
"""Tags that say what a run is of: keys of stages, number of the attempt, domain, folder."""
FILES = (
    ("experiments", "artifact_location"), ("runs", "artifact_uri"), ("model_versions", "source"),
    ("model_versions", "storage_location"), ("logged_models", "artifact_location"),
    ("trace_tags", "value"),
)  # fmt: skip
"""Tables and columns of MLflow's databases that say where files are."""
PARENT, NOTE, TABLES = "mlflow.parentRunId", "mlflow.note.content", "mlflow.loggedArtifacts"
EXPERIMENT_NOTE = (
    "A trace is a fusion: its stages, then each attempt to pack domains into an adapter with what "
    "was reached, asked and decided; those that were rolled back are marked. Runs, with curves and "
    "pictures, are under Model training."
)
LOCAL_SERVER = "http://127.0.0.1:5000"  # where `make ui` and `mlflow ui` listen
SERVERS = ("http:", "https:", "databricks")
REMEDIES = {
    r"disk is full|no space": "free some space",
    r"readonly|read-only|permission denied|unable to open": "make it writable",
    r"locked": "stop the other program that uses it",
    r"out-of-date|can't locate revision|no such (table|column)|schema": (
        "it was made by another version of MLflow: back it up and run `mlflow db upgrade`, or use "
        "that version, or move it away"
    ),
    r"no answer|retries exceeded|refused|timed out": "start it, or correct its address",
    r"error code 40[13]": "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD",
    r"no module named": "install that package",
    r"file exists|not a directory": "move it away",
    r"malformed|not a database|corrupt|disk image": "it is damaged: move it away",
    r"": "mend it",
}


def use_store(uri: str | None) -> None:
    """Use a store from now on; None for MLflow's default, SQLite in the working directory."""
    logging.getLogger("alembic").setLevel(logging.WARNING)  # a new database logs each migration
    logging.getLogger("mlflow").setLevel(logging.CRITICAL)  # `storing` says more of what fails
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")  # 8 s, not four minutes
    os.environ.setdefault("MLFLOW_ASYNC_LOGGING_BUFFERING_SECONDS", "2")  # a request for many steps
    os.environ.setdefault("MLFLOW_ENABLE_ASYNC_TRACE_LOGGING", "false")  # a trace ends with its run
    os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")  # with passwords
    mlflow.set_tracking_uri(uri or mlflow.get_tracking_uri())


def connect(paths: PathSettings, experiment: str) -> None:
    """Log to an experiment, made if needed; end runs that killed processes left running."""
    use_store(paths.tracking)
    # Two processes would both make the database.
    with FileLock(Path(paths.work) / "mlflow.lock"), storing():
        _make_database(mlflow.get_tracking_uri())
        found = mlflow.get_experiment_by_name(experiment)
        if found is not None and found.lifecycle_stage == "deleted":
            mlflow.MlflowClient().restore_experiment(found.experiment_id)
        mlflow.set_experiment(experiment)
        find_moved(mlflow.get_tracking_uri())
        mlflow.set_experiment_tag(NOTE, EXPERIMENT_NOTE)  # it must be writable, too
        ours = mlflow.search_experiments(filter_string="name LIKE 'valora/%'")
        for run in search("attributes.status = 'RUNNING'", [one.experiment_id for one in ours]):
            key = run.data.tags.get(TEACHER) or run.data.tags.get(FUSION)
            if key is not None and was_killed(Path(paths.work), key):
                mlflow.MlflowClient().set_terminated(run.info.run_id, "KILLED")


def _make_database(uri: str) -> None:
    """Make the database that an empty file is to be, at once: migrations that end early stay so."""
    file = Path(uri.removeprefix("sqlite:///"))
    if not file.is_file() or file.stat().st_size:
        return
    with TemporaryDirectory(prefix=".mlflow-", dir=file.parent) as folder:
        made = Path(folder, file.name)
        mlflow.MlflowClient(f"sqlite:///{made}").search_experiments()
        if not file.stat().st_size:  # another process may have been faster
            made.replace(file)


def find_moved(uri: str) -> None:
    """Let a database whose folder was moved find its files again: MLflow keeps whole paths."""
    if not uri.startswith("sqlite:///"):
        return
    engine = create_engine(uri)
    here = Path(engine.url.database or "").resolve().parent
    with engine.begin() as database:
        known = database.execute(sql("SELECT artifact_location FROM experiments")).scalars()
        roots = {location.rpartition("/mlruns/")[::2] for location in known}
        for root in {old for old, rest in roots if (here / "mlruns" / rest).is_dir()}:
            if Path(root, "mlruns").exists():
                continue
            for table, column in FILES:
                change = f"UPDATE {table} SET {column} = :new || substr({column}, :length + 1) "
                change += f"WHERE substr({column}, 1, :length) = :old"
                old = f"{root}/mlruns/"
                values = {"new": f"{here}/mlruns/", "old": old, "length": len(old)}
                database.execute(sql(change), values)
    engine.dispose()


def try_store(paths: PathSettings, experiment: str) -> None:
    """Connect before any work, in a thread: Ctrl-C must end a wait for a server."""
    use_store(paths.tracking)
    uri = mlflow.get_tracking_uri()
    failed: list[BaseException] = []

    def attempt() -> None:
        try:
            if re.match("sqlite|postgresql|mysql|mssql", uri):  # MLflow would try for 100 s
                with storing():
                    engine = create_engine(uri)
                    Path(engine.url.database or "").parent.mkdir(parents=True, exist_ok=True)
                    engine.connect().close()
            connect(paths, experiment)
        except BaseException as error:  # noqa: BLE001 (raised below)
            failed.append(error)

    thread = threading.Thread(target=attempt, daemon=True)
    thread.start()
    thread.join(seconds := 15 if uri.startswith(SERVERS) else 60)  # it may have to be made
    with storing():
        if thread.is_alive():
            raise OSError(f"it gave no answer in {seconds} s")
        if failed:
            raise failed[0]


@contextmanager
def storing() -> Iterator[None]:
    """Use MLflow's store: errors become a sentence, and signals wait for a transaction's end."""
    # Interrupted in the middle, it would stay open, and what ends the runs find a locked database.
    uri, arrived = mlflow.get_tracking_uri(), []
    handlers: dict[int, Any] = {}

    def later(number: int, frame: object) -> None:
        arrived.append(number)
        if len(arrived) > 1:
            handlers[number](number, frame)

    if threading.current_thread() is threading.main_thread() and not uri.startswith(SERVERS):
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if callable(handler := signal.getsignal(number)):
                handlers[number] = handler
                signal.signal(number, later)
    try:
        yield
    except (MlflowException, SQLAlchemyError, CommandError, ImportError, OSError) as error:
        reason = " ".join(str(error).split()).partition(" [SQL")[0] or type(error).__name__
        remedy = next(text for known, text in REMEDIES.items() if re.search(known, reason, re.I))
        if remedy.startswith("start it"):  # what ends the runs does not wait again
            os.environ |= {
                "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
                "MLFLOW_HTTP_REQUEST_TIMEOUT": "1",
            }
        text = f"MLflow's store {uri} cannot be used ({reason[:1000]}): {remedy}, or set "
        text += "paths.tracking to another store, and run the same command again; what is trained "
        raise TrackingError(without_passwords(f"{text}is kept")) from error
    finally:
        for held, handler in handlers.items():
            signal.signal(held, handler)
        if arrived:
            signal.raise_signal(arrived[0])


def search(condition: str, experiments: list[str] | None = None) -> list[Run]:
    """Runs of the experiment that is connected, or of others, the latest first."""
    found: Any = mlflow.search_runs(experiments, condition, output_format="list")
    return list(found)


def is_fusion(run: Run) -> bool:
    """Whether a run is that of a whole fusion, which may lie below that of a sweep."""
    return not {ATTEMPT, HEAD_ONLY, STAGE} & set(run.data.tags)


@contextmanager
def open_run(
    name: str, tags: dict[str, str], earlier: str | None = None, system: bool = False
) -> Iterator[str]:
    """A nested MLflow run, or the `earlier` one; its status says how the block ended."""
    run_id = ""
    tags = {"mlflow.source.name": "valora-train", "mlflow.source.type": "LOCAL"} | tags

    def end(status: str) -> None:
        active = mlflow.active_run()
        if active is not None and active.info.run_id == run_id:  # it may have ended before
            with storing():
                mlflow.end_run(status)

    try:
        with storing():
            run = mlflow.start_run(
                earlier, run_name=name, nested=True, tags=tags, log_system_metrics=system
            )
            run_id = run.info.run_id
        yield run_id
    except BaseException as error:
        with suppress(TrackingError):  # the first error counts
            end("FAILED" if isinstance(error, Exception) else "KILLED")
        raise
    end("FINISHED")


def active() -> str:
    """Id of the active run."""
    return str(mlflow.active_run().info.run_id)


@contextmanager
def curve() -> Iterator[Curve]:
    """Log a training into the active run without slowing it down: MLflow's own thread sends."""
    run_id, client = active(), mlflow.MlflowClient()
    sent: list[Any] = []

    def add(step: int, figures: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        rows = [Metric(key, value, now, step) for key, value in figures.items()]
        sent.append(client.log_batch(run_id, metrics=rows, synchronous=False))

    yield add
    with storing():
        mlflow.flush_async_logging()
        for operations in sent:
            operations.wait()


@contextmanager
def teacher_run(
    paths: PathSettings, domain: str, key: str, options: Mapping[str, Any]
) -> Iterator[Curve]:
    """The run of a small model's training (the stage of a key), continued after an interruption."""
    connect(paths, "valora/teachers")  # fusions of all tasks share them
    with storing():
        known = search(f"tags.`{TEACHER}` = '{key}' and attributes.status != 'FINISHED'")
    earlier = known[0].info.run_id if known else None
    tags = {TEACHER: key, "valora.domain": domain}
    with open_run(f"teach {domain}", tags, earlier), curve() as add:
        if earlier is None:
            log_config(options)
        yield add


def log_stage(parent: str, folder: Path, note: str) -> None:
    """Log a stage that has ended, by the record in its output folder, into a run of its own."""
    record, client = read_json(folder / RECORD), mlflow.MlflowClient()
    if search(f"tags.`{PARENT}` = '{parent}' and tags.`{STAGE}` = '{folder.name}'"):
        return
    end = int(datetime.fromisoformat(record["finished"]).timestamp() * 1000)
    tags = {PARENT: parent, STAGE: folder.name, NOTE: note, "mlflow.source.name": "valora-train"}
    experiment = mlflow.get_run(parent).info.experiment_id
    start, name = end - int(1000 * record["seconds"]), record["name"].replace("-", " ", 1)
    run = client.create_run(experiment, start, tags, name).info.run_id
    params = [Param(key, str(value)) for key, value in _flat(record["settings"]).items()]
    client.log_batch(run, [Metric("seconds", record["seconds"], end, 0)], params)
    client.set_terminated(run, "FINISHED", end)


def log_config(config: Mapping[str, Any]) -> None:
    """Log a configuration into the active run: as flat parameters, and as a file."""
    with storing():
        mlflow.log_params(_flat(config))
        mlflow.log_dict(dict(config), "config.yaml")


def _flat(config: Mapping[str, Any]) -> dict[str, Any]:
    from transformers.utils import flatten_dict

    return dict(flatten_dict(dict(config)))


def log_table(columns: Sequence[str], rows: Sequence[Sequence[Any]], file: str) -> None:
    """Log a table into the active run, in the place of an earlier one, for MLflow's pages."""
    # `mlflow.log_table` would append to what is there.
    mlflow.log_dict({"columns": list(columns), "data": [list(row) for row in rows]}, file)
    known = json.loads(mlflow.get_run(active()).data.tags.get(TABLES, "[]"))
    if (entry := {"path": file, "type": "table"}) not in known:
        mlflow.set_tag(TABLES, json.dumps([*known, entry]))


def log_classes(domain: str, facts: Mapping[str, Any]) -> None:
    """Log `ClassReport.as_json` into the active run: metrics, a table and a confusion matrix."""
    measured = ("precision", "recall", "f1", "ap")
    rows = [
        [label, one["support"], *(round(one[key], 4) if key in one else "" for key in measured)]
        for label, one in facts["per_class"].items()
    ]
    log_table(("class", "support", *measured), rows, f"classes/{domain}.json")
    if "confusion" in facts:  # not too many classes to be drawn
        values: dict[str, float] = {}
        for label, one in facts["per_class"].items():
            name = re.sub(r"[^\w\-. :]", "_", label).strip(".") or "_"  # what MLflow allows
            values |= {f"{key}/{domain}/{name}": one[key] for key in measured if key in one}
        mlflow.log_metrics(values)
        matrix = confusion_matrix(domain, facts["confusion"])
        mlflow.log_figure(matrix, f"pictures/{domain}-confusion.png")


def register_bundle(
    run_id: str, name: str, bundle: Path, tags: Mapping[str, str], figures: Mapping[str, float]
) -> None:
    """Register a bundle with the alias ``latest-fused``; its `figures` become metrics."""
    with storing():
        client = mlflow.MlflowClient()
        versions = client.search_model_versions(f"run_id = '{run_id}'")
        if any(known.name == name for known in versions):
            return  # by a process that was killed afterwards
        client.log_artifacts(run_id, str(bundle), "bundle")
        for key, value in figures.items():
            client.log_metric(run_id, key, value)
        with suppress(MlflowException):  # it may be there; other errors come again below
            client.create_registered_model(name, description="VaLoRA bundle: adapters and heads")
        source = f"{client.get_run(run_id).info.artifact_uri}/bundle"
        version = client.create_model_version(name, source, run_id, tags=dict(tags))
        client.set_registered_model_alias(name, "latest-fused", version.version)


def find_run(run_id: str) -> str | None:
    """Address of a run in MLflow's pages; None if the store does not have it."""
    uri = without_passwords(mlflow.get_tracking_uri())
    server = uri.rstrip("/") if uri.startswith("http") else LOCAL_SERVER  # which shows databases
    with suppress(TrackingError), storing():
        place = f"#/experiments/{mlflow.get_run(run_id).info.experiment_id}/runs/{run_id}"
        # MLflow 3 opens in its section for chat traces otherwise: it shows no metrics there.
        return f"{server}/{place}?workflowType=machine_learning"
    return None
