"""What kernels are chosen for and what is chosen: plain records, without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

ROWS_TOGETHER = 128
"""Rows of an adapter from which on it makes no difference to tiles whether others have more rows of
the same one (where LoRA comes first)."""


@dataclass(frozen=True, slots=True)
class Tiling:
    """One way to compute the LoRA operator; an arrangement ignores what it has no use for.

    Attributes:
        arrangement: Name of the arrangement of kernels, see `launching.LAUNCHES`.
        rows: Batch rows per tile.
        outputs: Output columns per tile.
        inputs: Input columns that a shrinking program loads at a time.
        split: Input columns per shrinking program (`shrink_expand`).
        ranks: Largest number of rank rows per shrinking program (`shrink_expand`).
        gather: Whether the last shrinking program of a tile sums the parts of the input width;
            otherwise every expanding program sums them (`shrink_expand`).
        loop: Output tiles per expanding program, computed one after the other (`shrink_expand`).
        parts: Programs that share the outputs of a tile (`fused`).
        warps: Warps per program; with two kernels, of the first.
        expand_warps: Warps per program of the second kernel (`shrink_expand`).
        stages: Loads in flight in a program's loop; with two kernels, in the first.
        expand_stages: Loads in flight in the second kernel (`shrink_expand`).
    """

    arrangement: str
    rows: int = 16
    outputs: int = 64
    inputs: int = 128
    split: int = 256
    ranks: int = 64
    gather: bool = False
    loop: int = 1
    parts: int = 1
    warps: int = 4
    expand_warps: int = 4
    stages: int = 3
    expand_stages: int = 3


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a call that its tiling depends on.

    Attributes:
        in_features: Width of x.
        out_features: Width of all projections together.
        projections: Number of projections that share x.
        rank: Largest rank that the weights have room for, rounded up as the kernels do.
        rows: Batch rows that have an adapter.
        adapters: Adapters that the rows share; `Grouping.effective_adapters` where the rows are
            shared unevenly.
        first: Whether LoRA writes y, to which the base product then adds. Such shapes have an
            adapter for every `ROWS_TOGETHER` rows or more.
    """

    in_features: int
    out_features: int
    projections: int
    rank: int
    rows: int
    adapters: float
    first: bool = False


class Case(NamedTuple):
    """A batch to measure tilings for: rows that adapters share evenly, and `Shape.first`."""

    rows: int
    adapters: int
    first: bool = False


@dataclass(frozen=True, slots=True)
class ProjectionGroup:
    """Input width and output widths of projections that share x, and their largest rank."""

    in_features: int
    out_features: tuple[int, ...]
    rank: int

    def shape(self, rows: int, adapters: float, first: bool = False) -> Shape:
        """The look-up key of `rows` rows that share `adapters` adapters evenly."""
        if first:  # enough that none has too many rows
            adapters = max(adapters, rows / ROWS_TOGETHER)
        outputs = self.out_features
        return Shape(
            self.in_features, sum(outputs), len(outputs), self.rank, rows, float(adapters), first
        )


@dataclass(frozen=True, slots=True)
class ProjectTiling:
    """One way to compute a base projection, with or without LoRA.

    Attributes:
        rows: Batch rows per tile.
        outputs: Output columns per tile.
        inputs: Input columns per step.
        warps: Warps per program.
        stages: Steps whose loads are in flight.
        fold: Expand within the base product's sum; otherwise shrink beside the base product and
            expand after it.
        ahead: Steps of W that are fetched before x is ready.
        halves: Store the two halves of a tile apart (with `fold` only).
    """

    rows: int
    outputs: int
    inputs: int
    warps: int
    stages: int
    fold: bool = False
    ahead: int = 2
    halves: bool = False
