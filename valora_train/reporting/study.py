"""Runs in MLflow that compare several trainings: sweeps."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

from valora_train.errors import TrackingError
from valora_train.reporting.mlflow_store import (
    NOTE,
    PARENT,
    Store,
    log_params,
    open_experiment,
    run_address,
    show_table,
    user_name,
)
from valora_train.reporting.text import markdown_table

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


STUDY = "valora.study"
"""Tag of these runs: what is compared, and a hash of it."""


class StudyRun:
    """The MLflow run of a study: continued by its key, ended with the `with` block.

    Args:
        uri: Tracking URI; None for MLflow's default, SQLite in the working directory.
        experiment: Name of the experiment.
        key: Kind of the study and a hash of what is compared.
        name: Name of the run.
        config: Settings of the study, for its parameters.
        parent: Id of the run that it is nested in, if any.

    Attributes:
        run_id: Id of the run.
    """

    def __init__(
        self,
        uri: str | None,
        experiment: str,
        key: str,
        name: str,
        config: Mapping[str, Any],
        parent: str | None = None,
    ) -> None:
        import mlflow

        self._uri = uri or mlflow.get_tracking_uri()
        self._client: Any = Store(self._uri)
        self._experiment = open_experiment(self._client, experiment)
        known = self._client.search_runs([self._experiment], f"tags.`{STUDY}` = '{key}'")
        if known:
            self.run_id = str(known[0].info.run_id)
            self._client.update_run(self.run_id, status="RUNNING", name=name)
        else:
            tags = {
                STUDY: key,
                "mlflow.user": user_name(),
                "mlflow.source.name": "valora-train",
                "mlflow.source.type": "LOCAL",
            }
            tags |= {} if parent is None else {PARENT: parent}
            run = self._client.create_run(self._experiment, tags=tags, run_name=name)
            self.run_id = str(run.info.run_id)
            log_params(self._client, self.run_id, config)

    @property
    def link(self) -> str:
        """Address of the run in MLflow's pages."""
        return run_address(self._uri, self._experiment, self.run_id)

    def log_table(self, columns: Sequence[str], rows: Sequence[Sequence[Any]], name: str) -> None:
        """Log a table, as JSON that MLflow shows and as markdown.

        Args:
            columns: Names of the columns.
            rows: The rows.
            name: Name of the files, without an ending.
        """
        table = {"columns": list(columns), "data": [list(row) for row in rows]}
        self._client.log_dict(self.run_id, table, f"{name}.json")
        show_table(self._client, self.run_id, f"{name}.json")
        text = "\n".join(markdown_table(columns, [[str(cell) for cell in row] for row in rows]))
        self._client.log_text(self.run_id, text + "\n", f"{name}.md")

    def adopt(self, run_id: str) -> None:
        """Put another run below this one."""
        self._client.set_tag(run_id, PARENT, self.run_id)

    def note(self, text: str) -> None:
        """Set the description of the run, in markdown."""
        self._client.set_tag(self.run_id, NOTE, text)

    def __enter__(self) -> StudyRun:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._client.set_terminated(self.run_id, "FINISHED")
            return
        with suppress(TrackingError):  # the first error counts
            status = "FAILED" if issubclass(kind, Exception) else "KILLED"
            self._client.set_terminated(self.run_id, status)
