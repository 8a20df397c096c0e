"""What a LoRA operator does, and how those that are made of torch's products read matrices."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

import torch

from valora_kernels.launching import ALIGNMENT

if TYPE_CHECKING:
    from collections.abc import Sequence

    from valora_kernels.metadata import LoraBatch
    from valora_kernels.weights import LoraWeights


class LoraOperator(ABC):
    """One way to compute y += Σ coefficient · scaling · (x Aᵀ) Bᵀ.

    Instances have no state; there is one of each class, see `registry.operator`. Where
    `batch.fixed` is set, a call is captured in a CUDA graph: its shapes may depend on the sizes
    of the batch only, and what it reads of the batch must lie on the device.

    Attributes:
        name: The name that it is registered under.
        adaptive: Whether the operator computes base product and LoRA together
            (`project.add_projection`); others add to the library's product.
    """

    name: ClassVar[str]
    adaptive: ClassVar[bool] = False

    @abstractmethod
    def add(
        self,
        ys: Sequence[torch.Tensor],
        x: torch.Tensor,
        weights: LoraWeights,
        batch: LoraBatch,
    ) -> None:
        """Add the LoRA terms of all rows.

        Args:
            ys: [P] tensors [rows, out_features[p]], changed in place.
            x: [rows, in_features].
            weights: A and B of every adapter.
            batch: Which rows have which adapters.
        """


def aligned(weights: LoraWeights) -> bool:
    """Whether the kernels, which load 16 bytes at a time, can read all widths."""
    return all(n % ALIGNMENT == 0 for n in (weights.in_features, *weights.out_features))


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
        slots: [n] int64 on the device, 0 where there is no adapter.
        ranks: [n] int32 on the device, 0 where there is no adapter.
        most: Rank rows of the result.

    Returns:
        A [n, most, in_features] and Bᵀ [n, most, out_features[projection]].
    """
    width = weights.out_features[projection]
    if weights.a_table is None or weights.b_table is None:
        shape = (weights.slots, weights.max_rank)
        start = weights.b_start(projection)
        b_pool = weights.b[start : start + weights.slots * weights.max_rank * width]
        a = weights.a.view(-1, *shape, weights.in_features)[projection, :, :most][slots]
        b = b_pool.view(*shape, width)[:, :most][slots]
    else:
        # Then rank rows start at multiples of it, too.
        step = ALIGNMENT if aligned(weights) else 1
        tables = (weights.a_table, weights.b_table)
        a_starts, b_starts = (table[projection, :, :most][slots] // step for table in tables)
        a = _rows(weights.a, step, weights.in_features)[a_starts]
        b = _rows(weights.b, step, width)[b_starts]
    absent = torch.arange(most, device=a.device) >= ranks[:, None]
    return a.masked_fill_(absent[..., None], 0), b.masked_fill_(absent[..., None], 0)


def _rows(memory: torch.Tensor, step: int, width: int) -> torch.Tensor:
    """Overlapping rows of `width` elements from every `step`-th one on, to read whole rows by."""
    flat = memory.view(-1)
    return flat.as_strided(((flat.numel() - width) // step + 1, width), (step, 1))
