"""The standard metric of each task, from what was said to a number with an interval.

Detection has its own, in `evaluate`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from valora_data.errors import DataError
from valora_data.schema import Task
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
        each: (n,) float64, what every sample adds to it.
        details: Further metrics by name.
    """

    each: NDArray[np.float64]
    details: dict[str, float] = field(default_factory=dict)

    @property
    def mean(self) -> float:
        """The metric."""
        return float(self.each.mean()) if len(self.each) else 0.0

    def interval(self, seed: int = 0) -> tuple[float, float]:
        """95 % bootstrap interval of the metric, drawn over samples (percentile method)."""
        n = len(self.each)
        if not n:
            return 0.0, 0.0
        drawn = np.random.default_rng(seed).multinomial(n, np.full(n, 1 / n), size=BOOTSTRAPS)
        low, high = np.quantile(drawn @ self.each / n, [0.025, 0.975])
        return float(low), float(high)


def measure(task: Task, said: Sequence[Answer], truth: Sequence[Answer]) -> Scores:
    """Compare answers with the truth by the task's standard metric.

    Args:
        task: Any but detection.
        said: What a model or teacher answered to each sample.
        truth: What is true of each.

    Raises:
        DataError: If the truth of a sample is not known.
    """
    if len(said) != len(truth):
        raise ValueError(f"expected answers to {len(truth)} samples, got {len(said)}")
    match task:
        case Task.CLASSIFICATION | Task.VIDEO:
            return _top1(said, truth)
        case Task.COUNTING:
            return _counts(said, truth)
        case Task.VQA:
            each = [
                vqa_score(one.choice or "", _known(other.answers, task))
                for one, other in zip(said, truth, strict=True)
            ]
            return Scores(np.array(each, np.float64))
        case Task.CAPTION:
            return cider([one.captions for one in said], [other.captions for other in truth])
        case Task.GROUNDING:
            return _grounding(said, truth)
    raise ValueError(f"detection is measured by valora_train.metrics.evaluate, got task {task}")


def _known(value: Sequence[str], task: Task) -> Sequence[str]:
    if not value:
        raise DataError(f"a sample of task {task} has no answer to compare with: leave it out")
    return value


def _top1(said: Sequence[Answer], truth: Sequence[Answer]) -> Scores:
    hits = [
        one.choice is not None and one.choice == other.choice
        for one, other in zip(said, truth, strict=True)
    ]
    return Scores(np.array(hits, np.float64))


def _counts(said: Sequence[Answer], truth: Sequence[Answer]) -> Scores:
    """Exact counts; also those that are off by one at most, and the mean absolute error."""
    far = 10**6  # of what is no number at all
    choices = [answer.choice or "" for answer in said]
    counts = [int(choice) if choice.isdecimal() else far for choice in choices]
    gaps = np.array(
        [abs(c - int(other.choice or 0)) for c, other in zip(counts, truth, strict=True)], np.int64
    )
    near = gaps[gaps < far // 2]
    details = {"within_one": float((gaps <= 1).mean()) if len(gaps) else 0.0}
    details["mae"] = float(near.mean()) if len(near) else float("nan")
    return Scores((gaps == 0).astype(np.float64), details)


def _grounding(said: Sequence[Answer], truth: Sequence[Answer]) -> Scores:
    """Whether the first box that is said overlaps the true one by IoU 0.5; also the mean IoU."""
    import torch
    from torchvision.ops import box_iou

    overlaps = []
    for one, other in zip(said, truth, strict=True):
        if not one.boxes or not other.boxes:
            overlaps.append(0.0)
            continue
        found = torch.tensor([one.boxes[0].xyxy], dtype=torch.float64)
        meant = torch.tensor([box.xyxy for box in other.boxes], dtype=torch.float64)
        overlaps.append(float(box_iou(found, meant).max()))
    iou = np.array(overlaps, np.float64)
    details = {"mean_iou": float(iou.mean()) if len(iou) else 0.0}
    return Scores((iou >= IOU).astype(np.float64), details)


def cider(said: Sequence[Sequence[str]], references: Sequence[Sequence[str]]) -> Scores:
    """CIDEr-D (Vedantam et al. 2015) by pycocoevalcap, between 0 and 10.

    Its tokenizer needs Java, so that words are cut here: lower case, without punctuation.

    Args:
        said: A caption for each image, in a list of one; an empty list says nothing.
        references: At least one for each.
    """
    from pycocoevalcap.cider.cider import Cider

    candidates = {i: [_words(captions[0] if captions else "")] for i, captions in enumerate(said)}
    known = {
        i: [_words(text) for text in _known(captions, Task.CAPTION)]
        for i, captions in enumerate(references)
    }
    if not known:
        return Scores(np.zeros(0))
    _, each = Cider().compute_score(known, candidates)
    return Scores(np.asarray(each, np.float64))


def _words(caption: str) -> str:
    return " ".join(re.findall(r"[\w']+", caption.lower()))
