"""Metrics that are means over samples, with confidence intervals; `evaluate` measures detection."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from valora_data.errors import DataError
from valora_train.metrics.evaluate import BOOTSTRAPS
from valora_train.metrics.vqa_score import vqa_score

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from valora_data.schema import Answer

IOU = 0.5


@dataclass(frozen=True)
class Scores:
    """A metric that is the mean over samples.

    Attributes:
        each: (n,) float64, the metric of each sample.
        details: Further metrics by name.
    """

    each: NDArray[np.float64]
    details: dict[str, float] = field(default_factory=dict)

    @property
    def mean(self) -> float:
        """The mean of the samples; 0 if there are none."""
        return float(self.each.mean()) if len(self.each) else 0.0

    def interval(self, seed: int = 0) -> tuple[float, float]:
        """95 % bootstrap interval of the metric, drawn over samples (percentile method)."""
        n = len(self.each)
        if not n:
            return 0.0, 0.0
        drawn = np.random.default_rng(seed).multinomial(n, np.full(n, 1 / n), size=BOOTSTRAPS)
        low, high = np.quantile(drawn @ self.each / n, [0.025, 0.975])
        return float(low), float(high)


def _pairs(predicted: Sequence[Answer], truth: Sequence[Answer]) -> list[tuple[Answer, Answer]]:
    if len(predicted) != len(truth):
        raise ValueError(f"expected answers to {len(truth)} samples, got {len(predicted)}")
    return list(zip(predicted, truth, strict=True))


def _known(value: Sequence[str], task: str) -> Sequence[str]:
    if not value:
        raise DataError(f"a sample of task {task} has no answer to compare with: leave it out")
    return value


def calibration_error(predicted: Sequence[Answer], truth: Sequence[Answer]) -> float | None:
    """Expected calibration error of chosen labels (Guo et al. 2017), 15 bins of equal width.

    Args:
        predicted: The answer to each sample.
        truth: The true answer to each sample.

    Returns:
        The error; None if not every answer has a probability for each label.
    """
    import torch
    from torchmetrics.functional.classification import binary_calibration_error

    pairs = _pairs(predicted, truth)
    if not pairs or not all(one.soft for one in predicted):
        return None
    hit = torch.tensor([int(one.choice == other.choice) for one, other in pairs])
    confidence = torch.tensor([max(one.soft) for one in predicted])
    return float(binary_calibration_error(confidence, hit, 15))


def top1(predicted: Sequence[Answer], truth: Sequence[Answer]) -> Scores:
    """Top-1 accuracy: the share of samples whose label is right."""
    hits = [
        one.choice is not None and one.choice == other.choice
        for one, other in _pairs(predicted, truth)
    ]
    return Scores(np.array(hits, np.float64))


def exact_counts(predicted: Sequence[Answer], truth: Sequence[Answer]) -> Scores:
    """Share of exact counts; also of those off by one at most, and the mean absolute error."""
    far = 10**6  # distance of what is no number at all
    choices = [
        (one.choice or "", int(other.choice or 0)) for one, other in _pairs(predicted, truth)
    ]
    gaps = np.array(
        [abs((int(choice) if choice.isdecimal() else far) - count) for choice, count in choices],
        np.int64,
    )
    near = gaps[gaps < far // 2]
    details = {"within_one": float((gaps <= 1).mean()) if len(gaps) else 0.0}
    details["mae"] = float(near.mean()) if len(near) else float("nan")
    return Scores((gaps == 0).astype(np.float64), details)


def vqa(predicted: Sequence[Answer], truth: Sequence[Answer]) -> Scores:
    """VQA score: agreement with the annotators, see `vqa_score`.

    Raises:
        DataError: A sample has no answer of an annotator.
    """
    each = [
        vqa_score(one.choice or "", _known(other.answers, "vqa"))
        for one, other in _pairs(predicted, truth)
    ]
    return Scores(np.array(each, np.float64))


def box_accuracy(predicted: Sequence[Answer], truth: Sequence[Answer]) -> Scores:
    """Share of first boxes that overlap a true one by IoU 0.5; also the mean IoU."""
    import torch
    from torchvision.ops import box_iou

    overlaps = []
    for one, other in _pairs(predicted, truth):
        if not one.boxes or not other.boxes:
            overlaps.append(0.0)
            continue
        found = torch.tensor([one.boxes[0].xyxy], dtype=torch.float64)
        meant = torch.tensor([box.xyxy for box in other.boxes], dtype=torch.float64)
        overlaps.append(float(box_iou(found, meant).max()))
    iou = np.array(overlaps, np.float64)
    details = {"mean_iou": float(iou.mean()) if len(iou) else 0.0}
    return Scores((iou >= IOU).astype(np.float64), details)


def cider(predicted: Sequence[Sequence[str]], references: Sequence[Sequence[str]]) -> Scores:
    """CIDEr-D (Vedantam et al. 2015) by pycocoevalcap, between 0 and 10.

    Its tokenizer needs Java; captions are split into words here: lower case, no punctuation.

    Args:
        predicted: A caption for each image, in a list of one; an empty list is no caption.
        references: At least one reference caption for each image.

    Raises:
        DataError: An image has no reference caption.
    """
    from pycocoevalcap.cider.cider import Cider

    candidates = {
        i: [_words(captions[0] if captions else "")] for i, captions in enumerate(predicted)
    }
    known = {
        i: [_words(text) for text in _known(captions, "caption")]
        for i, captions in enumerate(references)
    }
    if not known:
        return Scores(np.zeros(0))
    _, each = Cider().compute_score(known, candidates)
    return Scores(np.asarray(each, np.float64))


def _words(caption: str) -> str:
    return " ".join(re.findall(r"[\w']+", caption.lower()))
