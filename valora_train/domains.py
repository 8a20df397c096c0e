"""Stage `data`: a domain's samples, split for good.

Output: one Hugging Face data set per split (`valora_data.shards`), and `unlabelled_truth`, the
labels of the unlabelled split. Nothing learns from those; they tell how well a teacher labels.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from valora_data import shards
from valora_data.errors import DataError
from valora_data.schema import Answer, Sample, Split
from valora_data.splits import check_no_leak, split_samples
from valora_train.settings import as_dict
from valora_train.stage import Stage, digest

if TYPE_CHECKING:
    from valora_train.settings import DomainSettings, SourceSettings

TRUTH = "unlabelled_truth"


def data_stage(domain: DomainSettings) -> Stage:
    """The stage that makes a domain's data."""
    source = domain.source
    inputs = {}
    for path in (source.path, source.images):
        if path is not None:
            if not Path(path).exists():
                raise DataError(f"data of domain {domain.name} not found: {path} does not exist")
            inputs[path] = digest(Path(path))
    settings = {"labels": domain.labels, "name": domain.name, "source": as_dict(source)}
    return Stage(f"data-{domain.name}", 2, settings, inputs)


def build_data(domain: DomainSettings, folder: Path) -> None:
    """Fill the stage's folder.

    Raises:
        DataError: If a split would be empty, or shares an image with another.
    """
    splits = _splits(domain)
    for split in Split:
        if not splits.get(split):
            raise DataError(
                f"domain {domain.name} has no {split} samples: add some, or raise the share in "
                f"domains.{domain.name}.source"
            )
    check_no_leak(splits)
    for split, samples in splits.items():
        if split is Split.UNLABELLED:
            shards.write(samples, domain.labels, folder / TRUTH)
            samples = [replace(sample, answer=Answer()) for sample in samples]  # noqa: PLW2901
        shards.write(samples, domain.labels, folder / split)


def _splits(domain: DomainSettings) -> dict[Split, list[Sample]]:
    source = domain.source
    if source.kind == "scenes":
        from valora_data.sources.detection_scenes import detection_samples

        return {
            split: list(detection_samples(domain.name, split, source.counts[split], source.seed))
            for split in Split
        }
    if source.path is None:
        raise DataError(
            f"domain {domain.name} has no file to read: set domains.{domain.name}.source.path"
        )
    if source.kind == "coco":
        from valora_data.sources.coco import read_coco

        images = Path(source.images) if source.images else Path(source.path).parent
        samples = list(read_coco(Path(source.path), images, domain.labels))
        return split_samples(samples, _fractions(source, list(Split)), source.seed)
    return _yolo_splits(domain)


def _yolo_splits(domain: DomainSettings) -> dict[Split, list[Sample]]:
    """The splits that the YAML names; what it lacks is taken out of its training images."""
    from valora_data.sources.yolo import read_yolo, yolo_splits

    source = domain.source
    path = Path(source.path or "")
    named = yolo_splits(path)
    found = {
        split: list(read_yolo(path, split, domain.labels))
        for split in (Split.VAL, Split.TEST)
        if split in named
    }
    samples = list(read_yolo(path, Split.TRAIN, domain.labels))
    missing = [split for split in Split if split not in found]
    return split_samples(samples, _fractions(source, missing), source.seed) | found


def _fractions(source: SourceSettings, splits: list[Split]) -> dict[Split, float]:
    """The shares of `splits`, scaled to add up to one."""
    shares = {split: source.fractions.get(split, 0.25) for split in splits}
    total = sum(shares.values())
    return {split: share / total for split, share in shares.items()}
