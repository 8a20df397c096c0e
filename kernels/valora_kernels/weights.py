"""LoRA matrices of one projection, or of several that share their input, in device memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

Tensors = Sequence[torch.Tensor]

MAX_PROJECTIONS = 3  # most projections that share an input: q, k and v


@dataclass(frozen=True, slots=True)
class LoraWeights:
    """A and Bᵀ of the adapter in every slot, one contiguous row of memory per rank (S-LoRA §5.1).

    Row j of an adapter's A has `in_features` elements, row j of its Bᵀ has `out_features[p]`;
    `a_table` and `b_table` say where in `a` and `b` each row is.
    """

    in_features: int  # width of x
    out_features: tuple[int, ...]  # [P ≤ 3] widths of the projections
    slots: int  # adapters that there is room for
    max_rank: int  # rank rows per slot
    a: torch.Tensor  # any contiguous shape
    b: torch.Tensor  # likewise
    a_table: torch.Tensor  # [P, slots, max_rank] int64, first element of each row
    b_table: torch.Tensor  # the same for `b`

    def __post_init__(self) -> None:
        projections = len(self.out_features)
        assert 1 <= projections <= MAX_PROJECTIONS, self.out_features
        assert (self.a.dtype, self.a.device) == (self.b.dtype, self.b.device)
        assert self.a.is_contiguous()
        assert self.b.is_contiguous()
        for table in (self.a_table, self.b_table):
            assert table.shape == (projections, self.slots, self.max_rank)
            assert (table.dtype, table.device) == (torch.int64, self.a.device)
            assert table.is_contiguous()

    @classmethod
    def contiguous(
        cls,
        slots: int,
        max_rank: int,
        in_features: int,
        out_features: Sequence[int],
        *,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> LoraWeights:
        """A pool without adapters, all zero, with their rows one after the other."""
        outputs, rows = tuple(out_features), slots * max_rank
        a = torch.zeros(len(outputs), slots, max_rank, in_features, dtype=dtype, device=device)
        b = torch.zeros(rows * sum(outputs), dtype=dtype, device=device)
        tables = contiguous_tables(slots, max_rank, in_features, outputs, device)
        return cls(in_features, outputs, slots, max_rank, a, b, *tables)

    def rows_of(self, projection: int, slot: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A [rank, in_features], Bᵀ [rank, out_features[p]]; views of rows at equal distances."""
        found = []
        for memory, table, length in (
            (self.a, self.a_table, self.in_features),
            (self.b, self.b_table, self.out_features[projection]),
        ):
            starts = table[projection, slot, :rank]
            if rank and not starts.is_cuda:
                at = starts.tolist()
                step, *others = {two - one for one, two in pairwise(at)} or {length}
                if step > 0 and not others:
                    first = memory.storage_offset() + at[0]
                    found.append(memory.as_strided((rank, length), (step, 1), first))
                    continue
            place = starts[:, None] + torch.arange(length, device=memory.device)
            found.append(memory.view(-1)[place])
        return found[0], found[1]


def contiguous_tables(
    slots: int,
    max_rank: int,
    in_features: int,
    out_features: Sequence[int],
    device: torch.device | str,
) -> list[torch.Tensor]:
    """`a_table` and `b_table` of rank rows one after the other, by projection and slot."""
    rows = slots * max_rank
    found = []
    for widths in ([in_features] * len(out_features), out_features):
        row = torch.tensor(widths).repeat_interleave(rows)
        found.append((row.cumsum(0) - row).view(-1, slots, max_rank).to(device))
    return found
