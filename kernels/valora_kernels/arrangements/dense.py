"""The library's dense products, for large batches in which all rows have the same adapter."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import numpy as np

from valora_kernels.arrangements.base import Arrangement
from valora_kernels.tiling import ProjectionGroup, Tiling

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from valora_kernels.gpus.base import Gpu
    from valora_kernels.metadata import LoraBatch
    from valora_kernels.weights import LoraWeights


class Dense(Arrangement):
    """Two dense products per projection, h = x Aᵀ and y += scale · h Bᵀ.

    A table cannot choose it, because shapes do not tell whether all rows have one adapter. Its
    thresholds in `Gpu.direct` are the `rank` and the `rows` from which on it is the fastest, and
    the `elements` of y up to which it is.
    """

    name: ClassVar[str] = "dense"
    tabled: ClassVar[bool] = False

    def takes(self, weights: LoraWeights, batch: LoraBatch, *, add: bool = True) -> bool:
        """Whether all rows have one adapter, and there are enough rows and ranks for it to pay.

        The batch of a CUDA graph may have any mix at its next replay, and paged rank rows cannot be
        multiplied as one matrix.
        """
        if not _one_adapter(weights, batch):
            return False
        rows, rank = batch.grouping.rows, batch.max_rank
        limits = batch.gpu.direct[self.name]
        if not add:  # y is not read, so it pays earlier
            pays = rank >= limits["rank"] * 2 // 3 and rows >= limits["rows"] * 2 // 3
        elif rank > 128:
            pays = rows >= limits["rows"] // 3
        else:
            few = rows * sum(weights.out_features) <= limits["elements"]
            pays = rank >= limits["rank"] and rows >= limits["rows"] and few
        return pays and _one_scale(batch)

    def refusal(self, weights: LoraWeights, batch: LoraBatch) -> str | None:
        """Refuse batches of several adapters or scales, paged weights, and batches for graphs."""
        if _one_adapter(weights, batch) and _one_scale(batch):
            return None
        return "one adapter with one scale in all rows, in contiguous weights and outside a graph"

    def launch(
        self,
        tiling: Tiling,
        ys: Sequence[torch.Tensor],
        x: torch.Tensor,
        weights: LoraWeights,
        batch: LoraBatch,
        *,
        add: bool = True,
    ) -> None:
        """Compute the products; the tile sizes are the library's own."""
        grouping = batch.grouping
        slot, rank = int(grouping.adapters[0, 0]), int(grouping.ranks[0, 0])
        for p, y in enumerate(ys):
            a, b = weights.rows_of(p, slot, rank)
            y.addmm_(x @ a.T, b, beta=1.0 if add else 0.0, alpha=float(grouping.scale[0, 0]))

    def candidates(
        self, group: ProjectionGroup, rows: int, adapters: int, gpu: Gpu
    ) -> list[Tiling]:
        """None: `takes` decides, not a table."""
        return []


def _one_adapter(weights: LoraWeights, batch: LoraBatch) -> bool:
    """Whether all rows have the same single adapter, which lies in memory as a matrix."""
    return batch.one_adapter and not batch.fixed and not weights.paged


def _one_scale(batch: LoraBatch) -> bool:
    """Whether coefficient · scaling is the same in all rows."""
    return bool(np.ptp(batch.grouping.scale[:, 0]) == 0)
