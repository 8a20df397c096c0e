"""Finds images that occur again: equal, resized or recompressed, or mirrored."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from enum import StrEnum
from hashlib import sha256
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageOps

from valora_data.schema import Sample

NEAR_BITS = 16  # largest Hamming distance, of 64 bits, between the hashes of copies
SIDE = 24  # side of the thumbnails that copies are compared by, in pixels
SAME_LEVELS = 18.0
"""Largest difference between thumbnails of copies in any pixel, but for the brightness, of 255
levels: in grey, halving with recompression to quality 20 stays below 16, and a patch of a thirtieth
of the width that moved before a fixed camera exceeds 40."""
GREY = np.array([0.299, 0.587, 0.114], np.float32)
NEAR_LEVELS = 6.0
"""Largest mean difference between thumbnails of copies with the same boxes: a text may lie over."""
FLAT = 4.0
"""Standard deviation of the grey levels below which an image is too uniform to be recognised."""
SAME_PLACE = 0.8  # intersection over union from which two boxes are at the same place
SAME_BOXES = 0.8  # share of the boxes that must be at the same places
Key = tuple[str, str]  # Name of the split and id of a sample


class Likeness(StrEnum):
    """How an image is like another one."""

    EQUAL = "equal"
    ALIKE = "resized or recompressed"
    MIRRORED = "mirrored"


class Pair(NamedTuple):
    """Two samples of the same picture, the one that came first and the other one."""

    first: Key
    second: Key
    likeness: Likeness

    @property
    def leaks(self) -> bool:
        """Whether the two are in different splits."""
        return self.first[0] != self.second[0]

    def __str__(self) -> str:
        """The pair in words."""
        (split, one), (other_split, other) = self.first, self.second
        if one == other and self.leaks:
            return f"id {one} is in {split} and {other_split}"
        if self.likeness is Likeness.EQUAL:
            return f"the image of {one} in {split} is that of {other} in {other_split}"
        return f"{one} in {split} is, {self.likeness}, {other} in {other_split}"


class _Print(NamedTuple):
    """What a picture is recognised by; `boxes` has shape (n, 4), in shares of the image."""

    key: Key
    bits: np.uint64
    mirrored: np.uint64
    thumb: npt.NDArray[np.uint8]
    boxes: npt.NDArray[np.float64]

    def mirror(self) -> _Print:
        x0, y0, x1, y1 = self.boxes.T
        boxes = np.stack([1 - x1, y0, 1 - x0, y1], axis=1)
        return _Print(self.key, self.mirrored, self.bits, self.thumb[:, ::-1], boxes)


class Duplicates:
    """Recognises pictures that occur again, also changed ones if `near`; keeps no images."""

    def __init__(self, near: bool = True) -> None:
        self._near = near
        self._exact: dict[str, Key] = {}
        self._ids: dict[str, str] = {}
        self._seen: set[Key] = set()
        self._pairs: list[Pair] = []
        self._prints: list[_Print] = []

    def add(self, split: str, sample: Sample) -> None:
        """Add a sample; another question about the same image of a split is no copy."""
        key, image = (split, sample.id), (split, sample.id.split("#", 1)[0])
        if image in self._seen:
            return
        self._seen.add(image)
        other = self._ids.setdefault(sample.id, split)
        if other != split:
            self._pairs.append(Pair((other, sample.id), key, Likeness.EQUAL))
            return
        if not sample.images:  # questions about a document, which its splits share
            return
        first = self._exact.setdefault(content_hash(sample), key)
        if first != key:
            self._pairs.append(Pair(first, key, Likeness.EQUAL))
        elif self._near:
            picture = sample.images[len(sample.images) // 2]
            thumb = picture.resize((SIDE, SIDE), Image.Resampling.BILINEAR)
            bits, mirrored = perceptual_hash(thumb), perceptual_hash(ImageOps.mirror(thumb))
            # Where samples have prompts, the boxes are those of one question.
            known = sample.answer.boxes if sample.prompt is None else ()
            boxes = np.array([box.xyxy for box in known], np.float64).reshape(-1, 4)
            boxes /= [*picture.size, *picture.size]
            if bits is not None and mirrored is not None:
                self._prints.append(_Print(key, bits, mirrored, np.asarray(thumb), boxes))

    def pairs(self) -> list[Pair]:
        """All pairs so far: each copy with the first sample of its picture."""
        return [*self._pairs, *self._near_pairs()]

    def _near_pairs(self) -> Iterator[Pair]:
        prints = self._prints
        bits = np.array([one.bits for one in prints], np.uint64)
        for likeness in (Likeness.ALIKE, Likeness.MIRRORED):
            for place, one in enumerate(prints):
                shown = one.mirror() if likeness is Likeness.MIRRORED else one
                apart = np.bitwise_count(bits[:place] ^ shown.bits)
                for first in np.flatnonzero(apart <= NEAR_BITS):
                    if _is_copy(prints[first], shown):
                        yield Pair(prints[first].key, one.key, likeness)
                        break


def content_hash(sample: Sample) -> str:
    """SHA-256 of modes, sizes and pixels of a sample's images, whatever file they came from."""
    digest = sha256()
    for image in sample.images:
        digest.update(f"{image.mode} {image.width}x{image.height} ".encode())
        digest.update(image.tobytes())
    return digest.hexdigest()


def perceptual_hash(image: Image.Image) -> np.uint64 | None:
    """Difference hash of an image (`imagehash.dhash`), as 64 bits; None if it is too uniform."""
    import imagehash

    if np.asarray(image.convert("L").resize((9, 8), Image.Resampling.BOX)).std() < FLAT:
        return None
    return np.uint64(int(str(imagehash.dhash(image)), 16))


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


def _is_copy(one: _Print, other: _Print) -> bool:
    """Whether pictures differ nowhere (recompression changes colours), or have the same boxes."""
    gaps = one.thumb.astype(np.float32) - other.thumb
    if np.abs(gaps).mean() > NEAR_LEVELS:
        return False
    if np.abs(gaps - gaps.mean()).max() <= SAME_LEVELS:
        return True
    if len(one.boxes) and len(other.boxes):
        return _same_boxes(one.boxes, other.boxes)
    grey = gaps @ GREY
    return bool(np.abs(grey - grey.mean()).max() <= SAME_LEVELS)


def _same_boxes(one: npt.NDArray[np.float64], other: npt.NDArray[np.float64]) -> bool:
    """Whether most of the boxes of two pictures are at the same places."""
    from torch import from_numpy
    from torchvision.ops import box_iou

    near = box_iou(from_numpy(one), from_numpy(other)) >= SAME_PLACE
    matched = min(int(near.any(0).sum()), int(near.any(1).sum()))
    return bool(matched >= SAME_BOXES * max(near.shape))
