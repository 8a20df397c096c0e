"""Tells the trackers beside MLflow what MLflow's client is told."""

from __future__ import annotations

import sys
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any

from valora_train.trackers.base import RunFacts, SecondTracker
from valora_train.trackers.registry import TRACKERS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

PARENT = "mlflow.parentRunId"
NOTE = "mlflow.note.content"
OWN = "mlflow."
"""Prefix of the tags that mean something to MLflow alone."""

_MADE: dict[str, SecondTracker] = {}
"""Trackers of this process: the stores of a process share them, and the runs that are open."""
_GIVEN_UP: set[str] = set()


def check_trackers(names: Sequence[str]) -> None:
    """Check that trackers can be used.

    Args:
        names: The setting `tracking.also`.

    Raises:
        SettingsError: If a name is unknown, or a tracker cannot be used.
    """
    for name in names:
        TRACKERS[name]().check()


class Relay:
    """Reads the calls of an MLflow client and repeats them for other trackers.

    Runs that began in another process are not known here, and calls about them are ignored.

    Args:
        names: The trackers.
        client: The MLflow client, which is asked for what a call does not say.
    """

    def __init__(self, names: Sequence[str], client: Any) -> None:
        for name in names:
            if name not in _MADE:
                _MADE[name] = TRACKERS[name]()
        self._names = list(names)
        self._client = client
        self._open: set[str] = set()

    def tell(self, call: str, arguments: Sequence[Any], options: dict[str, Any]) -> None:
        """Repeat a call that MLflow has answered.

        Args:
            call: Name of the method of `MlflowClient`.
            arguments: Its arguments.
            options: Its named arguments.
        """
        heard = getattr(self, f"_on_{call}", None)
        if heard is not None and self._names:
            heard(*arguments, **options)

    def begun(self, run: Any, continued: bool) -> None:
        """Begin a run that MLflow has begun, or continued.

        Args:
            run: MLflow's run.
            continued: Whether it began in an earlier process.
        """
        if not self._names or run.info.run_id in self._open:
            return
        tags = run.data.tags
        facts = RunFacts(
            run.info.run_id,
            run.info.run_name,
            self._client.get_experiment(run.info.experiment_id).name,
            tags.get(PARENT),
            {name: value for name, value in tags.items() if not name.startswith(OWN)},
            tags.get(NOTE, ""),
            continued,
        )
        self._open.add(facts.id)
        self._each(lambda tracker: tracker.begin(facts))

    def _each(self, tell: Callable[[SecondTracker], None]) -> None:
        for name in self._names:
            if name in _GIVEN_UP:
                continue
            try:
                tell(_MADE[name])
            except Exception as error:  # noqa: BLE001 (MLflow has the evidence; training goes on)
                _GIVEN_UP.add(name)
                said = " ".join(str(error).split())[:300]
                print(
                    f"{name} is told nothing more ({type(error).__name__}: {said}); MLflow has "
                    "everything",
                    file=sys.stderr,
                )

    def _on_update_run(
        self, run_id: str, status: str | None = None, name: str | None = None
    ) -> None:
        if status == "RUNNING":
            self.begun(self._client.get_run(run_id), continued=True)
        if name is not None and run_id in self._open:
            self._each(lambda tracker: tracker.describe(run_id, name, None))

    def _on_log_batch(
        self, run_id: str, metrics: Sequence[Any] = (), params: Sequence[Any] = (), **_: Any
    ) -> None:
        if run_id not in self._open:
            return
        if params:
            values = {item.key: item.value for item in params}
            self._each(lambda tracker: tracker.log_params(run_id, values))
        for step, rows in groupby(metrics, key=lambda row: row.step):
            row = {item.key: item.value for item in rows}
            self._each(partial(_log_metrics, run_id=run_id, step=step, values=row))

    def _on_log_image(self, run_id: str, image: Any, file: str) -> None:
        if run_id in self._open:
            self._each(lambda tracker: tracker.log_picture(run_id, image, file))

    def _on_log_figure(self, run_id: str, figure: Any, file: str) -> None:
        if run_id in self._open:
            from io import BytesIO

            from PIL import Image

            drawn = BytesIO()
            figure.savefig(drawn, format="png")
            with Image.open(drawn) as image:
                self._on_log_image(run_id, image, file)

    def _on_log_dict(self, run_id: str, content: Any, file: str) -> None:
        if run_id in self._open and set(content) == {"columns", "data"}:
            self._each(
                lambda tracker: tracker.log_table(run_id, content["columns"], content["data"], file)
            )

    def _on_set_tag(self, run_id: str, name: str, value: str) -> None:
        if run_id not in self._open:
            return
        if name == NOTE:
            self._each(lambda tracker: tracker.describe(run_id, None, value))
        elif not name.startswith(OWN):
            self._each(lambda tracker: tracker.set_tag(run_id, name, value))

    def _on_set_terminated(self, run_id: str, status: str) -> None:
        if run_id in self._open:
            self._open.remove(run_id)
            self._each(lambda tracker: tracker.end(run_id, status))


def _log_metrics(
    tracker: SecondTracker, run_id: str, step: int, values: Mapping[str, float]
) -> None:
    tracker.log_metrics(run_id, step, values)
