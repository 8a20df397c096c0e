"""Disjoint splits: a check for leaks, and the split of a sample in a set without splits."""

from __future__ import annotations

from hashlib import sha256
from math import isclose
from typing import TYPE_CHECKING

from valora_data.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from valora_data.schema import Sample, Split

EXAMPLES = 3


def content_hash(sample: Sample) -> str:
    """SHA-256 of modes, sizes and pixels of a sample's images, whatever file they came from."""
    digest = sha256()
    for image in sample.images:
        digest.update(f"{image.mode} {image.width}x{image.height} ".encode())
        digest.update(image.tobytes())
    return digest.hexdigest()


class LeakCheck:
    """Checks that no id and no image occurs in two splits; keeps hashes, not images."""

    def __init__(self) -> None:
        self._ids: dict[str, Split] = {}
        self._images: dict[str, tuple[Split, str]] = {}
        self._examples: list[str] = []
        self._leaks = 0

    def add(self, split: Split, sample: Sample) -> None:
        """Add a sample."""
        other = self._ids.setdefault(sample.id, split)
        if other != split:
            self._note(f"id {sample.id} is in {other} and {split}")
            return
        place, twin = self._images.setdefault(content_hash(sample), (split, sample.id))
        if place != split:
            self._note(f"the image of {twin} in {place} is that of {sample.id} in {split}")

    def _note(self, leak: str) -> None:
        self._leaks += 1
        if len(self._examples) < EXAMPLES:
            self._examples.append(leak)

    def finish(self) -> None:
        """Raise if anything leaked.

        Raises:
            DataError: An id or image occurs in two splits; the message has the first examples.
        """
        if self._leaks:
            raise DataError(
                f"{self._leaks} samples leak between splits ({'; '.join(self._examples)}): "
                "keep each in one split"
            )


def split_of(sample_id: str, fractions: Mapping[Split, float], seed: int = 0) -> Split:
    """The split of a sample, by a hash of its id, so it does not change when the set grows.

    The part of an id before ``#`` names the image, so all questions about one image share a split.

    Args:
        sample_id: Id of the sample.
        fractions: Share of each split, adding up to 1.
        seed: Seed of the division.

    Raises:
        DataError: The fractions do not add up to 1.
    """
    if any(share < 0 for share in fractions.values()) or not isclose(sum(fractions.values()), 1.0):
        shown = ", ".join(f"{split} {share:g}" for split, share in fractions.items())
        raise DataError(f"fractions of the splits must add up to 1, got {shown}")
    digest = sha256(f"{seed}/{sample_id.split('#', 1)[0]}".encode()).digest()
    place = int.from_bytes(digest[:8], "big") / 2**64
    used = [(split, share) for split, share in fractions.items() if share > 0]
    for split, share in used[:-1]:
        if place < share:
            return split
        place -= share
    return used[-1][0]
