"""Rows of a batch, sorted by their adapters: plain numpy, on the host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

NONE = -1
"""Adapter index of a row or term without an adapter."""

FEW_RUNS = 4
"""Most runs of a batch in which a single one with an adapter is looked for."""

MAX_TERMS = 2
"""Most terms of a row: two adapters, or its own and the merged one, subtracted."""


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
        coefficients: Like `adapters`: the factor of each term, such as −1 to subtract an adapter;
            1 everywhere by default.
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
        order, base = rows_of(first[runs], held), rows_of(first[base], lengths[base])
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


def rows_of(first: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
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
