"""A domain's samples, encoded for training and evaluation when they are first needed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor

from valora_data.contract.base_model import base_folder
from valora_data.cpu import usable_cores
from valora_data.schema import Sample, Split
from valora_train.model.lmm import Lmm
from valora_train.model.prompts import Encoded
from valora_train.settings import AugmentSettings
from valora_train.tasks.augment import Augmenter
from valora_train.tasks.base import DomainTask

logger = logging.getLogger(__name__)
DECODED = 64  # original images that are decoded at a time
PSEUDO_LABELLED = "taught"  # folder of the samples that a teacher labelled


class LabelledSplit(NamedTuple):
    """A split that accuracy is measured on: encoded samples, and the same with true answers."""

    inputs: list[Encoded]
    samples: list[Sample]


class DomainData:
    """A domain's samples, encoded for training and evaluation.

    `inputs` are pseudo-labelled samples, mirrored ones, and augmented views; `splits` have true
    answers.
    """

    def __init__(
        self,
        task: DomainTask,
        pseudo_labelled: Sequence[Sample],
        labelled: Mapping[Split, list[Sample]],
        lmm: Lmm,
        mirror: bool,
        augment: AugmentSettings | None = None,
        seed: int = 0,
    ) -> None:
        self.task = task
        task.prepare(pseudo_labelled)
        shown = any(sample.images for sample in pseudo_labelled)
        mirrored = [task.mirrored(sample) for sample in pseudo_labelled] if mirror and shown else []
        samples = [*pseudo_labelled, *mirrored]
        self.inputs = lmm.encode(
            [task.training_example(sample) for sample in samples], task.whole_prompt
        )
        if augment is not None and augment.views and shown:
            augmenter = Augmenter(augment, task.geometric, seed, lmm.device.type)
            views = _views_that_fit(augment, pseudo_labelled, self.inputs, task.domain.name)
            for view in range(views):
                originals = mirrored if mirrored and view % 2 else pseudo_labelled
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
    augment: AugmentSettings, samples: Sequence[Sample], inputs: Sequence[Encoded], name: str
) -> int:
    """Number of augmented views that stay within the memory for them."""
    sizes = [
        sum(image.width * image.height * 3 for image in sample.images) + item.bytes
        for sample, item in zip(samples, inputs, strict=False)
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


class LazyDomains(dict[str, DomainData]):
    """Domains whose samples are loaded when they are first looked up."""

    def __init__(self, load: Callable[[str], DomainData]) -> None:
        super().__init__()
        self._load = load

    def __missing__(self, name: str) -> DomainData:
        self[name] = self._load(name)
        return self[name]


def pretraining_head(base: str) -> Tensor | None:
    """The pretraining head that a base model may ship, (5, width + 1), bias last."""
    file = Path(base_folder(base)) / "detection_head.safetensors"
    if not file.is_file():
        return None
    parts = load_file(file)
    rows = [
        torch.cat([parts[f"{name}.weight"], parts[f"{name}.bias"][:, None]], dim=1)
        for name in ("objectness", "box")
    ]
    return torch.cat(rows).float()


def make_deterministic(threads: int) -> None:
    """Make a seed give one packing: sums depend on the number of CPU threads (0: all cores)."""
    torch.set_num_threads(threads or usable_cores())
    torch.use_deterministic_algorithms(True, warn_only=True)
    # Nothing reads what it did not write; filling every new tensor takes a twentieth of a step.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
