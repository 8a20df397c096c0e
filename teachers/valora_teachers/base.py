"""What a teacher is: a small model that labels the samples of one domain."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from valora_data.errors import ValoraError
from valora_data.identity import code_hash, place_hash
from valora_data.schema import Answer
from valora_data.wording import plural

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from valora_data.schema import Sample, Task

    OnBatch = Callable[[int, int], None]
    """Called with the number of answered samples and the number of all samples."""
    OnEpoch = Callable[[int, int, float, Mapping[str, float]], None]
    """Called with the number of the epoch from 1, the number of epochs, the mean loss, and further
    figures by name, such as ``lr``, the learning rate of the next step."""

BATCH = 32
PATH_LENGTH = 4096  # PATH_MAX of Linux


class TeacherError(ValoraError):
    """A teacher is missing, cannot be loaded, or cannot answer for the domain."""


class Teacher(Protocol):
    """A model that answers for one domain."""

    @property
    def task(self) -> Task:
        """Task that the teacher answers."""
        ...

    @property
    def labels(self) -> tuple[str, ...]:
        """Labels in the order of the class indices; empty where answers are text."""
        ...

    def answer(self, samples: Sequence[Sample], on_batch: OnBatch | None = None) -> list[Answer]:
        """Answer for samples with images of any size.

        Args:
            samples: The samples.
            on_batch: Called after each batch.

        Returns:
            One answer per sample, in order. Boxes have confidences, are in pixels of the image, and
            come most confident first. Labels have `soft`, a probability for each of `labels`.
        """
        ...


class TeacherKind(ABC):
    """A kind of teacher: how its models are loaded and, where possible, trained.

    Register a subclass under a name in `valora_teachers.registry.KINDS`, or with an entry point of
    the group ``valora.teachers``.

    Attributes:
        artefact: Name of the file or folder that holds a trained model. A given model is copied
            into its stage under this name. None for models that are used where they are, such as
            names on the hub.
        trainable: Whether `train` is implemented.
        reads_prompt: Whether answers depend on the domain's prompt.
        without_effect: Options that answers do not depend on, such as a device.
        validation: Labelled samples that `train` may measure a curve on; nothing that is trained
            depends on them.
    """

    artefact: ClassVar[str | None] = None
    trainable: ClassVar[bool] = False
    reads_prompt: ClassVar[bool] = True
    without_effect: ClassVar[frozenset[str]] = frozenset()
    validation: Sequence[Sample] = ()

    def options(self) -> Sequence[str]:
        """Names of the options that `load` and `train` accept."""
        return ()

    def check(self, options: Mapping[str, Any]) -> None:
        """Check the values of options before any work.

        Args:
            options: Options, whose names are in `options()`.

        Raises:
            TeacherError: A value is not possible; `TypeError` and `ValueError` say it, too.
        """
        del options

    def inputs(
        self, weights: str | None, options: Mapping[str, Any], cache: Path | None
    ) -> dict[str, str]:
        """Content hashes of what answers depend on, besides the arguments of `load` as they are.

        By default these are the model, the files and folders that options name, and the code of a
        kind of another package.

        Args:
            weights: What names the model; None if its file or folder is hashed elsewhere.
            options: Options, whose names are in `options()`.
            cache: As in `valora_data.hashing.hash_files`.

        Raises:
            OSError: A file cannot be read.
        """
        found = {"code": code_hash(type(self).__module__)}
        if weights is not None:
            found["weights"] = place_hash(weights, cache)
        for name, value in options.items():
            for place, text in enumerate(_texts(value)):
                if Path(text).exists():
                    found[f"{name}.{place}"] = place_hash(text)
        return {name: value for name, value in found.items() if value}

    @abstractmethod
    def load(
        self,
        weights: Path | str,
        task: Task,
        labels: Sequence[str],
        names: Mapping[str, str] | None,
        options: Mapping[str, Any],
        prompt: str,
    ) -> Teacher:
        """Load a trained model.

        Args:
            weights: Its file or folder, or what else names it.
            task: Task of the domain.
            labels: Labels of the domain; empty where answers are text.
            names: Label for each class name of the model, where the two differ.
            options: Options, whose names are in `options()`.
            prompt: Prompt of the domain.

        Raises:
            TeacherError: The model cannot be loaded, or does not fit the task or the labels.
        """

    def train(
        self,
        samples: Sequence[Sample],
        task: Task,
        labels: Sequence[str],
        folder: Path,
        options: Mapping[str, Any],
        on_epoch: OnEpoch | None,
    ) -> dict[str, Any]:
        """Train a model and save it as `folder` / `artefact`.

        Args:
            samples: Labelled training samples.
            task: Task of the domain.
            labels: Labels in the order of the class indices.
            folder: Where to save; created if missing.
            options: Options, whose names are in `options()`.
            on_epoch: Called after each epoch.

        Returns:
            A report, ready for JSON.

        Raises:
            TeacherError: The task is not supported, or there are too few samples.
        """
        raise NotImplementedError


class BatchTeacher(ABC):
    """Base class of teachers that answer batch by batch.

    Args:
        task: Task that the teacher answers.
        labels: Labels in the order of the class indices; empty where answers are text.
        batch: Samples per batch.
    """

    def __init__(self, task: Task, labels: Sequence[str], batch: int = BATCH) -> None:
        self._task = task
        self._labels = tuple(labels)
        self._batch = batch

    @property
    def task(self) -> Task:
        """Task that the teacher answers."""
        return self._task

    @property
    def labels(self) -> tuple[str, ...]:
        """Labels in the order of the class indices; empty where answers are text."""
        return self._labels

    def answer(self, samples: Sequence[Sample], on_batch: OnBatch | None = None) -> list[Answer]:
        """Answer for samples, one answer per sample in order.

        Args:
            samples: The samples, with images of any size, and prompts where the task has them.
            on_batch: Called after each batch.
        """
        answers: list[Answer] = []
        for start in range(0, len(samples), self._batch):
            answers += self._answer_batch(samples[start : start + self._batch])
            if on_batch is not None:
                on_batch(len(answers), len(samples))
        return answers

    @abstractmethod
    def _answer_batch(self, samples: Sequence[Sample]) -> list[Answer]:
        """Answer for at most `batch` samples, one answer per sample in order."""


def check_numbers(options: Mapping[str, Any], settings: type[Any]) -> None:
    """Check options that are numbers against the types of a dataclass.

    Args:
        options: Values by name.
        settings: A dataclass whose fields are `int` or `float` and not negative.

    Raises:
        TeacherError: A value is no such number.
    """
    for item in fields(settings):
        value = options.get(item.name, item.default)
        whole = str(item.type) == "int"
        kinds = (int,) if whole else (int, float)
        if isinstance(value, bool) or not isinstance(value, kinds) or not 0 <= value < math.inf:
            what = "a whole number" if whole else "a number"
            raise TeacherError(
                f"teacher.options.{item.name}={value!r} is not possible: set it to {what} of at "
                "least 0"
            )


def _texts(value: Any) -> list[str]:
    """Strings in an option that may be paths."""
    if isinstance(value, str):
        return [value] if 0 < len(value) < PATH_LENGTH and "\0" not in value else []
    if isinstance(value, Mapping):
        value = value.values()
    if isinstance(value, Iterable):
        return [text for item in value for text in _texts(item)]
    return []


def map_classes(
    who: str,
    classes: Mapping[int, str],
    labels: Sequence[str] | None,
    names: Mapping[str, str] | None = None,
) -> dict[int, str]:
    """Match a domain's labels to a model's classes, ignoring case and underscores.

    Args:
        who: The model's name, for error messages.
        classes: Name of each class index.
        labels: Labels of the domain; None for the model's own classes.
        names: Label for a class name, where the two differ; several classes may have one label.

    Returns:
        The label of each class index that has one; other classes are left out.

    Raises:
        TeacherError: No class matches a label, or `names` contains an unknown class.
    """
    names = dict(names or {})
    strange = [name for name in names if name not in classes.values()]
    known = ", ".join(list(classes.values())[:10]) + (", …" if len(classes) > 10 else "")
    if strange:
        raise TeacherError(
            f"{who} has no class {strange[0]!r}, only {known}: correct teacher.options.names"
        )
    label_of = {index: names.get(name, name) for index, name in classes.items()}
    if labels is None:
        return label_of
    plain = {_plain(label): label for label in labels}
    mapped = {
        index: label if label in labels else plain[_plain(label)]
        for index, label in label_of.items()
        if label in labels or _plain(label) in plain
    }
    missing = [label for label in labels if label not in mapped.values()]
    if missing:
        raise TeacherError(
            f"{who} has no class {', '.join(map(repr, missing))}, only {known}: map one of its "
            "classes to it in teacher.options.names"
        )
    return mapped


def _plain(name: str) -> str:
    return name.replace("_", " ").strip().lower()


def choice_answer(task: Task, labels: Sequence[str], soft: Sequence[float]) -> Answer:
    """The answer of a teacher that scores each label.

    Args:
        task: Task of the domain, which determines the field of the answer.
        labels: The labels.
        soft: A score for each label; scaled to probabilities.
    """
    total = sum(soft)
    shares = tuple(share / total for share in soft) if total > 0 else ()
    best = labels[max(range(len(labels)), key=lambda i: soft[i])]
    return with_choice(task, best, shares)


def with_choice(task: Task, choice: str, soft: tuple[float, ...] = ()) -> Answer:
    """An answer with a chosen label in the field that the task uses."""
    return Answer.chosen(task, choice, soft)


def check_answers(who: str, task: Task, answers: Sequence[Answer]) -> None:
    """Check that a teacher answered at least one sample.

    Raises:
        TeacherError: All answers are empty.
    """
    if not any(a.boxes or a.choice is not None or a.captions for a in answers):
        what = "finds nothing" if task.spec.answer == "boxes" else "answers nothing"
        raise TeacherError(
            f"{who} {what} on {plural(len(answers), 'sample')}: check that it fits the domain, "
            "or lower its "
            "threshold"
        )
