"""Splits that share nothing: checked for given ones, made for sets that come in one piece."""

from __future__ import annotations

from hashlib import sha256
from math import isclose
from typing import TYPE_CHECKING

from valora_data.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from valora_data.schema import Sample, Split

EXAMPLES = 3


def content_hash(sample: Sample) -> str:
    """SHA-256 of an image's mode, size and pixels, whatever file it came from."""
    image = sample.image
    head = f"{image.mode} {image.width}x{image.height} ".encode()
    return sha256(head + image.tobytes()).hexdigest()


def check_no_leak(splits: Mapping[Split, Iterable[Sample]]) -> None:
    """See to it that no id and no image occurs in two splits.

    Args:
        splits: Samples per split; consumed once.

    Raises:
        DataError: If one does, with the first examples.
    """
    seen_ids: dict[str, Split] = {}
    seen_images: dict[str, tuple[Split, str]] = {}
    leaks = []
    for split, samples in splits.items():
        for sample in samples:
            other = seen_ids.setdefault(sample.id, split)
            if other != split:
                leaks.append(f"id {sample.id} is in {other} and {split}")
                continue
            place, twin = seen_images.setdefault(content_hash(sample), (split, sample.id))
            if place != split:
                leaks.append(f"the image of {twin} in {place} is that of {sample.id} in {split}")
    if leaks:
        raise DataError(
            f"{len(leaks)} samples leak between splits ({'; '.join(leaks[:EXAMPLES])}): "
            "keep each in one split"
        )


def split_samples(
    samples: Iterable[Sample], fractions: Mapping[Split, float], seed: int = 0
) -> dict[Split, list[Sample]]:
    """Divide samples by a hash of their ids, so that a sample stays where it is as a set grows.

    Args:
        samples: What to divide; order is kept.
        fractions: Share of each split, adding up to 1.
        seed: Another seed gives another division.

    Returns:
        The samples of each split; sizes match the fractions on average only.

    Raises:
        DataError: If the fractions are no shares of 1, or a split that should get samples gets
            none.
    """
    if any(share < 0 for share in fractions.values()) or not isclose(sum(fractions.values()), 1.0):
        shown = ", ".join(f"{split} {share:g}" for split, share in fractions.items())
        raise DataError(f"fractions of the splits must add up to 1, got {shown}")
    divided: dict[Split, list[Sample]] = {split: [] for split in fractions}
    used = [(split, share) for split, share in fractions.items() if share > 0]
    for sample in samples:
        digest = sha256(f"{seed}/{sample.id}".encode()).digest()
        place = int.from_bytes(digest[:8], "big") / 2**64
        chosen = used[-1][0]
        for split, share in used[:-1]:
            if place < share:
                chosen = split
                break
            place -= share
        divided[chosen].append(sample)
    empty = [split for split, _ in used if not divided[split]]
    if empty:
        raise DataError(
            f"split {empty[0]} gets no samples: add samples or raise its share "
            f"({fractions[empty[0]]:g})"
        )
    return divided
