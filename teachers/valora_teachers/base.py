"""What a teacher is: a small model that labels the samples of one domain."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import nan
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from valora_data.errors import ValoraError
from valora_data.hashing import code_hash, place_hash
from valora_data.schema import Answer, Box, Sample, Task
from valora_data.wording import plural

OnBatch = Callable[[int, int], None]  # called with the numbers of answered and of all samples
# Called with the number of the epoch from 1, that of all, the mean loss, and further figures.
OnEpoch = Callable[[int, int, float, Mapping[str, float]], None]
Dtype = Literal["float32", "float16", "bfloat16", "float64"]
Count = Annotated[int, Field(ge=1, le=1_000_000_000)]  # what is larger would never end
NotNegative = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
BATCH = 32
CHECKPOINT = "checkpoint"  # file that an interrupted training continues from
LOOK_SAMPLES = 64  # validation samples that suffice for a training's curve
PATH_LENGTH = 4096  # PATH_MAX of Linux


class TeacherError(ValoraError):
    """A teacher is missing, cannot be loaded, or cannot answer for the domain."""


class TeacherOptions(BaseModel):
    """Options of a kind of teacher, `teacher.options`: each field is one, with its default."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


class Teacher(ABC):
    """A small model that answers for one domain; each subclass is a kind of teacher.

    Another package adds one in the entry-point group ``valora.teachers``, in a module that imports
    large libraries only inside of methods. `names` has the label of each class name of the model
    that differs; ``{}`` in `prompt` stands for a sample's own.
    """

    options_type: ClassVar[type[TeacherOptions]] = TeacherOptions  # the options of this kind
    artefact: ClassVar[str | None] = None  # name of a model in its stage; None: used where it is
    trainable: ClassVar[bool] = False  # whether `train` is implemented
    reads_prompt: ClassVar[bool] = True  # whether answers depend on the domain's prompt
    without_effect: ClassVar[frozenset[str]] = frozenset()  # options that answers do not depend on
    license: ClassVar[str | None] = None  # of all models of this kind; None where each has its own
    batch: int = BATCH  # samples that `answer_batch` gets at once

    def __init__(
        self,
        task: Task,
        labels: Sequence[str] = (),
        options: Mapping[str, Any] | None = None,
        names: Mapping[str, str] | None = None,
        prompt: str = "",
    ) -> None:
        self.task, self.labels, self.prompt = task, tuple(labels), prompt
        self.names = dict(names or {})
        self.label_of: dict[int, str] = {}  # of class indices of the model, see `match_classes`
        self.remark = ""  # a sentence on what a loaded model knows that is not kept
        self.options: Any = self.options_type.model_validate(options or {})

    @classmethod
    def inputs(
        cls, weights: str | None, options: Mapping[str, Any], cache: Path | None
    ) -> dict[str, str]:
        """Content hashes of model (if not None), files that options name, and code elsewhere."""
        found = {"code": code_hash(cls.__module__)}
        if weights is not None:
            found["weights"] = place_hash(weights, cache)
        for name, value in options.items():
            for number, text in enumerate(_texts(value)):
                if Path(text).exists():
                    found[f"{name}.{number}"] = place_hash(text)
        return {name: value for name, value in found.items() if value}

    @abstractmethod
    def load(self, weights: Path | str) -> None:
        """Load a model from file, folder or name; a `TeacherError` if it does not fit."""

    @abstractmethod
    def answer_batch(self, samples: Sequence[Sample]) -> list[Answer]:
        """Answer at most `batch` samples: labels with `soft`, boxes in pixels by confidence."""

    def answer(self, samples: Sequence[Sample], on_batch: OnBatch | None = None) -> list[Answer]:
        """Answer for samples with images of any size, one answer per sample in order."""
        answers: list[Answer] = []
        for start in range(0, len(samples), self.batch):
            answers += self.answer_batch(samples[start : start + self.batch])
            if on_batch is not None:
                on_batch(len(answers), len(samples))
        return answers

    def train(
        self, samples: Sequence[Sample], folder: Path, on_epoch: OnEpoch | None = None,
        validation: Sequence[Sample] = (),
    ) -> dict[str, Any]:  # fmt: skip
        """Train on labelled samples, save the model as `folder` / `artefact`, and return a report.

        `folder` may hold a `CHECKPOINT`; `validation` is for a curve alone. A `TeacherError` says
        that task or samples do not fit.
        """
        raise TeacherError("a teacher of this kind is not trained here: name a trained one")

    def check_labelled(
        self, samples: Sequence[Sample], labels_of: Callable[[Sample], list[str | None]]
    ) -> None:
        """Refuse training samples that are too few, or have labels that the domain lacks."""
        if len(samples) < 2:
            raise TeacherError(f"training a teacher needs at least 2 samples, got {len(samples)}")
        for sample in samples:
            for label in labels_of(sample):
                if label not in self.labels:
                    raise TeacherError(
                        f"sample {sample.id} has label {label!r}, which is none of "
                        f"{', '.join(self.labels)}: correct the label or add it"
                    )

    def match_classes(self, who: str, classes: Mapping[int, str]) -> None:
        """Match the domain's labels to the classes of a model, ignoring case and underscores."""

        def plain(name: str) -> str:
            return name.replace("_", " ").strip().lower()

        by_name = {plain(label): label for label in self.labels}
        by_name |= {label: label for label in self.labels}
        own = {index: self.names.get(name, name) for index, name in classes.items()}
        found = {i: by_name.get(name) or by_name.get(plain(name)) for i, name in own.items()}
        self.label_of = {index: label for index, label in found.items() if label}
        strange = [name for name in self.names if name not in classes.values()]
        missing = [label for label in self.labels if label not in found.values()]
        if strange or missing:
            known = ", ".join(list(classes.values())[:10]) + (", …" if len(classes) > 10 else "")
            remedy = "correct" if strange else "map one of its classes to it in"
            raise TeacherError(
                f"{who} has no class {', '.join(map(repr, strange[:1] or missing))}, only {known}: "
                f"{remedy} teacher.options.names"
            )

    def choose(self, scores: Sequence[float]) -> Answer:
        """The answer by scores of the model's classes, which add up if they mean one label."""
        soft = dict.fromkeys(self.labels, 0.0)
        for index, label in self.label_of.items():
            soft[label] += scores[index]
        return self.choice_answer(list(soft.values()))

    def choice_answer(self, soft: Sequence[float]) -> Answer:
        """The answer by a score of each label, scaled to probabilities; none if all are 0."""
        if not any(soft):
            return Answer()
        total = sum(soft) or nan  # of scores that cancel out: no answer may hold NaN
        shares = tuple(share / total for share in soft)
        best = max(range(len(soft)), key=soft.__getitem__)
        return Answer.chosen(self.task, self.labels[best], shares)

    def find_phrases(self, who: str) -> dict[str, str]:
        """What an open-vocabulary detector looks for, to the label that each phrase stands for."""
        if not self.labels:
            raise TeacherError(f"{who} has to be told what to look for: give the domain labels")
        stray = [label for label in self.names.values() if label not in self.labels]
        if stray:
            raise TeacherError(
                f"{who} is mapped to {stray[0]!r}, which is not one of {', '.join(self.labels)}: "
                "correct teacher.options.names"
            )
        plain = [label for label in self.labels if label not in self.names.values()]
        return {label.replace("_", " "): label for label in plain} | self.names


def _texts(value: Any) -> list[str]:
    """Strings in an option that may be paths."""
    if isinstance(value, str):
        return [value] if 0 < len(value) < PATH_LENGTH and "\0" not in value else []
    items = value.values() if isinstance(value, Mapping) else value
    return [text for one in items for text in _texts(one)] if isinstance(items, Iterable) else []


def boxes_inside(
    edges: Iterable[Sequence[float]], labels: Iterable[str | None], scores: Iterable[float],
    size: tuple[int, int],
) -> Answer:  # fmt: skip
    """Boxes cut to an image of (width, height), most confident first, if any area is left."""
    boxes = [
        Box(max(0.0, x0), max(0.0, y0), min(x1, size[0]), min(y1, size[1]), label, score)
        for (x0, y0, x1, y1), label, score in zip(edges, labels, scores, strict=True)
        if label is not None and min(x1, size[0]) > max(0.0, x0) and min(y1, size[1]) > max(0.0, y0)
    ]
    return Answer(tuple(sorted(boxes, key=lambda box: -box.confidence)))


def phrase_of(sample: Sample) -> str:
    """The phrase of a sample of a grounding domain."""
    if not sample.prompt:
        raise TeacherError(f"sample {sample.id} has no phrase to look for: give it one")
    return sample.prompt


def check_answers(who: str, task: Task, answers: Sequence[Answer]) -> None:
    """Refuse a teacher all of whose answers are empty."""
    if not any(a.boxes or a.choice is not None or a.captions for a in answers):
        what = "finds nothing" if task.spec.answer == "boxes" else "answers nothing"
        raise TeacherError(
            f"{who} {what} on {plural(len(answers), 'sample')}: check that it fits the domain, or "
            "lower its threshold"
        )
