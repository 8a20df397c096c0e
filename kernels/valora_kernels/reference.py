"""The LoRA operator and the merge in plain torch: the definition that kernels are tested against.

Where there is no GPU or no Triton, adapters run through these functions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from valora_kernels.metadata import LoraBatch
    from valora_kernels.weights import LoraWeights


def atmm_reference(
    ys: Sequence[torch.Tensor], x: torch.Tensor, weights: LoraWeights, batch: LoraBatch
) -> None:
    """y[m] += Σ_t coefficient_t · scaling(a_t) · (x[m] Aᵀ) Bᵀ for each projection (VaLoRA §4.3).

    All arithmetic is in fp32, and y is rounded once, also with two terms.

    Args:
        ys: [P] tensors [rows, out_features[p]], changed in place.
        x: [rows, in_features].
        weights: A and B of every adapter.
        batch: Which rows have which adapters.
    """
    grouping = batch.grouping
    scale = torch.from_numpy(grouping.scale).to(x.device)
    for s in range(grouping.segments):
        first, end = int(grouping.starts[s]), int(grouping.starts[s + 1])
        rows = _neighbours(grouping.order[first:end], x.device)
        inputs = x[rows].float()
        for p, y in enumerate(ys):
            total = y[rows].float()
            for t in range(grouping.terms):
                slot, rank = int(grouping.adapters[s, t]), int(grouping.ranks[s, t])
                if rank:
                    a, b = weights.rows_of(p, slot, rank)
                    hidden = (inputs @ a.float().T) * scale[first:end, t, None]
                    total.addmm_(hidden, b.float())
            if y.dtype != torch.float32 or not isinstance(rows, slice):  # else a view of y
                y[rows] = total.to(y.dtype)


def _neighbours(order: NDArray[np.int32], device: torch.device) -> slice | torch.Tensor:
    """The rows of a segment, as a slice where they are neighbours: views cost nothing."""
    first, last = int(order[0]), int(order[-1])
    if last - first + 1 == len(order):  # they ascend
        return slice(first, last + 1)
    return torch.from_numpy(order).to(device)


def shrink_reference(x: torch.Tensor, weights: LoraWeights, batch: LoraBatch) -> torch.Tensor:
    """H = coefficient · scaling · x Aᵀ of each projection and term, the first half of the operator.

    Args:
        x: [rows, in_features].
        weights: A of every adapter.
        batch: Which rows have which adapters.

    Returns:
        [projections, terms, rows, max_rank] float32; zero behind an adapter's rank.
    """
    grouping = batch.grouping
    shape = (len(weights.out_features), grouping.terms, x.shape[0], weights.max_rank)
    found = torch.zeros(shape, dtype=torch.float32, device=x.device)
    order = torch.from_numpy(grouping.order).to(x.device)
    scale = torch.from_numpy(grouping.scale).to(x.device)
    for s in range(grouping.segments):
        first, end = int(grouping.starts[s]), int(grouping.starts[s + 1])
        rows = order[first:end]
        inputs = x[rows].float()
        for t in range(grouping.terms):
            slot, rank = int(grouping.adapters[s, t]), int(grouping.ranks[s, t])
            rank = min(rank, weights.max_rank)  # of a part of A
            for p in range(shape[0]):
                a, _ = weights.rows_of(p, slot, rank)
                found[p, t, rows, :rank] = (inputs @ a.float().T) * scale[first:end, t, None]
    return found


def expand_reference(
    ys: Sequence[torch.Tensor], h: torch.Tensor, weights: LoraWeights, batch: LoraBatch
) -> None:
    """Y += Σ_t h_t Bᵀ of each projection in fp32, rounded once: the second half of the operator.

    Args:
        ys: [P] tensors [rows, out_features[p]], changed in place.
        h: [projections, terms, rows, max_rank] float32, from `shrink_reference`.
        weights: B of every adapter.
        batch: Which rows have which adapters.
    """
    grouping = batch.grouping
    order = torch.from_numpy(grouping.order).to(h.device)
    for s in range(grouping.segments):
        rows = order[int(grouping.starts[s]) : int(grouping.starts[s + 1])]
        for p, y in enumerate(ys):
            total = y[rows].float()
            for t in range(grouping.terms):
                slot, rank = int(grouping.adapters[s, t]), int(grouping.ranks[s, t])
                if rank:
                    _, b = weights.rows_of(p, slot, rank)
                    total.addmm_(h[p, t, rows, :rank], b.float())
            y[rows] = total.to(y.dtype)


def merge_reference(
    pristine: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scaling: float
) -> torch.Tensor:
    """W + scaling · B · A, computed in fp32 and rounded once, so that switching never drifts.

    Args:
        pristine: [out, in] base weight.
        a: [rank, in] matrix A of the adapter.
        b: [out, rank] matrix B of the adapter.
        scaling: Scaling of the adapter.

    Returns:
        [out, in] in the dtype of `pristine`.
    """
    return torch.addmm(pristine.float(), b.float(), a.float(), alpha=scaling).to(pristine.dtype)
