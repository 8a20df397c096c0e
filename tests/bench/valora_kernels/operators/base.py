"""What operators made of torch's products read of a batch and of adapters."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from valora_kernels.atmm import aligned
from valora_kernels.launching import ALIGNMENT
from valora_kernels.metadata import MAX_TERMS, NONE, Table

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from valora_kernels.metadata import Grouping, LoraBatch
    from valora_kernels.weights import LoraWeights


ABSENT = -2
"""Behind the last adapter of a list of them; differs from that of rows without an adapter."""


class DeviceRowTerms(Table):
    """The terms of every row in the order of the batch, for operators that gather by row.

    Args:
        rows: Rows that there is room for.
        capacity: Distinct adapters that there is room for.
        device: Device of the buffer.

    Attributes:
        adapters: [2, rows] int32, adapter of each term, `NONE` without one.
        ranks: [2, rows] int32, its rank, 0 without one.
        scale: [2, rows] float32, coefficient · scaling of each term, 0 without one.
        distinct: [capacity, 2] int32, the adapters of the batch with their ranks; behind them
            `ABSENT` with rank 0.
        count: Number of distinct adapters of the last refresh, on the host.
    """

    def __init__(self, rows: int, capacity: int, device: torch.device) -> None:
        super().__init__(device, *[(MAX_TERMS, rows)] * 3, (capacity, 2))
        self.count = 0
        self.adapters, self.ranks, scale, self.distinct = self.parts(self.buffer)
        self.scale = scale.view(torch.float32)

    def write(self, grouping: Grouping, *parts: NDArray[np.int32]) -> None:
        """Write the terms of a batch."""
        adapters, ranks, scale, distinct = parts
        scale = scale.view(np.float32)
        adapters.fill(NONE)
        ranks.fill(0)
        scale.fill(0)
        distinct[:] = ABSENT, 0
        lengths = np.diff(grouping.starts)
        adapters[:, grouping.order] = np.repeat(grouping.adapters, lengths, axis=0).T
        ranks[:, grouping.order] = np.repeat(grouping.ranks, lengths, axis=0).T
        scale[:, grouping.order] = grouping.scale.T
        named = grouping.adapters != NONE
        found, first = np.unique(grouping.adapters[named], return_index=True)
        self.count = len(found)
        distinct[: self.count, 0] = found
        distinct[: self.count, 1] = grouping.ranks[named][first]


def row_terms(batch: LoraBatch) -> DeviceRowTerms:
    """The terms of every row of a batch."""
    capacity = min(batch.max_rows, batch.max_segments) * MAX_TERMS
    return batch.table("row terms", lambda: DeviceRowTerms(batch.max_rows, capacity, batch.device))


def ranks_of(weights: LoraWeights, batch: LoraBatch) -> int:
    """Rank rows that every adapter is padded to: the largest, of the batch if it may change."""
    return weights.max_rank if batch.fixed else batch.max_rank


def gathered(
    weights: LoraWeights, projection: int, slots: torch.Tensor, ranks: torch.Tensor, most: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Copies of the matrices of some adapters, padded with zeros to `most` rank rows.

    Args:
        weights: A and B of every adapter.
        projection: Which of the projections.
        slots: [n] int64 on the device; like `ranks` 0 where there is no adapter.
        ranks: [n] int32 on the device.
        most: Rank rows of the result.

    Returns:
        A [n, most, in_features] and Bᵀ [n, most, out_features[projection]].
    """
    # Rank rows start at multiples of it, too.
    step = ALIGNMENT if aligned(weights) else 1
    tables = (weights.a_table, weights.b_table)
    a_starts, b_starts = (table[projection, :, :most][slots] // step for table in tables)
    a = _rows(weights.a, step, weights.in_features)[a_starts]
    b = _rows(weights.b, step, weights.out_features[projection])[b_starts]
    absent = torch.arange(most, device=a.device) >= ranks[:, None]
    return a.masked_fill_(absent[..., None], 0), b.masked_fill_(absent[..., None], 0)


def _rows(memory: torch.Tensor, step: int, width: int) -> torch.Tensor:
    """Overlapping rows of `width` elements from every `step`-th one on, to read whole rows by."""
    flat = memory.view(-1)
    return flat.as_strided(((flat.numel() - width) // step + 1, width), (step, 1))
