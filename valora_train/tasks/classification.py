"""Tasks that choose a label: a head on one of four poolings, in one pass (VaLoRA §4.2.2)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from valora_data.contract.label_head import LabelHead, Pooling, confidences, pool, pooled_width
from valora_data.contract.results import LabelResult
from valora_data.errors import DataError
from valora_data.schema import Answer, Sample
from valora_data.tasks import CLASSIFICATION, COUNTING, VIDEO
from valora_data.wording import plural
from valora_train.metrics.measures import Scores, calibration_error, exact_counts, top1
from valora_train.metrics.per_class import choice_report
from valora_train.model.lmm import Lmm
from valora_train.model.prompts import Encoded, HeadInputs, Rows
from valora_train.settings import HeadSettings
from valora_train.tasks.base import Evaluation, HeadTask, Prediction

POOLINGS = tuple(str(pooling) for pooling in Pooling)
TEMPERATURES = (0.05, 20.0)  # bounds of the calibrated temperature


class LabelHeadModule(nn.Module):
    """Computes the logits of labels, in their order, for each of some `POOLINGS`."""

    chosen: Tensor  # (), index of the pooling in use
    temperature: Tensor  # (1,), divisor of the logits

    def __init__(
        self, width: int, labels: Sequence[str], kind: str, poolings: Sequence[str] = POOLINGS
    ) -> None:
        super().__init__()
        self.labels, self.kind, self.poolings = tuple(labels), kind, tuple(poolings)
        layers = [nn.Linear(pooled_width(name, width), len(labels)) for name in self.poolings]
        self.linears = nn.ModuleList(layers)
        for layer in layers:
            nn.init.normal_(layer.weight, std=0.01)
            nn.init.zeros_(layer.bias)
        self.query = nn.Parameter(torch.zeros(width))
        self.register_buffer("chosen", torch.tensor(0))
        self.register_buffer("temperature", torch.ones(1))

    @property
    def pooling(self) -> str:
        """Name of the pooling in use."""
        return self.poolings[int(self.chosen)]

    def forward(self, read: HeadInputs) -> Tensor:
        """Compute the logits of all poolings: (n, poolings, labels) float32 for n prompts."""
        logits = [
            linear(pool(pooling, read.last, read.visual, read.real, read.places, self.query))
            for pooling, linear in zip(self.poolings, self.linears, strict=True)
        ]
        return torch.stack(logits, dim=1)

    def loss(self, logits: Tensor, targets: ChoiceTargets, settings: HeadSettings) -> Tensor:
        """Distillation loss (Hinton et al. 2015): (1 − s) CE + s T² KL(p_T ‖ q_T).

        p_T is the normalised p^(1/T) of the teacher's probabilities p, and q_T is the softmax of
        logits / T, (n, poolings, labels). Samples without soft labels have s = 0. The mean over
        samples and poolings.
        """
        heat = settings.temperature
        label = targets.label[:, None].expand(logits.shape[:2])
        hard = F.cross_entropy(logits.transpose(1, 2), label, reduction="none")
        share = settings.soft * (targets.soft.sum(-1, keepdim=True) > 0).float()
        teacher = targets.soft.clamp_min(1e-8).log().div(heat).log_softmax(-1)
        student = (logits / heat).log_softmax(-1)
        teacher = teacher[:, None].expand_as(student)
        apart = F.kl_div(student, teacher, reduction="none", log_target=True).sum(-1)
        return ((1 - share) * hard + share * heat**2 * apart).mean()

    def calibrate(self, logits: Tensor, truth: Tensor) -> None:
        """Choose the best pooling on validation, then fit the temperature (Guo et al. 2017)."""
        from scipy.optimize import minimize_scalar

        logits, truth = logits[truth >= 0].detach(), truth[truth >= 0]
        hits = (logits.argmax(-1) == truth[:, None]).float().mean(0).tolist()
        losses = [float(F.cross_entropy(some, truth)) for some in logits.unbind(1)]
        best = max(range(len(hits)), key=lambda place: (hits[place], -losses[place]))
        self.chosen.fill_(best)
        if not len(truth):
            return
        chosen = logits[:, best].double()

        def misfit(log_temperature: float) -> float:
            return float(F.cross_entropy(chosen / math.exp(log_temperature), truth))

        bounds = tuple(math.log(edge) for edge in TEMPERATURES)
        fit = minimize_scalar(misfit, bounds=bounds, method="bounded")
        self.temperature.fill_(math.exp(float(fit.x)))

    def stored(self, settings: HeadSettings | None = None) -> LabelHead:
        """The head in the form that bundles hold, with the chosen pooling only."""
        linear, pooling = self.linears[int(self.chosen)], Pooling(self.pooling)
        assert isinstance(linear, nn.Linear)
        return LabelHead(
            kind=self.kind, labels=self.labels, pooling=pooling,
            weight=linear.weight.detach(), bias=linear.bias.detach(),
            query=self.query.detach() if pooling is Pooling.ATTENTION else None,
            temperature=float(self.temperature),
        )  # fmt: skip

    @classmethod
    def of(cls, head: LabelHead) -> LabelHeadModule:
        """The module of a head from a bundle, with the head's pooling only."""
        width = head.weight.shape[1] // pooled_width(head.pooling, 1)
        module = cls(width, head.labels, head.kind, [head.pooling])
        module.linears[0].load_state_dict({"weight": head.weight, "bias": head.bias})
        module.temperature.fill_(head.temperature)
        if head.query is not None:
            module.query.data.copy_(head.query)
        return module


@dataclass(frozen=True)
class ChoiceTargets(Rows):
    """Targets of a label head for each sample."""

    label: Tensor  # (n,) int64, index of the label
    soft: Tensor  # (n, labels) float32, probabilities by the teacher; zeros where it gave none


class ChoiceTask(HeadTask):
    """Chooses one of a domain's labels, with a head of a kind in `contract.heads.HEAD_KINDS`."""

    result, module, head_type = LabelResult, LabelHeadModule, LabelHead
    kind: str

    def targets(self, samples: Sequence[Sample], encoded: Sequence[Encoded]) -> ChoiceTargets:
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
        wanted = self.settings.pooling
        poolings = POOLINGS if wanted == "auto" else (wanted,)
        if not len(first.cells):  # the question alone
            if wanted not in ("auto", Pooling.LAST):
                raise DataError(
                    f"domain {self.domain.name} has no images, which heads.pooling={wanted} reads: "
                    "set it to auto"
                )
            poolings = (str(Pooling.LAST),)
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            head = LabelHeadModule(lmm.width, self.domain.labels, self.kind, poolings)
        return head.to(lmm.device)

    def calibrate(self, head: LabelHeadModule, raw: Tensor, samples: Sequence[Sample]) -> None:
        labels = {label: index for index, label in enumerate(self.domain.labels)}
        truth = [labels.get(sample.answer.choice or "", -1) for sample in samples]
        head.calibrate(raw, torch.tensor(truth))

    def predictions(
        self, head: LabelHeadModule, raw: Tensor, samples: Sequence[Sample]
    ) -> list[Prediction]:
        found = []
        for shares in confidences(raw[:, int(head.chosen)], head.temperature.cpu()).tolist():
            label = self.domain.labels[shares.index(max(shares))]
            found.append(Prediction(Answer.chosen(self.domain.task, label, tuple(shares))))
        return found

    def evaluate(
        self, head: LabelHeadModule, predictions: list[Prediction], samples: Sequence[Sample]
    ) -> Evaluation:
        found = super().evaluate(head, predictions, samples)
        answers, truth = [one.answer for one in predictions], [one.answer for one in samples]
        if (ece := calibration_error(answers, truth)) is not None:
            found.details["ece"] = ece
        said, true = [one.choice for one in answers], [one.choice for one in truth]
        return replace(found, classes=choice_report(said, true, self.domain.labels))

    def golden(self, prediction: Prediction, threshold: float | None) -> dict[str, Any]:
        shares = dict(zip(self.domain.labels, prediction.answer.soft, strict=True))
        label = prediction.answer.choice or ""
        return LabelResult(kind=self.kind, label=label, confidences=shares).golden()

    def metadata(self, head: LabelHeadModule) -> dict[str, Any]:
        return {"pooling": head.pooling}


class ClassificationTask(ChoiceTask):
    """Classifies images."""

    spec = CLASSIFICATION
    kind = "classification"
    geometric = True

    @classmethod
    def measure(cls, predicted: Sequence[Answer], truth: Sequence[Answer]) -> Scores:
        return top1(predicted, truth)


class VideoTask(ClassificationTask):
    """Classifies the frames of videos."""

    spec = VIDEO
    kind = "action"


class CountingTask(ChoiceTask):
    """Counts objects; each number is a label."""

    spec = COUNTING
    kind = "counting"

    @classmethod
    def measure(cls, predicted: Sequence[Answer], truth: Sequence[Answer]) -> Scores:
        return exact_counts(predicted, truth)
