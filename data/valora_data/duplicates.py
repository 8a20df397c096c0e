"""Finds images that occur again: equal, resized or recompressed, or mirrored."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image, ImageOps

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    import numpy.typing as npt

    from valora_data.schema import Sample

THUMB = 24
"""Side of the thumbnails that copies are compared by, in pixels."""
NEAR_BITS = 6
"""Largest Hamming distance, of 64 bits, between the hashes of copies."""
MOST_BITS = 16
"""Largest Hamming distance of copies of smooth pictures, whose hashes are half noise."""
NEAR_LEVELS = 6.0
"""Largest mean difference between the thumbnails of copies, of 255 levels."""
NEAR = (NEAR_LEVELS, 14.0)
"""Largest mean difference between the thumbnails of copies, on the whole and in any part of 3 × 3
pixels: where something moved in front of a fixed camera, the latter is larger."""
SMOOTH = (3.0, 8.0)
"""The same for pictures whose hashes differ in more than `NEAR_BITS` bits."""
DETAIL = 64
"""Side of the grey pictures that tell copies whose boxes differ, in pixels."""
SAME_LEVELS = 10.0
"""Largest difference between these pictures of copies, in any pixel: recompression to quality 20
and halving stay below it, and what moved in front of a fixed camera does not."""
FLAT = 4.0
"""Standard deviation of the grey levels below which an image is too uniform to be recognised."""
SAME_PLACE = 0.5
"""Intersection over union from which two boxes are at the same place."""
EXACT_PLACE = 0.8
"""Intersection over union from which they are at exactly the same place."""
SAME_BOXES = 0.8
"""Share of the boxes that must be at the same places in copies."""
Key = tuple[str, str]
"""Name of the split and id of a sample."""


class Likeness(StrEnum):
    """How an image is like another one."""

    EQUAL = "equal"
    ALIKE = "resized or recompressed"
    MIRRORED = "mirrored"


@dataclass(frozen=True, slots=True)
class Pair:
    """Two samples of the same picture.

    Attributes:
        first: Split and id of the sample that came first.
        second: Split and id of the other one.
        likeness: How their images are alike.
    """

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


@dataclass(frozen=True, slots=True)
class _Print:
    """What a picture is recognised by.

    Attributes:
        key: Split and id of the sample.
        bits: Perceptual hash.
        mirrored: Perceptual hash of the mirror image.
        thumb: Thumbnail, uint8 of shape (`THUMB`, `THUMB`, 3).
        detail: Grey levels, uint8 of shape (`DETAIL`, `DETAIL`).
        boxes: Edges of the objects as shares of the image, float of shape (n, 4); None where
            objects are not what is asked for.
    """

    key: Key
    bits: np.uint64
    mirrored: np.uint64
    thumb: npt.NDArray[np.uint8]
    detail: npt.NDArray[np.uint8]
    boxes: npt.NDArray[np.float64] | None


class Duplicates:
    """Recognises pictures that occur again; keeps hashes and thumbnails, not images.

    Args:
        near: Whether to look for copies whose pixels differ, too.
    """

    def __init__(self, near: bool = True) -> None:
        self._near = near
        self._exact: dict[str, Key] = {}
        self._ids: dict[str, str] = {}
        self._seen: set[Key] = set()
        self._pairs: list[Pair] = []
        self._prints: list[_Print] = []

    def add(self, split: str, sample: Sample) -> None:
        """Add a sample; another question about the same image of a split is no copy."""
        image_id = sample.id.split("#", 1)[0]
        if (split, image_id) in self._seen:
            return
        self._seen.add((split, image_id))
        key = (split, sample.id)
        other = self._ids.setdefault(sample.id, split)
        if other != split:
            self._pairs.append(Pair((other, sample.id), key, Likeness.EQUAL))
            return
        if not sample.images:  # questions about a document, which its splits share
            return
        first = self._exact.setdefault(content_hash(sample), key)
        if first != key:
            self._pairs.append(Pair(first, key, Likeness.EQUAL))
            return
        if not self._near:
            return
        picture = sample.images[len(sample.images) // 2]
        thumb = picture.resize((THUMB, THUMB), Image.Resampling.BOX)
        bits = perceptual_hash(thumb)
        mirrored = perceptual_hash(ImageOps.mirror(thumb))
        if bits is not None and mirrored is not None:
            levels = np.asarray(thumb, dtype=np.uint8)
            small = picture.convert("L").resize((DETAIL, DETAIL), Image.Resampling.BILINEAR)
            detail = np.asarray(small, dtype=np.uint8)
            boxes = _places(sample, picture)
            self._prints.append(_Print(key, bits, mirrored, levels, detail, boxes))

    def pairs(self) -> list[Pair]:
        """All pairs so far: each copy with the first sample of its picture."""
        return [*self._pairs, *self._near_pairs()]

    def _near_pairs(self) -> Iterator[Pair]:
        prints = self._prints
        if not prints:
            return
        bits = np.array([found.bits for found in prints])
        thumbs = np.stack([found.thumb for found in prints])
        parts = np.stack([_parts(found.thumb) for found in prints])
        for likeness in (Likeness.ALIKE, Likeness.MIRRORED):
            flip = likeness is Likeness.MIRRORED
            for place, found in enumerate(prints):
                shown = _mirrored(found) if flip else found
                apart = np.bitwise_count(bits[:place] ^ shown.bits)
                near = np.flatnonzero(apart <= MOST_BITS)
                gaps = np.abs(parts[near] - _parts(shown.thumb)).mean(axis=(1, 2, 3))
                near = near[gaps <= NEAR_LEVELS]  # cheap, and leaves few
                limits = np.where(apart[near, None] <= NEAR_BITS, NEAR, SMOOTH)
                alike, everywhere = _compare(thumbs[near], shown.thumb, limits)
                for first, same in zip(near[alike], everywhere[alike], strict=True):
                    if _is_copy(prints[first], shown, same):
                        yield Pair(prints[first].key, found.key, likeness)
                        break


def content_hash(sample: Sample) -> str:
    """SHA-256 of modes, sizes and pixels of a sample's images, whatever file they came from."""
    digest = sha256()
    for image in sample.images:
        digest.update(f"{image.mode} {image.width}x{image.height} ".encode())
        digest.update(image.tobytes())
    return digest.hexdigest()


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


def groups_of(pairs: Iterable[Pair]) -> Mapping[Key, Key]:
    """The first image of its group for every image of a pair; pairs chain to groups.

    Keys have the id of the image, which is the part of the sample's id before ``#``.
    """
    first: dict[Key, Key] = {}

    def root(key: Key) -> Key:
        while first.setdefault(key, key) != key:
            key = first[key]
        return key

    for pair in pairs:
        one, other = ((split, name.split("#", 1)[0]) for split, name in (pair.first, pair.second))
        first[root(other)] = root(one)
    return {key: root(key) for key in list(first)}


def _parts(levels: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """Means of the parts of 3 × 3 pixels of a thumbnail, of shape (8, 8, 3)."""
    side = THUMB // 3
    means: npt.NDArray[np.float32] = levels.reshape(side, 3, side, 3, 3).mean(
        axis=(1, 3), dtype=np.float32
    )
    return means


def _mirrored(found: _Print) -> _Print:
    boxes = found.boxes
    if boxes is not None:
        edges = (1 - boxes[:, 2], boxes[:, 1], 1 - boxes[:, 0], boxes[:, 3])
        boxes = np.stack(edges, axis=1)
    thumb, detail = found.thumb[:, ::-1], found.detail[:, ::-1]
    return _Print(found.key, found.mirrored, found.bits, thumb, detail, boxes)


def _compare(
    thumbs: npt.NDArray[np.uint8], shown: npt.NDArray[np.uint8], limits: npt.NDArray[np.float64]
) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """Whether thumbnails agree with another one, but for the brightness.

    Args:
        thumbs: Shape (n, `THUMB`, `THUMB`, 3).
        shown: Shape (`THUMB`, `THUMB`, 3).
        limits: Largest mean difference on the whole and in any part, of shape (n, 2).

    Returns:
        Whether they agree on the whole, and whether they do in every part, each of shape (n,).
    """
    gaps = thumbs.astype(np.float32) - shown
    alike = np.abs(gaps).mean(axis=(1, 2, 3)) <= NEAR_LEVELS
    gaps -= gaps.mean(axis=(1, 2, 3), keepdims=True)
    gaps = np.abs(gaps)
    alike &= gaps.mean(axis=(1, 2, 3)) <= limits[:, 0]
    side = THUMB // 3
    in_parts = gaps.reshape(-1, side, 3, side, 3, 3).mean(axis=(2, 4, 5))
    return alike, in_parts.max(axis=(1, 2), initial=0) <= limits[:, 1]


def _is_copy(one: _Print, other: _Print, everywhere: bool) -> bool:
    """Whether one of two pictures that are alike on the whole is a copy of the other.

    Args:
        one: The first.
        other: The second, mirrored where that is what is compared.
        everywhere: Whether they are alike in every part.
    """
    gap = one.detail.astype(np.float32) - other.detail
    if np.abs(gap - gap.mean()).max() <= SAME_LEVELS:
        return True  # whatever was labelled: two people may have
    if not everywhere and not _boxed_alike(one.boxes, other.boxes):
        return False
    return _same_boxes(one.boxes, other.boxes, SAME_PLACE)


def _boxed_alike(
    one: npt.NDArray[np.float64] | None, other: npt.NDArray[np.float64] | None
) -> bool:
    """Whether pictures have objects at exactly the same places, so that little was put over one."""
    known = one is not None and other is not None and len(one) and len(other)
    return bool(known) and _same_boxes(one, other, EXACT_PLACE)


def _same_boxes(
    one: npt.NDArray[np.float64] | None,
    other: npt.NDArray[np.float64] | None,
    least_iou: float,
) -> bool:
    """Whether boxes are at the same places; where one picture has none, they do not tell."""
    if one is None or other is None or not len(one) or not len(other):
        return True
    least = np.maximum(one[:, None, :2], other[None, :, :2])
    most = np.minimum(one[:, None, 2:], other[None, :, 2:])
    shared = np.prod(np.clip(most - least, 0, None), axis=2)
    areas = [np.prod(boxes[:, 2:] - boxes[:, :2], axis=1) for boxes in (one, other)]
    iou = shared / (areas[0][:, None] + areas[1][None] - shared)
    from scipy.optimize import linear_sum_assignment

    rows, columns = linear_sum_assignment(-iou)
    matched = int((iou[rows, columns] >= least_iou).sum())
    return matched >= SAME_BOXES * max(len(one), len(other))


def _places(sample: Sample, picture: Image.Image) -> npt.NDArray[np.float64] | None:
    if sample.prompt is not None:  # the boxes are those of one question
        return None
    edges: Sequence[tuple[float, ...]] = [box.xyxy for box in sample.answer.boxes]
    scale = (picture.width, picture.height, picture.width, picture.height)
    return np.array(edges, np.float64).reshape(-1, 4) / scale
