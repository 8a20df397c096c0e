"""Referring expressions: the box that a phrase refers to, as text; accuracy at IoU 0.5."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from valora_data.schema import Answer
from valora_data.tasks import GROUNDING
from valora_train.metrics.measures import Scores, box_accuracy
from valora_train.tasks.coordinates import read_boxes, write_box
from valora_train.tasks.language import LanguageTask

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from valora_data.schema import Domain, Sample
    from valora_train.model.lmm import Lmm
    from valora_train.model.prompts import Size
    from valora_train.settings import HeadSettings
    from valora_train.tasks.base import DomainTask
    from valora_train.tasks.coordinates import Convention


class GroundingTask(LanguageTask):
    """Finds what a phrase refers to.

    Args:
        domain: The domain.
        settings: Settings of answers.
        video: Whether samples are videos.
        coordinates: Convention in which the base model writes boxes.
        step: Coordinates are rounded to multiples of it.
    """

    spec = GROUNDING

    def __init__(
        self,
        domain: Domain,
        settings: HeadSettings,
        video: bool = False,
        coordinates: Convention = "grid1000",
        step: int = 1,
    ) -> None:
        super().__init__(domain, settings, video)
        self._coordinates, self._step = coordinates, step

    @classmethod
    def create(
        cls,
        domain: Domain,
        settings: HeadSettings,
        lmm: Lmm,
        *,
        video: bool,
        first_head: Tensor | None,
    ) -> DomainTask:
        """Build the task of a domain with the model's convention for boxes."""
        return cls(domain, settings, video, lmm.coordinates, lmm.coordinate_step)

    @classmethod
    def measure(cls, predicted: Sequence[Answer], truth: Sequence[Answer]) -> Scores:
        """Share of first boxes that overlap a true one by IoU 0.5."""
        return box_accuracy(predicted, truth)

    def target_text(self, sample: Sample, seen: Size) -> str | None:
        """The true boxes as text."""
        size = sample.image.size
        return "".join(
            write_box(box, size, seen, self._coordinates, self._step) for box in sample.answer.boxes
        )

    def parse(self, text: str, sample: Sample, seen: Size) -> Answer:
        """The boxes in the text."""
        return Answer(boxes=tuple(read_boxes(text, sample.image.size, seen, self._coordinates)))

    def metadata(self, head: None) -> dict[str, Any]:
        """Length of answers and the convention for boxes."""
        return super().metadata(head) | {"coordinates": self._coordinates}
