"""Confusion matrices, and the precision, recall and F1 of each class that follow from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torchvision.ops import box_iou

from valora_data.schema import Box
from valora_train.metrics.measures import IOU

BACKGROUND = "background"  # where detections match no object, and objects no detection
OTHER = "other"  # answers that are none of a domain's labels
MAX_CLASSES = 50  # most classes whose matrix is stored and drawn, and whose metrics MLflow draws


@dataclass(frozen=True)
class ClassReport:
    """How well each class of a domain is distinguished from the others."""

    labels: tuple[str, ...]
    rest: str  # name of what is none of the classes: `BACKGROUND` or `OTHER`
    # (classes + 1, classes + 1), counts by truth (row) and prediction (column); `rest` comes last.
    matrix: NDArray[np.int64]
    ap: Mapping[str, float] = field(default_factory=dict)  # as `evaluate.Matches`

    def figures(self) -> dict[str, dict[str, float]]:
        """Precision, recall, F1, support (number of truths) and AP of each class; 0 / 0 is 0."""
        hits = np.diagonal(self.matrix)
        found, truths = self.matrix.sum(axis=0), self.matrix.sum(axis=1)
        return {
            label: {
                "precision": float(hits[place] / max(found[place], 1)),
                "recall": float(hits[place] / max(truths[place], 1)),
                "f1": float(2 * hits[place] / max(found[place] + truths[place], 1)),
                "support": int(truths[place]),
                **({"ap": self.ap[label]} if label in self.ap else {}),
            }
            for place, label in enumerate(self.labels)
        }

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
    """Compare chosen labels with true ones; None or an unknown one counts as `OTHER`."""
    places, rest = {label: place for place, label in enumerate(labels)}, len(labels)
    matrix = np.zeros((rest + 1, rest + 1), np.int64)
    for one, other in zip(predicted, truth, strict=True):
        matrix[places.get(other or "", rest), places.get(one or "", rest)] += 1
    return ClassReport(tuple(labels), OTHER, matrix)


def detection_report(
    found: Sequence[Sequence[Box]],
    truth: Sequence[Sequence[Box]],
    labels: Sequence[str],
    threshold: float,
    ap: Mapping[str, float] | None = None,
) -> ClassReport:
    """Compare detections with true boxes at IoU 0.5: within their class, then across classes."""
    rest = len(labels)
    matrix = np.zeros((rest + 1, rest + 1), np.int64)
    for boxes, objects in zip(found, truth, strict=True):
        sure = [box for box in boxes if box.confidence >= threshold]
        sure.sort(key=lambda box: -box.confidence)
        edges = [torch.tensor([box.xyxy for box in part], dtype=torch.float64).reshape(-1, 4)
                 for part in (sure, objects)]  # fmt: skip
        overlaps = box_iou(*edges).numpy()
        said = np.array([labels.index(box.label) for box in sure], np.int64)
        true = np.array([labels.index(box.label) for box in objects], np.int64)
        pairs = np.full(len(sure), rest)  # the class of each detection's object
        free = np.ones(len(objects), bool)
        same = said[:, None] == true
        for allowed in (same, ~same):
            for box in np.flatnonzero(pairs == rest):
                near = np.where(allowed[box] & free, overlaps[box], 0.0)
                if near.max(initial=0.0) >= IOU:
                    pairs[box], free[near.argmax()] = true[near.argmax()], False
        for row, column in zip(pairs, said, strict=True):
            matrix[row, column] += 1
        matrix[:, rest] += np.bincount(true[free], minlength=rest + 1)
    return ClassReport(tuple(labels), BACKGROUND, matrix, dict(ap or {}))
