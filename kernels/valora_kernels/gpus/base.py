"""The record of a GPU: its hardware, and the thresholds that were measured on it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

from valora_kernels.tiling import ProjectTiling


@dataclass(frozen=True, slots=True)
class ProjectRule:
    """A tiling of the base product and the sizes for which it is the fastest; bounds are inclusive.

    Attributes:
        tiling: How the projection is computed.
        min_rows: Fewest batch rows.
        max_rows: Most batch rows; None without a bound.
        min_outputs: Fewest output columns of all projections together.
        max_outputs: Most output columns of all projections together; None without a bound.
        max_elements: Most elements of y, rows times output columns; None without a bound.
        max_projections: Most projections that share x; None without a bound.
    """

    tiling: ProjectTiling
    min_rows: int = 0
    max_rows: int | None = None
    min_outputs: int = 0
    max_outputs: int | None = None
    max_elements: int | None = None
    max_projections: int | None = None

    def applies(self, rows: int, out_features: Sequence[int]) -> bool:
        """Whether a product of so many rows, with projections of these widths, is within bounds."""
        outputs = sum(out_features)
        bounds = (
            (rows, self.max_rows),
            (outputs, self.max_outputs),
            (rows * outputs, self.max_elements),
            (len(out_features), self.max_projections),
        )
        return (
            rows >= self.min_rows
            and outputs >= self.min_outputs
            and all(most is None or value <= most for value, most in bounds)
        )


@dataclass(frozen=True, slots=True, eq=False)
class Gpu:
    """What the choice of kernels must know of a GPU.

    Records are compared by identity, so they are cheap keys of a cache.

    Attributes:
        name: Name in tables and messages, as torch reports it.
        patterns: Device names that the record describes, with `*` and `?`; case does not matter.
        processors: Streaming multiprocessors.
        shared_memory: Bytes of shared memory that a program may use, less what the compiler adds.
        capability: Compute capability, e.g. (9, 0).
        table: JSON file of the tilings that were measured on it; None, or a file that does not
            exist, where nothing was measured.
        like: A GPU with the same chip, whose tilings are used where none were measured.
        default: Arrangement whose rules choose a tiling where nothing was measured.
        direct: Thresholds of each arrangement that is asked before the table, by its name.
        sum_registers: Registers of a thread that hold partial sums while they are added up.
        startup_elements: 16-bit elements that could move while a kernel starts.
        rounds_from: Batch rows from which on a further round of programs costs more than the
            start of a kernel.
        lora_first_rows: Batch rows from which on LoRA writes y and the library's base product
            adds to it; below, LoRA adds to the base product.
        projections: Rules for base products with LoRA; the first that applies decides, and where
            none does the library computes the base product.
        products: Rules for base products without LoRA; the first that applies decides.
    """

    name: str
    patterns: tuple[str, ...]
    processors: int
    shared_memory: int
    capability: tuple[int, int]
    table: Path | None = None
    like: Gpu | None = None
    default: str = "shrink_expand"
    direct: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    sum_registers: int = 64
    startup_elements: float = 6e6
    rounds_from: int = 256
    lora_first_rows: int = 256
    projections: tuple[ProjectRule, ...] = ()
    products: tuple[ProjectRule, ...] = ()

    def describes(self, device_name: str) -> bool:
        """Whether the record is of the device that torch calls `device_name`."""
        return any(fnmatchcase(device_name.lower(), pattern.lower()) for pattern in self.patterns)

    def share(self, programs: int) -> float:
        """As many programs for each processor as `programs` are on a GPU of 132 processors."""
        return programs * self.processors / 132
