"""Checks of a data set: counts, labels, files that cannot be decoded, leaks between splits."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

from valora_data.schema import Sample, Split, Task
from valora_data.sources.formats.labelled import ImageReader
from valora_data.sources.registry import open_source
from valora_data.splits import content_hash

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    from valora_data.sources.base import Source

THUMB = 8
"""Side of the thumbnails that near duplicates are compared by, in pixels."""
NEAR_BITS = 6
"""Largest Hamming distance, of 64 bits, between the hashes of near duplicates."""
NEAR_LEVELS = 6.0
"""Largest mean difference between the thumbnails of near duplicates, of 255 levels."""
FLAT = 4.0
"""Standard deviation of the grey levels below which an image is too uniform to be recognised."""
KEPT_PICTURES = 12
"""Number of leaks whose images are kept for the contact sheet."""


@dataclass(slots=True)
class SplitFacts:
    """Counts of one split.

    Attributes:
        samples: Number of samples.
        images: Number of images or frames.
        labels: Number of occurrences of each label, answer or object class.
        unanswered: Number of samples without an answer.
        sizes: Number of images of each (width, height) in pixels.
    """

    samples: int = 0
    images: int = 0
    labels: Counter[str] = field(default_factory=Counter)
    unanswered: int = 0
    sizes: Counter[tuple[int, int]] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True)
class Leak:
    """An image that occurs in two splits.

    Attributes:
        first: Split and sample id of the first occurrence.
        second: Split and sample id of the second occurrence.
        exact: True for equal pixels, False for near duplicates.
        pictures: Thumbnails of both, None beyond `KEPT_PICTURES` leaks.
    """

    first: tuple[str, str]
    second: tuple[str, str]
    exact: bool
    pictures: tuple[Image.Image, Image.Image] | None = None


@dataclass(slots=True)
class Inspection:
    """Result of checking a data set.

    Attributes:
        task: Task of the answers.
        splits: Counts by split name; `all` for a set without splits.
        broken: Files that cannot be decoded.
        leaks: Images in two splits, exact ones first.
        duplicates: Number of images that occur again in their own split, not counting several
            questions about one image.
        problems: One sentence for each fault.
    """

    task: Task
    splits: dict[str, SplitFacts] = field(default_factory=dict)
    broken: list[str] = field(default_factory=list)
    leaks: list[Leak] = field(default_factory=list)
    duplicates: int = 0
    problems: list[str] = field(default_factory=list)


def inspect(source: Source, on_sample: Callable[[str, Sample], None] | None = None) -> Inspection:
    """Read a data set from end to end and check it.

    Args:
        source: The source; any number of broken files is tolerated and counted.
        on_sample: Called with the split's name and each sample.

    Raises:
        DataError: The set cannot be read at all.
    """
    reader = ImageReader(source.path or source.name, tolerance=1.0)
    found = Inspection(source.task)
    prints = _Prints()
    for split, stream in open_source(replace(source, reader=reader)).items():
        name = "all" if split is None else str(split)
        if split is None and len(open_source(source)) > 1:
            name = str(Split.TRAIN)
        facts = found.splits.setdefault(name, SplitFacts())
        for sample in stream():
            _note(facts, sample, source.task)
            found.duplicates += prints.add(name, sample)
            if on_sample is not None:
                on_sample(name, sample)
    found.broken = reader.skipped
    found.leaks = prints.leaks()
    found.problems = _problems(found)
    return found


def _note(facts: SplitFacts, sample: Sample, task: Task) -> None:
    answer = sample.answer
    facts.samples += 1
    facts.images += len(sample.images)
    facts.sizes[sample.image.size] += 1
    if task.spec.detects:
        facts.labels.update(box.label for box in answer.boxes)
        return
    if answer.choice is not None:
        facts.labels[answer.choice] += 1
    elif not answer.captions and not answer.boxes:
        facts.unanswered += 1


def _problems(found: Inspection) -> list[str]:
    problems = []
    if found.broken:
        shown = ", ".join(found.broken[:3])
        problems.append(
            f"{len(found.broken)} files cannot be decoded or are missing ({shown}): repair or "
            "remove them"
        )
    for exact, what in ((True, "are in two splits"), (False, "look the same in two splits")):
        leaks = [leak for leak in found.leaks if leak.exact == exact]
        if leaks:
            one = leaks[0]
            problems.append(
                f"{len(leaks)} pictures {what} (such as {one.first[1]} in {one.first[0]} and "
                f"{one.second[1]} in {one.second[0]}): keep each in one split"
            )
    problems += [
        f"split {name} holds no samples: add some"
        for name, facts in found.splits.items()
        if not facts.samples
    ]
    labels = {name: facts.labels for name, facts in found.splits.items() if facts.labels}
    learnt = labels.get(str(Split.TRAIN), labels.get("all"))
    spec = found.task.spec
    if spec.choice and spec.labels == "required" and learnt is not None:
        if len(learnt) == 1:
            problems.append(f"there is only one class, {next(iter(learnt))!r}: add another")
        for name, used in labels.items():
            strange = sorted(set(used) - set(learnt))
            if strange:
                problems.append(
                    f"split {name} has labels that are not in {Split.TRAIN} "
                    f"({', '.join(strange[:5])}): "
                    "give all splits the same label set"
                )
    return problems


class _Prints:
    """Exact hashes, perceptual hashes and thumbnails of all images so far."""

    def __init__(self) -> None:
        self._exact: dict[str, tuple[str, str]] = {}
        self._own: set[tuple[str, str]] = set()
        self._leaks: list[Leak] = []
        self._names: list[tuple[str, str]] = []
        self._bits: list[np.uint64] = []
        self._thumbs: list[npt.NDArray[np.uint8]] = []

    def add(self, split: str, sample: Sample) -> int:
        """Add a sample; returns 1 if its image was already in its split, else 0."""
        image_id = sample.id.split("#", 1)[0]
        if (split, image_id) in self._own:
            return 0  # another question about the same image
        self._own.add((split, image_id))
        digest = content_hash(sample)
        twin = self._exact.setdefault(digest, (split, sample.id))
        if twin != (split, sample.id):
            if twin[0] == split:
                return 1
            small = _small(sample.image)
            pictures = (small, small) if len(self._leaks) < KEPT_PICTURES else None
            self._leaks.append(Leak(twin, (split, sample.id), True, pictures))
            return 0
        middle = sample.images[len(sample.images) // 2]
        bits = perceptual_hash(middle)
        if bits is not None:
            self._names.append((split, sample.id))
            self._bits.append(bits)
            thumb = middle.resize((THUMB, THUMB), Image.Resampling.BOX)
            self._thumbs.append(np.asarray(thumb, dtype=np.uint8))
        return 0

    def leaks(self) -> list[Leak]:
        """All leaks, exact ones first."""
        near: list[Leak] = []
        bits, splits = np.array(self._bits, np.uint64), np.array([n[0] for n in self._names])
        for place, name in enumerate(self._names):
            apart = np.bitwise_count(bits[:place] ^ bits[place])
            others = np.flatnonzero((apart <= NEAR_BITS) & (splits[:place] != name[0]))
            for other in others:
                gap = self._thumbs[place].astype(float) - self._thumbs[other]
                if np.abs(gap).mean() <= NEAR_LEVELS:
                    pictures = None
                    if len(near) < KEPT_PICTURES:
                        first, second = (
                            Image.fromarray(self._thumbs[i]).resize((96, 96), Image.Resampling.BOX)
                            for i in (int(other), place)
                        )
                        pictures = (first, second)
                    near.append(Leak(self._names[int(other)], name, False, pictures))
                    break
        return [*self._leaks, *near]


def perceptual_hash(image: Image.Image) -> np.uint64 | None:
    """Difference hash of an image (`imagehash.dhash`), as 64 bits.

    It survives resizing, recompression and changes of brightness.

    Returns:
        The bits, or None for an image that is too uniform to be recognised.
    """
    import imagehash

    if np.asarray(image.convert("L").resize((9, 8), Image.Resampling.BOX)).std() < FLAT:
        return None
    packed = np.packbits(imagehash.dhash(image).hash)
    return np.uint64(int.from_bytes(packed.tobytes(), "big"))


def _small(image: Image.Image) -> Image.Image:
    copy = image.copy()
    copy.thumbnail((96, 96))
    return copy
