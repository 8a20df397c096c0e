"""Rows padded to blocks of one adapter, ranks to the largest, and batched products."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tests.bench.valora_kernels.operators.base import gathered, ranks_of
from valora_kernels.atmm import LoraOperator

if TYPE_CHECKING:
    from collections.abc import Sequence

    from valora_kernels.metadata import LoraBatch
    from valora_kernels.weights import LoraWeights

FEW_ROWS, FEW_BLOCK, BLOCK = 512, 16, 64
"""Up to how many rows of a batch blocks are small, and the rows of small and of other blocks."""


class Padded(LoraOperator):
    """Batched products over blocks of rows, each with a copy of its adapter's matrices."""

    def add(
        self,
        ys: Sequence[torch.Tensor],
        x: torch.Tensor,
        weights: LoraWeights,
        batch: LoraBatch,
    ) -> None:
        """Add the LoRA terms of all rows."""
        block = FEW_BLOCK if batch.max_rows <= FEW_ROWS else BLOCK
        table = batch.tiles(block)
        count = table.capacity if batch.fixed else table.count
        most = ranks_of(weights, batch)
        if not count or not most:
            return
        rows = len(x)
        places = table.rows[: count * block].long()
        absent = places < 0
        # Where in the blocks each row lies; a row behind all others takes the padding.
        place_of = torch.full((rows + 1,), -1, dtype=torch.int64, device=x.device)
        place_of[places.masked_fill(absent, rows)] = torch.arange(len(places), device=x.device)
        place_of = place_of[:rows]
        inside = (place_of >= 0)[:, None]
        place_of = place_of.clamp(min=0)
        inputs = x[places.clamp(min=0)].masked_fill_(absent[:, None], 0)
        inputs = inputs.view(count, block, -1)
        for t in range(batch.terms):
            slots = table.records[:count, 2 * t].clamp(min=0).long()
            ranks = table.records[:count, 2 * t + 1]
            scale = table.scale[t, : count * block].view(count, block, 1).to(x.dtype)
            for p, y in enumerate(ys):
                a, b = gathered(weights, p, slots, ranks, most)
                hidden = torch.bmm(inputs, a.transpose(1, 2)) * scale
                found = torch.bmm(hidden, b).flatten(0, 1)
                y.add_(torch.where(inside, found[place_of], 0))
