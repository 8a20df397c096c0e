"""Counting: the number of objects as one of a domain's labels, the share of exact counts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from valora_data.tasks import COUNTING
from valora_train.metrics.measures import Scores, exact_counts
from valora_train.tasks.choice import ChoiceTask

if TYPE_CHECKING:
    from collections.abc import Sequence

    from valora_data.schema import Answer


class CountingTask(ChoiceTask):
    """Counts objects."""

    spec = COUNTING
    head_kind = "counting"

    @classmethod
    def measure(cls, predicted: Sequence[Answer], truth: Sequence[Answer]) -> Scores:
        """Share of exact counts."""
        return exact_counts(predicted, truth)
