"""Metrics that are means over samples, with confidence intervals; `evaluate` measures detection."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torchvision.ops import box_iou

from valora_data.errors import DataError
from valora_data.schema import Answer

BOOTSTRAPS = 1000  # resamples behind an interval
IOU = 0.5
ENOUGH = 3  # annotators who must give an answer for it to score 1
NUMBERS = {
    "none": "0", "zero": "0", "one": "1", "two": "2", "three": "3", "four": "4", "five": "5",
    "six": "6", "seven": "7", "eight": "8", "nine": "9", "ten": "10",
}  # fmt: skip
PUNCTUATION = re.compile(r"[;/\[\]\"{}()=+\\_<>@`?!,\-]")
PERIOD = re.compile(r"(?<!\d)\.|\.(?!\d)")


def bootstrap(
    each: NDArray[Any], statistic: Callable[[NDArray[Any]], Any], seed: int = 0
) -> tuple[float, float]:
    """95 % percentile bootstrap of a `statistic` of sums over samples that add (n,) or (n, k)."""
    n = len(each)
    drawn = np.random.default_rng(seed).multinomial(n, np.full(n, 1 / n), size=BOOTSTRAPS)
    low, high = np.quantile(statistic(drawn @ each), [0.025, 0.975])
    return float(low), float(high)


@dataclass(frozen=True)
class Scores:
    """A metric that is the mean over samples."""

    each: NDArray[np.float64]  # (n,), the metric of each sample
    details: dict[str, float] = field(default_factory=dict)  # further metrics by name

    @property
    def mean(self) -> float:
        """The mean of the samples; 0 if there are none."""
        return float(self.each.mean()) if len(self.each) else 0.0

    def interval(self, seed: int = 0) -> tuple[float, float]:
        """95 % bootstrap interval of the mean; (0, 0) if there are no samples."""
        n = len(self.each)
        return bootstrap(self.each, lambda total: total / n, seed) if n else (0.0, 0.0)


def binary_calibration_error(confidence: Any, hit: Any) -> float:
    """Expected calibration error (Guo et al. 2017), 15 bins of equal width; 0 without answers."""
    from torchmetrics.functional.classification import binary_calibration_error as measured

    if not len(confidence):
        return 0.0
    return float(measured(torch.as_tensor(confidence), torch.as_tensor(hit).long(), 15))


def calibration_error(predicted: Sequence[Answer], truth: Sequence[Answer]) -> float | None:
    """`binary_calibration_error` of chosen labels; None if an answer has no probabilities."""
    if not predicted or not all(one.soft for one in predicted):
        return None
    return binary_calibration_error(
        [max(one.soft) for one in predicted],
        [one.choice == other.choice for one, other in zip(predicted, truth, strict=True)],
    )


def top1(predicted: Sequence[Answer], truth: Sequence[Answer]) -> Scores:
    """Top-1 accuracy: the share of samples whose label is right."""
    pairs = zip(predicted, truth, strict=True)
    hits = [one.choice is not None and one.choice == other.choice for one, other in pairs]
    return Scores(np.array(hits, np.float64))


def exact_counts(predicted: Sequence[Answer], truth: Sequence[Answer]) -> Scores:
    """Share of exact counts; also of those off by one at most, and the mean absolute error."""
    gaps = np.full(len(truth), np.inf)  # of what is no number
    for place, (one, other) in enumerate(zip(predicted, truth, strict=True)):
        if (choice := one.choice or "").isdecimal():
            gaps[place] = abs(int(choice) - int(other.choice or 0))
    near = gaps[np.isfinite(gaps)]
    details = {"within_one": float((gaps <= 1).mean()) if len(gaps) else 0.0}
    details["mae"] = float(near.mean()) if len(near) else float("nan")
    return Scores((gaps == 0).astype(np.float64), details)


def box_accuracy(predicted: Sequence[Answer], truth: Sequence[Answer]) -> Scores:
    """Share of first boxes that overlap a true one by IoU 0.5; also the mean IoU."""
    iou = np.zeros(len(truth))
    for place, (one, other) in enumerate(zip(predicted, truth, strict=True)):
        if one.boxes and other.boxes:
            found = torch.tensor([one.boxes[0].xyxy], dtype=torch.float64)
            meant = torch.tensor([box.xyxy for box in other.boxes], dtype=torch.float64)
            iou[place] = float(box_iou(found, meant).max())
    details = {"mean_iou": float(iou.mean()) if len(iou) else 0.0}
    return Scores((iou >= IOU).astype(np.float64), details)


def known(values: Sequence[str], task: str) -> Sequence[str]:
    """Return the true answers to a sample, of which there must be one."""
    if not values:
        raise DataError(f"a sample of task {task} has no answer to compare with: leave it out")
    return values


def cider(predicted: Sequence[Sequence[str]], references: Sequence[Sequence[str]]) -> Scores:
    """CIDEr-D (Vedantam et al. 2015), 0 to 10, of the first predicted caption of each image."""
    from pycocoevalcap.cider.cider import Cider

    def words(caption: str) -> str:  # its own tokenizer needs Java
        return " ".join(re.findall(r"[\w']+", caption.lower()))

    truth = {i: [words(text) for text in known(some, "caption")]
             for i, some in enumerate(references)}  # fmt: skip
    if not truth:
        return Scores(np.zeros(0))
    found = {i: [words(some[0] if some else "")] for i, some in enumerate(predicted)}
    _, each = Cider().compute_score(truth, found)
    return Scores(np.asarray(each, np.float64))


def vqa(predicted: Sequence[Answer], truth: Sequence[Answer]) -> Scores:
    """VQA score: agreement with the annotators, see `vqa_score`."""
    pairs = zip(predicted, truth, strict=True)
    each = [vqa_score(one.choice or "", known(other.answers, "vqa")) for one, other in pairs]
    return Scores(np.array(each, np.float64))


def vqa_score(said: str, answers: Sequence[str]) -> float:
    """Score an answer against those of all annotators (Antol et al. 2015; VQA v2), in [0, 1].

    The mean of min(agreeing annotators / 3, 1) over all subsets that leave one annotator out; of
    two or three, all of a subset must agree.
    """
    agree = [normalized(answer) == normalized(said) for answer in answers]
    if len(agree) == 1:
        return float(agree[0])
    enough = min(ENOUGH, len(agree) - 1)
    return sum(min((sum(agree) - one) / enough, 1.0) for one in agree) / len(agree)


def normalized(answer: str) -> str:
    """An answer as the VQA evaluation normalises it: case, numbers, punctuation, articles."""
    text = PERIOD.sub("", PUNCTUATION.sub(" ", answer.lower().replace("\n", " ")))
    words = [NUMBERS.get(word, word) for word in text.split() if word not in ("a", "an", "the")]
    return " ".join(words)
