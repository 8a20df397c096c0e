"""How well found boxes match the truth, at the confidence threshold that suits them best."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from valora_data.schema import Box

MIN_IOU = 0.5


def iou(a: Box, b: Box) -> float:
    """Intersection over union of two boxes, in [0, 1]."""
    width = min(a.x1, b.x1) - max(a.x0, b.x0)
    height = min(a.y1, b.y1) - max(a.y0, b.y0)
    if width <= 0 or height <= 0:
        return 0.0
    return width * height / (a.area + b.area - width * height)


def best_f1(found: Sequence[Sequence[Box]], truth: Sequence[Sequence[Box]]) -> tuple[float, float]:
    """F1 at IoU 0.5 over all images and labels, at the threshold that makes it largest.

    A found box, most confident first, takes the free true box of its label that it overlaps most.

    Args:
        found: Per image, boxes with confidences.
        truth: Per image, the true boxes.

    Returns:
        The F1 and the confidence threshold; (0, 1) if nothing is found.
    """
    verdicts: list[tuple[float, bool]] = []
    for guesses, boxes in zip(found, truth, strict=True):
        free = list(boxes)
        for guess in sorted(guesses, key=lambda box: -box.confidence):
            matches = [
                (iou(guess, box), i) for i, box in enumerate(free) if box.label == guess.label
            ]
            overlap, place = max(matches, default=(0.0, -1))
            hit = overlap >= MIN_IOU
            if hit:
                del free[place]
            verdicts.append((guess.confidence, hit))
    total = sum(len(boxes) for boxes in truth)
    best, threshold, hits = 0.0, 1.0, 0
    for count, (confidence, hit) in enumerate(sorted(verdicts, reverse=True), start=1):
        hits += hit
        if (f1 := 2 * hits / (count + total)) > best:
            best, threshold = f1, confidence
    return best, threshold
