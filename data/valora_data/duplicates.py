"""Finds images that occur again: equal; or resized, recompressed or mirrored."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageOps

from valora_data.contract.contexts import source_hash
from valora_data.schema import Sample

NEAR_BITS = 16  # largest Hamming distance, of 64 bits, between the hashes of copies
SIDE = 24  # side of the thumbnails that copies are compared by, in pixels
SAME_LEVELS = 18.0
"""Largest difference between thumbnails of copies in any pixel, but for the brightness, of 255
levels in grey: halving with recompression to quality 20 stays below 16. What differs in one place
only has moved before a fixed camera."""
GREY = np.array([0.299, 0.587, 0.114], np.float32)
NEAR_LEVELS = 6.0  # largest mean difference between thumbnails of copies
FLAT = 4.0
"""Standard deviation of the grey levels below which an image is too uniform to be recognised."""
Key = tuple[str, str]  # Name of the split and id of a sample


class Pair(NamedTuple):
    """Two samples of the same picture, the one that came first and the other one."""

    first: Key
    second: Key
    equal: bool  # or only alike: resized, recompressed or mirrored
    disputed: bool = False  # whether they are equal but for their labels

    @property
    def leaks(self) -> bool:
        """Whether the two are in different splits."""
        return self.first[0] != self.second[0]

    def __str__(self) -> str:
        (split, one), (other_split, other) = self.first, self.second
        if one == other and self.leaks:
            return f"id {one} is in {split} and {other_split}"
        if self.equal:
            return f"the image of {one} in {split} is that of {other} in {other_split}"
        return f"{one} in {split} looks like {other} in {other_split}"


class Duplicates:
    """Recognises pictures that occur again, also changed ones if `near`; keeps no images."""

    def __init__(self, near: bool = True) -> None:
        self._near = near
        self._exact: dict[str, tuple[Key, str | None]] = {}  # and the label
        self._ids: dict[str, str] = {}
        self._seen: set[Key] = set()
        self._pairs: list[Pair] = []
        self._prints: list[tuple[Key, Image.Image, np.uint64]] = []  # thumbnails, and hashes

    def add(self, split: str, sample: Sample) -> None:
        """Add a sample; another question about the same image of a split is no copy."""
        key, image = (split, sample.id), (split, sample.id.split("#", 1)[0])
        if image in self._seen:
            return
        self._seen.add(image)
        other = self._ids.setdefault(sample.id, split)
        if other != split:
            self._pairs.append(Pair((other, sample.id), key, equal=True))
        elif sample.images:  # there are none of a document, which its splits share
            mine = key, sample.answer.label
            first, label = self._exact.setdefault(source_hash("", sample.images), mine)
            if first != key:
                self._pairs.append(Pair(first, key, True, label != sample.answer.label))
            elif self._near:
                picture = sample.images[len(sample.images) // 2]
                thumb = picture.resize((SIDE, SIDE), Image.Resampling.BILINEAR)
                if (bits := perceptual_hash(thumb)) is not None:
                    self._prints.append((key, thumb, bits))

    def pairs(self) -> list[Pair]:
        """All pairs so far: each copy with the first sample of its picture."""
        found, known = [*self._pairs], np.array([bits for *_, bits in self._prints], np.uint64)
        for index, (key, thumb, _) in enumerate(self._prints):
            for shown in (thumb, ImageOps.mirror(thumb)):
                bits = perceptual_hash(shown) or np.uint64()
                near = np.flatnonzero(np.bitwise_count(known[:index] ^ bits) <= NEAR_BITS)
                copies = [first for first in near if _alike(self._prints[first][1], shown)]
                if copies:
                    found.append(Pair(self._prints[copies[0]][0], key, equal=False))
                    break
        return found


def perceptual_hash(image: Image.Image) -> np.uint64 | None:
    """Difference hash of an image (`imagehash.dhash`), as 64 bits; None if it is too uniform."""
    import imagehash

    if np.asarray(image.convert("L").resize((9, 8), Image.Resampling.BOX)).std() < FLAT:
        return None
    return np.uint64(int(str(imagehash.dhash(image)), 16))


def _alike(one: Image.Image, other: Image.Image) -> bool:
    gaps = np.asarray(one, np.float32) - np.asarray(other)
    if np.abs(gaps).mean() > NEAR_LEVELS:
        return False
    gaps -= gaps.mean()
    most, usual = np.abs(gaps).max(), np.sqrt(np.square(gaps).mean())
    return bool(np.abs(gaps @ GREY).max() <= SAME_LEVELS and most <= max(8, 10 * usual))


def groups_of(pairs: Iterable[Pair]) -> Mapping[Key, Key]:
    """The first image of the group of each image of a pair; pairs chain to groups."""
    first: dict[Key, Key] = {}

    def root(key: Key) -> Key:
        while first.setdefault(key, key) != key:
            key = first[key]
        return key

    for pair in pairs:
        one, other = ((split, name.split("#", 1)[0]) for split, name in (pair.first, pair.second))
        first[root(other)] = root(one)
    return {key: root(key) for key in list(first)}
