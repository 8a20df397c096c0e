"""The LoRA operator in two steps, between which GPUs can exchange h = scale · x Aᵀ (S-LoRA §6).

The layout of h is that of the kernels, so it is the same on all GPUs that call with the same batch
and widths. Where there is no GPU or no Triton, plain torch computes the same in fp32.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from valora_kernels import launching
from valora_kernels.arrangements import whole_shrink
from valora_kernels.atmm import aligned, table_choice
from valora_kernels.launching import padded_ranks, places_of, readable, use_triton
from valora_kernels.reference import expand_reference, shrink_reference

if TYPE_CHECKING:
    from collections.abc import Sequence

    from valora_kernels.metadata import LoraBatch
    from valora_kernels.tiling import Tiling
    from valora_kernels.weights import LoraWeights


class Shrunk(NamedTuple):
    """The result of the first step.

    Attributes:
        h: [projections, terms, places, ranks]: in the dtype of x, in places of tiles; or without
            kernels in fp32, in places of rows. Contiguous. The next `shrink` overwrites it.
        tiling: How the kernels computed it; None without kernels.
    """

    h: torch.Tensor
    tiling: Tiling | None


def shrink(
    x: torch.Tensor, weights: LoraWeights, batch: LoraBatch, *, tiling: Tiling | None = None
) -> Shrunk:
    """Compute h = coefficient · scaling · x Aᵀ for each projection.

    Args:
        x: [rows, in_features].
        weights: A of every adapter; B is not read.
        batch: Which rows have which adapters.
        tiling: How to compute it, with the kernels wherever x is; by default what the table of the
            GPU says.
    """
    if tiling is None and not (use_triton(x) and aligned(weights) and readable([x])):
        return Shrunk(shrink_reference(x, weights, batch), None)
    chosen = whole_shrink(tiling or table_choice(weights, batch), weights.in_features)
    flat, _ = launching.shrink(chosen, x, weights, batch)
    places = places_of(batch.tiles(chosen.rows), x)
    shape = (len(weights.out_features), batch.terms, places, padded_ranks(weights))
    return Shrunk(flat[: shape[0] * shape[1] * shape[2] * shape[3]].view(shape), chosen)


def expand(
    ys: Sequence[torch.Tensor], shrunk: Shrunk, weights: LoraWeights, batch: LoraBatch
) -> None:
    """Compute y += h Bᵀ for each projection, rounded once.

    Args:
        ys: [P] tensors [rows, out_features[p]], changed in place.
        shrunk: Result of `shrink`.
        weights: B of every adapter; A is not read.
        batch: Which rows have which adapters.
    """
    if shrunk.tiling is None:
        expand_reference(ys, shrunk.h, weights, batch)
    else:
        launching.expand(shrunk.tiling, ys, shrunk.h, 1, weights, batch)
