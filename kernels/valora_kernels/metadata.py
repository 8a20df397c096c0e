"""Which rows of a batch use which adapters: built once per batch, shared by all layers.

The host part (`group_rows`, `tile_rows`, `block_rows`) is plain numpy. `LoraBatch` keeps its
results in device buffers of fixed size and address, so that one captured CUDA graph serves any mix
of adapters.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from valora_kernels.gpus.detect import gpu_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import ArrayLike, NDArray

NONE = -1
"""Adapter index of a row or term without an adapter."""

ABSENT = -2
"""Behind the last adapter of a list of them; differs from that of rows without an adapter."""

MAX_TERMS = 2
"""Most terms of a row: its own adapter, and in mixture mode the merged one, subtracted again."""


@dataclass(frozen=True, slots=True)
class Grouping:
    """Rows of a batch sorted into segments that share their adapters (VaLoRA §4.3).

    Rows without an adapter belong to no segment; `base` lists them.

    Attributes:
        rows: Number of rows of the batch, including those without an adapter.
        terms: Terms per row: 1 if no row has a second adapter, else 2.
        order: [active] int32, row numbers, segment after segment.
        starts: [segments + 1] int32, position in `order` at which each segment starts.
        adapters: [segments, 2] int32, adapter of each term, `NONE` without one.
        ranks: [segments, 2] int32, rank of each term's adapter, 0 without one.
        scale: [active, 2] float32, coefficient · scaling of each term, in the order of `order`.
        base: [rows − active] int32, rows without an adapter.
    """

    rows: int
    terms: int
    order: NDArray[np.int32]
    starts: NDArray[np.int32]
    adapters: NDArray[np.int32]
    ranks: NDArray[np.int32]
    scale: NDArray[np.float32]
    base: NDArray[np.int32]

    @property
    def segments(self) -> int:
        """Number of segments."""
        return len(self.starts) - 1

    @property
    def active(self) -> int:
        """Number of rows that have an adapter."""
        return len(self.order)

    @property
    def one_adapter(self) -> bool:
        """Whether all rows have the same single adapter."""
        return (self.terms, self.segments, self.active) == (1, 1, self.rows)

    @property
    def effective_adapters(self) -> float:
        """Effective number of adapters, 1 / Σ p² over each segment's share p of the rows.

        It equals the number of segments if all are equally long, and is smaller if a few segments
        have most rows. Tilings depend on the segment length that most rows see.
        """
        if not self.active:
            return 1.0
        share = np.diff(self.starts) / self.active
        return float(1.0 / np.square(share).sum())


def group_rows(
    adapters: ArrayLike,
    ranks: ArrayLike,
    scalings: ArrayLike,
    coefficients: ArrayLike | None = None,
) -> Grouping:
    """Sort rows into segments that share their adapters.

    Args:
        adapters: [rows] or [rows, terms ≤ 2] adapter of each row and term, `NONE` for none.
        ranks: [slots] rank of each adapter; 0 for an empty slot.
        scalings: [slots] scaling of each adapter (alpha / r, or alpha / √r with rsLoRA).
        coefficients: Like `adapters`: +1 or −1 for each term; +1 everywhere by default.

    Returns:
        The grouping; rows of a segment stay in the order of the batch.

    Raises:
        ValueError: An adapter index is outside the slots or names an empty one, or shapes differ.
    """
    rank = np.asarray(ranks, dtype=np.int32)
    index, scale = _terms(adapters, rank, scalings, coefficients)
    slots = len(rank)
    key = (index[:, 0] + 1) * (slots + 1) + index[:, 1] + 1
    order = np.argsort(key, kind="stable")
    base = order[key[order] == 0]
    order = order[base.size :]
    changes = np.flatnonzero(np.diff(key[order])) + 1
    firsts = np.concatenate([[0], changes]) if order.size else np.zeros(0, dtype=np.int64)
    owners = index[order[firsts]]
    padded = np.append(rank, np.int32(0))  # NONE = -1 reads the rank 0 at the end
    return Grouping(
        rows=len(index),
        terms=2 if np.any(owners[:, 1] != NONE) else 1,
        order=order.astype(np.int32),
        starts=np.append(firsts, order.size).astype(np.int32),
        adapters=owners.astype(np.int32),
        ranks=padded[owners],
        scale=scale[order],
        base=base.astype(np.int32),
    )


def _terms(
    adapters: ArrayLike,
    rank: NDArray[np.int32],
    scalings: ArrayLike,
    coefficients: ArrayLike | None,
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Check the arguments of `group_rows`, and bring the terms of each row into one form.

    Returns:
        [rows, 2] adapter of each term, with the second `NONE` where one term is enough, and
        [rows, 2] coefficient · scaling of each term.
    """
    index = np.array(adapters, dtype=np.int64)  # a copy, terms are reordered below
    scaling = np.asarray(scalings, dtype=np.float32)
    if index.ndim == 1:
        index = index[:, None]
    if index.ndim != 2 or not 1 <= index.shape[1] <= MAX_TERMS:
        raise ValueError(f"adapters: expected [rows] or [rows, 1 or 2], got {index.shape}")
    if rank.ndim != 1 or rank.shape != scaling.shape:
        raise ValueError(f"ranks and scalings: expected [slots], got {rank.shape}, {scaling.shape}")
    slots = len(rank)
    wrong = index[(index < NONE) | (index >= slots)]
    if wrong.size:
        raise ValueError(f"adapters: expected -1 to {slots - 1}, got {wrong[0]}")
    if np.any(rank < 0):
        raise ValueError(f"ranks: expected 0 or more, got {rank.min()}")
    if coefficients is None:
        factor = np.ones(index.shape, dtype=np.float32)
    else:
        factor = np.asarray(coefficients, dtype=np.float32)
        factor = factor[:, None] if factor.ndim == 1 else factor
        if factor.shape != index.shape:
            raise ValueError(f"coefficients: expected {index.shape}, got {factor.shape}")
    used = index != NONE
    empty = index[used & (rank[index] == 0)] if slots else index[:0]
    if empty.size:
        raise ValueError(f"adapters: expected loaded ones, got {empty[0]}, an empty slot of rank 0")
    scale = np.where(used, factor * scaling[index], 0).astype(np.float32) if slots else 0 * factor

    if index.shape[1] == 1:
        index = np.concatenate([index, np.full_like(index, NONE)], axis=1)
        scale = np.concatenate([scale, np.zeros_like(scale)], axis=1)
    else:
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
    """Most tiles of `block` rows that `rows` rows in at most `segments` segments can need.

    Rows without an adapter count as one more segment.
    """
    segments = min(rows, segments + 1)
    return (rows - segments) // block + segments if rows else 0


@dataclass(frozen=True, slots=True)
class Tiles:
    """The grouping cut into tiles of `block` rows; no tile spans two segments.

    Tiles of rows without an adapter come last, because only calls that overwrite y launch them.

    Attributes:
        count: Number of tiles whose rows have an adapter.
        total: Number of tiles, including those whose rows have none.
        records: [capacity, 4] int32: adapter and rank of term 0, adapter and rank of term 1.
            Tiles without an adapter and unused ones have rank 0.
        rows: [capacity · block] int32, row numbers; `NONE` where a tile has fewer rows.
        scale: [2, capacity · block] float32, coefficient · scaling of each term, 0 on padding.
    """

    count: int
    total: int
    records: NDArray[np.int32]
    rows: NDArray[np.int32]
    scale: NDArray[np.float32]


def tile_rows(grouping: Grouping, block: int, capacity: int) -> Tiles:
    """Cut the segments into tiles.

    Args:
        grouping: Result of `group_rows`.
        block: Rows per tile.
        capacity: Number of tiles that the result has room for.

    Raises:
        ValueError: The grouping needs more tiles than that.
    """
    lengths = np.diff(grouping.starts)
    tiles = -(-lengths // block)
    count = int(tiles.sum())
    total = count - (-len(grouping.base) // block)
    if total > capacity:
        raise ValueError(
            f"batch: expected at most {capacity} tiles of {block} rows, got {total} "
            f"({grouping.rows} rows in {grouping.segments} segments)"
        )
    records = np.zeros((capacity, 2 * MAX_TERMS), dtype=np.int32)
    rows = np.full(capacity * block, NONE, dtype=np.int32)
    scale = np.zeros((MAX_TERMS, capacity * block), dtype=np.float32)
    records[:, 0::2] = NONE
    if count:
        owner = np.repeat(np.arange(grouping.segments), tiles)
        records[:count, 0::2] = grouping.adapters[owner]
        records[:count, 1::2] = grouping.ranks[owner]
        first = (np.cumsum(tiles) - tiles) * block
        place = np.arange(grouping.active) + np.repeat(first - grouping.starts[:-1], lengths)
        rows[place] = grouping.order
        scale[:, place] = grouping.scale.T
    rows[count * block : count * block + len(grouping.base)] = grouping.base
    return Tiles(count=count, total=total, records=records, rows=rows, scale=scale)


class Copier:
    """A device buffer that the host refreshes in stream order, without waiting for the device.

    Args:
        size: Number of elements.
        device: Device of the buffer.

    Attributes:
        buffer: [size] int32 on the device.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self.buffer = torch.empty(size, dtype=torch.int32, device=device)
        self._staging: list[torch.Tensor] = []
        self._copied: list[torch.cuda.Event] = []
        self._turn = 0

    def copy(self, values: NDArray[np.int32]) -> None:
        """Copy [size] values into the buffer, through pinned memory on a GPU."""
        if self.buffer.device.type != "cuda":
            self.buffer.copy_(torch.from_numpy(values))
            return
        if not self._staging:
            self._staging = [torch.empty(values.size, dtype=torch.int32).pin_memory() for _ in "ab"]
            self._copied = [torch.cuda.Event() for _ in "ab"]
        self._turn ^= 1
        # Two staging buffers take turns: the copy out of this one was enqueued two batches ago.
        self._copied[self._turn].synchronize()
        self._staging[self._turn].numpy()[:] = values
        self.buffer.copy_(self._staging[self._turn], non_blocking=True)
        self._copied[self._turn].record()


@dataclass(slots=True)
class DeviceTiles:
    """`Tiles` on the device: views of one buffer, which one copy refreshes.

    Attributes:
        block: Rows per tile.
        capacity: Number of tiles that there is room for.
        copier: The buffer of all tensors below, [capacity · (4 + 3 · block) + 2] int32.
        count: `Tiles.count` of the last refresh, on the host.
        total: `Tiles.total` of the last refresh, on the host.
        records: [capacity, 4] int32, see `Tiles`.
        rows: [capacity · block] int32, see `Tiles`.
        scale: [2, capacity · block] float32, see `Tiles`.
        ends: [2] int32, `count` and `total`.
    """

    block: int
    capacity: int
    copier: Copier
    count: int = 0
    total: int = 0
    records: torch.Tensor = field(init=False)
    rows: torch.Tensor = field(init=False)
    scale: torch.Tensor = field(init=False)
    ends: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        places = self.capacity * self.block
        split = 2 * MAX_TERMS * self.capacity
        buffer = self.copier.buffer
        self.records = buffer[:split].view(self.capacity, 2 * MAX_TERMS)
        self.rows = buffer[split : split + places]
        scale, self.ends = buffer[split + places :].split([MAX_TERMS * places, 2])
        self.scale = scale.view(torch.float32).view(MAX_TERMS, places)

    def refresh(self, tiles: Tiles) -> None:
        """Copy the tiles of the next batch to the device."""
        self.count, self.total = tiles.count, tiles.total
        scale, ends = tiles.scale.view(np.int32), np.array([tiles.count, tiles.total], np.int32)
        self.copier.copy(np.concatenate([tiles.records.ravel(), tiles.rows, scale.ravel(), ends]))


@dataclass(frozen=True, slots=True)
class RowBlocks:
    """The adapters of each block of neighbouring rows, for projections with folded expansion.

    Attributes:
        slot_of_row: [rows] int32, adapter of each row, `NONE` without one.
        counts: [blocks] int32, number of adapters in each block.
        lists: [blocks, capacity, 2] int32, adapter and rank of each adapter in each block.
    """

    slot_of_row: NDArray[np.int32]
    counts: NDArray[np.int32]
    lists: NDArray[np.int32]


def block_rows(grouping: Grouping, block: int, rows: int, capacity: int) -> RowBlocks:
    """List the adapters of each block of rows.

    Args:
        grouping: What `group_rows` returned, with one term per row.
        block: Rows per block.
        rows: Number of rows that the result has room for.
        capacity: Adapters per block that the result has room for.
    """
    slot_of_row = np.full(rows, NONE, dtype=np.int32)
    owner = np.repeat(np.arange(grouping.segments), np.diff(grouping.starts))
    slot_of_row[grouping.order] = grouping.adapters[owner, 0]
    blocks = -(-rows // block)
    counts = np.zeros(blocks, dtype=np.int32)
    lists = np.zeros((blocks, capacity, 2), dtype=np.int32)
    if grouping.active:
        # Pairs as one number: numpy sorts columns of pairs ten times as long.
        pairs = np.unique(grouping.order.astype(np.int64) // block * grouping.segments + owner)
        of_block, segment = np.divmod(pairs, grouping.segments)
        counts[:] = np.bincount(of_block, minlength=blocks)
        place = np.arange(len(pairs)) - (np.cumsum(counts) - counts)[of_block]
        lists[of_block, place, 0] = grouping.adapters[segment, 0]
        lists[of_block, place, 1] = grouping.ranks[segment, 0]
    return RowBlocks(slot_of_row=slot_of_row, counts=counts, lists=lists)


@dataclass(slots=True)
class DeviceBlocks:
    """`RowBlocks` on the device: views of one buffer, which one copy refreshes.

    Attributes:
        block: Rows per block.
        capacity: Adapters per block that there is room for.
        copier: The buffer of all tensors below.
        slot_of_row: [rows] int32, see `RowBlocks`.
        counts: [blocks] int32, see `RowBlocks`.
        lists: [blocks · capacity · 2] int32, see `RowBlocks`.
    """

    block: int
    capacity: int
    copier: Copier
    slot_of_row: torch.Tensor
    counts: torch.Tensor
    lists: torch.Tensor


@dataclass(slots=True)
class DeviceRowTerms:
    """The terms of every row in the order of the batch, for operators that gather by row.

    Attributes:
        copier: The buffer of all tensors below.
        adapters: [2, rows] int32, adapter of each term, `NONE` without one.
        ranks: [2, rows] int32, its rank, 0 without one.
        scale: [2, rows] float32, coefficient · scaling of each term, 0 without one.
        distinct: [capacity, 2] int32, the adapters of the batch with their ranks; behind them
            `ABSENT` with rank 0.
        count: Number of distinct adapters of the last refresh, on the host.
    """

    copier: Copier
    adapters: torch.Tensor
    ranks: torch.Tensor
    scale: torch.Tensor
    distinct: torch.Tensor
    count: int = 0

    @classmethod
    def of(cls, rows: int, capacity: int, device: torch.device) -> DeviceRowTerms:
        """Room for so many rows and distinct adapters."""
        sizes = [MAX_TERMS * rows] * 3 + [2 * capacity]
        copier = Copier(sum(sizes), device)
        adapters, ranks, scale, distinct = copier.buffer.split(sizes)
        shape = (MAX_TERMS, rows)
        return cls(
            copier,
            adapters.view(shape),
            ranks.view(shape),
            scale.view(torch.float32).view(shape),
            distinct.view(capacity, 2),
        )

    def refresh(self, grouping: Grouping) -> None:
        """Copy the terms of the next batch to the device."""
        shape = (MAX_TERMS, self.adapters.shape[1])
        adapters, ranks = np.full(shape, NONE, np.int32), np.zeros(shape, np.int32)
        scale = np.zeros(shape, np.float32)
        lengths = np.diff(grouping.starts)
        adapters[:, grouping.order] = np.repeat(grouping.adapters, lengths, axis=0).T
        ranks[:, grouping.order] = np.repeat(grouping.ranks, lengths, axis=0).T
        scale[:, grouping.order] = grouping.scale.T
        named = grouping.adapters != NONE
        found, first = np.unique(grouping.adapters[named], return_index=True)
        self.count = len(found)
        distinct = np.tile(np.array([ABSENT, 0], np.int32), (len(self.distinct), 1))
        distinct[: self.count, 0] = found
        distinct[: self.count, 1] = grouping.ranks[named][first]
        parts = (adapters, ranks, scale.view(np.int32), distinct)
        self.copier.copy(np.concatenate([part.ravel() for part in parts]))


class Scratch:
    """Working memory that calls share, one after the other in the order of one stream.

    Args:
        device: Device of the memory.
    """

    def __init__(self, device: torch.device | str) -> None:
        self._device = device
        self._kept: dict[tuple[str, torch.dtype], list[torch.Tensor]] = {}

    def take(self, use: str, elements: int, dtype: torch.dtype) -> torch.Tensor:
        """Memory of at least so many elements.

        It is zero at first; a kernel that relies on this must leave it zero.

        Args:
            use: What it is for; calls with the same use and dtype share memory.
            elements: Number of elements that are needed.
            dtype: Element type.
        """
        kept = self._kept.setdefault((use, dtype), [])
        if not kept or kept[-1].numel() < elements:
            # Smaller buffers stay allocated: a captured graph may hold their addresses.
            kept.append(torch.zeros(max(elements, 1), dtype=dtype, device=self._device))
        return kept[-1]


class LoraBatch:
    """The adapters of one batch, in fixed device buffers that all layers read.

    Call `update` before every batch, then `atmm` for every projection. In a CUDA graph the buffers
    keep their addresses, and the launch grids cover the worst case of `max_rows` rows in
    `max_segments` segments, so a replay after `update` computes the new mix.

    Args:
        max_rows: Most rows of a batch; a captured graph has exactly as many.
        max_segments: Most different (adapter, second adapter) pairs of a batch.
        device: Device on which `atmm` runs.
        fixed: Whether CUDA graphs are captured with it: the numbers of rows and terms stay, and
            launches cover the worst case.
        scratch: Working memory of the calls, which other batches of the same stream may share;
            its own by default.

    Attributes:
        gpu: Record of the device's GPU.
        grouping: The batch of the last `update`.
        max_rank: Largest rank of the batch's adapters.
        last_adapter: Highest adapter index of the batch.
        effective_adapters: `Grouping.effective_adapters` of the batch.
        one_adapter: Whether all rows of the batch have the same single adapter.
        terms: Terms per row that kernels are launched for.
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
        if max_rows < 0 or max_segments < 0:
            raise ValueError(
                f"batch: expected sizes ≥ 0, got {max_rows} rows, {max_segments} segments"
            )
        self.max_rows = max_rows
        self.max_segments = max_segments
        self.device = torch.empty(0, device=device).device  # with the index of a GPU
        self.gpu = gpu_of(self.device)
        self.fixed = fixed
        self.grouping = group_rows(np.zeros(0, np.int64), [], [])
        self.max_rank = 0
        self.last_adapter = NONE
        self.effective_adapters = 1.0
        self.one_adapter = False
        self.terms = 1
        self._tiles: dict[int, DeviceTiles] = {}
        self._blocks: dict[int, DeviceBlocks] = {}
        self._row_terms: DeviceRowTerms | None = None
        self.scratch = scratch or Scratch(self.device)

    def update(
        self,
        adapters: ArrayLike,
        ranks: Sequence[int] | NDArray[np.int32],
        scalings: Sequence[float] | NDArray[np.float32],
        coefficients: ArrayLike | None = None,
    ) -> None:
        """Describe the next batch; see `group_rows` for the arguments.

        The copies to the device are enqueued on the current stream, and nothing waits for them.

        Raises:
            ValueError: What `group_rows` raises, or more rows, segments or terms than there is
                room for.
        """
        grouping = group_rows(adapters, ranks, scalings, coefficients)
        if grouping.rows > self.max_rows:
            raise ValueError(f"batch: expected at most {self.max_rows} rows, got {grouping.rows}")
        if grouping.segments > self.max_segments:
            raise ValueError(
                f"batch: expected at most {self.max_segments} segments, got {grouping.segments}"
            )
        if grouping.terms > self.terms and self._captured and self.fixed:
            raise ValueError(
                "batch: expected one term per row, as when the graph was captured, got 2"
            )
        self.grouping = grouping
        # Stored because every layer asks for them.
        self.max_rank = int(grouping.ranks.max(initial=0))
        self.last_adapter = int(grouping.adapters.max(initial=NONE))
        self.effective_adapters = grouping.effective_adapters
        self.one_adapter = grouping.one_adapter
        self.terms = max(self.terms, grouping.terms) if self.fixed else grouping.terms
        for table in self._tiles.values():
            table.refresh(tile_rows(grouping, table.block, table.capacity))
        for blocks in self._blocks.values():
            self._refresh(blocks)
        if self._row_terms is not None:
            self._row_terms.refresh(grouping)

    @property
    def _captured(self) -> bool:
        """Whether a call has read what a captured graph reads again."""
        return bool(self._tiles) or self._row_terms is not None

    def tiles(self, block: int) -> DeviceTiles:
        """The batch in tiles of `block` rows; made on first use, then refreshed by `update`."""
        table = self._tiles.get(block)
        if table is None:
            capacity = tile_capacity(self.max_rows, self.max_segments, block)
            size = capacity * (2 * MAX_TERMS + (1 + MAX_TERMS) * block) + 2
            table = DeviceTiles(block, capacity, Copier(size, self.device))
            table.refresh(tile_rows(self.grouping, block, capacity))
            self._tiles[block] = table
        return table

    def blocks(self, block: int) -> DeviceBlocks:
        """The adapters of each block of rows; made on first use, then refreshed by `update`."""
        table = self._blocks.get(block)
        if table is None:
            capacity = max(1, min(block, self.max_segments))
            count = -(-self.max_rows // block)
            copier = Copier(self.max_rows + count * (1 + 2 * capacity), self.device)
            slot_of_row, counts, lists = copier.buffer.split(
                [self.max_rows, count, 2 * count * capacity]
            )
            table = DeviceBlocks(block, capacity, copier, slot_of_row, counts, lists)
            self._refresh(table)
            self._blocks[block] = table
        return table

    def row_terms(self) -> DeviceRowTerms:
        """The terms of every row; made on first use, then refreshed by `update`."""
        if self._row_terms is None:
            capacity = min(self.max_rows, self.max_segments) * MAX_TERMS
            self._row_terms = DeviceRowTerms.of(self.max_rows, capacity, self.device)
            self._row_terms.refresh(self.grouping)
        return self._row_terms

    def _refresh(self, table: DeviceBlocks) -> None:
        found = block_rows(self.grouping, table.block, self.max_rows, table.capacity)
        table.copier.copy(np.concatenate([found.slot_of_row, found.counts, found.lists.ravel()]))
