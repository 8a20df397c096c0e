"""Shares of a batch by domain, and its parts: a batch is indices of training samples by domain."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

UNEVEN = 1.1  # most samples of a part of whole domains, as a multiple of what equal parts have


def shares(size: int, names: Sequence[str], first: int) -> dict[str, int]:
    """Equal shares of a number of samples; those from `first` on get what is left over."""
    return {
        name: size // len(names) + (offset < size % len(names))
        for offset, name in enumerate([*names[first:], *names[:first]])
    }


def side_by_side(batch: Mapping[str, Tensor], count: int) -> list[dict[str, Tensor]]:
    """Cut a batch into at most some parts of equal size: of whole domains, where that works out."""
    size = sum(len(rows) for rows in batch.values())
    parts: list[dict[str, Tensor]] = [{} for _ in range(count)]
    sizes = [0] * count
    for name, rows in sorted(batch.items(), key=lambda item: -len(item[1])):
        smallest = sizes.index(min(sizes))
        parts[smallest][name] = rows
        sizes[smallest] += len(rows)
    if max(sizes) <= UNEVEN * size / count:
        return [part for part in parts if part]
    return pieces(batch, math.ceil(size / count))


def pieces(group: Mapping[str, Tensor], most: int) -> list[dict[str, Tensor]]:
    """Cut a batch into pieces of at most `most` samples."""
    pieces: list[dict[str, Tensor]] = [{}]
    room = most
    for name, rows in group.items():
        left = rows
        while len(left):
            if not room:
                pieces.append({})
                room = most
            pieces[-1][name] = left[:room]
            taken = len(pieces[-1][name])
            left, room = left[taken:], room - taken
    return pieces
