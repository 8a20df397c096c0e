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
    """A and Bᵀ of the adapter in every slot, one contiguous row of memory per rank.

    Row j of an adapter's A has `in_features` elements, row j of its Bᵀ has `out_features[p]`. In a
    contiguous pool the place of a row follows from slot and rank. In paged memory (S-LoRA §5.1: one
    vector per page) `a_table` and `b_table` say where each row is.
    """

    in_features: int  # width of x
    out_features: tuple[int, ...]  # [P ≤ 3] widths of the projections
    slots: int  # adapters that there is room for
    max_rank: int  # rank rows per slot
    a: torch.Tensor  # [P, slots, max_rank, in_features]; any contiguous shape if paged
    b: torch.Tensor  # flat, for each p [slots, max_rank, out_features[p]]; any if paged
    a_table: torch.Tensor | None = None  # [P, slots, max_rank] int64, first element of each row
    b_table: torch.Tensor | None = None  # the same for `b`

    def __post_init__(self) -> None:
        projections = len(self.out_features)
        assert 1 <= projections <= MAX_PROJECTIONS, self.out_features
        assert (self.a.dtype, self.a.device) == (self.b.dtype, self.b.device)
        assert self.a.is_contiguous()
        assert self.b.is_contiguous()
        assert (self.a_table is None) == (self.b_table is None)
        rows = self.slots * self.max_rank
        if self.a_table is None:
            assert self.a.numel() == projections * rows * self.in_features
            assert self.b.numel() == rows * sum(self.out_features)
        for table in (self.a_table, self.b_table):
            if table is not None:
                assert table.shape == (projections, self.slots, self.max_rank)
                assert (table.dtype, table.device) == (torch.int64, self.a.device)
                assert table.is_contiguous()

    @property
    def paged(self) -> bool:
        """Whether address tables say where the rank rows are."""
        return self.a_table is not None

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
        """A contiguous pool without adapters, all zero; see the attributes for the arguments."""
        shape = (len(out_features), slots, max_rank, in_features)
        a = torch.zeros(shape, dtype=dtype, device=device)
        b = torch.zeros(slots * max_rank * sum(out_features), dtype=dtype, device=device)
        return cls(in_features, tuple(out_features), slots, max_rank, a, b)

    def b_start(self, projection: int) -> int:
        """First element of a projection's part of `b` in a contiguous pool."""
        return self.slots * self.max_rank * sum(self.out_features[:projection])

    def rows_of(self, projection: int, slot: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A [rank, in_features], Bᵀ [rank, out_features[p]]; views of rows at equal distances."""
        width = self.out_features[projection]
        if self.a_table is None or self.b_table is None:
            a = self.a.view(len(self.out_features), self.slots, self.max_rank, self.in_features)
            start = self.b_start(projection) + slot * self.max_rank * width
            b = self.b[start : start + rank * width].view(rank, width)
            return a[projection, slot, :rank], b
        found = []
        pairs = ((self.a, self.a_table, self.in_features), (self.b, self.b_table, width))
        for memory, table, length in pairs:
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

    def write(self, slot: int, a: Tensors, b: Tensors) -> None:
        """Write A [rank, in_features] and B [out_features[p], rank] of each p into a slot."""
        if not 0 <= slot < self.slots or not len(a) == len(b) == len(self.out_features):
            raise ValueError(
                f"adapter: expected {len(self.out_features)} projections and a slot below "
                f"{self.slots}, got {len(a)}, {len(b)} and {slot}"
            )
        for p, (one, two) in enumerate(zip(a, b, strict=True)):
            rank = one.shape[0]
            want = ((rank, self.in_features), (self.out_features[p], rank))
            if (one.shape, two.shape) != want or rank > self.max_rank:
                raise ValueError(
                    f"adapter: expected {want} with ranks up to {self.max_rank}, "
                    f"got {tuple(one.shape)}, {tuple(two.shape)}"
                )
            if self.a_table is None or self.b_table is None:
                to_a, to_b = self.rows_of(p, slot, rank)
                to_a.copy_(one)
                to_b.copy_(two.T)
                continue
            for memory, table, value in (
                (self.a, self.a_table, one),
                (self.b, self.b_table, two.T),
            ):
                start_of = table[p, slot, :rank, None]
                place = start_of + torch.arange(value.shape[1], device=memory.device)
                memory.view(-1)[place] = value.to(memory)
