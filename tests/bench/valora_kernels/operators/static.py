"""The kernels of ATMM with one tiling for all calls, as Punica and S-LoRA have it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from valora_kernels.atmm import LoraOperator, aligned, atmm
from valora_kernels.launching import use_triton
from valora_kernels.reference import atmm_reference
from valora_kernels.tiling import Tiling

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from valora_kernels.metadata import LoraBatch
    from valora_kernels.weights import LoraWeights

TILING = Tiling("shrink_expand", rows=16, outputs=64, inputs=64, split=512, ranks=16)
"""Punica's SGMV: 16 rows by 64 columns, inputs 64 at a time in split sums; for small batches."""


class Static(LoraOperator):
    """`atmm` without its table: whatever the batch, the tiles have one shape."""

    def add(
        self,
        ys: Sequence[torch.Tensor],
        x: torch.Tensor,
        weights: LoraWeights,
        batch: LoraBatch,
    ) -> None:
        """Add the LoRA terms of all rows; where kernels cannot run, in plain torch."""
        if use_triton(x) and aligned(weights):
            atmm(ys, x, weights, batch, tiling=TILING)
        else:
            atmm_reference(ys, x, weights, batch)
