"""Metrics of object detection: F1 at IoU 0.5, COCO mAP, calibration error, bootstrap intervals.

pycocotools matches, by descending confidence, so that one matching serves every threshold.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from valora_data.schema import Box
from valora_train.metrics.measures import binary_calibration_error, bootstrap


@dataclass(frozen=True)
class Matches:
    """The detections of a split, matched to the true boxes at IoU 0.5."""

    score: NDArray[np.float64]  # (n,), confidence of each detection
    hit: NDArray[np.bool_]  # (n,), whether it is matched to a true box
    image: NDArray[np.int64]  # (n,), index of its image
    truths: NDArray[np.int64]  # (images,), number of true boxes of each image
    map: float  # COCO's mean average precision over IoU 0.50:0.95, up to 100 detections an image
    ap: Mapping[str, float] = field(default_factory=dict)  # of each class that has objects

    def counts(self, threshold: float) -> NDArray[np.int64]:
        """(images, 3), the hits, detections from a confidence on, and true boxes of each image."""
        images, kept = len(self.truths), self.score >= threshold
        hits = np.bincount(self.image[kept & self.hit], minlength=images)
        return np.stack([hits, np.bincount(self.image[kept], minlength=images), self.truths], 1)

    def f1(self, threshold: float) -> float:
        """F1 of the detections at or above a confidence; 0 if there are no true boxes."""
        return float(_f1(*self.counts(threshold).sum(0)))

    def precision_recall(self, threshold: float) -> tuple[float, float]:
        """Precision and recall of the detections at or above a confidence."""
        hits, found, truths = self.counts(threshold).sum(0)
        return float(hits / max(found, 1)), float(hits / max(truths, 1))

    def f1_interval(self, threshold: float, seed: int = 0) -> tuple[float, float]:
        """95 % bootstrap interval of `f1`, drawn over images."""
        return bootstrap(self.counts(threshold), lambda sums: _f1(*sums.T), seed)

    def above(self, confidence: float) -> Matches:
        """The matches of the detections at or above a confidence; `map` and `ap` stay."""
        kept = self.score >= confidence
        return replace(self, score=self.score[kept], hit=self.hit[kept], image=self.image[kept])

    def best_threshold(self) -> float:
        """The confidence threshold with the highest F1; 0.5 if no detection is matched."""
        if not self.hit.any():
            return 0.5
        order = np.argsort(-self.score, kind="stable")
        score, hits = self.score[order], np.cumsum(self.hit[order])
        f1 = _f1(hits, np.arange(1, len(hits) + 1), self.truths.sum())
        f1[:-1][score[:-1] == score[1:]] = -1  # equal scores: only the last of them counts
        best = int(np.argmax(f1))
        return float((score[best] + np.append(score, 0.0)[best + 1]) / 2)

    def calibration_error(self) -> float:
        """Expected calibration error of the confidences."""
        return binary_calibration_error(self.score, self.hit)


def _f1(hits: Any, found: Any, truths: Any) -> Any:
    return 2 * hits / np.maximum(found + truths, 1)


def match(
    found: Sequence[Sequence[Box]], truth: Sequence[Sequence[Box]], labels: Sequence[str]
) -> Matches:
    """Match the detections of each image, of any confidence, to its true boxes of their labels."""
    if len(found) != len(truth):
        raise ValueError(f"expected detections of {len(truth)} images, got {len(found)}")
    truths = np.array([len(boxes) for boxes in truth], np.int64)
    if not any(found) or not any(truth):  # pycocotools refuses these
        score = np.array([box.confidence for boxes in found for box in boxes], np.float64)
        image = np.repeat(np.arange(len(found)), [len(boxes) for boxes in found])
        ap = {box.label: 0.0 for boxes in truth for box in boxes}
        return Matches(score, np.zeros(len(score), bool), image, truths, 0.0, ap)
    evaluation = _coco_evaluation(found, truth, labels)
    results = [result for result in evaluation.evalImgs if result is not None]
    precision = evaluation.eval["precision"]  # -1 where a class has no objects
    ap = {
        label: float(precision[:, :, place].mean())
        for place, label in enumerate(labels)
        if (precision[:, :, place] > -1).all()
    }
    scores = [np.array(result["dtScores"], np.float64) for result in results]
    hit = np.concatenate([result["dtMatches"][0] > 0 for result in results])
    image = np.repeat([result["image_id"] - 1 for result in results], [len(s) for s in scores])
    mean = float(np.mean(precision[precision > -1]))
    return Matches(np.concatenate(scores), hit, image, truths, mean, ap)


def _coco_evaluation(
    found: Sequence[Sequence[Box]], truth: Sequence[Sequence[Box]], labels: Sequence[str]
) -> Any:
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    category = {label: index for index, label in enumerate(labels, start=1)}

    def rows(images: Sequence[Sequence[Box]]) -> list[dict[str, Any]]:
        return [
            {"image_id": image, "category_id": category[box.label], "iscrowd": 0,
             "bbox": [box.x0, box.y0, box.x1 - box.x0, box.y1 - box.y0], "area": box.area,
             "score": box.confidence}
            for image, boxes in enumerate(images, start=1) for box in boxes
        ]  # fmt: skip

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
