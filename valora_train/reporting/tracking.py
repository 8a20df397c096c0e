"""A fusion in MLflow: a parent run for the fusion, a nested run for every attempt.

Runs are found by their tags, not by what this process remembers: after a kill, the parent run is
continued and the run of the interrupted attempt is replaced.
"""

from __future__ import annotations

import json
import re
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from valora_train.errors import TrackingError
from valora_train.fusion.decision import Verdict
from valora_train.reporting import pictures
from valora_train.reporting.attempt_text import outcome_of, verdict_of, went
from valora_train.reporting.mlflow_store import (
    METRICS_PER_REQUEST,
    NOTE,
    PARENT,
    Store,
    explained,
    log_metrics,
    log_params,
    open_experiment,
    run_address,
    show_table,
    signals_later,
    user_name,
)
from valora_train.stage import was_killed

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from matplotlib.figure import Figure
    from PIL.Image import Image

    from valora_train.fusion.decision import Attempt, AttemptDecision, HeadOnlyDecision
    from valora_train.metrics.per_class import ClassReport

FUSION = "valora.fusion"
ATTEMPT = "valora.attempt"
HEAD_ONLY = "valora.head_only"
TEACHER = "valora.teacher"
TEACHERS = "valora/teachers"
"""Experiment of the small models: fusions of all tasks share them."""
NOTE_LENGTH = 8000
"""Most characters of a description."""
CURVE_SECONDS = 2.0  # between two requests of a curve


@dataclass(frozen=True)
class DataSet:
    """A data set that a run reads.

    Attributes:
        name: Name of the data set.
        digest: Content hash.
        folder: Folder of the data set.
        context: What the run does with it, e.g. ``training`` or ``rehearsal``.
    """

    name: str
    digest: str
    folder: Path
    context: str


class Tracker:
    """The MLflow runs of one fusion.

    Args:
        uri: Tracking URI; None for MLflow's default, SQLite in the working directory.
        experiment: Name of the experiment.
        fusion: Key of the fusion's stage.

    Attributes:
        run_id: Id of the parent run; empty until `start`.
    """

    def __init__(self, uri: str | None, experiment: str, fusion: str) -> None:
        import mlflow

        self._uri = uri or mlflow.get_tracking_uri()
        self._client: Any = Store(self._uri)
        self._experiment = open_experiment(self._client, experiment)
        self._fusion = fusion
        self.run_id = ""
        self._monitor: Any = None
        self._notes: dict[int, str] = {}

    def start(self, name: str, config: Mapping[str, Any], note: str, earlier: str | None) -> str:
        """Start the parent run, or continue that of an interrupted process.

        Args:
            name: Name of the run.
            config: The whole configuration.
            note: Description in markdown.
            earlier: Id of the run that the interrupted process started, if it is known.

        Returns:
            Id of the run.
        """
        interrupted = [
            run.info.run_id
            for run in self._runs(f"tags.`{FUSION}` = '{self._fusion}'")
            if _is_fusion(run) and (run.info.run_id == earlier or run.info.status != "FINISHED")
        ]
        if interrupted:
            self.run_id = interrupted[0]
            self._client.update_run(self.run_id, status="RUNNING")
        else:
            tags = {
                FUSION: self._fusion,
                NOTE: note,
                "mlflow.user": user_name(),
                "mlflow.source.name": "valora-train",
                "mlflow.source.type": "LOCAL",
            }
            run = self._client.create_run(self._experiment, tags=tags, run_name=name)
            self.run_id = run.info.run_id
            self._log_config(config)
        self._end_stale_runs()
        self._monitor_system(resume=bool(interrupted))
        return self.run_id

    def _end_stale_runs(self) -> None:
        """End runs of this fusion that processes left running when they were killed."""
        running = f"tags.`{FUSION}` = '{self._fusion}' and attributes.status = 'RUNNING'"
        for run in self._runs(running):
            if run.info.run_id != self.run_id:
                self._client.set_terminated(run.info.run_id, "KILLED")

    def find(self, run_id: str | None) -> str | None:
        """Id of a run of this fusion that the store holds.

        Args:
            run_id: The run that is preferred.

        Returns:
            `run_id` if the store holds it, else another finished parent run of the fusion, or None.
        """
        found = [
            run.info.run_id
            for run in self._runs(f"tags.`{FUSION}` = '{self._fusion}'")
            if _is_fusion(run) and run.info.status == "FINISHED"
        ]
        return run_id if run_id in found else next(iter(found), None)

    def _log_config(self, config: Mapping[str, Any]) -> None:
        from omegaconf import OmegaConf

        log_params(self._client, self.run_id, config)
        self._client.log_text(
            self.run_id, OmegaConf.to_yaml(OmegaConf.create(dict(config))), "config.yaml"
        )

    def _monitor_system(self, resume: bool) -> None:
        """Log memory and processor use into the parent run until it ends."""
        from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

        self._monitor = SystemMetricsMonitor(
            self.run_id, sampling_interval=5, resume_logging=resume, tracking_uri=self._uri
        )
        self._monitor.start()

    @property
    def link(self) -> str:
        """Address of the parent run in MLflow's pages, once it is started."""
        return run_address(self._uri, self._experiment, self.run_id)

    def log_data_sets(self, data_sets: Sequence[DataSet]) -> None:
        """Log the inputs of the parent run."""
        _log_data_sets(self._client, self.run_id, data_sets)

    def start_attempt(
        self,
        attempt: Attempt,
        required: Mapping[str, float],
        data_sets: Sequence[DataSet],
        note: str = "",
    ) -> AttemptRun:
        """Start the nested run of an attempt; the run of an interrupted attempt is replaced.

        Args:
            attempt: The attempt.
            required: Accuracy that each domain must keep.
            data_sets: What the attempt reads.
            note: Description in markdown, until the attempt is decided.
        """
        mine = f"tags.`{PARENT}` = '{self.run_id}' and tags.`{ATTEMPT}` = '{attempt.number}'"
        for run in self._runs(mine):
            self._client.delete_run(run.info.run_id)
        run = AttemptRun(
            self._client, self._experiment, self.run_id, self._fusion, attempt, required, note
        )
        run.log_data_sets(data_sets)
        return run

    def log_head_only(self, decision: HeadOnlyDecision, picture: Path) -> None:
        """Log the decision that a domain takes no adapter as a nested run, replacing an older one.

        Args:
            decision: The decision.
            picture: The contact sheet of its test split.
        """
        known = f"tags.`{PARENT}` = '{self.run_id}' and tags.`{HEAD_ONLY}` = '{decision.domain}'"
        for run in self._runs(known):
            self._client.delete_run(run.info.run_id)
        tags = {
            PARENT: self.run_id,
            FUSION: self._fusion,
            HEAD_ONLY: decision.domain,
            "valora.domain": decision.domain,
            "valora.decision": "no adapter",
            NOTE: f"**no adapter**: {decision.reason}",
        }
        made = self._client.create_run(
            self._experiment, tags=tags, run_name=f"{decision.domain} (no adapter)"
        )
        run_id = made.info.run_id
        log_metrics(self._client, run_id, {f"accuracy/{decision.domain}": [(0, decision.accuracy)]})
        self._client.log_artifact(run_id, str(picture), "pictures")
        self._client.set_terminated(run_id, "FINISHED" if decision.met else "FAILED")

    def log_summary(
        self,
        decisions: Sequence[AttemptDecision],
        seconds: Sequence[float],
        required: Mapping[str, float],
        told: Sequence[Mapping[str, Any]],
    ) -> None:
        """Replace the table and the figures of the parent run by those of all decisions so far.

        Args:
            decisions: All decisions so far.
            seconds: Duration of each attempt, in seconds.
            required: Accuracy that each domain must keep.
            told: What each attempt changed (see `fusion.history.History.told`).
        """
        rows: dict[str, list[Any]] = {
            "step": [decision.attempt.number for decision in decisions],
            "domain": [", ".join(decision.attempt.new) for decision in decisions],
            "adapter": [decision.attempt.adapter for decision in decisions],
            "decision": [verdict_of(one) for one in told],
            "reason": [outcome_of(one) for one in told],
            "went": [went(one) for one in told],
            "seconds": [round(value, 1) for value in seconds],
        }
        for name in required:
            rows[name] = [
                f"{decision.accuracy[name]:.3f}" if name in decision.accuracy else ""
                for decision in decisions
            ]
        rows["held before"] = [", ".join(decision.attempt.held) for decision in decisions]
        # `log_table` appends to what is there; a summary replaces it.
        self._client.log_dict(
            self.run_id,
            {
                "columns": list(rows),
                "data": [list(row) for row in zip(*rows.values(), strict=True)],
            },
            "steps.json",
        )
        heat = pictures.heat_map(decisions, required)
        self._client.log_figure(self.run_id, heat, "accuracy_heat_map.png")
        timeline = pictures.packing_timeline(decisions, seconds)
        self._client.log_figure(self.run_id, timeline, "packing_timeline.png")
        show_table(self._client, self.run_id, "steps.json")

    def describe_attempts(self, notes: Mapping[int, str]) -> None:
        """Set the descriptions of attempts; those that are as they were are left alone.

        Args:
            notes: Descriptions in markdown, by number of the attempt.
        """
        changed = {
            number: text for number, text in notes.items() if self._notes.get(number) != text
        }
        for number, text in changed.items():
            mine = f"tags.`{PARENT}` = '{self.run_id}' and tags.`{ATTEMPT}` = '{number}'"
            for run in self._runs(mine):
                self._client.set_tag(run.info.run_id, NOTE, text[:NOTE_LENGTH])
        self._notes |= changed

    def curve(self) -> Curve:
        """A curve in the parent run."""
        return Curve(self._client, self.run_id)

    def log_metrics(self, values: Mapping[str, float], step: int = 0) -> None:
        """Log metrics of the parent run."""
        log_metrics(self._client, self.run_id, {key: [(step, v)] for key, v in values.items()})

    def log_classes(self, domain: str, facts: Mapping[str, Any]) -> None:
        """Log the metrics of a domain's classes, measured on the test split.

        Args:
            domain: The domain.
            facts: `ClassReport.as_json`; more keys are ignored.
        """
        _log_classes(self._client, self.run_id, domain, facts)

    def log_picture(self, image: Image, file: str) -> None:
        """Log a picture as the artifact `file` of the parent run."""
        self._client.log_image(self.run_id, image, file)

    def log_figure(self, figure: Figure, file: str) -> None:
        """Log a figure as the artifact `file` of the parent run."""
        self._client.log_figure(self.run_id, figure, file)

    def finish(self, status: str, note: str | None = None) -> None:
        """End the parent run.

        Args:
            status: ``FINISHED``, ``FAILED`` or ``KILLED``.
            note: Description in markdown; replaces the one of `start`.
        """
        if self._monitor is not None:
            self._monitor.finish()
        if note is not None:
            self._client.set_tag(self.run_id, NOTE, note)
        self._client.set_terminated(self.run_id, status)

    def _runs(self, condition: str) -> list[Any]:
        return list(self._client.search_runs([self._experiment], condition))


class Curve:
    """Logs figures of a training while it runs, without slowing it down.

    Figures are gathered for a moment and sent by MLflow's own thread.

    Args:
        client: MLflow's client.
        run_id: Id of the run.
    """

    def __init__(self, client: Any, run_id: str) -> None:
        self._client = client
        self._run_id = run_id
        self._rows: list[Any] = []
        self._sent: list[Any] = []
        self._next = time.monotonic() + CURVE_SECONDS

    def add(self, step: int, figures: Mapping[str, float]) -> None:
        """Log figures at a step."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        self._rows += [Metric(key, value, now, step) for key, value in figures.items()]
        if time.monotonic() >= self._next or len(self._rows) >= METRICS_PER_REQUEST - 50:
            self._send()

    def _send(self) -> None:
        for start in range(0, len(self._rows), METRICS_PER_REQUEST):
            rows = self._rows[start : start + METRICS_PER_REQUEST]
            self._sent.append(self._client.log_batch(self._run_id, metrics=rows, synchronous=False))
        self._rows = []
        self._next = time.monotonic() + CURVE_SECONDS

    def finish(self) -> None:
        """Send what is left, and wait until everything is stored."""
        self._send()
        with self._client.usable():
            for operations in self._sent:
                operations.wait()
        self._sent = []


class TeacherRun:
    """The MLflow run of a small model's training; that of an interrupted training is continued.

    Used in a `with` block, which ends the run.

    Args:
        uri: Tracking URI; None for MLflow's default.
        domain: The domain.
        stage: Key of the stage.
        options: Settings of the training.
    """

    def __init__(
        self, uri: str | None, domain: str, stage: str, options: Mapping[str, Any]
    ) -> None:
        import mlflow

        self._client: Any = Store(uri or mlflow.get_tracking_uri())
        experiment = open_experiment(self._client, TEACHERS)
        earlier = self._client.search_runs(
            [experiment], f"tags.`{TEACHER}` = '{stage}' and attributes.status != 'FINISHED'"
        )
        if earlier:
            self._id = earlier[0].info.run_id
            self._client.update_run(self._id, status="RUNNING")
        else:
            tags = {TEACHER: stage, "valora.domain": domain, "mlflow.user": user_name()}
            run = self._client.create_run(experiment, tags=tags, run_name=f"teach {domain}")
            self._id = run.info.run_id
            log_params(self._client, self._id, options)
        self._curve = Curve(self._client, self._id)

    def add(self, epoch: int, figures: Mapping[str, float]) -> None:
        """Log figures after an epoch."""
        self._curve.add(epoch, figures)

    def __enter__(self) -> TeacherRun:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._end("FINISHED")
        else:
            with suppress(TrackingError):  # the first error counts
                self._end("FAILED" if issubclass(kind, Exception) else "KILLED")

    def _end(self, status: str) -> None:
        self._curve.finish()
        self._client.set_terminated(self._id, status)


class AttemptRun:
    """The nested MLflow run of one attempt.

    Args:
        client: MLflow's client.
        experiment: Id of the experiment.
        parent: Id of the parent run.
        fusion: Key of the fusion's stage.
        attempt: The attempt.
        required: Accuracy that each domain must keep.
        note: Description in markdown, until the attempt is decided.

    Attributes:
        curve: Logs the figures of its training.
    """

    def __init__(
        self,
        client: Any,
        experiment: str,
        parent: str,
        fusion: str,
        attempt: Attempt,
        required: Mapping[str, float],
        note: str = "",
    ) -> None:
        self._client = client
        self._attempt = attempt
        self._required = required
        tags = {
            PARENT: parent,
            FUSION: fusion,
            ATTEMPT: str(attempt.number),
            "valora.domain": ", ".join(attempt.new),
            "valora.adapter": attempt.adapter,
            NOTE: note,
        }
        self._run = client.create_run(experiment, tags=tags, run_name=attempt.name)
        self._id = self._run.info.run_id
        self.curve = Curve(client, self._id)

    def log_data_sets(self, data_sets: Sequence[DataSet]) -> None:
        """Log the inputs of the attempt."""
        _log_data_sets(self._client, self._id, data_sets)

    def finish(
        self,
        decision: AttemptDecision,
        seconds: float,
        sheets: Mapping[str, Image],
        details: Mapping[str, float],
        classes: Mapping[str, ClassReport],
    ) -> None:
        """Log the outcome of the attempt and end the run.

        Args:
            decision: The verdict.
            seconds: Duration of the attempt, in seconds.
            sheets: Contact sheets by domain.
            details: Further metrics by name.
            classes: Metrics of each class, by domain.
        """
        self.curve.finish()
        values: dict[str, list[tuple[int, float]]] = {}
        for name, accuracy in decision.accuracy.items():
            values[f"accuracy/{name}"] = [(0, accuracy)]
            values[f"required/{name}"] = [(0, self._required[name])]
        values |= {key: [(0, value)] for key, value in details.items()}
        values["seconds"] = [(0, seconds)]
        log_metrics(self._client, self._id, values)
        for name, sheet in sheets.items():
            self._client.log_image(self._id, sheet, f"pictures/{name}.png")
        for name, report in classes.items():
            _log_classes(self._client, self._id, name, report.as_json())
        self._client.set_tag(self._id, "valora.decision", str(decision.verdict))
        self._client.set_tag(self._id, "valora.reason", decision.reason)
        self._client.update_run(self._id, name=f"{self._attempt.name} ({decision.verdict})")
        ended = "FINISHED" if decision.verdict is not Verdict.UNREACHABLE else "FAILED"
        self._client.set_terminated(self._id, ended)

    def abandon(self) -> None:
        """End the run of an interrupted attempt; the next start of the fusion replaces it."""
        self._client.set_terminated(self._id, "KILLED")


def end_stale_runs(uri: str | None, work: str) -> None:
    """End the runs of all stages of this folder whose processes were killed.

    Runs of other folders, and of stages that a process is running, are left alone.

    Args:
        uri: Tracking URI; None for MLflow's default.
        work: Folder of all stages.

    Raises:
        TrackingError: If the store cannot be used.
    """
    import mlflow

    client: Any = Store(uri or mlflow.get_tracking_uri())
    experiments = client.search_experiments(filter_string="name LIKE 'valora/%'")
    if not experiments:
        return
    running = client.search_runs(
        [item.experiment_id for item in experiments], "attributes.status = 'RUNNING'"
    )
    for run in running:
        key = run.data.tags.get(TEACHER) or run.data.tags.get(FUSION)
        if key is not None and was_killed(Path(work), key):
            client.set_terminated(run.info.run_id, "KILLED")


def _is_fusion(run: Any) -> bool:
    """Whether a run is that of a whole fusion, which may lie below that of a sweep."""
    return not {ATTEMPT, HEAD_ONLY} & set(run.data.tags)


def register_bundle(
    uri: str | None, run_id: str, name: str, bundle: Path, tags: Mapping[str, str]
) -> int:
    """Register a bundle as a model version with the alias ``latest-fused``.

    Args:
        uri: Tracking URI; None for the default.
        run_id: Id of the fusion's parent run; the bundle becomes one of its artifacts.
        name: Name of the registered model.
        bundle: Folder of the bundle.
        tags: Tags of the model version.

    Returns:
        Number of the model version.
    """
    import mlflow
    from mlflow.exceptions import MlflowException

    uri = uri or mlflow.get_tracking_uri()
    with signals_later(uri), explained(uri):
        client = mlflow.MlflowClient(uri)
        for known in client.search_model_versions(f"run_id = '{run_id}'"):
            if known.name == name:  # registered by a process that was killed afterwards
                return int(known.version)
        client.log_artifacts(run_id, str(bundle), "bundle")
        try:
            client.create_registered_model(
                name, description="VaLoRA bundle: LoRA adapters and heads"
            )
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
        source = f"{client.get_run(run_id).info.artifact_uri}/bundle"
        version = client.create_model_version(name, source, run_id, tags=dict(tags))
        client.set_registered_model_alias(name, "latest-fused", version.version)
        return int(version.version)


def find_run(uri: str | None, run_id: str) -> str | None:
    """Address of a run; None if the store does not have the run.

    Args:
        uri: Tracking URI; None for the default.
        run_id: Id of the run.
    """
    import mlflow

    uri = uri or mlflow.get_tracking_uri()
    try:
        run = Store(uri).get_run(run_id)
    except TrackingError:
        return None
    return run_address(uri, run.info.experiment_id, run_id)


def latest_fusions(uri: str | None) -> list[tuple[str, str, str]]:
    """The latest fusion of every task, the latest one first.

    Args:
        uri: Tracking URI; None for the default.

    Returns:
        Name of the experiment, name of the run, and its address.
    """
    import mlflow

    uri = uri or mlflow.get_tracking_uri()
    client: Any = Store(uri)
    found = []
    for experiment in client.search_experiments(filter_string="name LIKE 'valora/%'"):
        runs = client.search_runs(
            [experiment.experiment_id],
            f"tags.`{FUSION}` LIKE '%'",
            order_by=["attributes.start_time DESC"],
        )
        latest = next((run for run in runs if _is_fusion(run)), None)
        if latest is not None:
            address = run_address(uri, experiment.experiment_id, latest.info.run_id)
            found.append((latest.info.start_time, experiment.name, latest.info.run_name, address))
    return [row[1:] for row in sorted(found, reverse=True)]


def _log_data_sets(client: Any, run_id: str, data_sets: Sequence[DataSet]) -> None:
    from mlflow.entities import Dataset, DatasetInput, InputTag

    inputs = [
        DatasetInput(
            Dataset(item.name, item.digest[:36], "local", json.dumps({"uri": str(item.folder)})),
            [InputTag("mlflow.data.context", item.context)],
        )
        for item in data_sets
    ]
    client.log_inputs(run_id, inputs)


def _log_classes(client: Any, run_id: str, domain: str, facts: Mapping[str, Any]) -> None:
    """Log the metrics of single classes: as metrics, as a table, and as a confusion matrix."""
    figures = facts["per_class"]
    columns = ("class", "support", "precision", "recall", "f1", "ap")
    rows = [
        [label, *(_rounded(values.get(column)) for column in columns[1:])]
        for label, values in figures.items()
    ]
    table = f"classes/{domain}.json"
    client.log_dict(run_id, {"columns": list(columns), "data": rows}, table)
    show_table(client, run_id, table)
    if "confusion" not in facts:  # too many classes to be drawn
        return
    counts, title = facts["confusion"], f"{domain}: truth and prediction"
    matrix = pictures.confusion_matrix(counts["names"], counts["counts"], title)
    client.log_figure(run_id, matrix, f"pictures/{domain}-confusion.png")
    log_metrics(
        client,
        run_id,
        {
            f"{metric}/{domain}/{_metric_name(label)}": [(0, values[metric])]
            for label, values in figures.items()
            for metric in ("precision", "recall", "f1", "ap")
            if metric in values
        },
    )


def _rounded(value: float | None) -> float | str:
    return "" if value is None else round(value, 4)


def _metric_name(label: str) -> str:
    """A label as a part of a metric's name, in the characters that MLflow allows."""
    return re.sub(r"[^\w\-. :]", "_", label).strip(".") or "_"
