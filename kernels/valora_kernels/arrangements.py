"""The arrangements of kernels that tiling tables choose from, with their search."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from importlib.metadata import entry_points
from itertools import product
from typing import TYPE_CHECKING

from valora_kernels import launching
from valora_kernels.launching import EXPAND_RANKS
from valora_kernels.tiling import Arrangement, ProjectionGroup, Shape, Tiling, Timer, Times

if TYPE_CHECKING:
    from valora_kernels.gpus import Gpu

SHRINK_EXPAND, FUSED = "shrink_expand", "fused"
ALL, SHRINK, EXPAND = "all", "shrink", "expand"
"""What is timed of a tiling: the whole operator, or a step of `shrink_expand`."""


def fits(tiling: Tiling, shape: Shape, gpu: Gpu) -> bool:
    """Whether the GPU can run the tiling for a shape."""
    return arrangements()[tiling.arrangement].memory(tiling, shape.rank) <= gpu.shared_memory


def rounds(tiling: Tiling, shape: Shape, gpu: Gpu) -> int:
    """How often the processors take programs until all have run: time grows in such steps."""
    way = arrangements()[tiling.arrangement]
    resident = max(1, gpu.shared_memory // max(1, way.memory(tiling, shape.rank)))
    return max(1, math.ceil(way.programs(tiling, shape) / (gpu.processors * resident)))


def refit(tiling: Tiling, measured: int, in_features: int) -> Tiling:
    """Split another input width into as many parts as the measured one was."""
    if tiling.arrangement != SHRINK_EXPAND or measured == in_features:
        return tiling
    parts = -(-measured // tiling.split)
    share = -(-in_features // parts)
    return replace(tiling, split=-(-share // tiling.inputs) * tiling.inputs)


def default_tiling(shape: Shape) -> Tiling:
    """What usually does well: larger tiles for longer segments, more parts for fewer rows."""
    per = shape.rows / max(shape.adapters, 1)
    rows = 16 if per <= 64 else 32 if per <= 512 else 64
    parts = max(1, min(8, 256 * rows // max(shape.rows, 1)))
    split = -(-shape.in_features // parts // 128) * 128
    return Tiling(SHRINK_EXPAND, rows, 128, 128, split, 64, gather=parts > 1)


def whole_shrink(tiling: Tiling, in_features: int) -> Tiling:
    """A shrink that leaves h in one piece, whichever tiling was chosen for the whole operator."""
    if tiling.arrangement == SHRINK_EXPAND:
        return replace(tiling, gather=True)
    split = -(-in_features // 128) * 128
    return Tiling(SHRINK_EXPAND, max(tiling.rows, 16), inputs=128, split=split)


def beside_product(tiling: Tiling, in_features: int) -> Tiling:
    """The two steps beside a base product: time to sum h up, but place for few programs."""
    split = -(-in_features // (4 * 128)) * 128
    return Tiling(SHRINK_EXPAND, max(tiling.rows, 16), 256, 128, split, 64, gather=True, stages=4)


def _row_tiles(rows: int, adapters: int) -> list[int]:
    """Rows per tile that waste little on short segments and repeat little on long ones."""
    per = rows / adapters
    found = [16] if per <= 256 else []
    return found + [tile for tile, min_rows in ((32, 24), (64, 48), (128, 500)) if per >= min_rows]


def _tile_count(rows: int, adapters: int, tile: int) -> int:
    return adapters * -(-(rows // adapters) // tile)


def _tiles_of(tiling: Tiling, shape: Shape) -> float:
    adapters = max(shape.adapters, 1)
    return adapters * math.ceil(shape.rows / adapters / tiling.rows) * shape.projections


def _two_memory(tiling: Tiling, rank: int) -> int:
    """Bytes that a program of the kernel that needs more of them holds."""
    stages = tiling.stages if tiling.split > tiling.inputs else 1
    ahead = tiling.expand_stages if tiling.loop > 1 else 1
    first = stages * (tiling.rows + min(rank, tiling.ranks)) * tiling.inputs
    return 2 * max(first, ahead * (tiling.rows + min(rank, EXPAND_RANKS)) * tiling.outputs)


def _two_programs(tiling: Tiling, shape: Shape) -> float:
    """Shrinking programs: they read x and A, the larger part of what is read."""
    splits = -(-shape.in_features // tiling.split)
    return _tiles_of(tiling, shape) * (splits * -(-shape.rank // min(shape.rank, tiling.ranks)))


def shrinks(group: ProjectionGroup, rows: int, adapters: int, gpu: Gpu) -> list[Tiling]:
    """Candidates of the first of two steps; the second step's fields are still open."""
    found = []
    ranks = max(16, group.rank)
    for tile in _row_tiles(rows, adapters):
        blocks = sorted({16, min(ranks, 64)}) if tile <= 32 else sorted({min(ranks, 64), ranks})
        steps = (128, 256) if tile == 16 else (64, 128)
        for block, splits, step in product(blocks, (1, 2, 4, 8, 16), steps):
            split = -(-group.in_features // splits // step) * step
            count = len(group.out_features) * ranks // block * splits
            programs = _tile_count(rows, adapters, tile) * count
            if programs > gpu.share(2300) or (programs < gpu.share(40) and splits < 4):
                continue  # far too many to start, or most processors idle
            if block > 128 or block * step > 32768 or (splits == 16 and tile >= 64):
                continue
            warps = 8 if tile == 128 or (tile == 64 and step == 128) else 4
            for stages in (2,) if split == step else (3, 5) if tile >= 32 else (4,):
                if stages * (tile + block) * step * 2 > gpu.shared_memory:
                    continue
                sizes = {"rows": tile, "inputs": step, "split": split, "ranks": block}
                for gather in (False, True) if splits > 1 else (False,):
                    if not gather and splits * tile > 256:
                        continue  # every expanding program would sum too much
                    found.append(
                        Tiling(SHRINK_EXPAND, **sizes, gather=gather, warps=warps, stages=stages)
                    )
    return list(dict.fromkeys(found))


def expands(
    first: Tiling, group: ProjectionGroup, rows: int, adapters: int, gpu: Gpu
) -> list[Tiling]:
    """Candidates of the second step for a given first one."""
    found = []
    tiles = _tile_count(rows, adapters, first.rows)
    for outputs, loop, warps in product((64, 128, 256), (1, 2, 4, 8), (4, 8)):
        programs = tiles * sum(-(-n // (outputs * loop)) for n in group.out_features)
        enough = gpu.share(24) <= programs <= gpu.share(4800)
        if not enough and (outputs, loop) != (64, 1):
            continue
        if (warps == 8) != (first.rows * outputs > 8192) or first.rows * outputs > 128 * 256:
            continue
        for stages in (3,) if loop < 4 else (2, 4):
            memory = stages * (first.rows + max(16, group.rank)) * outputs * 2
            if loop > 1 and memory > gpu.shared_memory:
                continue
            found.append(
                replace(first, outputs=outputs, loop=loop, expand_warps=warps, expand_stages=stages)
            )
    return found


def _search_two(time: Timer, group: ProjectionGroup, rows: int, adapters: int, gpu: Gpu) -> Times:
    """Time the steps apart, and only the best of each together: a sum instead of a product."""
    best: dict[tuple[int, int], tuple[float, Tiling]] = {}
    for us, tiling in time(SHRINK, shrinks(group, rows, adapters, gpu), 3):
        # The second step sees only these properties of the first.
        parts = 1 if tiling.gather else -(-group.in_features // tiling.split)
        best.setdefault((tiling.rows, parts), (us, tiling))
    leading = sorted(best.values(), key=lambda pair: pair[0])[:5]
    seconds = [(us, expands(first, group, rows, adapters, gpu)) for us, first in leading]
    times = time(EXPAND, [t for _, tilings in seconds for t in tilings], 3)
    sums: Times = []
    for us, tilings in seconds:
        mine = set(tilings)
        sums += [(us + more, t) for more, t in times if t in mine][:3]
    return time(ALL, [t for _, t in sorted(sums, key=lambda pair: pair[0])[:12]], 5)


def _fused_memory(tiling: Tiling, rank: int) -> int:
    """Bytes that the step that needs more of them holds."""
    return 2 * tiling.stages * (tiling.rows + rank) * max(tiling.inputs, tiling.outputs)


def fused_tilings(group: ProjectionGroup, rows: int, adapters: int, gpu: Gpu) -> list[Tiling]:
    """Candidates of one kernel, for many rows of small ranks."""
    if rows < 512 or group.rank > 128:
        return []
    found = []
    for tile, outputs, step, parts, stages in product(
        (16, 32, 64, 128), (64, 128), (64, 128), (1, 2, 4), (3, 4)
    ):
        programs = _tile_count(rows, adapters, tile) * parts * len(group.out_features)
        enough = gpu.share(96) <= programs <= gpu.share(1100)
        if tile not in _row_tiles(rows, adapters) or not enough or (step, outputs) == (64, 128):
            continue
        sizes = (tile, outputs, step, 0, 64)
        warps = 8 if tile == 128 else 4
        tiling = Tiling(FUSED, *sizes, parts=parts, warps=warps, stages=stages)
        if _fused_memory(tiling, group.rank) <= gpu.shared_memory:
            found.append(tiling)
    return found


@cache
def arrangements() -> dict[str, Arrangement]:
    """Arrangements by the name in tiling tables, others' from the group ``valora.arrangements``."""
    others = {entry.name: entry.load() for entry in entry_points(group="valora.arrangements")}
    return others | {
        SHRINK_EXPAND: Arrangement(
            launching.shrink_expand, _two_memory, _two_programs, _search_two
        ),
        FUSED: Arrangement(
            launching.fused,
            _fused_memory,
            lambda tiling, shape: _tiles_of(tiling, shape) * tiling.parts,
            lambda time, *sizes: time(ALL, fused_tilings(*sizes), 3)[:2],
        ),
    }
