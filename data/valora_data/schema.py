"""What a domain asks for and what a sample answers: the types that every stage shares."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from valora_data.errors import DataError

if TYPE_CHECKING:
    from PIL.Image import Image


class Task(StrEnum):
    """The task types of VaLoRA §6.1; each has one standard metric (`METRICS`)."""

    DETECTION = "detection"


METRICS = {Task.DETECTION: "f1@0.5"}


class Split(StrEnum):
    """Roles of samples: teachers learn from `train`, the LMM from `unlabelled` (through a teacher).

    Decisions are taken on `val`; what a bundle promises is measured once on `test`.
    """

    TRAIN = "train"
    UNLABELLED = "unlabelled"
    VAL = "val"
    TEST = "test"


@dataclass(frozen=True, slots=True)
class Box:
    """An axis-aligned box in pixels of its image: x to the right, y down, x1 and y1 exclusive.

    Attributes:
        x0: Left edge.
        y0: Top edge.
        x1: Right edge, greater than `x0`.
        y1: Bottom edge, greater than `y0`.
        label: Name of the class, one of the domain's labels.
        confidence: 1 for a label made by people, the teacher's score otherwise.
    """

    x0: float
    y0: float
    x1: float
    y1: float
    label: str
    confidence: float = 1.0

    @property
    def xyxy(self) -> tuple[float, float, float, float]:
        """The four edges (x0, y0, x1, y1) in pixels."""
        return (self.x0, self.y0, self.x1, self.y1)

    @property
    def area(self) -> float:
        """Area in square pixels."""
        return (self.x1 - self.x0) * (self.y1 - self.y0)


@dataclass(frozen=True, slots=True)
class Answer:
    """What is known about one sample; a task fills the fields that it needs."""

    boxes: tuple[Box, ...] = ()


@dataclass(frozen=True, slots=True)
class Sample:
    """One image with what is known about it.

    Attributes:
        id: Unique and stable within the domain and split, e.g. ``person/val/00012``.
        image: RGB image.
        answer: The truth, or what a teacher says.
    """

    id: str
    image: Image
    answer: Answer


@dataclass(frozen=True, slots=True)
class Domain:
    """One unit of knowledge that an application asks for (VaLoRA §4.2).

    Attributes:
        name: Identifier, e.g. ``license_plate``; file, adapter and API names are made of it.
        task: Its task type.
        labels: The label set, in the order of class indices.
        prompt: What the LMM is asked, without the image.
        required: Accuracy to keep, in (0, 1]; of the truth, or a share of the teacher's accuracy
            if `relative`.
        relative: Whether `required` is a share of what the teacher reaches.
    """

    name: str
    task: Task
    labels: tuple[str, ...]
    prompt: str
    required: float
    relative: bool = False

    def __post_init__(self) -> None:
        if not self.name.isidentifier():
            raise DataError(
                f"domain name {self.name!r} must be letters, digits and underscores: rename it"
            )
        if not self.labels or len(set(self.labels)) != len(self.labels):
            raise DataError(
                f"domain {self.name} needs a list of distinct labels, got {self.labels}"
            )
        if not 0.0 < self.required <= 1.0:
            raise DataError(
                f"required accuracy of domain {self.name} must lie in (0, 1], got {self.required}"
            )

    @property
    def metric(self) -> str:
        """Name of the task's standard metric."""
        return METRICS[self.task]
