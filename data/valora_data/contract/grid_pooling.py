"""Pooling `grid` of label heads: what is where, at 4 × 4 places of an image (docs/bundle.md)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

SIDE = 4
PLACES = SIDE * SIDE


def places_of(rows: int, columns: int, images: int = 1) -> Tensor:
    """Return the place in its image of each visual token.

    Args:
        rows: Rows of visual tokens in an image.
        columns: Columns of visual tokens in an image.
        images: Images or frames of this size, one after the other.

    Returns:
        (images · rows · columns,) int64, from 0 (top left), row by row, to `PLACES` − 1.
    """
    row = torch.arange(rows) * SIDE // rows
    column = torch.arange(columns) * SIDE // columns
    return (row[:, None] * SIDE + column).flatten().repeat(images)


def pool_places(seen: Tensor, places: Tensor, real: Tensor) -> Tensor:
    """The mean of the visual tokens in each place, over all images; zeros where there are none.

    Args:
        seen: (n, tokens, width), states of visual tokens.
        places: (n, tokens) int64, see `places_of`.
        real: (n, tokens) bool, which of the tokens there are.

    Returns:
        (n, PLACES · width), one place after the other.
    """
    weights = F.one_hot(places, PLACES).to(seen.dtype) * real[..., None]
    weights = weights / weights.sum(1, keepdim=True).clamp(min=1)
    return torch.einsum("ntp,ntw->npw", weights, seen).flatten(1)
