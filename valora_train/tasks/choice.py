"""Tasks that choose one of a domain's labels; a label head answers in one pass."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from valora_data.contract.label_head import LabelHead, confidences
from valora_data.contract.results import LabelResult
from valora_data.errors import DataError
from valora_data.schema import Answer
from valora_data.wording import plural
from valora_train.metrics.measures import calibration_error
from valora_train.metrics.per_class import choice_report
from valora_train.tasks.base import Evaluation, HeadTask, Prediction
from valora_train.tasks.label_head import POOLINGS, ChoiceTargets, LabelHeadModule

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor, nn

    from valora_data.contract.head import Head
    from valora_data.schema import Sample
    from valora_train.model.lmm import Lmm
    from valora_train.model.prompts import Encoded, HeadInputs


class ChoiceTask(HeadTask):
    """Chooses one of a domain's labels.

    Attributes:
        head_kind: Kind of the head, a name in `contract.heads.HEAD_KINDS`.
    """

    result = LabelResult
    head_kind: ClassVar[str]

    @property
    def kind(self) -> str:
        """Kind of the domain's head."""
        return self.head_kind

    def targets(self, samples: Sequence[Sample], encoded: Sequence[Encoded]) -> ChoiceTargets:
        """The labels, and the teacher's probabilities."""
        labels = self.domain.labels
        soft = torch.zeros(len(samples), len(labels))
        indices = []
        for row, sample in enumerate(samples):
            choice = sample.answer.choice
            if choice not in labels:
                raise DataError(
                    f"sample {sample.id} of domain {self.domain.name} is answered by {choice!r}, "
                    f"which is none of its labels ({', '.join(labels)}): add it or leave the "
                    "sample out"
                )
            indices.append(labels.index(choice))
            if sample.answer.soft:
                soft[row] = torch.tensor(sample.answer.soft)
        if len(set(indices)) == 1:
            raise DataError(
                f"{plural(len(samples), 'training sample')} of domain {self.domain.name}, all "
                f"{labels[indices[0]]!r}, so that there is nothing to tell apart: add samples of "
                "other labels, or check the teacher"
            )
        return ChoiceTargets(torch.tensor(indices), soft)

    def new_head(self, lmm: Lmm, first: Encoded, seed: int) -> LabelHeadModule:
        """A head with initial weights for every pooling that is to be tried."""
        wanted = self.settings.pooling
        poolings = POOLINGS if wanted == "auto" else (wanted,)
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return LabelHeadModule(lmm.width, self.domain.labels, self.kind, poolings).to(
                lmm.device
            )

    def head_loss(
        self, head: LabelHeadModule, inputs: HeadInputs, targets: ChoiceTargets
    ) -> Tensor:
        """Loss of hard and soft labels, see `distillation_loss`."""
        return head.loss(self.head_outputs(head, inputs), targets, self.settings)

    def stored_head(self, head: LabelHeadModule) -> LabelHead:
        """The head with the chosen pooling."""
        return head.stored()

    def load_head(self, head: Head) -> nn.Module:
        """The module of a head from a bundle."""
        return LabelHeadModule.of(head) if isinstance(head, LabelHead) else super().load_head(head)

    def calibrate(self, head: LabelHeadModule, raw: Tensor, samples: Sequence[Sample]) -> None:
        """Choose the pooling, then fit the temperature.

        Args:
            head: The head.
            raw: (n, poolings, labels) float32.
            samples: The validation samples.
        """
        labels = {label: index for index, label in enumerate(self.domain.labels)}
        truth = torch.tensor([labels.get(sample.answer.choice or "", -1) for sample in samples])
        head.choose_pooling(raw, truth)
        head.calibrate(raw[:, int(head.chosen)], truth)

    def predictions(
        self, head: LabelHeadModule, raw: Tensor, samples: Sequence[Sample]
    ) -> list[Prediction]:
        """The most probable label, with a probability for each."""
        shares = confidences(raw[:, int(head.chosen)], head.temperature.cpu())
        return [Prediction(self._answer(row)) for row in shares.tolist()]

    def _answer(self, shares: Sequence[float]) -> Answer:
        label = self.domain.labels[max(range(len(shares)), key=shares.__getitem__)]
        return Answer.chosen(self.domain.task, label, tuple(shares))

    def evaluate(
        self, head: LabelHeadModule, predictions: list[Prediction], samples: Sequence[Sample]
    ) -> Evaluation:
        """The task's metric, the calibration error of the confidences, metrics of each label."""
        found = super().evaluate(head, predictions, samples)
        truth = [sample.answer for sample in samples]
        ece = calibration_error([one.answer for one in predictions], truth)
        choices = [one.answer.choice for one in predictions]
        classes = choice_report(choices, [one.choice for one in truth], self.domain.labels)
        more = {} if ece is None else {"ece": ece}
        return replace(found, details=found.details | more, classes=classes)

    def golden(self, prediction: Prediction, threshold: float | None) -> dict[str, Any]:
        """The label and its confidence."""
        answer = prediction.answer
        shares = dict(zip(self.domain.labels, answer.soft, strict=True))
        label = answer.choice or ""
        return LabelResult(kind=self.kind, label=label, confidences=shares).golden()

    def metadata(self, head: LabelHeadModule) -> dict[str, Any]:
        """The pooling of the head."""
        return {"pooling": head.pooling}
