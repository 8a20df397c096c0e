"""The label head: predicts one of a domain's labels in a single forward pass (VaLoRA §4.2.2).

It reads the last token, the mean of the visual tokens, their learnt weighted mean, or their means
in the parts of a grid. All poolings are trained together; the most accurate on validation is kept.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from valora_data.contract.label_head import LabelHead, Pooling, pool, pooled_width

if TYPE_CHECKING:
    from collections.abc import Sequence

    from valora_train.model.prompts import HeadInputs
    from valora_train.settings import HeadSettings

POOLINGS = tuple(str(pooling) for pooling in Pooling)
TEMPERATURES = (0.05, 20.0)
"""Bounds of the calibrated temperature."""


class LabelHeadModule(nn.Module):
    """Computes the logits of a label set, for each pooling.

    Args:
        width: Size of the hidden states.
        labels: Label set in the order of the outputs.
        kind: ``classification``, ``counting``, ``yes_no`` or ``action``.
        poolings: Names of the poolings to train, from `POOLINGS`.

    Attributes:
        linears: A layer (labels, width) for each pooling, (labels, 16 · width) for ``grid``.
        query: (width,), query vector of the pooling ``attention``.
        chosen: (), index of the pooling in use, see `choose_pooling`.
        temperature: (1,), divisor of the logits, see `calibrate`.
    """

    chosen: Tensor
    temperature: Tensor

    def __init__(
        self, width: int, labels: Sequence[str], kind: str, poolings: Sequence[str] = POOLINGS
    ) -> None:
        super().__init__()
        self.labels, self.kind, self.poolings = tuple(labels), kind, tuple(poolings)
        layers = [
            nn.Linear(pooled_width(pooling, width), len(self.labels)) for pooling in self.poolings
        ]
        for layer in layers:
            nn.init.normal_(layer.weight, std=0.01)
            nn.init.zeros_(layer.bias)
        self.linears = nn.ModuleList(layers)
        self.query = nn.Parameter(torch.zeros(width))
        self.register_buffer("chosen", torch.tensor(0))
        self.register_buffer("temperature", torch.ones(1))

    @property
    def pooling(self) -> str:
        """Name of the pooling in use."""
        return self.poolings[int(self.chosen)]

    def forward(self, read: HeadInputs) -> Tensor:
        """Compute the logits of all poolings.

        Args:
            read: Hidden states of n prompts.

        Returns:
            (n, poolings, labels) float32.
        """
        logits = [
            linear(pool(pooling, read.last, read.visual, read.real, read.places, self.query))
            for pooling, linear in zip(self.poolings, self.linears, strict=True)
        ]
        return torch.stack(logits, dim=1)

    def loss(self, logits: Tensor, targets: ChoiceTargets, settings: HeadSettings) -> Tensor:
        """Compute the training loss of a batch, the mean over samples and poolings.

        Args:
            logits: (n, poolings, labels) from `forward`.
            targets: Targets of the same n samples.
            settings: Weight and temperature of soft labels.
        """
        return distillation_loss(logits, targets, settings.soft, settings.temperature)

    def choose_pooling(self, logits: Tensor, truth: Tensor) -> None:
        """Choose the pooling with the best accuracy on validation; ties go to the lowest loss.

        Args:
            logits: (n, poolings, labels) from `forward`.
            truth: (n,) int64, indices of the true labels; −1 for samples without one.
        """
        logits, truth = logits[truth >= 0].detach(), truth[truth >= 0]
        hits = (logits.argmax(-1) == truth[:, None]).float().mean(0).tolist()
        losses = [
            float(F.cross_entropy(logits[:, place], truth)) for place in range(len(self.poolings))
        ]
        best = max(range(len(hits)), key=lambda place: (hits[place], -losses[place]))
        self.chosen.fill_(best)

    def calibrate(self, logits: Tensor, truth: Tensor) -> None:
        """Fit the temperature that calibrates the confidences (Guo et al. 2017).

        Args:
            logits: (n, labels) of the chosen pooling on the validation split.
            truth: (n,) int64, indices of the true labels; −1 for samples without one.
        """
        from scipy.optimize import minimize_scalar

        logits, truth = logits[truth >= 0].double(), truth[truth >= 0]
        if not len(truth):
            return

        def misfit(log_temperature: float) -> float:
            return float(F.cross_entropy(logits / math.exp(log_temperature), truth))

        bounds = tuple(math.log(edge) for edge in TEMPERATURES)
        best = minimize_scalar(misfit, bounds=bounds, method="bounded")
        self.temperature.fill_(math.exp(float(best.x)))

    def stored(self) -> LabelHead:
        """The head in the form that bundles hold, with the chosen pooling only."""
        linear = self.linears[int(self.chosen)]
        assert isinstance(linear, nn.Linear)
        pooling = Pooling(self.pooling)
        return LabelHead(
            kind=self.kind,
            labels=self.labels,
            weight=linear.weight.detach(),
            bias=linear.bias.detach(),
            pooling=pooling,
            query=self.query.detach() if pooling is Pooling.ATTENTION else None,
            temperature=float(self.temperature),
        )

    @classmethod
    def of(cls, head: LabelHead) -> LabelHeadModule:
        """Create the module of a head from a bundle.

        Args:
            head: The head; the module has its pooling only.
        """
        module = cls(head.width, head.labels, head.kind, [head.pooling])
        module.linears[0].load_state_dict({"weight": head.weight, "bias": head.bias})
        module.temperature.fill_(head.temperature)
        if head.query is not None:
            module.query.data.copy_(head.query)
        return module


@dataclass(frozen=True)
class ChoiceTargets:
    """Targets of a label head for each sample.

    Attributes:
        label: (n,) int64, index of the label.
        soft: (n, labels) float32, probabilities by the teacher; zeros where it gave none.
    """

    label: Tensor
    soft: Tensor

    def to(self, device: torch.device) -> ChoiceTargets:
        """Copy the targets to another device."""
        return ChoiceTargets(self.label.to(device), self.soft.to(device))

    def __getitem__(self, rows: Tensor) -> ChoiceTargets:
        rows = rows.to(self.label.device)
        return ChoiceTargets(self.label[rows], self.soft[rows])


def distillation_loss(
    logits: Tensor, targets: ChoiceTargets, soft: float, temperature: float
) -> Tensor:
    """Distillation loss (Hinton et al. 2015): (1 − s) CE + s T² KL(p_T ‖ q_T).

    p_T is the normalised p^(1/T) of the teacher's probabilities p, and q_T is the softmax of
    logits / T. Samples without soft labels have s = 0.

    Args:
        logits: (n, poolings, labels) float32.
        targets: Targets of the same samples.
        soft: Weight s of the soft labels.
        temperature: Temperature T; above 1 it gives more weight to improbable labels.

    Returns:
        () float32, the mean over samples and poolings.
    """
    label = targets.label[:, None].expand(logits.shape[:2])
    hard = F.cross_entropy(logits.transpose(1, 2), label, reduction="none")
    share = soft * (targets.soft.sum(-1, keepdim=True) > 0).float()
    teacher = targets.soft.clamp_min(1e-8).log().div(temperature).log_softmax(-1)
    student = (logits / temperature).log_softmax(-1)
    teacher = teacher[:, None].expand_as(student)
    apart = F.kl_div(student, teacher, reduction="none", log_target=True).sum(-1)
    return ((1 - share) * hard + share * temperature**2 * apart).mean()
