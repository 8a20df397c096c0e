"""Task types: what the data side must know of each, and the registry that adds new ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from valora_data.errors import DataError
from valora_data.registry import Registry

if TYPE_CHECKING:
    AnswerField = Literal["label", "boxes", "count", "answers", "captions"]
    """A field of `valora_data.schema.Answer`."""


@dataclass(frozen=True, slots=True)
class TaskSpec:
    """What is declared about a task type.

    Attributes:
        metric: Name of the standard metric.
        answer: The field of `Answer` that holds the truth of a sample.
        labels: Whether domains of this type list the possible answers.
        largest: Largest value of the metric.
        video: Whether samples are videos.
        detects: Whether an answer is any number of boxes of the domain's labels, of which those
            above a confidence threshold count.
        prompted: Whether samples have prompts of their own, so that an image may occur in several.
    """

    metric: str
    answer: AnswerField
    labels: Literal["required", "optional", "none"] = "none"
    largest: float = 1.0
    video: bool = False
    detects: bool = False
    prompted: bool = False

    @property
    def choice(self) -> bool:
        """Whether an answer is one of the domain's labels, where the domain has labels."""
        return self.labels != "none" and self.answer != "boxes"


class TaskType(Protocol):
    """What an entry point in `valora.tasks` names: a `valora_train.tasks.base.DomainTask`."""

    spec: TaskSpec


CLASSIFICATION = TaskSpec("top1", "label", "required")
DETECTION = TaskSpec("f1@0.5", "boxes", "required", detects=True)
VIDEO = TaskSpec("top1", "label", "required", video=True)
VQA = TaskSpec("vqa", "answers", "optional", prompted=True)
CAPTION = TaskSpec("cider", "captions", largest=10.0)
GROUNDING = TaskSpec("acc@iou0.5", "boxes", prompted=True)
COUNTING = TaskSpec("exact", "count", "required")
CONTEXT = TaskSpec("exact_match", "answers", prompted=True)

GROUP = "valora.tasks"
"""Entry-point group of task types; an entry point names a subclass of `DomainTask`."""

_BUILTIN = (
    "classification", "detection", "video", "vqa", "caption", "grounding", "counting", "context",
)  # fmt: skip
_SPECS: Registry[TaskSpec | TaskType] = Registry(
    GROUP,
    "task type",
    {name: f"valora_data.tasks:{name.upper()}" for name in _BUILTIN},
    DataError,
)


def task_names() -> tuple[str, ...]:
    """Names of all task types: the built-in ones, then those of other packages."""
    return (*_BUILTIN, *sorted(set(_SPECS) - set(_BUILTIN)))


def task_spec(name: str) -> TaskSpec:
    """What is declared about a task type.

    Raises:
        DataError: There is no task type of this name; the message lists all.
    """
    found = _SPECS[name]
    return found if isinstance(found, TaskSpec) else found.spec
