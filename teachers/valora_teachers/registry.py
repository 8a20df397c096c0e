"""Kinds of teachers by the name that the configuration gives them."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from valora_teachers.base import Teacher, TeacherError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from valora_data.schema import Sample

KINDS = ("yolo",)
NAMES = "names"
"""Option of loading: label for each class name of the model, where the two differ."""


def load_teacher(
    kind: str, weights: Path, labels: Sequence[str], options: Mapping[str, Any] | None = None
) -> Teacher:
    """Load a trained teacher.

    Args:
        kind: One of `KINDS`.
        weights: Its file.
        labels: Labels that the domain asks for.
        options: `names` counts here; settings of training are allowed beside it.

    Raises:
        TeacherError: If the kind is unknown or the file does not fit.
    """
    _check(kind)
    from valora_teachers.yolo import YoloTeacher

    return YoloTeacher.load(weights, labels, (options or {}).get(NAMES))


def train_teacher(
    kind: str,
    train: Sequence[Sample],
    labels: Sequence[str],
    folder: Path,
    options: Mapping[str, Any] | None = None,
    on_epoch: Callable[[int, int, float], None] | None = None,
) -> dict[str, Any]:
    """Train a teacher and save it as `folder`/teacher.pt.

    Args:
        kind: One of `KINDS`.
        train: What it learns from.
        labels: Label set in the order of class indices.
        folder: Where to save; made if missing.
        options: Settings of the kind's training.
        on_epoch: Called after each epoch with its number from 1, their count, and the mean loss.

    Returns:
        The kind's report, ready for JSON.

    Raises:
        TeacherError: If the kind or an option is unknown, or there is too little to learn from.
    """
    _check(kind)
    from valora_teachers.yolo import YoloSettings, train_yolo

    chosen = {key: value for key, value in (options or {}).items() if key != NAMES}
    unknown = sorted(set(chosen) - set(YoloSettings.__slots__))
    if unknown:
        raise TeacherError(
            f"unknown option {', '.join(unknown)} of teacher {kind}: "
            f"expected {', '.join(YoloSettings.__slots__)}"
        )
    settings = YoloSettings(**chosen)
    report = train_yolo(train, labels, folder, settings=settings, on_epoch=on_epoch)
    return asdict(report)


def _check(kind: str) -> None:
    if kind not in KINDS:
        raise TeacherError(f"unknown kind of teacher {kind!r}: expected {', '.join(KINDS)}")
