"""Kinds of teachers by name: loading one and training one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from valora_data.registry import Registry
from valora_data.schema import Task
from valora_teachers.base import TeacherError, TeacherKind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from valora_data.schema import Sample
    from valora_teachers.base import OnEpoch, Teacher

KINDS: Registry[type[TeacherKind]] = Registry(
    "valora.teachers",
    "teacher kind",
    {
        "yolo": "valora_teachers.kinds.yolo:Yolo",
        "yolo_world": "valora_teachers.kinds.yolo_world:YoloWorldKind",
        "small": "valora_teachers.kinds.small:Small",
        "huggingface": "valora_teachers.kinds.huggingface:HuggingFace",
        "function": "valora_teachers.kinds.function:Function",
        "in_context": "valora_teachers.kinds.in_context:InContext",
    },
    TeacherError,
)
NAMES = "names"
"""Option of every kind: the label for each class name of the model, where the two differ."""


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
        kind: A name of `KINDS`.
        weights: The model's file or folder; for `huggingface` also a name on the hub; for
            `function` ``package.module:function``.
        labels: Labels of the domain; empty where answers are text.
        options: `names`, and the kind's own options. Settings of training are accepted and ignored.
        task: Task of the domain.
        prompt: Prompt of the domain, for vision-language models.

    Raises:
        TeacherError: The kind or an option is unknown, or the model does not fit the task or the
            labels.
    """
    found = KINDS[kind]()
    chosen = dict(options or {})
    names = chosen.pop(NAMES, None)
    _check_options(kind, found, chosen)
    return found.load(weights, task, labels, names, chosen, prompt)


@dataclass(frozen=True, slots=True)
class TeacherFacts:
    """What the answers of a teacher depend on, besides its task, its labels and the samples.

    Attributes:
        settings: Values for JSON.
        inputs: Content hashes by name.
    """

    settings: dict[str, Any]
    inputs: dict[str, str]


def teacher_facts(
    kind: str,
    weights: str | None,
    options: Mapping[str, Any] | None = None,
    prompt: str = "",
    cache: Path | None = None,
) -> TeacherFacts:
    """What the answers of a loaded teacher depend on.

    Args:
        kind: A name of `KINDS`.
        weights: What names the model; None if its file or folder is hashed elsewhere.
        options: As in `load_teacher`.
        prompt: Prompt of the domain.
        cache: As in `valora_data.hashing.hash_files`.

    Raises:
        TeacherError: The kind is unknown, or a file cannot be read.
    """
    found = KINDS[kind]()
    with_effect = {
        key: value for key, value in (options or {}).items() if key not in found.without_effect
    }
    plain = {key: value for key, value in with_effect.items() if key != NAMES}
    try:
        inputs = found.inputs(weights, plain, cache)
    except OSError as error:
        raise TeacherError(
            f"{error.filename} of teacher {weights or kind} cannot be read ({error.strerror}): "
            "check its permissions"
        ) from error
    settings: dict[str, Any] = {"kind": kind, "options": with_effect}
    if found.reads_prompt:
        settings["prompt"] = prompt
    if weights is not None and not Path(weights).exists():
        settings["weights"] = weights  # a name on the hub, or of a function
    return TeacherFacts(settings, inputs)


def train_teacher(
    kind: str,
    train: Sequence[Sample],
    labels: Sequence[str],
    folder: Path,
    options: Mapping[str, Any] | None = None,
    on_epoch: OnEpoch | None = None,
    task: Task = Task.DETECTION,
    validation: Sequence[Sample] = (),
) -> dict[str, Any]:
    """Train a teacher and save it in a folder, under the name `TeacherKind.artefact`.

    Args:
        kind: A name of `KINDS` whose kind is `trainable`.
        train: Labelled training samples.
        labels: Labels in the order of the class indices.
        folder: Where to save; created if missing.
        options: Settings of the kind's training.
        on_epoch: Called after each epoch, see `base.OnEpoch`.
        task: Task of the domain.
        validation: Labelled samples for a curve of the training; nothing that is trained depends on
            them.

    Returns:
        A report of the training, ready for JSON.

    Raises:
        TeacherError: The kind or an option is unknown, the kind cannot be trained for the task, or
            there are too few samples.
    """
    found = KINDS[kind]()
    if not found.trainable:
        trainable = " or ".join(name for name, one in KINDS.items() if one.trainable)
        raise TeacherError(
            f"a teacher of kind {kind} is not trained here: name a trained one, or choose "
            f"{trainable}"
        )
    chosen = {key: value for key, value in (options or {}).items() if key != NAMES}
    _check_options(kind, found, chosen)
    found.validation = validation
    return found.train(train, task, labels, folder, chosen, on_epoch)


def check_options(kind: str, options: Mapping[str, Any]) -> None:
    """Check the options of a teacher before it is trained or loaded.

    Args:
        kind: A name of `KINDS`.
        options: As in `load_teacher`.

    Raises:
        TeacherError: The kind or an option is unknown, or a value is not possible.
    """
    found = KINDS[kind]()
    chosen = {key: value for key, value in options.items() if key != NAMES}
    names = options.get(NAMES)
    if names is not None and not isinstance(names, Mapping):
        raise TeacherError(
            f"teacher.options.names={names!r} is no mapping: give the label for each class name"
        )
    _check_options(kind, found, chosen)
    try:
        found.check(chosen)
    except (TypeError, ValueError) as error:
        raise TeacherError(f"teacher.options of kind {kind}: {error}; correct them") from error


def _check_options(name: str, kind: TeacherKind, options: Mapping[str, Any]) -> None:
    known = kind.options()
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise TeacherError(
            f"unknown option {', '.join(unknown)} of teacher {name}: expected {', '.join(known)}"
        )
