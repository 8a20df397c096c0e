"""What every teacher looks like: a small model that answers one domain's question about samples."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Protocol

from valora_data.errors import ValoraError
from valora_data.schema import Answer

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from valora_data.schema import Sample, Task

    OnBatch = Callable[[int, int], None]
    """Called with how many samples are answered and how many there are."""

BATCH = 32


class TeacherError(ValoraError):
    """A teacher is missing, cannot be loaded, or does not do what the domain asks for."""


class Teacher(Protocol):
    """A model that knows one domain."""

    @property
    def task(self) -> Task:
        """What it does."""
        ...

    @property
    def labels(self) -> tuple[str, ...]:
        """Labels that it answers with, in the order of class indices; empty for language."""
        ...

    def answer(self, samples: Sequence[Sample], on_batch: OnBatch | None = None) -> list[Answer]:
        """Answer for samples with images of any size, one answer per sample in order.

        Boxes come with confidences, most confident first, in pixels of the image; labels with
        `soft`, a probability for each of `labels`.
        """
        ...


class BatchTeacher(ABC):
    """A teacher that answers batch by batch.

    Args:
        task: What it does.
        labels: Labels that it answers with; empty for language.
        batch: Samples at once.
    """

    def __init__(self, task: Task, labels: Sequence[str], batch: int = BATCH) -> None:
        self._task = task
        self._labels = tuple(labels)
        self._batch = batch

    @property
    def task(self) -> Task:
        """What it does."""
        return self._task

    @property
    def labels(self) -> tuple[str, ...]:
        """Labels that it answers with, in the order of class indices; empty for language."""
        return self._labels

    def answer(self, samples: Sequence[Sample], on_batch: OnBatch | None = None) -> list[Answer]:
        """Answer for samples, one answer per sample in order.

        Args:
            samples: Images of any size, with prompts where the task has such.
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
        """Answer for at most `batch` samples."""


def map_classes(
    who: str,
    classes: Mapping[int, str],
    labels: Sequence[str] | None,
    names: Mapping[str, str] | None = None,
) -> dict[int, str]:
    """Find a domain's labels among a model's classes.

    Args:
        who: The model, for messages.
        classes: Name of each class index.
        labels: Labels that the domain asks for; the model's classes if None.
        names: Label for a class name, where the two differ; several classes may mean one label.

    Returns:
        The label of each class index that means one; other classes are left out. Case and
        underscores make no difference.

    Raises:
        TeacherError: If a label is none of the classes, or `names` names a class that is not there.
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
            f"{who} knows no {', '.join(map(repr, missing))}, only {known}: name the class that "
            "stands for it in teacher.options.names"
        )
    return mapped


def _plain(name: str) -> str:
    return name.replace("_", " ").strip().lower()


def choice_answer(task: Task, labels: Sequence[str], soft: Sequence[float]) -> Answer:
    """The answer of a teacher that chooses one of the labels.

    Args:
        task: Says which field holds the choice.
        labels: The labels.
        soft: A probability for each.
    """
    total = sum(soft)
    shares = tuple(share / total for share in soft) if total > 0 else ()
    best = labels[max(range(len(labels)), key=lambda i: soft[i])]
    return with_choice(task, best, shares)


def with_choice(task: Task, choice: str, soft: tuple[float, ...] = ()) -> Answer:
    """An answer whose `choice` it is, in the field that the task uses."""
    if task == "counting":
        return Answer(count=int(choice), soft=soft)
    if task == "vqa":
        return Answer(answers=(choice,), soft=soft)
    return Answer(label=choice, soft=soft)


def check_answers(who: str, task: Task, answers: Sequence[Answer]) -> None:
    """See to it that a teacher said anything at all.

    Raises:
        TeacherError: If no answer holds anything.
    """
    if not any(a.boxes or a.choice is not None or a.captions for a in answers):
        what = "finds nothing" if task in ("detection", "grounding") else "answers nothing"
        raise TeacherError(
            f"{who} {what} on {len(answers)} samples: check that it fits the domain, or lower its "
            "threshold"
        )
