"""A domain's samples, encoded for training and evaluation."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from valora_train.tasks.augment import Augmenter

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from valora_data.schema import Sample, Split
    from valora_train.model.lmm import Lmm
    from valora_train.model.prompts import Encoded
    from valora_train.settings import AugmentSettings
    from valora_train.tasks.base import DomainTask

logger = logging.getLogger(__name__)
DECODED = 64  # original images that are decoded at a time


@dataclass(frozen=True)
class LabelledSplit:
    """A split that accuracy is measured on.

    Attributes:
        inputs: The encoded samples.
        samples: The same samples with their true answers.
    """

    inputs: list[Encoded]
    samples: list[Sample]

    def every(self, most: int) -> LabelledSplit:
        """At most `most` samples of the split, evenly taken and always the same ones."""
        rows = evenly(len(self.samples), most)
        inputs = [self.inputs[row] for row in rows]
        return LabelledSplit(inputs, [self.samples[row] for row in rows])


class DomainData:
    """A domain's samples, encoded for training and evaluation.

    Args:
        task: Task of the domain: prompts, targets, loss and metric.
        taught: Samples that the teacher labelled, for training.
        labelled: Splits with true answers, for evaluation.
        lmm: Encodes every sample once.
        mirror: Whether mirrored images are trained on too.
        augment: Augmented views of the training samples; None for no views.
        seed: Seed of the views.

    Attributes:
        task: Task of the domain.
        inputs: The encoded training samples.
        targets: What the head learns of each training sample; None where the model writes.
        splits: The splits with true answers.
    """

    def __init__(
        self,
        task: DomainTask,
        taught: Sequence[Sample],
        labelled: Mapping[Split, list[Sample]],
        lmm: Lmm,
        mirror: bool,
        augment: AugmentSettings | None = None,
        seed: int = 0,
    ) -> None:
        self.task = task
        task.prepare(taught)
        samples = list(taught)
        mirrored = [task.mirrored(sample) for sample in taught] if mirror else []
        samples += mirrored
        self.inputs = lmm.encode(
            [task.training_example(sample) for sample in samples], task.whole_prompt
        )
        if augment is not None and augment.views:
            augmenter = Augmenter(augment, task.geometric, seed)
            views = _views_that_fit(augment, samples[: len(taught)], self.inputs, task.domain.name)
            for view in range(views):
                originals = mirrored if mirrored and view % 2 else taught
                for start in range(0, len(originals), DECODED):
                    part = [augmenter(one, view) for one in originals[start : start + DECODED]]
                    examples = [task.training_example(sample) for sample in part]
                    self.inputs += lmm.encode(examples, task.whole_prompt)
                    samples += part
        self.targets = task.targets(samples, self.inputs)
        if self.targets is not None:
            self.targets = self.targets.to(lmm.device)
        self.splits = {
            split: LabelledSplit(
                lmm.encode([task.prompt(sample) for sample in samples], task.whole_prompt), samples
            )
            for split, samples in labelled.items()
        }


def _views_that_fit(
    augment: AugmentSettings, taught: Sequence[Sample], inputs: Sequence[Encoded], name: str
) -> int:
    """Number of augmented views that stay within the memory for them."""
    sizes = [
        sum(image.width * image.height * 3 for image in sample.images) + item.bytes
        for sample, item in zip(taught, inputs, strict=False)
    ]
    room = int(augment.memory_gb * 1e9 // max(sum(sizes), 1))
    if room < augment.views:
        logger.warning(
            "domain %s gets %d of %d augmented views, which take %.1f GB each: raise "
            "train.augment.memory_gb for more",
            name, room, augment.views, sum(sizes) / 1e9,
        )  # fmt: skip
    return min(room, augment.views)


def evenly(count: int, most: int) -> list[int]:
    """At most `most` numbers below `count`, evenly spaced and always the same ones."""
    return sorted({round(row * count / most) for row in range(most)} & set(range(count)))
