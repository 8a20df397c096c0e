"""Which arrangement of the operator for which shape: torch-free look-up (VaLoRA §4.3.2)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """How the operator is computed; see `atmm_kernels`."""

    PAIR = "pair"
    FLOW = "flow"
    ROWS = "rows"


@dataclass(frozen=True, slots=True)
class Tiling:
    """One way to compute the operator.

    Attributes:
        kind: Arrangement of the two steps.
        rows: Rows a tile.
        outputs: Output columns a tile.
        inputs: Input columns that a shrinking program loads at a time.
        split: Input columns a shrinking program; `rows` takes all and ignores it.
        ranks: Rank rows a shrinking program at most; `rows` takes all and ignores it.
        parts: Programs that share the outputs of a tile (`rows` only).
        warps: Warps a program; of the shrink if there are two kernels.
        expand_warps: Warps a program of the second kernel (`pair` only).
        stages: Loads in flight in a program's loop.
    """

    kind: Kind
    rows: int = 16
    outputs: int = 64
    inputs: int = 128
    split: int = 256
    ranks: int = 64
    parts: int = 1
    warps: int = 4
    expand_warps: int = 4
    stages: int = 3
