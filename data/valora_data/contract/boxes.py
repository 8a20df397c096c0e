"""Heads that find objects: boxes relative to visual tokens, see docs/reference/bundle.md."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, ClassVar, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from valora_data.contract.files import expect, parse_json
from valora_data.contract.head import Head, check_shapes, parse_labels
from valora_data.contract.results import BoxesResult, Detection, Size
from valora_data.wording import plural

Floats = NDArray[np.float32]
Indices = NDArray[np.int64]
DETECTION = "detection"  # the kind of head that finds objects
MAX_BOXES = 10_000  # of an image, that a box head may be set to return
TINY = np.finfo(np.float32).tiny
LOG_SIZE = (-4.0, 3.0)  # bounds of (ow, oh): from a fiftieth of a cell to twenty cells


@lru_cache(maxsize=64)
def cell_centres(grid: tuple[int, int]) -> Floats:
    """Return the centres of a grid's cells: (rows · columns, 2) float32, x and y, row by row."""
    y, x = np.indices(grid, np.float32) + 0.5
    return np.stack([x / grid[1], y / grid[0]], -1).reshape(-1, 2)


# A cell says (ox, oy, ow, oh): its box has the cell's centre plus (ox, oy) cells and measures
# (exp ow, exp oh) cells. Boxes (x0, y0, x1, y1) are shares of the image.
def decode(raw: Any, grid: tuple[int, int]) -> Any:
    """Decode what all cells predict, (..., rows · columns, 4) float32, a tensor or an array."""
    xp: Any = torch if isinstance(raw, Tensor) else np
    like = {"dtype": xp.float32, "device": raw.device}
    cell = xp.asarray([1.0 / grid[1], 1.0 / grid[0]], **like)
    centre = xp.asarray(cell_centres(grid), **like) + raw[..., :2] * cell
    half = xp.exp(xp.clip(raw[..., 2:], *LOG_SIZE)) * cell / 2
    return xp.clip(xp.concatenate([centre - half, centre + half], -1), 0.0, 1.0)


# What follows is of one image on the host: NumPy's calls take half the time of torchvision's.
def overlaps(boxes: Floats, classes: Indices, chosen: Indices) -> Floats:
    """(k, n) IoU of k chosen boxes with all n, 0 between classes; 1 of a box with itself."""
    x0, y0, x1, y1 = boxes.T
    width = np.minimum(x1[chosen, None], x1) - np.maximum(x0[chosen, None], x0)
    height = np.minimum(y1[chosen, None], y1) - np.maximum(y0[chosen, None], y0)
    shared, area = np.maximum(width, 0) * np.maximum(height, 0), (x1 - x0) * (y1 - y0)
    found: Floats = shared / np.maximum(area[chosen, None] + area - shared, TINY)
    found *= classes[chosen, None] == classes
    found[np.arange(len(chosen)), chosen] = 1  # also without an area
    return found


def suppress(overlap: Floats, iou: float, most: int) -> list[int]:
    """Greedy non-maximum suppression of k boxes by falling score, whose overlaps are (k, k)."""
    kept: list[int] = []
    free = np.ones(len(overlap), bool)
    for number, over in enumerate(overlap > iou):
        if free[number] and len(kept) < most:
            kept.append(number)
            free &= ~over
    return kept


def vote(boxes: Floats, log_scores: Floats, overlap: Floats, sigma: float) -> Floats:
    """Place k boxes each at the mean of all n boxes, weighted by score and overlap (k, n).

    A box counts with its score · exp(-(1 - IoU)² / sigma), as in softer-NMS (He et al. 2019,
    "Bounding Box Regression with Uncertainty", without learnt variances); boxes apart do not count.
    """
    weights = np.where(overlap > 0, log_scores - (1 - overlap) ** 2 / sigma, -np.inf)
    weights = np.exp(weights - weights.max(-1, keepdims=True))
    placed: Floats = weights @ boxes / weights.sum(-1, keepdims=True)
    return placed


def read_detections(
    raw: Floats, grid: tuple[int, int], calibration: Sequence[float], *,
    nms_iou: float, min_score: float, most: int, vote_sigma: float | None = None,
) -> tuple[Floats, Floats, Indices]:  # fmt: skip
    """Decode a box head's outputs for one image: k boxes, calibrated confidences, int64 classes.

    `raw` (rows · columns, 5 + classes) are objectness logit, (ox, oy, ow, oh), and class logits,
    which a head of a single class does not have; `calibration` (a, b) makes the confidence
    sigmoid(a · logit + b) (Platt scaling). Boxes do not `vote` if `vote_sigma` is None.
    """
    logit = raw[:, 0]
    score, classes = -np.logaddexp(0, -logit), np.zeros(len(raw), np.int64)
    if raw.shape[1] > 5:
        best = raw[:, 5:].max(-1, keepdims=True)
        score -= np.log(np.exp(raw[:, 5:] - best).sum(-1))
        classes = raw[:, 5:].argmax(-1)
        logit = score - np.log(-np.expm1(score.clip(max=-1e-6)))
    confidence = np.exp(-np.logaddexp(0, -(calibration[0] * logit + calibration[1])))
    sure = np.flatnonzero(confidence >= min_score)
    if not len(sure):  # of many domains most find nothing in an image
        return np.empty((0, 4), np.float32), confidence[:0], classes[:0]
    sure = sure[np.argsort(-confidence[sure], kind="stable")]
    boxes = decode(raw[:, 1:5], grid)
    overlap = overlaps(boxes, classes, sure)
    places = suppress(overlap[:, sure], nms_iou, most)
    kept = sure[places]
    # All cells vote, by scores before calibration, so that a box does not depend on `min_score`.
    found = boxes[kept] if vote_sigma is None else vote(boxes, score, overlap[places], vote_sigma)
    return found, confidence[kept], classes[kept]


@dataclass(frozen=True, eq=False, kw_only=True)
class BoxHead(Head):
    """Finds objects: every visual token says objectness, box and class (see `decode`)."""

    finds_boxes: ClassVar[bool] = True
    grid: tuple[int, int]  # rows and columns of visual tokens of an image
    calibration: Tensor  # (2,) float32 on the CPU, Platt scaling of the confidence
    threshold: float  # confidence from which a box counts
    nms_iou: float  # overlap above which the less confident of two boxes of a class is dropped
    most: int  # maximum number of boxes of an image
    vote_sigma: float | None = None  # see `vote`; None in heads of earlier versions

    @classmethod
    def parse(
        cls, kind: str, metadata: Mapping[str, str], tensors: Mapping[str, Tensor], width: int
    ) -> Self:
        labels, weight = parse_labels(metadata), tensors["weight"]
        grid, outputs = parse_json(metadata["grid"]), cls.outputs(labels)
        sides = [type(side) for side in grid]
        expect(sides == [int, int] and min(grid) > 0, "grid", "rows and columns", grid)
        check_shapes(tensors, weight=(outputs, width), bias=(outputs,), calibration=(2,))
        nms_iou, most = float(metadata["nms_iou"]), int(metadata["most"])
        sigma = float(metadata["vote_sigma"]) if "vote_sigma" in metadata else None
        expect(0 <= nms_iou <= 1, "nms_iou", "0 to 1", nms_iou)
        expect(1 <= most <= MAX_BOXES, "most", f"1 to {MAX_BOXES}", most)
        expect(sigma is None or 0 < sigma <= 1, "vote_sigma", "above 0, up to 1", sigma)
        return cls(
            kind=kind, labels=labels, weight=weight.contiguous(), bias=tensors["bias"],
            grid=tuple(grid), calibration=tensors["calibration"],
            threshold=tensors["threshold"].item(), nms_iou=nms_iou, most=most, vote_sigma=sigma,
        )  # fmt: skip

    @staticmethod
    def outputs(labels: Sequence[str]) -> int:
        """Outputs for each visual token; a single class needs no class logits."""
        return 5 + (len(labels) if len(labels) > 1 else 0)

    def metadata(self) -> dict[str, str]:
        lists = {name: json.dumps(getattr(self, name)) for name in ("labels", "grid")}
        votes = {} if self.vote_sigma is None else {"vote_sigma": str(self.vote_sigma)}
        return {**lists, "nms_iou": str(self.nms_iou), "most": str(self.most), **votes}

    def tensors(self) -> dict[str, Tensor]:
        threshold = torch.tensor([self.threshold])
        return {**super().tensors(), "calibration": self.calibration, "threshold": threshold}

    def configured(self, promise: Mapping[str, Any]) -> Self:
        threshold = promise.get("threshold")
        return self if threshold is None else replace(self, threshold=float(threshold))

    def misfit(self, visual: int, images: int) -> str | None:
        rows, columns = self.grid
        if visual and visual != images * rows * columns:
            return (
                f"a {self.kind} head of {rows} × {columns} cells cannot read {visual} visual "
                f"tokens of {plural(images, 'image')}: send images as the bundle's card says"
            )
        return super().misfit(visual, images)

    def inputs(self, last: Tensor, visual: Tensor, places: Tensor | None) -> Tensor:
        return visual.float()

    def interpret(
        self, logits: Tensor, sizes: Sequence[Size], min_score: float | None = None
    ) -> BoxesResult:
        images = logits.numpy().reshape(len(sizes), self.grid[0] * self.grid[1], -1)
        low = self.threshold if min_score is None else min_score
        found = [self.detections(raw, size, low) for raw, size in zip(images, sizes, strict=True)]
        return BoxesResult(kind=self.kind, detections=tuple(found), logits=logits.numpy().copy())

    def detections(self, raw: Floats, size: Size, min_score: float) -> tuple[Detection, ...]:
        """The objects in one image, by falling confidence; `raw` as in `read_detections`."""
        boxes, scores, classes = read_detections(
            raw, self.grid, self.calibration.tolist(), nms_iou=self.nms_iou,
            min_score=min_score, most=self.most, vote_sigma=self.vote_sigma,
        )  # fmt: skip
        width, height = size
        rows = zip(boxes.tolist(), scores.tolist(), classes.tolist(), strict=True)
        return tuple(
            Detection(self.labels[index], score, (x0 * width, y0 * height, x1 * width, y1 * height))
            for (x0, y0, x1, y1), score, index in rows
        )
