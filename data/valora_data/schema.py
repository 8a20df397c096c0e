"""Domains, samples, answers and boxes: the types that all stages share."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from math import isclose
from typing import Any, ClassVar

from PIL.Image import Image

from valora_data.errors import DataError
from valora_data.tasks import BUILTIN, TaskSpec, task_names, task_spec


class Task(str):
    """Name of a task type, one object for each; others than `task_names` raise a `DataError`."""

    CLASSIFICATION: ClassVar[Task]
    DETECTION: ClassVar[Task]
    VIDEO: ClassVar[Task]
    VQA: ClassVar[Task]
    CAPTION: ClassVar[Task]
    GROUNDING: ClassVar[Task]
    COUNTING: ClassVar[Task]
    CONTEXT: ClassVar[Task]
    _known: ClassVar[dict[str, Task]] = {}

    def __new__(cls, name: str) -> Task:
        """Return the one object of a name."""
        if name not in cls._known:
            task_spec(name)
            cls._known[name] = super().__new__(cls, name)
        return cls._known[name]

    @property
    def spec(self) -> TaskSpec:
        """Declaration of the task type."""
        return task_spec(self)

    @classmethod
    def all(cls) -> tuple[Task, ...]:
        """Every type: the built-in ones, then those of other packages."""
        return tuple(cls(name) for name in task_names())

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        """How pydantic, which reads the settings, makes one of a string."""
        from pydantic_core import core_schema

        def checked(name: str) -> Task:
            try:
                return cls(name)
            except DataError as error:
                raise ValueError(str(error)) from error

        return core_schema.no_info_after_validator_function(checked, core_schema.str_schema())


for _name in BUILTIN:
    setattr(Task, _name.upper(), Task(_name))


class Split(StrEnum):
    """Role of a sample."""

    TRAIN = "train"  # teachers are trained on it
    UNLABELLED = "unlabelled"  # the LMM is, labelled by a teacher
    VAL = "val"  # decisions are made on it
    TEST = "test"  # the accuracy that a bundle promises is measured on it, once


@dataclass(frozen=True, slots=True)
class Box:
    """An axis-aligned box in pixels of its image: x to the right, y down, x1 and y1 exclusive."""

    x0: float
    y0: float
    x1: float  # greater than `x0`
    y1: float  # greater than `y0`
    label: str  # name of the class, one of the domain's labels; for grounding the phrase
    confidence: float = 1.0  # 1 for the truth, otherwise the teacher's or the model's

    @property
    def xyxy(self) -> tuple[float, float, float, float]:
        """The four edges (x0, y0, x1, y1) in pixels."""
        return (self.x0, self.y0, self.x1, self.y1)

    @property
    def area(self) -> float:
        """Area in square pixels."""
        return (self.x1 - self.x0) * (self.y1 - self.y0)

    def iou(self, other: Box) -> float:
        """The area shared with another box, as a share of what both cover."""
        width = min(self.x1, other.x1) - max(self.x0, other.x0)
        height = min(self.y1, other.y1) - max(self.y0, other.y0)
        shared = max(width, 0) * max(height, 0)
        return shared / (self.area + other.area - shared)


@dataclass(frozen=True, slots=True)
class Answer:
    """The true or predicted answer for one sample; each task fills its own fields."""

    boxes: tuple[Box, ...] = ()  # objects (detection), or what a phrase refers to (grounding)
    label: str | None = None  # one of the domain's labels (classification, video)
    soft: tuple[float, ...] = ()  # a probability for each of the domain's labels, or empty
    answers: tuple[str, ...] = ()  # answers of all annotators, repeated ones included (VQA)
    captions: tuple[str, ...] = ()  # reference captions
    count: int | None = None  # number of objects (counting)

    def __post_init__(self) -> None:
        if self.soft and (min(self.soft) < 0 or not isclose(sum(self.soft), 1.0, abs_tol=1e-3)):
            text = f"got a sum of {sum(self.soft):g} and a least one of {min(self.soft):g}"
            raise DataError(f"soft labels must add up to 1, {text}: apply a softmax")
        if self.count is not None and not 0 <= self.count < 2**31:  # what shards hold
            raise DataError(f"a count must lie in [0, 2³¹), got {self.count}: fix the data set")

    @classmethod
    def chosen(cls, task: Task, choice: str, soft: tuple[float, ...] = ()) -> Answer:
        """The answer of a model that chooses one of the labels, in the field of the task type."""
        if task.spec.answer == "count":
            return cls(count=int(choice), soft=soft)
        if task.spec.answer == "answers":
            return cls(answers=(choice,), soft=soft)
        return cls(label=choice, soft=soft)

    @property
    def choice(self) -> str | None:
        """The answer as one of a closed set: label, count as digits, or commonest answer."""
        if self.label is not None:
            return self.label
        if self.count is not None:
            return str(self.count)
        return Counter(self.answers).most_common(1)[0][0] if self.answers else None


@dataclass(frozen=True, slots=True)
class Document:
    """What a domain of task `context` is about: a text, or the images of an album in order."""

    text: str
    images: tuple[Image, ...] = ()
    measured_by: str = ""  # in words, which questions measure the domain


@dataclass(frozen=True, slots=True)
class Sample:
    """An image, several ones or the frames of a video, with their answer; or a question alone."""

    id: str  # unique and stable within the domain and split, e.g. ``person/val/00012``
    image: Image  # RGB image; the first one if there are several; `no_image()` if there is none
    answer: Answer  # the true answer, or a teacher's
    prompt: str | None = None  # its own question or phrase; None to use the domain's prompt
    rest: tuple[Image, ...] = ()  # the images or frames after the first, in order
    document: Document | None = None  # that it asks about

    @property
    def images(self) -> tuple[Image, ...]:
        """All images or frames in order; none for a question alone."""
        return () if self.image is no_image() else (self.image, *self.rest)


@cache
def no_image() -> Image:
    """Return what stands for the image of a sample that has none: a white pixel."""
    from PIL import Image

    return Image.new("RGB", (1, 1), "white")


@dataclass(frozen=True, slots=True)
class Domain:
    """One unit of knowledge that an application asks for (VaLoRA §4.2)."""

    name: str  # identifier, e.g. ``license_plate``; used in file, adapter and API names
    task: Task
    labels: tuple[str, ...]  # in the order of class indices; empty where answers are language
    prompt: str  # a sample's own prompt replaces it, or ``{}`` in it, as in ``locate {}``
    required: float  # required accuracy on the task's metric, in (0, 1] (CIDEr: (0, 10])

    def __post_init__(self) -> None:
        name, labels, spec, required = self.name, self.labels, self.task.spec, self.required
        domain, wrong = f"domain {name}", ""
        if not name.isidentifier():
            domain, wrong = f"domain name {name!r}", "must be letters, digits and underscores"
        elif len(set(labels)) != len(labels) or (spec.labels == "required" and not labels):
            wrong = f"needs a list of distinct labels, got {labels}"
        elif spec.labels == "none" and labels:
            wrong = "does not choose from labels: leave its labels empty"
        elif spec.choice and len(labels) == 1:
            wrong = f"has one class, {labels[0]!r}, so there is nothing to choose: add a label"
        elif spec.answer == "count" and (words := [one for one in labels if not one.isdecimal()]):
            wrong = f"counts, so that its labels must be digits, got {words[0]!r}"
        elif not 0.0 < required <= spec.largest:
            domain = f"required accuracy of {domain}"
            wrong = f"must lie in (0, {spec.largest:g}], got {required}"
            if spec.largest == 1.0 < required <= 100.0:
                wrong += f": {required:g} % is {required / 100:g}"
        if wrong:
            raise DataError(f"{domain} {wrong}")

    @property
    def metric(self) -> str:
        """Name of the task's standard metric."""
        return self.task.spec.metric

    def question(self, sample: Sample) -> str:
        """The prompt for a sample, see `question_of`."""
        return question_of(self.prompt, sample)


def question_of(prompt: str, sample: Sample) -> str:
    """The prompt for a sample of a domain: its own prompt, inserted at the domain's ``{}``."""
    if sample.prompt is None:
        return prompt
    return prompt.replace("{}", sample.prompt) if "{}" in prompt else sample.prompt
