"""Metrics of single classes, and confusion matrices.

Precision, recall and F1 of a class follow from the matrix: its diagonal entry, divided by the sum
of its column (predictions) or row (truths).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from valora_data.schema import Box

BACKGROUND = "background"
"""Where detections match no object, and objects no detection."""
OTHER = "other"
"""Answers that are none of a domain's labels."""
IOU = 0.5
MAX_CLASSES = 50
"""Most classes whose matrix is stored and drawn, and whose metrics MLflow draws."""


@dataclass(frozen=True)
class ClassReport:
    """How well each class of a domain is told from the others.

    Attributes:
        labels: The classes.
        rest: Name of what is none of the classes: `BACKGROUND` or `OTHER`.
        matrix: (classes + 1, classes + 1) int64, counts by truth (row) and prediction (column);
            `rest` comes last.
        ap: COCO's average precision of each class with objects, over IoU 0.50:0.95; empty where
            there are no boxes.
    """

    labels: tuple[str, ...]
    rest: str
    matrix: NDArray[np.int64]
    ap: Mapping[str, float] = field(default_factory=dict)

    def figures(self) -> dict[str, dict[str, float]]:
        """Precision, recall, F1, support (number of truths) and AP of each class.

        Precision is 0 without predictions of the class, recall is 0 without truths.
        """
        hits = np.diagonal(self.matrix)
        found, truths = self.matrix.sum(axis=0), self.matrix.sum(axis=1)
        figures = {}
        for place, label in enumerate(self.labels):
            one = {
                "precision": float(hits[place] / max(found[place], 1)),
                "recall": float(hits[place] / max(truths[place], 1)),
                "f1": float(2 * hits[place] / max(found[place] + truths[place], 1)),
                "support": int(truths[place]),
            }
            if label in self.ap:
                one["ap"] = self.ap[label]
            figures[label] = one
        return figures

    def used(self) -> tuple[list[str], NDArray[np.int64]]:
        """Names and counts of the matrix, without `rest` where nothing belongs there."""
        if self.matrix[-1].any() or self.matrix[:, -1].any():
            return [*self.labels, self.rest], self.matrix
        return list(self.labels), self.matrix[:-1, :-1]

    def as_json(self) -> dict[str, Any]:
        """Figures of each class (`per_class`) and, of few classes, the matrix (`confusion`)."""
        found: dict[str, Any] = {"per_class": self.figures()}
        if len(self.labels) <= MAX_CLASSES:
            names, counts = self.used()
            found["confusion"] = {"names": names, "counts": counts.tolist()}
        return found


def choice_report(
    predicted: Sequence[str | None], truth: Sequence[str | None], labels: Sequence[str]
) -> ClassReport:
    """Compare chosen labels with true ones.

    Args:
        predicted: The chosen label of each sample; None or an unknown one counts as `OTHER`.
        truth: The true label of each sample.
        labels: The classes.
    """
    places = {label: place for place, label in enumerate(labels)}
    matrix = np.zeros((len(labels) + 1, len(labels) + 1), np.int64)
    for one, other in zip(predicted, truth, strict=True):
        row = places.get(other or "", len(labels))
        matrix[row, places.get(one or "", len(labels))] += 1
    return ClassReport(tuple(labels), OTHER, matrix)


def detection_report(
    found: Sequence[Sequence[Box]],
    truth: Sequence[Sequence[Box]],
    labels: Sequence[str],
    threshold: float,
    ap: Mapping[str, float] | None = None,
) -> ClassReport:
    """Compare detections with true boxes at IoU 0.5.

    Detections are first matched to objects of their own class as in COCO (`evaluate.match`), so
    that the diagonal is what F1 counts. A detection that is left over and overlaps a left-over
    object of another class by IoU 0.5 is a confusion of the two; what remains is matched with the
    background.

    Args:
        found: Detections of each image.
        truth: True boxes of each image.
        labels: The classes.
        threshold: Confidence from which a detection counts.
        ap: Average precision of each class, if it is known.
    """
    places = {label: place for place, label in enumerate(labels)}
    rest = len(labels)
    matrix = np.zeros((rest + 1, rest + 1), np.int64)
    for boxes, objects in zip(found, truth, strict=True):
        sure = sorted(
            (box for box in boxes if box.confidence >= threshold), key=lambda box: -box.confidence
        )
        overlaps = _overlaps(sure, objects)
        same = np.array(
            [[box.label == other.label for other in objects] for box in sure], bool
        ).reshape(overlaps.shape)
        free_boxes, free_objects = list(range(len(sure))), list(range(len(objects)))
        for allowed in (same, ~same):
            for box in list(free_boxes):
                near = [
                    other
                    for other in free_objects
                    if allowed[box, other] and overlaps[box, other] >= IOU
                ]
                if near:
                    best = near[int(np.argmax(overlaps[box, near]))]
                    matrix[places[objects[best].label], places[sure[box].label]] += 1
                    free_boxes.remove(box)
                    free_objects.remove(best)
        for box in free_boxes:
            matrix[rest, places[sure[box].label]] += 1
        for other in free_objects:
            matrix[places[objects[other].label], rest] += 1
    return ClassReport(tuple(labels), BACKGROUND, matrix, dict(ap or {}))


def _overlaps(boxes: Sequence[Box], others: Sequence[Box]) -> NDArray[np.float64]:
    """IoU of each pair of boxes, (boxes, others)."""
    import torch
    from torchvision.ops import box_iou

    one, two = (
        torch.tensor([box.xyxy for box in part], dtype=torch.float64).reshape(-1, 4)
        for part in (boxes, others)
    )
    overlaps: NDArray[np.float64] = box_iou(one, two).numpy()
    return overlaps
