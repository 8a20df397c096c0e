"""Pooling `grid` of label heads: means of the visual tokens in 4 × 4 places of an image.

docs/bundle.md describes the format.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

SIDE = 4
"""Rows and columns of places."""
PLACES = SIDE * SIDE
"""Number of places of an image."""


def places_of(rows: int, columns: int, images: int = 1) -> Tensor:
    """Return the place of each visual token in its image.

    Args:
        rows: Rows of visual tokens of an image.
        columns: Columns of visual tokens of an image.
        images: Number of images or frames of this size.

    Returns:
        (images · rows · columns,) int64, indices from 0 (top left) to `PLACES` − 1, row by row.
    """
    row = torch.arange(rows) * SIDE // rows
    column = torch.arange(columns) * SIDE // columns
    return (row[:, None] * SIDE + column).flatten().repeat(images)


def pool_places(seen: Tensor, places: Tensor, real: Tensor) -> Tensor:
    """Average the visual tokens of each place, over all images; zeros where a place has none.

    Args:
        seen: (n, tokens, width), hidden states of the visual tokens.
        places: (n, tokens) int64, place of each token as `places_of` returns it.
        real: (n, tokens) bool, False for padding.

    Returns:
        (n, PLACES · width), the means concatenated in the order of places.
    """
    weights = F.one_hot(places, PLACES).to(seen.dtype) * real[..., None]
    weights = weights / weights.sum(1, keepdim=True).clamp(min=1)
    return torch.einsum("ntp,ntw->npw", weights, seen).flatten(1)
