"""The linear head: one of a closed set of labels in a single pass (VaLoRA §4.2.2).

It can look at the last token, at the mean of the visual tokens, at a learnt weighting of them, or
at what is where in the image; all are trained side by side and the one that does best on
validation stays.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

from valora_data.contract.grid_pooling import PLACES, pool_places
from valora_data.errors import BundleError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from valora_train.model.prompts import HeadInputs
    from valora_train.settings import HeadSettings

POOLINGS = ("last", "visual_mean", "attention", "grid")
TEMPERATURES = (0.05, 20.0)


class LinearHead(nn.Module):
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
            nn.Linear(width * (PLACES if pooling == "grid" else 1), len(self.labels))
            for pooling in self.poolings
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
            linear(self._pool(read, pooling))
            for pooling, linear in zip(self.poolings, self.linears, strict=True)
        ]
        return torch.stack(logits, dim=1)

    def _pool(self, read: HeadInputs, pooling: str) -> Tensor:
        """(n, inputs of the layer) float32."""
        if pooling == "last":
            return read.last.float()
        seen, real = read.visual.float(), read.real
        if pooling == "grid":
            return pool_places(seen, read.places, real)
        if pooling == "visual_mean":
            return (seen * real[..., None]).sum(1) / real.sum(1, keepdim=True)
        scores = seen @ self.query / math.sqrt(seen.shape[-1])
        weights = scores.masked_fill(~real, -math.inf).softmax(-1)
        return (weights[:, None] @ seen)[:, 0]

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

    def choose(self, logits: Tensor, truth: Tensor) -> None:
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

    def save(self, file: Path, settings: HeadSettings) -> None:
        """Write the chosen part as safetensors, as docs/bundle.md describes it."""
        facts = {"kind": self.kind, "labels": json.dumps(self.labels), "pooling": self.pooling}
        tensors = {
            **self.linears[int(self.chosen)].state_dict(),
            "temperature": self.temperature,
        }
        if self.pooling == "attention":
            tensors["query"] = self.query.detach()
        save_file({key: value.cpu().contiguous() for key, value in tensors.items()}, file, facts)

    @classmethod
    def load(cls, file: Path) -> LinearHead:
        """Read what `save` wrote.

        Raises:
            BundleError: If it is another kind of head, or a tensor is missing or misshapen.
        """
        try:
            with safe_open(file, "pt") as parts:
                facts = parts.metadata() or {}
                tensors = {key: parts.get_tensor(key) for key in parts.keys()}  # noqa: SIM118
            labels, pooling = json.loads(facts["labels"]), facts["pooling"]
            width = tensors["weight"].shape[1] // (PLACES if pooling == "grid" else 1)
            head = cls(width, labels, facts["kind"], [pooling])
            head.linears[0].load_state_dict({key: tensors[key] for key in ("weight", "bias")})
            head.temperature.copy_(tensors["temperature"])
            if pooling == "attention":
                head.query.data.copy_(tensors["query"])
        except (OSError, KeyError, RuntimeError, ValueError, SafetensorError) as error:
            raise BundleError(
                f"head {file} is damaged: {error}; export the bundle again"
            ) from error
        return head


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
