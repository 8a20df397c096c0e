"""What a tracker beside MLflow is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from PIL.Image import Image


@dataclass(frozen=True)
class RunFacts:
    """A run that begins, or continues after an interruption.

    Attributes:
        id: MLflow's id of the run, 32 hexadecimal digits.
        name: Name of the run.
        experiment: Name of MLflow's experiment, e.g. ``valora/detection``.
        parent: Id of the run that it is nested in, if any.
        tags: Tags by name, without MLflow's own.
        note: Description in markdown.
        continued: Whether it began in an earlier process.
    """

    id: str
    name: str
    experiment: str
    parent: str | None
    tags: Mapping[str, str]
    note: str
    continued: bool


class SecondTracker(ABC):
    """A tracker beside MLflow. One object lives as long as the process; several runs may be open.

    What a method raises is told once in the terminal, and ends this tracker, never the training.
    """

    def check(self) -> None:  # noqa: B027 (most need none)
        """Check, before any work, that the tracker can be used.

        Raises:
            SettingsError: If it cannot; the message names the remedy.
        """

    @abstractmethod
    def begin(self, run: RunFacts) -> None:
        """Begin or continue a run."""

    @abstractmethod
    def log_metrics(self, run_id: str, step: int, values: Mapping[str, float]) -> None:
        """Log the metrics of one step; steps may come in any order."""

    @abstractmethod
    def end(self, run_id: str, status: str) -> None:
        """End a run: ``FINISHED``, ``FAILED`` or ``KILLED``."""

    def log_params(self, run_id: str, values: Mapping[str, str]) -> None:  # noqa: B027
        """Log settings of the run, flat (``train.lr``)."""

    def log_picture(self, run_id: str, image: Image, file: str) -> None:  # noqa: B027
        """Log a picture; `file` is MLflow's name for it, e.g. ``pictures/person.png``."""

    def log_table(  # noqa: B027
        self, run_id: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], file: str
    ) -> None:
        """Log a table, which replaces an earlier one of the same name."""

    def set_tag(self, run_id: str, name: str, value: str) -> None:  # noqa: B027
        """Set a tag."""

    def describe(self, run_id: str, name: str | None, note: str | None) -> None:  # noqa: B027
        """Change name or description; None leaves it as it is."""
