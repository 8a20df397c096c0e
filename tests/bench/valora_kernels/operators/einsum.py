"""Every row through every adapter of the batch, masked: dLoRA's operator."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tests.bench.valora_kernels.operators.base import gathered, ranks_of, row_terms
from valora_kernels.atmm import LoraOperator

if TYPE_CHECKING:
    from collections.abc import Sequence

    from valora_kernels.metadata import LoraBatch
    from valora_kernels.weights import LoraWeights


class Einsum(LoraOperator):
    """Two sums over all pairs of row and adapter, of which the mask keeps one or two a row."""

    def add(
        self,
        ys: Sequence[torch.Tensor],
        x: torch.Tensor,
        weights: LoraWeights,
        batch: LoraBatch,
    ) -> None:
        """Add the LoRA terms of all rows."""
        terms = row_terms(batch)
        most = ranks_of(weights, batch)
        count = terms.count
        if batch.fixed:
            count = min(batch.terms * min(batch.max_segments, batch.max_rows), weights.slots)
        if not most or not count:
            return
        rows = len(x)
        distinct = terms.distinct[:count]
        mask = torch.zeros(rows, count, dtype=torch.float32, device=x.device)
        for t in range(batch.terms):
            same = terms.adapters[t, :rows, None] == distinct[:, 0]
            mask += same * terms.scale[t, :rows, None]
        mask = mask.to(x.dtype)
        slots = distinct[:, 0].clamp(min=0).long()
        for p, y in enumerate(ys):
            a, b = gathered(weights, p, slots, distinct[:, 1], most)
            hidden = torch.einsum("mk,srk->msr", x, a) * mask[:, :, None]
            y.addmm_(hidden.flatten(1), b.flatten(0, 1))
