"""What kernels are chosen for and what is chosen: plain records, without torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

ROWS_TOGETHER = 128
"""Rows of an adapter from which on it does not matter to tiles whether others have more of one."""


@dataclass(frozen=True, slots=True)
class Tiling:
    """One way to compute the LoRA operator; an arrangement ignores what it has no use for."""

    arrangement: str  # see `arrangements.arrangements`
    rows: int = 16  # batch rows per tile
    outputs: int = 64  # output columns per tile
    inputs: int = 128  # input columns that a shrinking program loads at a time
    split: int = 256  # input columns per shrinking program (`shrink_expand`)
    ranks: int = 64  # most rank rows per shrinking program (`shrink_expand`)
    gather: bool = False  # the last shrinking program sums the parts, not every expanding one
    loop: int = 1  # output tiles per expanding program, in turn (`shrink_expand`)
    parts: int = 1  # programs that share the outputs of a tile (`fused`)
    warps: int = 4  # of the first kernel
    expand_warps: int = 4
    stages: int = 3  # loads in flight in the first kernel
    expand_stages: int = 3


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a call that its tiling depends on."""

    in_features: int
    out_features: int  # of all projections together
    projections: int
    rank: int  # largest that the weights have room for, rounded up as the kernels do
    rows: int  # with an adapter
    adapters: float  # `Grouping.effective_adapters`
    first: bool = False  # LoRA writes y, to which the base product then adds


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
    """One way to compute a base projection, with or without LoRA."""

    rows: int  # batch rows per tile
    outputs: int  # columns per tile
    inputs: int  # columns per step
    warps: int
    stages: int  # steps whose loads are in flight
    fold: bool = False  # expand within the product's sum, not after a shrink beside it
    ahead: int = 2  # steps of W that are fetched before x is ready


Times = list[tuple[float, Tiling]]  # median microseconds of each tiling, the fastest first

Timer = Callable[[str, Sequence[Tiling], int], Times]
"""Times a step of tilings with so many replays each; leaves out those that cannot be compiled."""


@dataclass(frozen=True, slots=True)
class Arrangement:
    """A way to compute the operator, and what the choice of its tilings must know."""

    launch: Callable[..., None]  # (tiling, ys, x, weights, batch, *, add), without checks
    memory: Callable[[Tiling, int], int]  # bytes of shared memory a program needs, for a rank
    programs: Callable[[Tiling, Shape], float]  # that the deciding kernel launches
    search: Callable[..., Times]  # (timer, group, rows, adapters, gpu)
