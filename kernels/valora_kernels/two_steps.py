"""The LoRA operator in two steps, between which GPUs can exchange h = scale · x Aᵀ (S-LoRA §6)."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from valora_kernels import launching
from valora_kernels.arrangements import whole_shrink
from valora_kernels.atmm import aligned, table_choice
from valora_kernels.launching import padded_ranks, places_of, readable, use_triton
from valora_kernels.reference import expand_reference, shrink_reference

if TYPE_CHECKING:
    from valora_kernels.metadata import LoraBatch
    from valora_kernels.tiling import Tiling
    from valora_kernels.weights import LoraWeights, Tensors


class Shrunk(NamedTuple):
    """h [projections, terms, places, ranks], contiguous, until the next `shrink`.

    In x's dtype and places of tiles, by `tiling`; without kernels in fp32 and places of rows. Its
    layout is the same on all GPUs that call with the same batch and widths.
    """

    h: torch.Tensor
    tiling: Tiling | None


def shrink(
    x: torch.Tensor, weights: LoraWeights, batch: LoraBatch, *, tiling: Tiling | None = None
) -> Shrunk:
    """Compute h = coefficient · scaling · x Aᵀ of each projection for x [rows, in_features]."""
    if tiling is None and not (use_triton(x) and aligned(weights) and readable([x])):
        return Shrunk(shrink_reference(x, weights, batch), None)
    chosen = whole_shrink(tiling or table_choice(weights, batch), weights.in_features)
    flat, _ = launching.shrink(chosen, x, weights, batch)
    places = places_of(batch.tiles(chosen.rows), x)
    shape = (len(weights.out_features), batch.terms, places, padded_ranks(weights))
    return Shrunk(flat[: shape[0] * shape[1] * shape[2] * shape[3]].view(shape), chosen)


def expand(ys: Tensors, shrunk: Shrunk, weights: LoraWeights, batch: LoraBatch) -> None:
    """Compute y += h Bᵀ, rounded once, for [P] tensors [rows, out_features[p]]; A is not read."""
    if shrunk.tiling is None:
        expand_reference(ys, shrunk.h, weights, batch)
    else:
        launching.expand(shrunk.tiling, ys, shrunk.h, 1, weights, batch)
