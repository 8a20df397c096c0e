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

FEW_RUNS = 4
"""Most runs of a batch in which a single one with an adapter is looked for."""

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
    """Sort rows into segments that share their adapters.

    Args:
        adapters: [runs] or [runs, terms ≤ 2] adapter of each term of a run of neighbouring rows,
            `NONE` for none.
        ranks: [slots] rank of each adapter; 0 for an empty slot.
        scalings: [slots] scaling of each adapter (alpha / r, or alpha / √r with rsLoRA).
        coefficients: Like `adapters`: +1 or −1 for each term; +1 everywhere by default.
        counts: [runs] number of rows of each run, at least 1; each run is one row by default.
        rows: Number of rows; those behind the runs have no adapter. There are none by default.

    Returns:
        The grouping; rows of a segment stay in the order of the batch.

    Raises:
        ValueError: An adapter index is outside the slots or names an empty one, or shapes differ.
    """
    rank, scaling = np.asarray(ranks, dtype=np.int32), np.asarray(scalings, dtype=np.float32)
    if counts is not None:
        one = _one_run(adapters, rank, scaling, coefficients, counts, rows)
        if one is not None:
            return one
    index, scale = _terms(adapters, rank, scaling, coefficients)
    key = (index + 1) @ np.array([len(rank) + 1, 1])
    runs = np.argsort(key, kind="stable")
    plain = len(key) - np.count_nonzero(key)
    base, runs = runs[:plain], runs[plain:]
    own = key[runs]
    firsts = np.concatenate([own[:1] != 0, own[1:] != own[:-1]]).nonzero()[0]
    owners = index[runs[firsts]]
    scale = scale[runs]
    starts = np.empty(len(firsts) + 1, dtype=np.int32)
    if counts is None:
        used, order = len(index), runs
        starts[:-1] = firsts
    else:
        lengths = np.asarray(counts, dtype=np.int64)
        if lengths.shape != key.shape or lengths.min(initial=1) < 1:
            raise ValueError(
                f"counts: expected {len(key)} numbers of rows from 1 on, got {lengths.tolist()}"
            )
        first = np.cumsum(lengths) - lengths
        used = int(lengths.sum())
        held = lengths[runs]
        starts[:-1] = (np.cumsum(held) - held)[firsts]
        order, base = _rows_of(first[runs], held), _rows_of(first[base], lengths[base])
        scale = np.repeat(scale, held, axis=0)
    starts[-1] = len(order)
    if rows is None:
        rows = used
    elif rows != used:
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
        scale=scale,
        base=base.astype(np.int32),
    )


def _one_run(
    adapters: ArrayLike,
    rank: NDArray[np.int32],
    scaling: NDArray[np.float32],
    coefficients: ArrayLike | None,
    counts: ArrayLike,
    rows: int | None,
) -> Grouping | None:
    """What `group_rows` returns where a single run has an adapter; None for other batches.

    A lone prompt waits for it: numpy's operations take a host some 5 us each after a wait for the
    GPU, and these are a third of the general ones.
    """
    given, lengths = np.asarray(adapters), np.asarray(counts)
    if len(lengths) > FEW_RUNS or given.ndim != 2 or given.shape != (len(lengths), 1):
        return None
    slots, held = given[:, 0].tolist(), lengths.tolist()
    named = [at for at, slot in enumerate(slots) if slot != NONE]
    used = sum(held)
    total = used if rows is None else rows
    if len(named) != 1 or min(held) < 1 or total < used:
        return None
    (at,) = named
    slot, first, count = slots[at], sum(held[:at]), held[at]
    if rank.shape != scaling.shape or not 0 <= slot < rank.size or rank[slot] < 1:
        return None
    factor = 1 if coefficients is None else np.asarray(coefficients)[at, 0]
    base = np.arange(total - count, dtype=np.int32)
    base[first:] += count
    scale = np.zeros((count, MAX_TERMS), dtype=np.float32)
    scale[:, 0] = np.float32(factor) * scaling[slot]
    return Grouping(
        rows=total,
        terms=1,
        order=np.arange(first, first + count, dtype=np.int32),
        starts=np.array([0, count], dtype=np.int32),
        adapters=np.array([[slot, NONE]], dtype=np.int32),
        ranks=np.array([[rank[slot], 0]], dtype=np.int32),
        scale=scale,
        base=base,
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
    """Check the arguments of `group_rows`, and bring the terms of each run into one form.

    Returns:
        [runs, 2] adapter of each term, with the second `NONE` where one term is enough, and
        [runs, 2] coefficient · scaling of each term.
    """
    given = np.asarray(adapters, dtype=np.int64)
    if given.ndim == 1:
        given = given[:, None]
    if given.ndim != 2 or not 1 <= given.shape[1] <= MAX_TERMS:
        raise ValueError(f"adapters: expected [runs] or [runs, 1 or 2], got {given.shape}")
    if rank.ndim != 1 or rank.shape != scaling.shape:
        raise ValueError(f"ranks and scalings: expected [slots], got {rank.shape}, {scaling.shape}")
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
        self._arrays: list[NDArray[np.int32]] = []
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
            self._arrays = [staging.numpy() for staging in self._staging]
            self._copied = [torch.cuda.Event() for _ in "ab"]
        self._turn ^= 1
        self._copied[self._turn].synchronize()
        return self._arrays[self._turn]

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
        pairs = np.unique(_rows_of(of_first, spans) * segments + owner)
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
        described: The batch of the last refresh.
    """

    copier: Copier
    adapters: torch.Tensor
    ranks: torch.Tensor
    scale: torch.Tensor
    distinct: torch.Tensor
    count: int = 0
    described: Grouping | None = None

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
        """Copy the terms of a batch to the device, unless they are there."""
        if grouping is self.described:
            return
        memory, rows = self.copier.stage(), self.adapters.shape[1]
        adapters, ranks, scale = memory[: 3 * MAX_TERMS * rows].reshape(3, MAX_TERMS, rows)
        distinct = memory[3 * MAX_TERMS * rows :].reshape(-1, 2)
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
        self.described = grouping
        self.copier.send()


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
        counts: ArrayLike | None = None,
        rows: int | None = None,
    ) -> None:
        """Describe the next batch; see `group_rows` for the arguments.

        The copies to the device are enqueued on the current stream, and nothing waits for them:
        now if graphs may read them again, otherwise by the first call that reads them.

        Raises:
            ValueError: What `group_rows` raises, or more rows, segments or terms than there is
                room for.
        """
        grouping = group_rows(adapters, ranks, scalings, coefficients, counts, rows)
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
        if self.fixed:
            for tiles in self._tiles.values():
                tiles.refresh(grouping)
            for blocks in self._blocks.values():
                blocks.refresh(grouping)
            if self._row_terms is not None:
                self._row_terms.refresh(grouping)

    @property
    def _captured(self) -> bool:
        """Whether a call has read what a captured graph reads again."""
        return bool(self._tiles) or self._row_terms is not None

    def tiles(self, block: int) -> DeviceTiles:
        """The batch in tiles of `block` rows."""
        table = self._tiles.get(block)
        if table is None:
            capacity = tile_capacity(self.max_rows, self.max_segments, block)
            copier = Copier(tile_elements(block, capacity), self.device)
            table = self._tiles[block] = DeviceTiles(block, capacity, copier)
        table.refresh(self.grouping)
        return table

    def blocks(self, block: int) -> DeviceBlocks:
        """The adapters of each block of rows."""
        table = self._blocks.get(block)
        if table is None:
            capacity = max(1, min(block, self.max_segments))
            table = DeviceBlocks.of(block, self.max_rows, capacity, self.device)
            self._blocks[block] = table
        table.refresh(self.grouping)
        return table

    def row_terms(self) -> DeviceRowTerms:
        """The terms of every row."""
        if self._row_terms is None:
            capacity = min(self.max_rows, self.max_segments) * MAX_TERMS
            self._row_terms = DeviceRowTerms.of(self.max_rows, capacity, self.device)
        self._row_terms.refresh(self.grouping)
        return self._row_terms
