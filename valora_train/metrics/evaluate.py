"""Metrics of object detection: F1 at IoU 0.5, COCO mAP, calibration error, bootstrap intervals.

Detections are matched as in COCO (pycocotools): per image and class, in order of descending
confidence, each detection is matched to the unmatched true box with the highest IoU, if that is at
least 0.5. A match never depends on less confident detections, so one matching serves every
confidence threshold.
"""

from __future__ import annotations

import contextlib
import io
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from valora_data.schema import Box

BOOTSTRAPS = 1000
"""Number of bootstrap samples of an interval."""


@dataclass(frozen=True)
class Matches:
    """The detections of a split, matched to the true boxes at IoU 0.5.

    Attributes:
        score: (n,) float64, confidence of each detection.
        hit: (n,) bool, whether the detection is matched to a true box.
        image: (n,) int64, index of the image of each detection.
        truths: (images,) int64, number of true boxes of each image.
        map: COCO's mean average precision over IoU 0.50:0.95, maximum 100 detections per image.
        ap: The same of each class that has objects.
    """

    score: NDArray[np.float64]
    hit: NDArray[np.bool_]
    image: NDArray[np.int64]
    truths: NDArray[np.int64]
    map: float
    ap: Mapping[str, float] = field(default_factory=dict)

    def f1(self, threshold: float) -> float:
        """F1 of the detections at or above a confidence; 0 if there are no true boxes."""
        return float(_f1(*(part.sum() for part in self._counts(threshold))))

    def precision_recall(self, threshold: float) -> tuple[float, float]:
        """Precision and recall of the detections at or above a confidence."""
        hits, found, truths = (part.sum() for part in self._counts(threshold))
        return float(hits / max(found, 1)), float(hits / max(truths, 1))

    def f1_interval(self, threshold: float, seed: int = 0) -> tuple[float, float]:
        """95 % bootstrap interval of `f1`, drawn over images (percentile method)."""
        counts = np.stack(self._counts(threshold))
        images = counts.shape[1]
        drawn = np.random.default_rng(seed).multinomial(
            images, np.full(images, 1 / images), size=BOOTSTRAPS
        )
        low, high = np.quantile(_f1(*(counts @ drawn.T)), [0.025, 0.975])
        return float(low), float(high)

    def above(self, confidence: float) -> Matches:
        """The matches of the detections at or above a confidence; `map` and `ap` stay."""
        kept = self.score >= confidence
        return replace(self, score=self.score[kept], hit=self.hit[kept], image=self.image[kept])

    def best_threshold(self) -> float:
        """The confidence threshold with the highest F1; 0.5 if no detection is matched."""
        if not self.hit.any():
            return 0.5
        order = np.argsort(-self.score, kind="stable")
        hits = np.cumsum(self.hit[order])
        f1 = _f1(hits, np.arange(1, len(order) + 1), self.truths.sum())
        # A threshold cannot separate equal scores: only the last of them counts.
        score = self.score[order]
        f1[:-1][score[:-1] == score[1:]] = -1
        best = int(np.argmax(f1))
        after = score[best + 1] if best + 1 < len(score) else 0.0
        return float((score[best] + after) / 2)

    def calibration_error(self, bins: int = 15) -> float:
        """Expected calibration error of the confidences (Guo et al. 2017), equal-width bins."""
        import torch
        from torchmetrics.functional.classification import binary_calibration_error

        if not len(self.score):
            return 0.0
        return float(
            binary_calibration_error(
                torch.from_numpy(self.score), torch.from_numpy(self.hit.astype(np.int64)), bins
            )
        )

    def _counts(self, threshold: float) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
        """Numbers of matched detections, detections and true boxes of each image."""
        images = len(self.truths)
        kept = self.score >= threshold
        hits = np.bincount(self.image[kept & self.hit], minlength=images)
        found = np.bincount(self.image[kept], minlength=images)
        return hits, found, self.truths


def _f1(hits: Any, found: Any, truths: Any) -> Any:
    return 2 * hits / np.maximum(found + truths, 1)


def match(
    found: Sequence[Sequence[Box]], truth: Sequence[Sequence[Box]], labels: Sequence[str]
) -> Matches:
    """Match the detections of a split to the true boxes.

    Args:
        found: Detections of each image, of any confidence.
        truth: True boxes of each image.
        labels: Label set; a detection only matches true boxes of its own label.

    Returns:
        The matches at IoU 0.5, and mAP.
    """
    if len(found) != len(truth):
        raise ValueError(f"expected detections of {len(truth)} images, got {len(found)}")
    if not any(found) or not any(truth):
        scores = [box.confidence for boxes in found for box in boxes]
        return Matches(
            np.array(scores, np.float64),
            np.zeros(len(scores), bool),
            np.repeat(np.arange(len(found)), [len(boxes) for boxes in found]),
            np.array([len(boxes) for boxes in truth], np.int64),
            0.0,
            {box.label: 0.0 for boxes in truth for box in boxes},
        )
    evaluation = _coco_evaluation(found, truth, labels)
    score, hit, image = [], [], []
    for result in evaluation.evalImgs:
        if result is not None:
            score.extend(result["dtScores"])
            hit.extend(result["dtMatches"][0] > 0)
            image.extend([result["image_id"] - 1] * len(result["dtScores"]))
    precision = evaluation.eval["precision"]
    return Matches(
        np.array(score, np.float64),
        np.array(hit, bool),
        np.array(image, np.int64),
        np.array([len(boxes) for boxes in truth], np.int64),
        float(np.mean(precision[precision > -1])),
        {
            label: float(precision[:, :, place].mean())
            for place, label in enumerate(labels)
            if (precision[:, :, place] > -1).all()
        },
    )


def _coco_evaluation(
    found: Sequence[Sequence[Box]], truth: Sequence[Sequence[Box]], labels: Sequence[str]
) -> Any:
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    category = {label: index for index, label in enumerate(labels, start=1)}

    def rows(images: Sequence[Sequence[Box]]) -> list[dict[str, Any]]:
        return [
            {
                "image_id": image,
                "category_id": category[box.label],
                "bbox": [box.x0, box.y0, box.x1 - box.x0, box.y1 - box.y0],
                "area": box.area,
                "score": box.confidence,
                "iscrowd": 0,
            }
            for image, boxes in enumerate(images, start=1)
            for box in boxes
        ]

    with contextlib.redirect_stdout(io.StringIO()):  # pycocotools prints its progress
        reference = COCO()
        reference.dataset = {
            "images": [{"id": image + 1} for image in range(len(truth))],
            "categories": [{"id": index, "name": name} for name, index in category.items()],
            # An id of 0 would read as "no match".
            "annotations": [row | {"id": index} for index, row in enumerate(rows(truth), start=1)],
            "info": {},
        }
        reference.createIndex()
        evaluation = COCOeval(reference, reference.loadRes(rows(found)), "bbox")
        evaluation.params.areaRng = [[0, 1e10]]
        evaluation.params.areaRngLbl = ["all"]
        evaluation.params.maxDets = [100]
        evaluation.evaluate()
        evaluation.accumulate()
    return evaluation
