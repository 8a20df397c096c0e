"""The task types by name, and how the task of a domain is built."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from valora_data.errors import DataError
from valora_data.registry import Registry
from valora_data.schema import Domain
from valora_data.tasks import GROUP
from valora_train.model.lmm import Lmm
from valora_train.settings import HeadSettings
from valora_train.tasks.base import DomainTask

TASK_TYPES: Registry[type[DomainTask]] = Registry(
    GROUP,
    "task type",
    {
        "classification": "valora_train.tasks.classification:ClassificationTask",
        "detection": "valora_train.tasks.detection:DetectionTask",
        "video": "valora_train.tasks.classification:VideoTask",
        "vqa": "valora_train.tasks.language:VqaTask",
        "caption": "valora_train.tasks.language:CaptionTask",
        "grounding": "valora_train.tasks.language:GroundingTask",
        "counting": "valora_train.tasks.classification:CountingTask",
        "context": "valora_train.tasks.context:ContextTask",
    },
    DataError,
)


def make_task(domain: Domain, settings: HeadSettings, lmm: Lmm, **more: Any) -> DomainTask:
    """Build the task of a domain for a model; the arguments are those of `DomainTask`."""
    task_type = TASK_TYPES[domain.task]
    if task_type.spec.answer == "boxes" and lmm.crops:
        raise DataError(
            f"the image processor of the base model cuts off the borders of images, which belies "
            f"the boxes of domain {domain.name}: save the processor with do_center_crop=false and "
            "a size of height and width"
        )
    return task_type(domain, settings, lmm, **more)


def load_head(task: DomainTask, file: Path | None, lmm: Lmm) -> nn.Module | None:
    """The head of a domain from a bundle, on the model's device; None without a file."""
    return None if file is None else task.read_head(file, lmm.width).to(lmm.device)
