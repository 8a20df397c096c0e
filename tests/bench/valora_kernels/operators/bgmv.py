"""Every row gathers the matrices of its own adapter (Punica's BGMV), in torch's products."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tests.bench.valora_kernels.operators.base import gathered, ranks_of, row_terms
from valora_kernels.atmm import LoraOperator

if TYPE_CHECKING:
    from collections.abc import Sequence

    from valora_kernels.metadata import LoraBatch
    from valora_kernels.weights import LoraWeights

ROWS = 256
"""Most rows whose matrices are in memory at a time: 0.5 GB for rank 64 and width 4,096."""


class Bgmv(LoraOperator):
    """Batched products of a vector and its matrices: nothing is shared between rows."""

    def add(
        self,
        ys: Sequence[torch.Tensor],
        x: torch.Tensor,
        weights: LoraWeights,
        batch: LoraBatch,
    ) -> None:
        """Add the LoRA terms of all rows, `ROWS` at a time."""
        terms = row_terms(batch)
        most = ranks_of(weights, batch)
        if not most:
            return
        for start in range(0, len(x), ROWS):
            part = slice(start, min(start + ROWS, len(x)))
            inputs = x[part, :, None]
            for t in range(batch.terms):
                slots = terms.adapters[t, part].clamp(min=0).long()
                scale = terms.scale[t, part, None, None].to(x.dtype)
                for p, y in enumerate(ys):
                    a, b = gathered(weights, p, slots, terms.ranks[t, part], most)
                    hidden = torch.bmm(a, inputs).transpose(1, 2) * scale  # [rows, 1, ranks]
                    y[part, None].baddbmm_(hidden, b)
