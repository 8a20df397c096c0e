"""Boxes relative to visual tokens, see docs/bundle.md.

The token in row i and column j of a rows × columns grid predicts boxes relative to its cell: four
outputs (ox, oy, ow, oh) say that a box has the cell's centre plus (ox, oy) cells, and measures
(exp ow, exp oh) cells. Boxes are (x0, y0, x1, y1), as shares of the image's width and height.
"""

from __future__ import annotations

import torch
from torch import Tensor

LOG_SIZE = (-4.0, 3.0)  # bounds of (ow, oh): from a fiftieth of a cell to twenty cells


def cell_centres(grid: tuple[int, int]) -> Tensor:
    """Return the centres of a grid's cells: (rows · columns, 2) float32, x and y, row by row."""
    rows, columns = grid
    y, x = torch.meshgrid(
        (torch.arange(rows) + 0.5) / rows, (torch.arange(columns) + 0.5) / columns, indexing="ij"
    )
    return torch.stack([x.flatten(), y.flatten()], dim=-1)


def decode(raw: Tensor, grid: tuple[int, int]) -> Tensor:
    """Decode what all cells predict, (..., rows · columns, 4), to float32 boxes in the image."""
    raw = raw.float()
    cell = raw.new_tensor([1.0 / grid[1], 1.0 / grid[0]])
    centre = cell_centres(grid).to(raw) + raw[..., :2] * cell
    half = raw[..., 2:].clamp(*LOG_SIZE).exp() * cell / 2
    return torch.cat([centre - half, centre + half], dim=-1).clamp(0.0, 1.0)


def suppress(
    boxes: Tensor, scores: Tensor, classes: Tensor, iou: float, min_score: float, most: int
) -> Tensor:
    """Return int64 indices of at most `most` boxes of at least `min_score`, by descending score.

    No two of a class overlap by more than `iou`.
    """
    from torchvision.ops import batched_nms

    candidates = torch.nonzero(scores >= min_score).flatten()
    kept = batched_nms(boxes[candidates], scores[candidates], classes[candidates], iou)
    return candidates[kept[:most]]


def vote(boxes: Tensor, log_scores: Tensor, classes: Tensor, kept: Tensor, sigma: float) -> Tensor:
    """Place each kept box at the mean of all boxes of its class, weighted by score and overlap.

    A box counts with its score · exp(-(1 - IoU)² / sigma), as in softer-NMS (He et al. 2019,
    "Bounding Box Regression with Uncertainty", without learnt variances); boxes apart do not count.
    `kept` are (k,) int64 indices into the n boxes; (k, 4) are returned.
    """
    from torchvision.ops import box_iou

    overlap = box_iou(boxes[kept], boxes)
    # A box counts for itself, also where it has no area, and its IoU is 0 / 0.
    own = torch.arange(len(boxes), device=boxes.device) == kept[:, None]
    overlap = torch.where(own, 1.0, overlap)
    counts = (overlap > 0) & (classes[kept, None] == classes)
    weights = (log_scores - (1 - overlap) ** 2 / sigma).where(counts, -torch.inf).softmax(-1)
    return weights @ boxes


def read_detections(
    raw: Tensor,
    grid: tuple[int, int],
    calibration: Tensor,
    *,
    nms_iou: float,
    min_score: float,
    most: int,
    vote_sigma: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Decode a box head's outputs for one image: k boxes, calibrated confidences, int64 classes.

    `raw` (rows · columns, 5 + classes) are objectness logit, (ox, oy, ow, oh), and class logits,
    which a head of a single class does not have; `calibration` (a, b) makes the confidence
    sigmoid(a · logit + b) (Platt scaling). Boxes do not `vote` if `vote_sigma` is None.
    """
    raw = raw.float()
    logit = raw[:, 0]
    score = torch.nn.functional.logsigmoid(logit)
    classes = torch.zeros(len(raw), dtype=torch.int64, device=raw.device)
    if raw.shape[1] > 5:
        best, classes = raw[:, 5:].log_softmax(-1).max(-1)
        score = score + best
        logit = score - torch.log(-torch.expm1(score.clamp(max=-1e-6)))
    confidence = torch.sigmoid(calibration[0] * logit + calibration[1])
    boxes = decode(raw[:, 1:5], grid)
    kept = suppress(boxes, confidence, classes, nms_iou, min_score, most)
    # All cells vote, by scores before calibration, so that a box does not depend on `min_score`.
    found = boxes[kept] if vote_sigma is None else vote(boxes, score, classes, kept, vote_sigma)
    return found, confidence[kept], classes[kept]
