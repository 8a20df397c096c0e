"""Which rows of a batch use which adapters: built once per batch, shared by all layers.

`group_rows` sorts a batch's rows; `LoraBatch` keeps what kernels read of them in device buffers of
fixed size and address, so that a captured CUDA graph serves any mix of adapters.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from valora_kernels.gpus import gpu_of

T = TypeVar("T", bound="Table")

NONE = -1  # adapter index of a row or term without an adapter

MAX_TERMS = 2  # most terms of a row: two adapters, or its own and the merged one, subtracted


@dataclass(frozen=True, slots=True)
class Grouping:
    """Rows of a batch sorted into segments that share their adapters (VaLoRA §4.3)."""

    rows: int  # including those without an adapter
    terms: int  # 1 if no row has a second adapter, else 2
    order: NDArray[np.int32]  # [active] rows with an adapter, segment after segment
    starts: NDArray[np.int32]  # [segments + 1] position in `order` of each segment
    adapters: NDArray[np.int32]  # [segments, 2] adapter of each term, or `NONE`
    ranks: NDArray[np.int32]  # [segments, 2] its rank, or 0
    scale: NDArray[np.float32]  # [active, 2] coefficient · scaling of each term, as `order`
    base: NDArray[np.int32]  # [rows − active] rows without an adapter

    @property
    def segments(self) -> int:
        """Number of segments."""
        return len(self.starts) - 1

    @property
    def active(self) -> int:
        """Number of rows that have an adapter."""
        return len(self.order)

    @property
    def effective_adapters(self) -> float:
        """1 / Σ p² over each segment's share p of the rows: what most rows see."""
        if self.segments <= 1:
            return 1.0
        share = np.diff(self.starts) / self.active
        return float(1.0 / np.square(share).sum())


def group_rows(
    adapters: ArrayLike,
    ranks: ArrayLike,
    scalings: ArrayLike,
    coefficients: ArrayLike | None = None,
    counts: ArrayLike | None = None,
    rows: int | None = None,
) -> Grouping:
    """Sort rows into segments that share their adapters; rows of one stay in the batch's order.

    Args:
        adapters: [runs] or [runs, terms ≤ 2] adapters of a run of neighbouring rows, or `NONE`.
        ranks: [slots] rank of each adapter; 0 for an empty slot.
        scalings: [slots] scaling of each adapter (alpha / r, or alpha / √r with rsLoRA).
        coefficients: Factors like `adapters`, such as −1 to subtract one; 1 by default.
        counts: [runs] number of rows of each run, at least 1 and by default 1.
        rows: Number of rows; those behind the runs have no adapter. There are none by default.

    Raises:
        ValueError: An adapter index is outside the slots or names an empty one, or shapes differ.
    """
    rank, scaling = np.asarray(ranks, dtype=np.int32), np.asarray(scalings, dtype=np.float32)
    index, scale = _terms(adapters, rank, scaling, coefficients)
    key = (index + 1) @ np.array([len(rank) + 1, 1])
    runs = np.argsort(key, kind="stable")
    plain = len(key) - np.count_nonzero(key)
    base, runs = runs[:plain], runs[plain:]
    own = key[runs]
    firsts = np.concatenate([own[:1] != 0, own[1:] != own[:-1]]).nonzero()[0]
    owners = index[runs[firsts]]
    lengths = np.ones(key.shape, np.int64) if counts is None else np.asarray(counts, np.int64)
    if lengths.shape != key.shape or lengths.min(initial=1) < 1:
        raise ValueError(
            f"counts: expected {len(key)} numbers of rows from 1 on, got {lengths.tolist()}"
        )
    first = np.cumsum(lengths) - lengths
    used, held = int(lengths.sum()), lengths[runs]
    order, base = _rows_of(first[runs], held), _rows_of(first[base], lengths[base])
    starts = np.append((np.cumsum(held) - held)[firsts], len(order)).astype(np.int32)
    rows = used if rows is None else rows
    if rows < used:
        raise ValueError(f"rows: expected at least the {used} of the runs, got {rows}")
    base = np.concatenate([base, np.arange(used, rows)])
    owned = owners != NONE
    return Grouping(
        rows=rows,
        terms=2 if owned[:, 1].any() else 1,
        order=order.astype(np.int32),
        starts=starts,
        adapters=owners.astype(np.int32),
        ranks=rank[owners] * owned if len(owners) else np.zeros((0, MAX_TERMS), np.int32),
        scale=np.repeat(scale[runs], held, axis=0),
        base=base.astype(np.int32),
    )


def _rows_of(first: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Rows of runs with these first rows and lengths, one run after the other."""
    before = np.cumsum(lengths) - lengths
    rows: NDArray[np.int64] = np.arange(lengths.sum()) + np.repeat(first - before, lengths)
    return rows


def _terms(
    adapters: ArrayLike,
    rank: NDArray[np.int32],
    scaling: NDArray[np.float32],
    coefficients: ArrayLike | None,
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Checked adapters and scales of each run, [runs, 2], in one form."""
    given = np.asarray(adapters, dtype=np.int64)
    if given.ndim == 1:
        given = given[:, None]
    sizes = (given.shape, rank.shape, scaling.shape)
    if given.ndim != 2 or not 1 <= given.shape[1] <= MAX_TERMS or rank.shape != (scaling.size,):
        raise ValueError(f"adapters: expected [runs, 1 or 2], ranks as scalings, got {sizes}")
    runs, terms = given.shape
    slots = len(rank)
    if given.min(initial=NONE) < NONE or given.max(initial=NONE) >= slots:
        wrong = given[(given < NONE) | (given >= slots)]
        raise ValueError(f"adapters: expected -1 to {slots - 1}, got {wrong[0]}")
    if rank.min(initial=0) < 0:
        raise ValueError(f"ranks: expected 0 or more, got {rank.min()}")
    index = np.full((runs, MAX_TERMS), NONE, dtype=np.int64)
    index[:, :terms] = given
    scale = np.zeros((runs, MAX_TERMS), dtype=np.float32)
    used = given != NONE
    named = given[used]
    if not rank[named].all():
        empty = named[rank[named] == 0][0]
        raise ValueError(f"adapters: expected loaded ones, got {empty}, an empty slot of rank 0")
    scale[:, :terms][used] = scaling[named]
    if coefficients is not None:
        factor = np.asarray(coefficients, dtype=np.float32)
        factor = factor[:, None] if factor.ndim == 1 else factor
        if factor.shape != given.shape:
            raise ValueError(f"coefficients: expected {given.shape}, got {factor.shape}")
        scale[:, :terms] *= factor
    if terms == MAX_TERMS:
        # The same adapter twice makes one term, and terms that cancel out make none.
        same = (index[:, 0] == index[:, 1]) & (index[:, 0] != NONE)
        scale[same, 0] += scale[same, 1]
        index[same, 1] = NONE
        index[scale == 0] = NONE
        second = (index[:, 0] == NONE) & (index[:, 1] != NONE)
        index[second] = index[second][:, ::-1]
        scale[second] = scale[second][:, ::-1]
        scale[index == NONE] = 0
    return index, scale


def tile_capacity(rows: int, segments: int, block: int) -> int:
    """Most tiles of `block` rows that `rows` rows in at most `segments` segments can need."""
    segments = min(rows, segments + 1)  # rows without an adapter are one more
    return (rows - segments) // block + segments if rows else 0


class Table(ABC):
    """What kernels read of a batch: int32 arrays on the device, whose sizes and addresses stay."""

    def __init__(self, device: torch.device, *shapes: tuple[int, ...]) -> None:
        self._shapes, size = shapes, sum(map(math.prod, shapes))
        self.buffer = torch.empty(size, dtype=torch.int32, device=device)
        self._described: Grouping | None = None
        self._turn = 0
        if device.type == "cuda":
            self._staging = [torch.empty(size, dtype=torch.int32).pin_memory() for _ in "ab"]
            self._copied = [torch.cuda.Event() for _ in "ab"]

    def parts(self, memory: Any) -> list[Any]:
        """Memory of the buffer's size, an array or a tensor, in shapes one after the other."""
        found, end = [], 0
        for shape in self._shapes:
            start, end = end, end + math.prod(shape)
            found.append(memory[start:end].reshape(shape))
        return found

    @abstractmethod
    def write(self, grouping: Grouping, *parts: NDArray[np.int32]) -> None:
        """Write a batch to the arrays on the host, all of them anew."""

    def refresh(self, grouping: Grouping) -> None:
        """Copy what a batch has of it to the device, in stream order, unless it is there."""
        if grouping is self._described:
            return
        if self.buffer.device.type != "cuda":
            self.write(grouping, *self.parts(self.buffer.numpy()))
        else:
            # Two take turns: the copy out of this one was enqueued two batches ago, and has ended.
            self._turn ^= 1
            staging, copied = self._staging[self._turn], self._copied[self._turn]
            copied.synchronize()
            self.write(grouping, *self.parts(staging.numpy()))
            self.buffer.copy_(staging, non_blocking=True)
            copied.record()
        self._described = grouping


class Tiles(Table):
    """A batch cut into tiles of `block` rows of one segment; those without adapter come last.

    - `records`: [capacity, 4], adapter and rank of term 0, then of term 1; rank 0: none.
    - `rows`: [capacity · block], row numbers, or `NONE`.
    - `scale`: [2, capacity · block] fp32, coefficient · scaling of each term, or 0.
    - `ends`: [2], tiles whose rows have an adapter, and tiles of all rows.
    """

    def __init__(self, block: int, capacity: int, device: torch.device) -> None:
        places = capacity * block
        super().__init__(device, (capacity, 2 * MAX_TERMS), (places,), (MAX_TERMS, places), (2,))
        self.block, self.capacity = block, capacity
        self.records, self.rows, scale, self.ends = self.parts(self.buffer)
        self.scale = scale.view(torch.float32)
        self.count = self.total = 0  # as `ends`, on the host

    def write(self, grouping: Grouping, *parts: NDArray[np.int32]) -> None:
        """Cut the segments into tiles."""
        block, lengths = self.block, np.diff(grouping.starts)
        tiles = -(-lengths // block)
        count = int(tiles.sum())
        total = count - (-len(grouping.base) // block)
        assert total <= self.capacity, (total, self.capacity)
        self.count, self.total = count, total
        records, rows, scale, ends = parts
        scale = scale.view(np.float32)
        ends[:] = count, total
        records[:count, 0::2] = np.repeat(grouping.adapters, tiles, axis=0)
        records[:count, 1::2] = np.repeat(grouping.ranks, tiles, axis=0)
        records[count:, 0::2] = NONE
        records[count:, 1::2] = 0
        rows.fill(NONE)
        scale.fill(0)
        place: slice | NDArray[np.int64] = slice(grouping.active)
        if grouping.segments > 1:
            first = (np.cumsum(tiles) - tiles) * block
            place = np.arange(grouping.active) + np.repeat(first - grouping.starts[:-1], lengths)
        rows[place] = grouping.order
        scale[:, place] = grouping.scale.T
        rows[count * block : count * block + len(grouping.base)] = grouping.base


class Blocks(Table):
    """The adapters of each block of neighbouring rows, for projections with folded expansion.

    - `slot_of_row`: [rows], adapter of each row, or `NONE`.
    - `counts`: [blocks], adapters in each block.
    - `lists`: [blocks, capacity, 2], adapter and rank of each one.
    """

    def __init__(self, block: int, rows: int, capacity: int, device: torch.device) -> None:
        blocks = -(-rows // block)
        super().__init__(device, (rows,), (blocks,), (blocks, capacity, 2))
        self.block, self.capacity = block, capacity
        self.slot_of_row, self.counts, self.lists = self.parts(self.buffer)

    def write(self, grouping: Grouping, *parts: NDArray[np.int32]) -> None:
        """List the adapters of each block."""
        block = self.block
        slot_of_row, counts, lists = parts
        slot_of_row.fill(NONE)
        counts.fill(0)
        lists.fill(0)
        order, segments = grouping.order, grouping.segments
        segment = np.repeat(np.arange(segments), np.diff(grouping.starts))
        slot_of_row[order] = grouping.adapters[segment, 0]
        # Pairs as one number: numpy sorts columns of pairs ten times as long.
        pairs = np.unique(order // block * segments + segment)
        of_block, segment = np.divmod(pairs, max(segments, 1))
        counts[:] = np.bincount(of_block, minlength=len(counts))
        place = np.arange(len(pairs)) - (np.cumsum(counts) - counts)[of_block]
        lists[of_block, place, 0] = grouping.adapters[segment, 0]
        lists[of_block, place, 1] = grouping.ranks[segment, 0]


class Scratch:
    """Working memory that calls share, one after the other in the order of one stream."""

    def __init__(self, device: torch.device | str) -> None:
        self._device = device
        self._kept: dict[tuple[str, torch.dtype], list[torch.Tensor]] = {}

    def take(self, use: str, elements: int, dtype: torch.dtype) -> torch.Tensor:
        """At least so many elements for a use: zero at first, left zero where that counts."""
        kept = self._kept.setdefault((use, dtype), [])
        if not kept or kept[-1].numel() < elements:
            # Smaller buffers stay allocated: a captured graph may hold their addresses.
            kept.append(torch.zeros(max(elements, 1), dtype=dtype, device=self._device))
        return kept[-1]


class LoraBatch:
    """The adapters of one batch, in fixed device buffers that all layers read.

    Call `update` before every batch, then `atmm` for every projection. With `fixed` it is captured
    in CUDA graphs: rows, terms and addresses stay, and grids cover `max_rows` rows in at most
    `max_segments` different (adapter, second adapter) pairs. Batches of a stream share `scratch`.
    """

    def __init__(
        self,
        max_rows: int,
        max_segments: int,
        device: torch.device | str,
        *,
        fixed: bool = False,
        scratch: Scratch | None = None,
    ) -> None:
        self.max_rows = max_rows
        self.max_segments = max_segments
        self.device = torch.empty(0, device=device).device  # with the index of a GPU
        self.gpu = gpu_of(self.device)
        self.fixed = fixed
        self.terms = 1
        self._tables: dict[Hashable, Table] = {}
        self.scratch = scratch or Scratch(self.device)
        self._describe(group_rows(np.zeros(0, np.int64), [], []))

    def update(
        self,
        adapters: ArrayLike,
        ranks: Sequence[int] | NDArray[np.int32],
        scalings: Sequence[float] | NDArray[np.float32],
        coefficients: ArrayLike | None = None,
        counts: ArrayLike | None = None,
        rows: int | None = None,
    ) -> None:
        """Describe the next batch, see `group_rows`; a `ValueError` says that it has no room.

        Copies to the device are enqueued: now if graphs read them, else by the first reader.
        """
        grouping = group_rows(adapters, ranks, scalings, coefficients, counts, rows)
        if grouping.rows > self.max_rows:
            raise ValueError(f"batch: expected at most {self.max_rows} rows, got {grouping.rows}")
        if grouping.segments > self.max_segments:
            raise ValueError(
                f"batch: expected at most {self.max_segments} segments, got {grouping.segments}"
            )
        # Blocks have no terms; a captured graph reads those of other tables again.
        captured = any(not isinstance(table, Blocks) for table in self._tables.values())
        if self.fixed and captured and grouping.terms > self.terms:
            raise ValueError(
                "batch: expected one term per row, as when the graph was captured, got 2"
            )
        self._describe(grouping)
        if self.fixed:
            for table in self._tables.values():
                table.refresh(grouping)

    def _describe(self, grouping: Grouping) -> None:
        self.grouping = grouping
        self.max_rank = int(grouping.ranks.max(initial=0))
        self.last_adapter = int(grouping.adapters.max(initial=NONE))
        self.effective_adapters = grouping.effective_adapters
        self.terms = max(self.terms, grouping.terms) if self.fixed else grouping.terms

    def table(self, key: Hashable, make: Callable[[], T]) -> T:
        """A table of the batch by its key, made at its first use; it follows every `update`."""
        if key not in self._tables:
            self._tables[key] = make()
        table = self._tables[key]
        table.refresh(self.grouping)
        return cast("T", table)

    def tiles(self, block: int) -> Tiles:
        """The batch in tiles of `block` rows."""
        return self.table(
            ("tiles", block),
            lambda: Tiles(
                block, tile_capacity(self.max_rows, self.max_segments, block), self.device
            ),
        )

    def blocks(self, block: int) -> Blocks:
        """The adapters of each block of rows."""
        capacity = max(1, min(block, self.max_segments))
        return self.table(
            ("blocks", block), lambda: Blocks(block, self.max_rows, capacity, self.device)
        )
