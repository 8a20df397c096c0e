"""Closed sets of answers: classification, video actions, counting, and questions with few answers.

A linear head gives the answer in one pass.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from valora_data.contract.heads import LabelHead, LabelResult, confidences
from valora_data.errors import DataError
from valora_data.schema import Answer, Task
from valora_train.metrics.measures import measure
from valora_train.model.prompts import Example
from valora_train.tasks.base import MEASURED_AT_ONCE, DomainTask, Evaluation, Said
from valora_train.tasks.linear_head import POOLINGS, ChoiceTargets, LinearHead

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor, nn

    from valora_data.contract.heads import Head
    from valora_data.schema import Sample
    from valora_train.model.lmm import Lmm
    from valora_train.model.prompts import Encoded, HeadInputs, HiddenStates

KINDS = {Task.CLASSIFICATION: "classification", Task.VIDEO: "action", Task.COUNTING: "counting"}


class ChoiceTask(DomainTask):
    """One of a domain's labels."""

    @property
    def kind(self) -> str:
        """The head's kind in docs/bundle.md."""
        if self.domain.task is Task.VQA:
            return "yes_no" if set(self.domain.labels) == {"yes", "no"} else "classification"
        return KINDS[self.domain.task]

    def asked(self, sample: Sample) -> Example:
        """The question, and all images or frames."""
        return Example(self.domain.question(sample), sample.images, self.video)

    def mirrored(self, sample: Sample) -> Sample:
        """All images, left to right; the answer stays."""
        from PIL import ImageOps

        first, *rest = (ImageOps.mirror(image) for image in sample.images)
        return replace(sample, image=first, rest=tuple(rest))

    def targets(self, samples: Sequence[Sample], encoded: Sequence[Encoded]) -> ChoiceTargets:
        """The labels, and the teacher's probabilities."""
        labels = self.domain.labels
        soft = torch.zeros(len(samples), len(labels))
        places = []
        for row, sample in enumerate(samples):
            choice = sample.answer.choice
            if choice not in labels:
                raise DataError(
                    f"sample {sample.id} of domain {self.domain.name} is answered by {choice!r}, "
                    f"which is none of its labels ({', '.join(labels)}): add it or leave the "
                    "sample out"
                )
            places.append(labels.index(choice))
            if sample.answer.soft:
                soft[row] = torch.tensor(sample.answer.soft)
        if len(set(places)) == 1:
            raise DataError(
                f"all {len(samples)} training samples of domain {self.domain.name} are "
                f"{labels[places[0]]!r}, so that there is nothing to tell apart: add samples of "
                "other labels, or check the teacher"
            )
        return ChoiceTargets(torch.tensor(places), soft)

    def new_head(self, lmm: Lmm, first: Encoded, seed: int) -> LinearHead:
        """A fresh head with every pooling that is to be tried."""
        wanted = self.settings.pooling
        poolings = POOLINGS if wanted == "auto" else (wanted,)
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return LinearHead(lmm.width, self.domain.labels, self.kind, poolings).to(lmm.device)

    def loss(
        self, head: LinearHead, states: HiddenStates, targets: ChoiceTargets, lmm: Lmm
    ) -> Tensor:
        """Of hard and soft labels, see `distillation_loss`."""
        return self.probe_loss(head, states.head_inputs(), targets)

    def probe_loss(self, head: LinearHead, read: HeadInputs, targets: ChoiceTargets) -> Tensor:
        """The same of hidden states."""
        return head.loss(head(read), targets, self.settings)

    def stored_head(self, head: LinearHead) -> LabelHead:
        """The head with the pooling that was chosen."""
        return head.stored()

    def load_head(self, head: Head) -> nn.Module:
        """The module of a head from a bundle."""
        return LinearHead.of(head) if isinstance(head, LabelHead) else super().load_head(head)

    def read(self, head: LinearHead, lmm: Lmm, batch: Sequence[Encoded]) -> Tensor:
        """(n, poolings, labels) float32 on the CPU."""
        step = MEASURED_AT_ONCE
        raw = [
            head(lmm.states(batch[at : at + step]).head_inputs()).cpu()
            for at in range(0, len(batch), step)
        ]
        return torch.cat(raw)

    def calibrate(self, head: LinearHead, raw: Tensor, samples: Sequence[Sample]) -> None:
        """The pooling, then the temperature."""
        labels = {label: place for place, label in enumerate(self.domain.labels)}
        truth = torch.tensor([labels.get(sample.answer.choice or "", -1) for sample in samples])
        head.choose(raw, truth)
        head.calibrate(raw[:, int(head.chosen)], truth)

    def said(self, head: LinearHead, raw: Tensor, samples: Sequence[Sample]) -> list[Said]:
        """The likeliest label and a confidence for each."""
        shares = confidences(raw[:, int(head.chosen)], head.temperature.cpu())
        return [Said(self._answer(row)) for row in shares.tolist()]

    def _answer(self, shares: Sequence[float]) -> Answer:
        label = self.domain.labels[max(range(len(shares)), key=shares.__getitem__)]
        soft = tuple(shares)
        if self.domain.task is Task.COUNTING:
            return Answer(count=int(label), soft=soft)
        if self.domain.task is Task.VQA:
            return Answer(answers=(label,), soft=soft)
        return Answer(label=label, soft=soft)

    def evaluation(
        self,
        head: LinearHead,
        said: list[Said],
        samples: Sequence[Sample],
    ) -> Evaluation:
        """The task's metric, and the calibration error of the confidences."""
        truth = [sample.answer for sample in samples]
        scores = measure(self.domain.task, [one.answer for one in said], truth)
        details = scores.details | {"ece": self._calibration_error(said, truth)}
        return Evaluation(scores.mean, scores.interval(), said, details)

    def _calibration_error(self, said: Sequence[Said], truth: Sequence[Answer]) -> float:
        from torchmetrics.functional.classification import binary_calibration_error

        sure = torch.tensor([max(one.answer.soft) for one in said])
        hit = [one.answer.choice == other.choice for one, other in zip(said, truth, strict=True)]
        return float(binary_calibration_error(sure, torch.tensor(hit, dtype=torch.int64), 15))

    def golden(self, said: Said, threshold: float | None) -> dict[str, Any]:
        """The label and its confidence."""
        answer = said.answer
        shares = dict(zip(self.domain.labels, answer.soft, strict=True))
        label = answer.choice or ""
        return LabelResult(kind=self.kind, label=label, confidences=shares).golden()

    def same(self, found: Any, expected: Any, threshold: float | None) -> bool:
        """Whether the labels are equal and the confidences close."""
        return LabelResult.matches(found, expected, 0.0)

    def facts(self, head: LinearHead) -> dict[str, Any]:
        """What the head looks at."""
        return {"pooling": head.pooling}
