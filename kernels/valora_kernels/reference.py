"""The definition of LoRA operator and merge in plain torch, which runs without a GPU or Triton."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from valora_kernels.metadata import LoraBatch
    from valora_kernels.weights import LoraWeights, Tensors


def atmm_reference(
    ys: Tensors,
    x: torch.Tensor,
    weights: LoraWeights,
    batch: LoraBatch,
    dtype: torch.dtype = torch.float32,
) -> None:
    """y[m] += Σ_t coefficient_t · scaling(a_t) · (x[m] Aᵀ) Bᵀ for each projection (VaLoRA §4.3).

    All is in `dtype`, and y [rows, out_features[p]], changed in place, is rounded once for each
    term. Arguments as in `atmm.atmm`.
    """
    for rows, terms in _segments(batch, x.device):
        inputs = x[rows].to(dtype)
        for p, y in enumerate(ys):
            total = y[rows].to(dtype)
            for _, slot, rank, scale in terms:
                a, b = weights.rows_of(p, slot, rank)
                total.addmm_((inputs @ a.to(dtype).T).mul_(scale), b.to(dtype))
            if y.dtype != dtype or not isinstance(rows, slice):  # else a view of y
                y[rows] = total.to(y.dtype)


def _segments(
    batch: LoraBatch, device: torch.device
) -> Iterator[tuple[slice | torch.Tensor, list[tuple[int, int, int, torch.Tensor]]]]:
    """Rows of each segment, and number, slot, rank and scale [rows, 1] of each of its terms."""
    grouping = batch.grouping
    scales = torch.from_numpy(grouping.scale).to(device)
    for s in range(grouping.segments):
        first, end = int(grouping.starts[s]), int(grouping.starts[s + 1])
        order = grouping.order[first:end]
        rows: slice | torch.Tensor = slice(int(order[0]), int(order[-1]) + 1)
        if order[-1] - order[0] + 1 != len(order):  # else they ascend, and views cost nothing
            rows = torch.from_numpy(order).to(device)
        slots, ranks = grouping.adapters[s].tolist(), grouping.ranks[s].tolist()
        yield (
            rows,
            [
                (t, slots[t], ranks[t], scales[first:end, t, None])
                for t in range(grouping.terms)
                if ranks[t]
            ],
        )


def shrink_reference(x: torch.Tensor, weights: LoraWeights, batch: LoraBatch) -> torch.Tensor:
    """Half of it: coefficient · scaling · x Aᵀ, [projections, terms, rows, max_rank] fp32."""
    shape = (len(weights.out_features), batch.grouping.terms, x.shape[0], weights.max_rank)
    found = torch.zeros(shape, dtype=torch.float32, device=x.device)
    for rows, terms in _segments(batch, x.device):
        inputs = x[rows].float()
        for t, slot, own, scale in terms:
            rank = min(own, weights.max_rank)  # of a part of A
            for p in range(shape[0]):
                a, _ = weights.rows_of(p, slot, rank)
                found[p, t, rows, :rank] = (inputs @ a.float().T) * scale
    return found


def expand_reference(ys: Tensors, h: torch.Tensor, weights: LoraWeights, batch: LoraBatch) -> None:
    """Y += Σ_t h_t Bᵀ of each projection in fp32, rounded once: the second half of the operator."""
    for rows, terms in _segments(batch, h.device):
        for p, y in enumerate(ys):
            total = y[rows].float()
            for t, slot, rank, _ in terms:
                _, b = weights.rows_of(p, slot, rank)
                total.addmm_(h[p, t, rows, :rank], b.float())
            y[rows] = total.to(y.dtype)


def merge_reference(
    pristine: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scaling: float
) -> torch.Tensor:
    """W [out, in] + scaling · B [out, rank] · A [rank, in], in fp32 and rounded once."""
    return torch.addmm(pristine.float(), b.float(), a.float(), alpha=scaling).to(pristine.dtype)
