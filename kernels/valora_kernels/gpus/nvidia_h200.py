"""NVIDIA H200: Hopper, 132 processors, 141 GB. All thresholds were measured on it, in bf16."""

from pathlib import Path

from valora_kernels.gpus.base import Gpu, ProjectRule
from valora_kernels.tiling import ProjectTiling

ONE_ROUND = 4224
"""Output columns that 132 processors take at once, 32 each."""


def _beside(rows: int, outputs: int | None, tile: tuple[int, int, int, int, int]) -> ProjectRule:
    """A product that the shrink runs beside, up to so many rows and outputs.

    Below 3,072 columns there are too few to occupy the processors, and the library splits the
    inputs too.
    """
    return ProjectRule(
        ProjectTiling(*tile),
        max_rows=rows,
        min_outputs=3072,
        max_outputs=outputs,
        max_elements=6 << 18,
    )


gpu = Gpu(
    name="NVIDIA H200",
    patterns=("NVIDIA H200",),
    processors=132,
    shared_memory=216 << 10,  # of 227 KB
    capability=(9, 0),
    table=Path(__file__).with_suffix(".json"),
    direct={"dense": {"rank": 96, "rows": 3072, "elements": 7 << 22}},
    sum_registers=64,
    startup_elements=6e6,  # in 3 µs
    rounds_from=256,
    lora_first_rows=256,
    projections=(
        ProjectRule(
            ProjectTiling(128, 256, 64, 8, 3, fold=True),
            min_rows=1024,
            max_elements=1 << 24,
            max_projections=1,
        ),
        _beside(16, None, (16, 32, 128, 4, 6)),
        # Hopper's own matrix instructions take 64 rows or more.
        _beside(64, ONE_ROUND, (64, 32, 128, 4, 6)),
        _beside(64, 16384, (64, 64, 64, 4, 6)),
        _beside(128, ONE_ROUND, (64, 64, 128, 4, 4)),
        _beside(256, ONE_ROUND, (64, 128, 64, 4, 6)),
        _beside(256, None, (64, 128, 64, 4, 4)),
    ),
    products=tuple(
        # The library reads W at 60 to 90 % of the bandwidth there and splits its sum into two
        # kernels; ours starts while what came before still ends (programmatic dependent launch).
        ProjectRule(ProjectTiling(16, *tile, ahead=0), min_rows=1, max_rows=16, min_outputs=outputs)
        for outputs, tile in ((8192, (64, 128, 4, 4)), (3072, (32, 256, 4, 6)))
    ),
)
