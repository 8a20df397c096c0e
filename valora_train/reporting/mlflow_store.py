"""MLflow's store as every run uses it: errors that say what to do, and runs that end.

Only `MlflowClient` with explicit run ids is used, so that libraries that log into "the active run"
cannot write into these runs.
"""

from __future__ import annotations

import getpass
import json
import logging
import os
import re
import signal
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock

from valora_train.errors import TrackingError, without_passwords

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from types import FrameType

PARENT = "mlflow.parentRunId"
NOTE = "mlflow.note.content"
KIND = "mlflow.experimentKind"
TABLES = "mlflow.loggedArtifacts"
MODEL_TRAINING = "custom_model_development"
"""Value of `KIND` for experiments with runs and metrics instead of chat traces."""
LOCAL_SERVER = "http://127.0.0.1:5000"
"""Where `make ui` and `mlflow ui` listen."""
MAX_PARAM_LENGTH = 500  # characters; longer values are cut, config.yaml has them in full
METRICS_PER_REQUEST = 500
SERVERS = ("http:", "https:", "databricks")


def store_lock(work: str) -> FileLock:
    """Lock to hold while an experiment is opened: two processes would both make the database.

    Args:
        work: Folder of all stages.
    """
    return FileLock(Path(work) / "mlflow.lock")


def try_store(uri: str | None, experiment: str, work: str) -> None:
    """Open an experiment before any work, in a thread: Ctrl-C must end a wait for a server."""
    import mlflow

    uri = uri or mlflow.get_tracking_uri()
    failed: list[BaseException] = []

    def attempt() -> None:
        try:
            if re.match("sqlite|postgresql|mysql|mssql", uri):  # MLflow would try for 100 s
                engine = create_engine(uri)
                Path(engine.url.database or "").parent.mkdir(parents=True, exist_ok=True)
                engine.connect().close()
            client = Store(uri)
            number = open_experiment(client, experiment)
            client.set_experiment_tag(number, KIND, MODEL_TRAINING)  # it must be writable, too
        except BaseException as error:  # noqa: BLE001 (raised below)
            failed.append(error)

    thread = threading.Thread(target=attempt, daemon=True)
    with store_lock(work), explained(uri):
        from sqlalchemy import create_engine

        thread.start()
        thread.join(seconds := 15 if uri.startswith(SERVERS) else 60)  # it may have to be made
        if thread.is_alive():
            raise OSError(f"it gave no answer in {seconds} s")
        if failed:
            raise failed[0]


class Store:
    """MLflow's client, whose errors say what to do.

    Args:
        uri: Tracking URI.
    """

    def __init__(self, uri: str) -> None:
        from mlflow import MlflowClient

        # Creating the database logs every one of its migrations.
        logging.getLogger("alembic").setLevel(logging.WARNING)
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")  # 8 s, not four minutes
        os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")  # with passwords
        # What fails is raised, and `explained` says more of it, without passwords.
        logging.getLogger("mlflow").setLevel(logging.CRITICAL)
        self._uri = uri
        self._lost: TrackingError | None = None
        with explained(uri):
            self._client = MlflowClient(uri)

    def create_run(self, *arguments: Any, **options: Any) -> Any:
        """Create a run, which `end_open_runs` ends unless it is ended before."""
        with signals_later(self._uri):
            run = self._call("create_run", *arguments, **options)
            _OPEN[run.info.run_id] = self
        return run

    def update_run(self, run_id: str, **changes: Any) -> None:
        """Change a run; one that runs again is ended by `end_open_runs`, too."""
        with signals_later(self._uri):
            self._call("update_run", run_id, **changes)
            if changes.get("status") == "RUNNING":
                _OPEN[run_id] = self

    def set_terminated(self, run_id: str, status: str) -> None:
        """End a run."""
        with signals_later(self._uri):
            self._call("set_terminated", run_id, status)
            _OPEN.pop(run_id, None)

    @contextmanager
    def usable(self) -> Iterator[None]:
        """Explain errors; what was lost once is not waited for again when the process ends."""
        if self._lost is not None:
            raise self._lost
        try:
            with explained(self._uri):
                yield
        except TrackingError as error:
            self._lost = error if self._uri.startswith(SERVERS) else None
            raise

    def _call(self, name: str, /, *arguments: Any, **options: Any) -> Any:
        with self.usable():
            return getattr(self._client, name)(*arguments, **options)

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            with signals_later(self._uri):
                return self._call(name, *arguments, **options)

        return call


_OPEN: dict[str, Store] = {}
"""Runs that this process has begun and not ended, with their stores."""


def end_open_runs() -> None:
    """End what this process has begun and not ended, because it is about to end itself."""
    for run_id, store in list(_OPEN.items()):
        with suppress(TrackingError):  # what ends the process counts
            store.set_terminated(run_id, "KILLED")
    _OPEN.clear()


@contextmanager
def signals_later(uri: str) -> Iterator[None]:
    """Hold back signals until a database has done what it is doing; a second one is not held.

    Raised in the middle of a transaction, an interruption leaves it open, and what ends the runs
    finds the database locked.
    """
    kept: dict[int, Any] = {}
    arrived: list[tuple[int, Any]] = []

    def later(number: int, frame: FrameType | None) -> None:
        arrived.append((number, frame))
        if len(arrived) > 1:  # a store that does not answer must not hold the process
            kept[number](number, frame)

    if threading.current_thread() is threading.main_thread() and not uri.startswith(SERVERS):
        for name in ("SIGINT", "SIGTERM", "SIGHUP"):
            number = getattr(signal, name, None)
            if number is not None and callable(handler := signal.getsignal(number)):
                kept[number] = handler
                signal.signal(number, later)
    try:
        yield
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)
        for number, frame in arrived[:1]:
            kept[number](number, frame)


_TROUBLES = {
    r"locked": "stop the other program that uses it",
    r"out-of-date|can't locate revision|no such (table|column)|schema": (
        "it was made by another version of MLflow: back it up and run `mlflow db upgrade`, or use "
        "that version, or move it away"
    ),
    r"no answer|retries exceeded|refused|timed out": "start it, or correct its address",
    r"error code 40[13]": "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD",
    r"file exists": "move it away",
    r"no module named": "install that package",
    r"malformed|not a database|corrupt|disk image": "it is damaged: move it away",
}


@contextmanager
def explained(uri: str) -> Iterator[None]:
    """Turn errors of MLflow's store into a sentence.

    Raises:
        TrackingError: Instead of such an error.
    """
    from alembic.util import CommandError
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    try:
        yield
    except (MlflowException, SQLAlchemyError, CommandError, ImportError, OSError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        remedy = "mend it"
        for trouble, advice in _TROUBLES.items():
            if re.search(trouble, reason, re.IGNORECASE):
                remedy = advice
                break
        raise TrackingError(
            without_passwords(
                f"MLflow's store {uri} cannot be used ({reason.partition(' [SQL')[0][:1000]}): "
                f"{remedy}, or set paths.tracking to another store, and run the same command "
                "again; what is trained is kept"
            )
        ) from error


def user_name() -> str:
    """Name of the user; some containers have none."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return "unknown"


def log_metrics(client: Any, run_id: str, values: Mapping[str, list[tuple[int, float]]]) -> None:
    """Log the (step, value) pairs of metrics, in as few requests as the server takes."""
    from mlflow.entities import Metric

    now = int(time.time() * 1000)
    rows = [Metric(key, value, now, step) for key, pairs in values.items() for step, value in pairs]
    for start in range(0, len(rows), METRICS_PER_REQUEST):
        client.log_batch(run_id, metrics=rows[start : start + METRICS_PER_REQUEST])


def log_params(client: Any, run_id: str, config: Mapping[str, Any]) -> None:
    """Log a configuration as flat parameters; long values are cut."""
    from mlflow.entities import Param

    flat = _flatten(config)
    params = [Param(key, str(value)[:MAX_PARAM_LENGTH]) for key, value in flat.items()]
    client.log_batch(run_id, params=params)


def _flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, dict) and value:
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def open_experiment(client: Any, name: str) -> str:
    """Id of an experiment, which is created, or restored from the trash, if needed."""
    found = client.get_experiment_by_name(name)
    if found is None:
        return str(client.create_experiment(name, tags={KIND: MODEL_TRAINING}))
    if found.lifecycle_stage == "deleted":
        client.restore_experiment(found.experiment_id)
    if found.tags.get(KIND) != MODEL_TRAINING:
        client.set_experiment_tag(found.experiment_id, KIND, MODEL_TRAINING)
    return str(found.experiment_id)


def show_table(client: Any, run_id: str, path: str) -> None:
    """Tell MLflow's pages that an artifact is a table."""
    known = json.loads(client.get_run(run_id).data.tags.get(TABLES, "[]"))
    entry = {"path": path, "type": "table"}
    if entry not in known:
        client.set_tag(run_id, TABLES, json.dumps([*known, entry]))


def run_address(uri: str, experiment: str, run_id: str) -> str:
    """Address of a run in MLflow's pages.

    Args:
        uri: Tracking URI; stores that are files or databases are shown by a local server.
        experiment: Id of the experiment.
        run_id: Id of the run.
    """
    uri = without_passwords(uri)
    server = uri.rstrip("/") if uri.startswith(("http://", "https://")) else LOCAL_SERVER
    # Without the parameter, MLflow 3 opens in its section for chat traces, whatever the kind of
    # the experiment: it shows no metrics there.
    return f"{server}/#/experiments/{experiment}/runs/{run_id}?workflowType=machine_learning"
