"""The box head: predicts the objects of an image in a single forward pass (VaLoRA §4.2.2).

It is a linear layer on the last hidden states of the visual tokens, trained with the adapter.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from valora_data.contract import boxes as box_code
from valora_data.contract.box_head import DETECTION, BoxHead
from valora_data.schema import Box

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from valora_data.schema import Sample
    from valora_train.metrics.evaluate import Matches
    from valora_train.settings import HeadSettings


VOTE_SIGMA = 0.05
"""How boxes of new heads vote for their place, see `contract.boxes.vote`.

Chosen on the validation splits of the six built-in domains from 0.01 to 0.12, where COCO mAP is
flat from 0.03 to 0.08.
"""
CLAIMED_AT_ONCE = 256
"""Samples whose boxes are assigned to cells together."""


class BoxHeadModule(nn.Module):
    """Predicts an objectness, a class and a box for every visual token.

    Args:
        width: Size of the hidden states.
        labels: Label set in the order of class indices; a single class needs no class logits.
        grid: Rows and columns of visual tokens of an image.

    Attributes:
        linear: (5 + classes, width), computes objectness, box (see `contract.boxes`) and class
            logits.
        calibration: (2,), Platt scaling of the confidence; see `calibrate`.
        threshold: (), confidence from which a box counts, with the best F1 on validation.
        vote_sigma: Where boxes vote for their place, see `contract.boxes.vote`; None: they do not.
    """

    calibration: Tensor
    threshold: Tensor

    def __init__(self, width: int, labels: Sequence[str], grid: tuple[int, int]) -> None:
        super().__init__()
        self.labels = tuple(labels)
        self.grid = grid
        self.vote_sigma: float | None = VOTE_SIGMA
        self.linear = nn.Linear(width, BoxHead.outputs(self.labels))
        nn.init.normal_(self.linear.weight, std=0.01)
        nn.init.zeros_(self.linear.bias)
        with torch.no_grad():
            self.linear.bias[0] = -math.log(30)  # about one cell in thirty holds an object
        self.register_buffer("calibration", torch.tensor([1.0, 0.0]))
        self.register_buffer("threshold", torch.tensor(0.5))

    def forward(self, hidden: Tensor) -> Tensor:
        """Compute the raw outputs.

        Args:
            hidden: (n, tokens, width), last hidden states of the visual tokens.

        Returns:
            (n, tokens, 5 + classes) float32.
        """
        raw: Tensor = self.linear(hidden.float())
        return raw

    def loss(self, raw: Tensor, targets: DetectionTargets, weights: HeadSettings) -> Tensor:
        """Compute the training loss of a batch, divided by its number of objects.

        The sum of the binary cross entropy of objectness, the generalised-IoU loss of boxes
        (Rezatofighi et al. 2019) and the cross entropy of classes. Objects are weighted by the
        teacher's confidence. Objectness learns 1 where a box is assigned, or the IoU of the
        predicted with that box (``HeadSettings.objectness``).

        Args:
            raw: (n, tokens, 5 + classes) from `forward`.
            targets: Targets of the same n images.
            weights: Settings with the weights of the three parts.
        """
        from torchvision.ops import generalized_box_iou_loss

        positive, weight = targets.positive, targets.weight
        objects = weight[positive].sum().clamp_min(1.0)
        found = box_code.decode(raw[..., 1:5], self.grid)[positive]
        wanted = positive.float()
        if weights.objectness == "iou":
            wanted[positive] = _pairwise_iou(found.detach(), targets.boxes[positive])
        objectness = F.binary_cross_entropy_with_logits(
            raw[..., 0], wanted, torch.where(positive, weight, 1.0), reduction="sum"
        )
        total = weights.objectness_weight * objectness
        overlap = generalized_box_iou_loss(found, targets.boxes[positive])
        total = total + weights.box_weight * (overlap * weight[positive]).sum()
        if len(self.labels) > 1:
            wrong = F.cross_entropy(
                raw[..., 5:][positive], targets.classes[positive], reduction="none"
            )
            total = total + weights.class_weight * (wrong * weight[positive]).sum()
        loss: Tensor = total / objects
        return loss

    def predict(
        self, raw: Tensor, size: tuple[int, int], settings: HeadSettings, min_score: float
    ) -> list[Box]:
        """Predict the boxes of one image.

        Args:
            raw: (tokens, 5 + classes) from `forward`.
            size: Width and height of the image in pixels.
            settings: Settings of non-maximum suppression.
            min_score: Calibrated confidence below which boxes are dropped.
        """
        found = self.stored(settings).detections(raw, size, min_score)
        return [Box(*item.box, label=item.label, confidence=item.confidence) for item in found]

    def stored(self, settings: HeadSettings) -> BoxHead:
        """The head in the form that bundles hold.

        Args:
            settings: Settings of non-maximum suppression.
        """
        return BoxHead(
            kind=DETECTION,
            labels=self.labels,
            weight=self.linear.weight.detach(),
            bias=self.linear.bias.detach(),
            grid=self.grid,
            calibration=self.calibration.cpu(),
            threshold=float(self.threshold),
            nms_iou=settings.nms_iou,
            most=settings.most,
            vote_sigma=self.vote_sigma,
        )

    @classmethod
    def of(cls, head: BoxHead) -> BoxHeadModule:
        """Create the module of a head from a bundle."""
        module = cls(head.weight.shape[1], head.labels, head.grid)
        module.vote_sigma = head.vote_sigma
        module.linear.load_state_dict({"weight": head.weight, "bias": head.bias})
        module.calibration.copy_(head.calibration)
        module.threshold.fill_(head.threshold)
        return module

    def calibrate(self, matches: Matches) -> None:
        """Fit the Platt scaling that calibrates the confidences.

        Args:
            matches: Matches of the validation split, with confidences of the current calibration.
        """
        from sklearn.linear_model import LogisticRegression

        if len(set(matches.hit.tolist())) < 2:
            return  # a fit needs hits and misses
        score = torch.from_numpy(matches.score).clamp(1e-6, 1 - 1e-6)
        a, b = self.calibration.tolist()
        logit = (torch.logit(score) - b) / a
        fit = LogisticRegression(C=1e6).fit(logit[:, None].numpy(), matches.hit)
        slope, offset = float(fit.coef_[0, 0]), float(fit.intercept_[0])
        if slope > 0:  # a negative slope would reverse the order of boxes
            self.calibration.copy_(torch.tensor([slope, offset]))


def _pairwise_iou(one: Tensor, other: Tensor) -> Tensor:
    """IoU of each box with the one in the same row: (n, 4) and (n, 4) → (n,)."""
    sides = torch.min(one[:, 2:], other[:, 2:]) - torch.max(one[:, :2], other[:, :2])
    shared = sides.clamp_min(0.0).prod(-1)
    areas = [(boxes[:, 2:] - boxes[:, :2]).clamp_min(0.0).prod(-1) for boxes in (one, other)]
    return shared / (areas[0] + areas[1] - shared).clamp_min(1e-9)


@dataclass(frozen=True)
class DetectionTargets:
    """Targets of a box head for each visual token of each image.

    A box is assigned to the cell that holds its centre, and to those cells whose centres are near
    the centre of the box (see `REACH`) and inside the box. A cell with several boxes gets the
    smallest.

    Attributes:
        positive: (n, tokens) bool, whether a box is assigned to the token.
        weight: (n, tokens) float32, the teacher's confidence in the box.
        boxes: (n, tokens, 4) float32, (x0, y0, x1, y1) relative to the image size.
        classes: (n, tokens) int64, index of the label.
        REACH: Largest distance in cells, along each axis, between the centres of box and cell.
    """

    positive: Tensor
    weight: Tensor
    boxes: Tensor
    classes: Tensor

    REACH: ClassVar[float] = 0.75

    @classmethod
    def of(
        cls, samples: Sequence[Sample], labels: Sequence[str], grid: tuple[int, int]
    ) -> DetectionTargets:
        """Create the targets of samples.

        Args:
            samples: Images with boxes in pixels, and the teacher's confidences.
            labels: Label set.
            grid: Rows and columns of visual tokens.
        """
        tokens = grid[0] * grid[1]
        targets = cls(
            torch.zeros(len(samples), tokens, dtype=torch.bool),
            torch.zeros(len(samples), tokens),
            torch.zeros(len(samples), tokens, 4),
            torch.zeros(len(samples), tokens, dtype=torch.int64),
        )
        for start in range(0, len(samples), CLAIMED_AT_ONCE):
            targets._claim(start, samples[start : start + CLAIMED_AT_ONCE], labels, grid)
        return targets

    def _claim(
        self, start: int, samples: Sequence[Sample], labels: Sequence[str], grid: tuple[int, int]
    ) -> None:
        """Assign the boxes of some samples, whose first row is `start`."""
        rows, columns = grid
        places, ranks, edges, weights, classes = [], [], [], [], []
        for place, sample in enumerate(samples, start):
            width, height = sample.image.size
            ranked = sorted(sample.answer.boxes, key=lambda box: -box.area)
            for rank, box in enumerate(ranked):
                places.append(place)
                ranks.append(rank)
                edges.append((box.x0 / width, box.y0 / height, box.x1 / width, box.y1 / height))
                weights.append(box.confidence)
                classes.append(labels.index(box.label))
        if not places:
            return
        whole = torch.tensor(edges, dtype=torch.float32)
        low, high = whole[:, None, :2], whole[:, None, 2:]
        middle = (low + high) / 2
        shape = torch.tensor([columns, rows], dtype=torch.float32)
        centres = box_code.cell_centres(grid)
        near = ((centres - middle) * shape).abs().amax(-1) <= self.REACH
        mine = near & (centres > low).all(-1) & (centres < high).all(-1)  # (boxes, tokens)
        column, row = (middle[:, 0] * shape).long().unbind(-1)
        cell = row.clamp_max(rows - 1) * columns + column.clamp_max(columns - 1)
        mine[torch.arange(len(mine)), cell] = True
        order = torch.tensor(ranks)
        for rank in range(int(order.max()) + 1):  # the smallest box of a sample comes last
            some = order == rank
            at, token = mine[some].nonzero(as_tuple=True)
            at = some.nonzero()[at, 0]
            there = torch.tensor(places)[at], token
            self.positive[there] = True
            self.weight[there] = torch.tensor(weights)[at]
            self.boxes[there] = whole[at]
            self.classes[there] = torch.tensor(classes)[at]

    def to(self, device: torch.device) -> DetectionTargets:
        """Copy the targets to another device."""
        return self._each(lambda part: part.to(device))

    def __getitem__(self, rows: Tensor) -> DetectionTargets:
        """The targets of some of the images."""
        return self._each(lambda part: part[rows.to(part.device)])

    def _each(self, change: Callable[[Tensor], Tensor]) -> DetectionTargets:
        return DetectionTargets(*(change(getattr(self, f.name)) for f in fields(self)))
