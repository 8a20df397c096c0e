"""Kinds of teachers by the name that the configuration gives them."""

from __future__ import annotations

import inspect
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from valora_data.schema import Task
from valora_teachers.base import Teacher, TeacherError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from valora_data.schema import Sample

KINDS = ("yolo", "yolo_world", "small", "huggingface", "function")
"""Ultralytics (detect, classify), open-vocabulary YOLO-World, a small classifier that is trained
here, transformers, and any Python callable."""
TRAINED = {"yolo": "teacher.pt", "small": "teacher"}
"""Kinds that can be trained here, and the file or folder that training leaves."""
NAMES = "names"
"""Option of loading: label for each class name of the model, where the two differ."""


def load_teacher(
    kind: str,
    weights: Path | str,
    labels: Sequence[str],
    options: Mapping[str, Any] | None = None,
    task: Task = Task.DETECTION,
    prompt: str = "",
) -> Teacher:
    """Load a trained teacher.

    Args:
        kind: One of `KINDS`.
        weights: Its file or folder; for `huggingface` also a name on the hub; for `function`
            ``package.module:function``.
        labels: Labels that the domain asks for; empty where answers are language.
        options: `names`, and what the kind's loading takes; settings of training are allowed beside
            it.
        task: The domain's task.
        prompt: The domain's prompt, for vision-language models.

    Raises:
        TeacherError: If the kind or an option is unknown, or the model does not fit.
    """
    _check(kind)
    options = dict(options or {})
    names = options.pop(NAMES, None)
    path = Path(weights)
    if kind == "yolo":
        _known(kind, options, _settings("yolo"))
        return _load_yolo(path, task, labels, names)
    if kind == "small":
        from valora_teachers.small import SmallTeacher

        _known(kind, options, _settings("small"))
        return SmallTeacher.load(path, task, labels, names)
    if kind == "yolo_world":
        from valora_teachers.yolo_world import YoloWorld

        _known(kind, options, ("text_encoder",))
        return YoloWorld.load(path, task, labels, names, **options)
    if kind == "function":
        from valora_teachers.functions import FunctionTeacher

        _known(kind, options, ("batch",))
        return FunctionTeacher(str(weights), task, labels, names, **options)
    from valora_teachers.huggingface import load_huggingface

    taken = inspect.signature(load_huggingface).parameters
    _known(kind, options, [name for name in taken if name not in ("source", "task", "labels")])
    return load_huggingface(weights, task, labels, **({"names": names, "prompt": prompt} | options))


def _load_yolo(
    path: Path, task: Task, labels: Sequence[str], names: Mapping[str, str] | None
) -> Teacher:
    if task in (Task.CLASSIFICATION, Task.COUNTING):
        from valora_teachers.yolo_classify import YoloClassifier

        return YoloClassifier.load(path, task, labels, names)
    if task is not Task.DETECTION:
        raise TeacherError(
            f"a YOLO gives no answers for task {task}: use it for detection, classification or "
            "counting, or yolo_world for grounding"
        )
    from valora_teachers.yolo import YoloTeacher

    return YoloTeacher.load(path, labels, names)


def train_teacher(
    kind: str,
    train: Sequence[Sample],
    labels: Sequence[str],
    folder: Path,
    options: Mapping[str, Any] | None = None,
    on_epoch: Callable[[int, int, float], None] | None = None,
    task: Task = Task.DETECTION,
) -> dict[str, Any]:
    """Train a teacher and save it in `folder` under the name that `TRAINED` gives.

    Args:
        kind: A key of `TRAINED`.
        train: What it learns from.
        labels: Label set in the order of class indices.
        folder: Where to save; made if missing.
        options: Settings of the kind's training.
        on_epoch: Called after each epoch with its number from 1, their count, and the mean loss.
        task: The domain's task.

    Returns:
        The kind's report, ready for JSON.

    Raises:
        TeacherError: If the kind or an option is unknown or cannot be trained for the task, or
            there is too little to learn from.
    """
    _check(kind)
    if kind not in TRAINED:
        raise TeacherError(
            f"a teacher of kind {kind} is not trained here: name a trained one, or choose "
            f"{' or '.join(TRAINED)}"
        )
    chosen = {key: value for key, value in (options or {}).items() if key != NAMES}
    _known(kind, chosen, _settings(kind))
    if kind == "small":
        from valora_teachers.small import SmallSettings, train_small

        small = SmallSettings(**chosen)
        return asdict(train_small(train, task, labels, folder, settings=small, on_epoch=on_epoch))
    if task is not Task.DETECTION:
        raise TeacherError(
            f"a YOLO is trained here for detection only, not for {task}: choose teacher small"
        )
    from valora_teachers.yolo import YoloSettings, train_yolo

    settings = YoloSettings(**chosen)
    return asdict(train_yolo(train, labels, folder, settings=settings, on_epoch=on_epoch))


def _settings(kind: str) -> Sequence[str]:
    """Names of a kind's settings of training."""
    if kind == "small":
        from valora_teachers.small import SmallSettings

        return SmallSettings.__slots__
    from valora_teachers.yolo import YoloSettings

    return YoloSettings.__slots__


def _known(kind: str, options: Mapping[str, Any], known: Sequence[str]) -> None:
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise TeacherError(
            f"unknown option {', '.join(unknown)} of teacher {kind}: expected {', '.join(known)}"
        )


def _check(kind: str) -> None:
    if kind not in KINDS:
        raise TeacherError(f"unknown kind of teacher {kind!r}: expected {', '.join(KINDS)}")
