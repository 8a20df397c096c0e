"""Pooling `grid` of label heads: means of the visual tokens in 4 × 4 places of an image."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

SIDE = 4
"""Rows and columns of places."""
PLACES = SIDE * SIDE
"""Number of places of an image."""


def places_of(rows: int, columns: int, images: int = 1) -> Tensor:
    """Return the place of each visual token in its image: (images · rows · columns,) int64.

    `rows` and `columns` are those of an image's visual tokens. Places are indices from 0 (top left)
    to `PLACES` − 1, row by row.
    """
    row = torch.arange(rows) * SIDE // rows
    column = torch.arange(columns) * SIDE // columns
    return (row[:, None] * SIDE + column).flatten().repeat(images)


def pool_places(seen: Tensor, places: Tensor, real: Tensor) -> Tensor:
    """Average hidden states (n, tokens, width) by place: (n, PLACES · width).

    `places` are those of `places_of`, `real` is False for padding, both (n, tokens). A place
    without a token is zeros; one that several images share has the mean over all of them.
    """
    weights = F.one_hot(places, PLACES).to(seen.dtype) * real[..., None]
    weights = weights / weights.sum(1, keepdim=True).clamp(min=1)
    return torch.einsum("ntp,ntw->npw", weights, seen).flatten(1)
