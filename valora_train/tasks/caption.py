"""Image captioning, by CIDEr."""

from __future__ import annotations

from typing import TYPE_CHECKING

from valora_data.schema import Answer
from valora_data.tasks import CAPTION
from valora_train.metrics.measures import Scores, cider
from valora_train.tasks.language import LanguageTask

if TYPE_CHECKING:
    from collections.abc import Sequence

    from valora_data.schema import Sample
    from valora_train.model.prompts import Size


class CaptionTask(LanguageTask):
    """Describes images."""

    spec = CAPTION

    @classmethod
    def measure(cls, predicted: Sequence[Answer], truth: Sequence[Answer]) -> Scores:
        """CIDEr-D."""
        return cider([one.captions for one in predicted], [other.captions for other in truth])

    def target_text(self, sample: Sample, seen: Size) -> str | None:
        """The first reference caption."""
        return next(iter(sample.answer.captions), None)

    def parse(self, text: str, sample: Sample, seen: Size) -> Answer:
        """The text as a caption."""
        return Answer(captions=(text,))
