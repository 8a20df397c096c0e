"""Records of GPUs: their hardware, what was measured on them, and the tiling tables beside it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING

from valora_kernels.tiling import ProjectTiling

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

COMPILER_MEMORY = 11 << 10  # bytes of shared memory a program that are left to the compiler


@dataclass(frozen=True, slots=True)
class ProjectRule:
    """The sizes for which a tiling of the base product is the fastest; bounds are inclusive."""

    tiling: ProjectTiling
    min_rows: int = 0
    max_rows: float = float("inf")
    min_outputs: int = 0
    max_outputs: float = float("inf")
    max_elements: float = float("inf")
    max_projections: float = float("inf")

    def applies(self, rows: int, out_features: Sequence[int]) -> bool:
        """Whether a product of so many rows, with projections of these widths, is within bounds."""
        outputs = sum(out_features)
        return (
            self.min_rows <= rows <= self.max_rows
            and self.min_outputs <= outputs <= self.max_outputs
            and rows * outputs <= self.max_elements
            and len(out_features) <= self.max_projections
        )


@dataclass(frozen=True, slots=True, eq=False)
class Gpu:
    """What the choice of kernels must know of a GPU; compared by identity, a cheap cache key."""

    name: str  # as torch reports it
    patterns: tuple[str, ...]  # device names, with * and ?
    processors: int
    shared_memory: int  # bytes that a program may use, less what the compiler adds
    capability: tuple[int, int]
    table: Path | None = None  # JSON file of the tilings that were measured on it
    like: Gpu | None = None  # of the same chip: its tilings are used where none were measured
    lora_first_rows: int = 256  # from which on LoRA writes y and the base product adds to it
    projections: tuple[ProjectRule, ...] = ()  # base products with LoRA, else the library's
    products: tuple[ProjectRule, ...] = ()  # base products without LoRA

    def describes(self, device_name: str) -> bool:
        """Whether the record is of the device that torch calls `device_name`."""
        return any(fnmatchcase(device_name.lower(), pattern.lower()) for pattern in self.patterns)

    def share(self, programs: int) -> float:
        """As many programs for each processor as `programs` are on a GPU of 132 processors."""
        return programs * self.processors / 132


def _table(name: str) -> Path:
    return Path(__file__).with_name(name.lower().replace(" ", "_") + ".json")


def _beside(rows: int, outputs: float, tiling: ProjectTiling) -> ProjectRule:
    """A shrink beside it; below 3,072 columns the library, which splits the inputs, is faster."""
    return ProjectRule(tiling, 0, rows, 3072, outputs, max_elements=6 << 18)


ONE_ROUND = 4224  # output columns that 132 processors take at once, 32 each

H200 = Gpu(  # all thresholds were measured on it, in bf16
    name="NVIDIA H200",
    patterns=("NVIDIA H200",),
    processors=132,
    shared_memory=216 << 10,  # of 227 KB
    capability=(9, 0),
    table=_table("NVIDIA H200"),
    projections=(
        ProjectRule(
            ProjectTiling(128, 256, 64, 8, 3, fold=True),
            min_rows=1024,
            max_elements=1 << 24,
            max_projections=1,
        ),
        _beside(16, float("inf"), ProjectTiling(16, 32, 128, 4, 6)),
        # Hopper's own matrix instructions take 64 rows or more.
        _beside(64, ONE_ROUND, ProjectTiling(64, 32, 128, 4, 6)),
        _beside(64, 16384, ProjectTiling(64, 64, 64, 4, 6)),
        _beside(128, ONE_ROUND, ProjectTiling(64, 64, 128, 4, 4)),
        _beside(256, ONE_ROUND, ProjectTiling(64, 128, 64, 4, 6)),
        _beside(256, float("inf"), ProjectTiling(64, 128, 64, 4, 4)),
    ),
    products=tuple(
        # The library reads W at 60 to 90 % of the bandwidth there and splits its sum into two
        # kernels; ours starts while what came before still ends (programmatic dependent launch).
        ProjectRule(ProjectTiling(16, *tile, ahead=0), min_rows=1, max_rows=16, min_outputs=outputs)
        for outputs, tile in ((8192, (64, 128, 4, 4)), (3072, (32, 256, 4, 6)))
    ),
)
H100 = replace(  # the same chip; the H100 PCIe has fewer processors, which the driver tells
    H200,
    name="NVIDIA H100",
    patterns=(
        "NVIDIA H100 80GB HBM3",
        "NVIDIA H100 NVL",
        "NVIDIA H200 NVL",
        "NVIDIA H800",
        "NVIDIA GH200*",
    ),
    table=_table("NVIDIA H100"),
    like=H200,
)
GPUS = [H200, H100]
"""The records of this package; others are in the entry-point group ``valora.gpus``."""


def recorded(device_name: str) -> Gpu | None:
    """The first record of the device that `torch.cuda.get_device_name` calls so, if any."""
    others: list[Gpu] = [entry.load() for entry in entry_points(group="valora.gpus")]
    return next((gpu for gpu in [*GPUS, *others] if gpu.describes(device_name)), None)


def generic(name: str, *, processors: int, shared_memory: int, capability: tuple[int, int]) -> Gpu:
    """An unmeasured GPU: the H200's thresholds, base products on data-centre GPUs (9.x, 10.x)."""
    large = capability[0] in (9, 10)
    return replace(
        H200,
        name=name,
        patterns=(),
        processors=processors,
        shared_memory=shared_memory,
        capability=capability,
        table=_table(name),
        projections=H200.projections if large else (),
        products=H200.products if large else (),
    )


@cache
def gpu_of(device: torch.device) -> Gpu:
    """The record of a device, or one read from the driver; that of a CPU is for the interpreter."""
    if device.type != "cuda":
        return recorded(device.type) or generic(
            device.type, processors=3, shared_memory=H200.shared_memory, capability=(0, 0)
        )
    import torch

    name = torch.cuda.get_device_name(device)
    found = recorded(name)
    if found is None:
        driver = torch.cuda.get_device_properties(device)
        found = generic(
            name,
            processors=driver.multi_processor_count,
            shared_memory=driver.shared_memory_per_block_optin - COMPILER_MEMORY,
            capability=(driver.major, driver.minor),
        )
        log.warning(
            "%s has no record: %d processors and %d KB of shared memory are read from the driver, "
            "all thresholds are those of the %s; register a record in the group valora.gpus",
            name, found.processors, found.shared_memory >> 10, H200.name,
        )  # fmt: skip
    return found
