"""The label head: one of a closed set of labels in a single pass (VaLoRA §4.2.2).

It can look at the last token, at the mean of the visual tokens, at a learnt weighting of them, or
at what is where in the image; all are trained side by side and the one that does best on
validation stays.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from valora_data.contract.heads import LabelHead, Pooling, pool, pooled_width

if TYPE_CHECKING:
    from collections.abc import Sequence

    from valora_train.model.prompts import HeadInputs
    from valora_train.settings import HeadSettings

POOLINGS = tuple(str(pooling) for pooling in Pooling)
TEMPERATURES = (0.05, 20.0)


class LabelHeadModule(nn.Module):
    """Logits of a label set, for each way of pooling.

    Args:
        width: Size of the hidden states.
        labels: Label set in the order of the outputs.
        kind: ``classification``, ``counting``, ``yes_no`` or ``action``.
        poolings: Those to train; of `POOLINGS`.

    Attributes:
        linears: A layer (labels, width) for each pooling, (labels, 16 · width) for ``grid``.
        query: (width,), what ``attention`` weighs the visual tokens by.
        chosen: (), index into `poolings` of the one that counts.
        temperature: (1,), by which logits are divided, see `calibrate`.
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
        """The one that counts."""
        return self.poolings[int(self.chosen)]

    def forward(self, read: HeadInputs) -> Tensor:
        """Logits.

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
        """Training loss of a batch: the mean over its samples and over the poolings.

        Args:
            logits: (n, poolings, labels) from `forward`.
            targets: Of the same n samples.
            settings: How soft labels count.
        """
        losses = [
            distillation_loss(logits[:, place], targets, settings.soft, settings.temperature)
            for place in range(len(self.poolings))
        ]
        return torch.stack(losses).mean()

    def choose_pooling(self, logits: Tensor, truth: Tensor) -> None:
        """Choose the pooling with the most hits on validation; of equal ones the likeliest truth.

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
        """Fit the temperature so that confidences say how often a label is right (Guo et al. 2017).

        Args:
            logits: (n, labels), of the chosen pooling on validation.
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
        """The head as a bundle holds it: the chosen pooling alone."""
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
        """The module of a head from a bundle.

        Args:
            head: The head; the module has its pooling alone.
        """
        module = cls(head.width, head.labels, head.kind, [head.pooling])
        module.linears[0].load_state_dict({"weight": head.weight, "bias": head.bias})
        module.temperature.fill_(head.temperature)
        if head.query is not None:
            module.query.data.copy_(head.query)
        return module


@dataclass(frozen=True)
class ChoiceTargets:
    """What the head should say of each sample.

    Attributes:
        label: (n,) int64, index of the label.
        soft: (n, labels) float32, the teacher's probabilities; zeros where it gave none.
    """

    label: Tensor
    soft: Tensor

    def to(self, device: torch.device) -> ChoiceTargets:
        """The same on another device."""
        return ChoiceTargets(self.label.to(device), self.soft.to(device))

    def __getitem__(self, rows: Tensor) -> ChoiceTargets:
        rows = rows.to(self.label.device)
        return ChoiceTargets(self.label[rows], self.soft[rows])


def distillation_loss(
    logits: Tensor, targets: ChoiceTargets, soft: float, temperature: float
) -> Tensor:
    """Hard and soft labels mixed (Hinton et al. 2015): (1 − s) CE + s T² KL(p_T ‖ q_T).

    p_T is the teacher's distribution p^(1/T), normalised, and q_T the softmax of logits / T.
    Samples without soft labels count by their hard label alone.

    Args:
        logits: (n, labels).
        targets: Of the same samples.
        soft: The share s of the soft labels.
        temperature: T; above 1 it shows how the teacher ranks what is wrong.

    Returns:
        (), the mean over samples.
    """
    hard = F.cross_entropy(logits, targets.label, reduction="none")
    known = targets.soft.sum(-1) > 0
    share = soft * known.float()
    teacher = targets.soft.clamp_min(1e-8).log().div(temperature).log_softmax(-1)
    student = (logits / temperature).log_softmax(-1)
    apart = F.kl_div(student, teacher, reduction="none", log_target=True).sum(-1)
    return ((1 - share) * hard + share * temperature**2 * apart).mean()
