"""Visual question answering, by VQA score: with labels a head chooses, without the model writes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from valora_data.schema import Answer, Domain
from valora_data.tasks import VQA
from valora_train.metrics.measures import Scores, vqa
from valora_train.tasks.base import DomainTask
from valora_train.tasks.classification import ChoiceTask
from valora_train.tasks.language import LanguageTask


class VqaTask(DomainTask):
    """Answers questions about images; its subclass follows from the labels."""

    spec = VQA

    def __new__(cls, domain: Domain, *_: Any, **__: Any) -> VqaTask:
        """Create the task of a domain, with a head where it has labels."""
        return super().__new__(VqaChoiceTask if domain.labels else VqaTextTask)

    @classmethod
    def measure(cls, predicted: Sequence[Answer], truth: Sequence[Answer]) -> Scores:
        """VQA score."""
        return vqa(predicted, truth)


class VqaChoiceTask(VqaTask, ChoiceTask):
    """Answers questions with one of the domain's labels."""

    def __init__(self, domain: Domain, *given: Any, **options: Any) -> None:
        super().__init__(domain, *given, **options)
        self.kind = "yes_no" if set(domain.labels) == {"yes", "no"} else "classification"


class VqaTextTask(VqaTask, LanguageTask):
    """Answers questions in words; it learns the commonest answer of the annotators."""
