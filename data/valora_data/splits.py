"""The split of a sample in a set without splits."""

from __future__ import annotations

from hashlib import sha256
from math import isclose
from typing import TYPE_CHECKING

from valora_data.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from valora_data.schema import Split


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
