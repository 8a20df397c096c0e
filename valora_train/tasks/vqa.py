"""Visual question answering, by VQA score: with labels a head chooses, without the model writes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from valora_data.schema import Answer
from valora_data.tasks import VQA
from valora_train.metrics.measures import Scores, vqa
from valora_train.tasks.base import DomainTask
from valora_train.tasks.choice import ChoiceTask
from valora_train.tasks.language import LanguageTask

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from valora_data.schema import Domain, Sample
    from valora_train.model.lmm import Lmm
    from valora_train.model.prompts import Size
    from valora_train.settings import HeadSettings


class VqaTask(DomainTask):
    """Answers questions about images."""

    spec = VQA

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
        """Build the task of a domain, with a head where it has labels."""
        chosen = VqaChoiceTask if domain.labels else VqaTextTask
        return chosen(domain, settings, video)

    @classmethod
    def measure(cls, predicted: Sequence[Answer], truth: Sequence[Answer]) -> Scores:
        """VQA score."""
        return vqa(predicted, truth)


class VqaChoiceTask(VqaTask, ChoiceTask):
    """Answers questions with one of the domain's labels."""

    @property
    def kind(self) -> str:
        """Kind of the domain's head."""
        return "yes_no" if set(self.domain.labels) == {"yes", "no"} else "classification"


class VqaTextTask(VqaTask, LanguageTask):
    """Answers questions in words."""

    def target_text(self, sample: Sample, seen: Size) -> str | None:
        """The commonest answer of the annotators."""
        return sample.answer.choice

    def parse(self, text: str, sample: Sample, seen: Size) -> Answer:
        """The text as the answer."""
        return Answer(answers=(text,))
