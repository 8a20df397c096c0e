"""Task types: what the data side must know of each, and the registry that adds new ones."""

from dataclasses import dataclass
from typing import Literal, Protocol

from valora_data.errors import DataError
from valora_data.registry import Registry


@dataclass(frozen=True, slots=True)
class TaskSpec:
    """What is declared about a task type."""

    metric: str  # name of the standard metric
    answer: Literal["label", "boxes", "count", "answers", "captions"]  # the field of `Answer`
    labels: Literal["required", "optional", "none"] = "none"  # whether domains list the answers
    largest: float = 1.0  # largest value of the metric
    video: bool = False  # whether samples are videos
    detects: bool = False  # whether an answer is any number of boxes of the domain's labels
    prompted: bool = False  # whether samples have prompts, so that an image may occur in several

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

BUILTIN = (
    "classification", "detection", "video", "vqa", "caption", "grounding", "counting", "context",
)  # fmt: skip
GROUP = "valora.tasks"
_SPECS: Registry[TaskSpec | TaskType] = Registry(
    GROUP, "task type", {name: f"valora_data.tasks:{name.upper()}" for name in BUILTIN}, DataError
)


def task_names() -> tuple[str, ...]:
    """Names of all task types: the built-in ones, then those of other packages."""
    return (*BUILTIN, *sorted(set(_SPECS) - set(BUILTIN)))


def task_spec(name: str) -> TaskSpec:
    """What is declared about a task type; a `DataError` if there is none of this name."""
    found = _SPECS[name]
    return found if isinstance(found, TaskSpec) else found.spec
