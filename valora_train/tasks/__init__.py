"""Tasks of domains: one class for boxes, one for closed sets of answers, one for language."""

from __future__ import annotations

from typing import TYPE_CHECKING

from valora_data.contract.heads import read_head
from valora_data.errors import DataError
from valora_data.schema import Task
from valora_train.tasks.base import DomainTask, Evaluation, Said
from valora_train.tasks.choice import ChoiceTask
from valora_train.tasks.detection import DetectionTask
from valora_train.tasks.language import LanguageTask

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor, nn

    from valora_data.schema import Domain
    from valora_train.model.lmm import Lmm
    from valora_train.settings import HeadSettings

__all__ = ["DomainTask", "Evaluation", "Said", "load_head", "make_task"]


def make_task(
    domain: Domain,
    settings: HeadSettings,
    lmm: Lmm,
    *,
    video: bool = False,
    first_head: Tensor | None = None,
) -> DomainTask:
    """The task of a domain on a model.

    Args:
        domain: The domain.
        settings: Of heads and answers.
        lmm: The model.
        video: Whether samples are videos and not images.
        first_head: A generic detection head that the base model ships, see `DetectionTask`.

    Raises:
        DataError: If boxes are asked of a model whose image processor cuts images.
    """
    if domain.task in (Task.DETECTION, Task.GROUNDING) and lmm.crops:
        raise DataError(
            f"the image processor of the base model cuts off the borders of images, which belies "
            f"the boxes of domain {domain.name}: save the processor with do_center_crop=false and "
            "a size of height and width"
        )
    if domain.task is Task.DETECTION:
        return DetectionTask(domain, settings, first_head)
    if domain.labels:
        return ChoiceTask(domain, settings, video)
    return LanguageTask(domain, settings, video, lmm.coordinates, lmm.coordinate_step)


def load_head(task: DomainTask, file: Path | None, width: int) -> nn.Module | None:
    """The head of a domain from a bundle; None where the model writes its answers.

    Args:
        task: The domain's task.
        file: File of the head in the bundle; None if there is none.
        width: Size of the model's hidden states.

    Raises:
        BundleError: The file is damaged or holds a head that does not fit.
    """
    return None if file is None else task.load_head(read_head(file, width))
