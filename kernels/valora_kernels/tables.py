"""What kernels read of a grouping: tiles and blocks of rows, in device buffers.

`tile_rows` and `block_rows` are plain numpy. The device tables have a fixed size and address, so
that one captured CUDA graph serves any mix of adapters.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from valora_kernels.grouping import MAX_TERMS, NONE, rows_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from valora_kernels.grouping import Grouping

ABSENT = -2
"""Behind the last adapter of a list of them; differs from that of rows without an adapter."""


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


def tile_rows(
    grouping: Grouping, block: int, capacity: int, memory: NDArray[np.int32] | None = None
) -> Tiles:
    """Cut the segments into tiles.

    Args:
        grouping: Result of `group_rows`.
        block: Rows per tile.
        capacity: Number of tiles that the result has room for.
        memory: [`tile_elements`] int32 that the result is written to; new memory by default.

    Raises:
        ValueError: The grouping needs more tiles than that.
    """
    adapters, ranks = grouping.adapters, grouping.ranks
    if grouping.segments == 1:
        count = -(-grouping.active // block)
    else:
        lengths = np.diff(grouping.starts)
        tiles = -(-lengths // block)
        count = int(tiles.sum())
        adapters, ranks = (np.repeat(part, tiles, axis=0) for part in (adapters, ranks))
    total = count - (-len(grouping.base) // block)
    if total > capacity:
        raise ValueError(
            f"batch: expected at most {capacity} tiles of {block} rows, got {total} "
            f"({grouping.rows} rows in {grouping.segments} segments)"
        )
    if memory is None:
        memory = np.empty(tile_elements(block, capacity), dtype=np.int32)
    places, split = capacity * block, 2 * MAX_TERMS * capacity
    records = memory[:split].reshape(capacity, 2 * MAX_TERMS)
    rows = memory[split : split + places]
    scale = memory[split + places : -2].view(np.float32).reshape(MAX_TERMS, places)
    memory[-2:] = count, total
    records[:count, 0::2] = adapters
    records[:count, 1::2] = ranks
    records[count:, 0::2] = NONE
    records[count:, 1::2] = 0
    rows.fill(NONE)
    scale.fill(0)
    if grouping.segments == 1:
        rows[: grouping.active] = grouping.order
        scale[:, : grouping.active] = grouping.scale.T
    elif count:
        first = (np.cumsum(tiles) - tiles) * block
        place = np.arange(grouping.active) + np.repeat(first - grouping.starts[:-1], lengths)
        rows[place] = grouping.order
        scale[:, place] = grouping.scale.T
    rows[count * block : count * block + len(grouping.base)] = grouping.base
    return Tiles(count=count, total=total, records=records, rows=rows, scale=scale)


def tile_elements(block: int, capacity: int) -> int:
    """Elements of 4 bytes that describe so many tiles: records, rows, scales, and two counts."""
    return capacity * (2 * MAX_TERMS + (1 + MAX_TERMS) * block) + 2


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

    def stage(self) -> NDArray[np.int32]:
        """Return the memory [size] that `send` copies next, pinned on a GPU; all is written anew.

        Two take turns: the copy out of this one was enqueued two batches ago, and has ended.
        """
        if self.buffer.device.type != "cuda":
            return self.buffer.numpy()
        if not self._staging:
            size = self.buffer.numel()
            self._staging = [torch.empty(size, dtype=torch.int32).pin_memory() for _ in "ab"]
            self._copied = [torch.cuda.Event() for _ in "ab"]
        self._turn ^= 1
        self._copied[self._turn].synchronize()
        return self._staging[self._turn].numpy()

    def send(self) -> None:
        """Enqueue the copy of what was written to the memory of `stage`."""
        if self.buffer.device.type == "cuda":
            self.buffer.copy_(self._staging[self._turn], non_blocking=True)
            self._copied[self._turn].record()


@dataclass(slots=True)
class DeviceTiles:
    """`Tiles` on the device: views of one buffer, which one copy refreshes.

    Attributes:
        block: Rows per tile.
        capacity: Number of tiles that there is room for.
        copier: The buffer of all tensors below, [`tile_elements`] int32.
        described: The batch of the last refresh.
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
    described: Grouping | None = None
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

    def refresh(self, grouping: Grouping) -> None:
        """Copy the tiles of a batch to the device, unless they are there."""
        if grouping is self.described:
            return
        tiles = tile_rows(grouping, self.block, self.capacity, self.copier.stage())
        self.described, self.count, self.total = grouping, tiles.count, tiles.total
        self.copier.send()


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


def block_rows(
    grouping: Grouping,
    block: int,
    rows: int,
    capacity: int,
    memory: NDArray[np.int32] | None = None,
) -> RowBlocks:
    """List the adapters of each block of rows.

    Args:
        grouping: What `group_rows` returned, with one term per row.
        block: Rows per block.
        rows: Number of rows that the result has room for.
        capacity: Adapters per block that the result has room for.
        memory: [`block_elements`] int32 that the result is written to; new memory by default.
    """
    blocks = -(-rows // block)
    if memory is None:
        memory = np.empty(block_elements(block, rows, capacity), dtype=np.int32)
    slot_of_row, counts = memory[:rows], memory[rows : rows + blocks]
    lists = memory[rows + blocks :].reshape(blocks, capacity, 2)
    slot_of_row.fill(NONE)
    counts.fill(0)
    lists.fill(0)
    starts, order, segments = grouping.starts, grouping.order, grouping.segments
    if segments == 1 and order[-1] - order[0] < len(order):  # one run of rows
        slot_of_row[order[0] : order[-1] + 1] = grouping.adapters[0, 0]
        spanned = slice(order[0] // block, order[-1] // block + 1)
        counts[spanned] = 1
        lists[spanned, 0] = grouping.adapters[0, 0], grouping.ranks[0, 0]
    elif segments:
        slot_of_row[order] = np.repeat(grouping.adapters[:, 0], np.diff(starts))
        # Neighbouring rows of one segment are one piece, of which a prompt has few.
        apart = order[1:] != order[:-1] + 1
        apart[starts[1:-1] - 1] = True
        first = np.concatenate([[0], np.flatnonzero(apart) + 1])
        last = np.append(first[1:], len(order)) - 1
        owner = np.searchsorted(starts, first, side="right") - 1
        of_first = order[first] // block
        spans = order[last] // block - of_first + 1
        owner = np.repeat(owner, spans)
        # Pairs as one number: numpy sorts columns of pairs ten times as long.
        pairs = np.unique(rows_of(of_first, spans) * segments + owner)
        of_block, segment = np.divmod(pairs, segments)
        counts[:] = np.bincount(of_block, minlength=blocks)
        place = np.arange(len(pairs)) - (np.cumsum(counts) - counts)[of_block]
        lists[of_block, place, 0] = grouping.adapters[segment, 0]
        lists[of_block, place, 1] = grouping.ranks[segment, 0]
    return RowBlocks(slot_of_row=slot_of_row, counts=counts, lists=lists)


def block_elements(block: int, rows: int, capacity: int) -> int:
    """Elements of 4 bytes that describe the blocks of so many rows: `RowBlocks`."""
    return rows + -(-rows // block) * (1 + 2 * capacity)


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
        described: The batch of the last refresh.
    """

    block: int
    capacity: int
    copier: Copier
    slot_of_row: torch.Tensor
    counts: torch.Tensor
    lists: torch.Tensor
    described: Grouping | None = None

    @classmethod
    def of(cls, block: int, rows: int, capacity: int, device: torch.device) -> DeviceBlocks:
        """Room for blocks of so many rows."""
        count = -(-rows // block)
        copier = Copier(block_elements(block, rows, capacity), device)
        parts = copier.buffer.split([rows, count, 2 * count * capacity])
        return cls(block, capacity, copier, *parts)

    def refresh(self, grouping: Grouping) -> None:
        """Copy the blocks of a batch to the device, unless they are there."""
        if grouping is self.described:
            return
        rows = len(self.slot_of_row)
        block_rows(grouping, self.block, rows, self.capacity, self.copier.stage())
        self.described = grouping
        self.copier.send()
