"""Video understanding: one of a domain's labels for the frames of a video, top-1 accuracy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from valora_data.tasks import VIDEO
from valora_train.metrics.measures import Scores, top1
from valora_train.tasks.choice import ChoiceTask

if TYPE_CHECKING:
    from collections.abc import Sequence

    from valora_data.schema import Answer


class VideoTask(ChoiceTask):
    """Classifies videos."""

    spec = VIDEO
    head_kind = "action"
    geometric = True

    @classmethod
    def measure(cls, predicted: Sequence[Answer], truth: Sequence[Answer]) -> Scores:
        """Top-1 accuracy."""
        return top1(predicted, truth)
