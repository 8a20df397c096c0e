"""Kinds of teachers by name: loading one and training one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from valora_data.registry import Registry
from valora_data.schema import Task
from valora_teachers.base import Teacher, TeacherError

KINDS: Registry[type[Teacher]] = Registry(
    "valora.teachers",
    "teacher kind",
    {
        "yolo": "valora_teachers.yolo:Yolo",
        "yolo_world": "valora_teachers.yolo:YoloWorld",
        "small": "valora_teachers.small:Small",
        "huggingface": "valora_teachers.huggingface:HuggingFace",
        "function": "valora_teachers.function:Function",
        "in_context": "valora_teachers.in_context:InContext",
    },
    TeacherError,
)
NAMES = "names"  # option of every kind: the label of each class name of the model that differs


def make_teacher(
    kind: str,
    task: Task = Task.DETECTION,
    labels: Sequence[str] = (),
    options: Mapping[str, Any] | None = None,
    prompt: str = "",
) -> Teacher:
    """A teacher to be trained or loaded; a `TeacherError` names what is not possible."""
    found = KINDS[kind]
    own = dict(options or {})
    names = own.pop(NAMES, None)
    if names is not None and not isinstance(names, Mapping):
        raise TeacherError(
            f"teacher.options.names={names!r} is no mapping: give the label for each class name"
        )
    try:
        return found(task, labels, own, names, prompt)
    except ValidationError as error:
        (problem, *_) = error.errors()
        name = ".".join(map(str, problem["loc"]))
        message = f"teacher.options.{name}={problem['input']!r} is not possible: {problem['msg']}"
        if problem["type"] == "extra_forbidden":
            known = ", ".join(found.options_type.model_fields)
            message = f"unknown option {name} of teacher {kind}: expected {known}"
        raise TeacherError(message) from error


def load_teacher(
    kind: str,
    weights: Path | str,
    labels: Sequence[str],
    options: Mapping[str, Any] | None = None,
    task: Task = Task.DETECTION,
    prompt: str = "",
) -> Teacher:
    """Load a teacher from file, folder, name on the hub or of a function; or a `TeacherError`."""
    teacher = make_teacher(kind, task, labels, options, prompt)
    teacher.load(weights)
    return teacher


def teacher_facts(
    kind: str,
    weights: str | None,
    options: Mapping[str, Any] | None = None,
    prompt: str = "",
    cache: Path | None = None,
) -> tuple[dict[str, Any], dict[str, str]]:
    """Settings (JSON) and content hashes that a teacher's answers depend on.

    Task, labels and samples are left out, and the model where `weights` is None. `cache` is that of
    `valora_data.hashing.hash_files`.
    """
    found = KINDS[kind]
    counting = {k: value for k, value in (options or {}).items() if k not in found.without_effect}
    try:
        own = {name: value for name, value in counting.items() if name != NAMES}
        inputs = found.inputs(weights, own, cache)
    except OSError as error:
        raise TeacherError(
            f"{error.filename} of teacher {weights or kind} cannot be read ({error.strerror}): "
            "check its permissions"
        ) from error
    settings: dict[str, Any] = {"kind": kind, "options": counting}
    if found.reads_prompt:
        settings["prompt"] = prompt
    if weights is not None and not Path(weights).exists():
        settings["weights"] = weights  # a name on the hub, or of a function
    return settings, inputs
