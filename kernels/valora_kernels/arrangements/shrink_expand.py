"""Two kernels, one for each step of the operator: `shrink_kernel`, then `expand_kernel`."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, ClassVar

import torch

from valora_kernels.arrangements.base import (
    ALL,
    Arrangement,
    Times,
    Trial,
    row_tiles,
    tile_count,
    tiles_of,
)
from valora_kernels.launching import (
    ALIGNMENT,
    common_arguments,
    kernels,
    outputs_of,
    padded_ranks,
    power_of_two,
    sizes_of,
    start,
    tiles_to_launch,
)
from valora_kernels.tiling import ProjectionGroup, Shape, Tiling

if TYPE_CHECKING:
    from valora_kernels.gpus.base import Gpu
    from valora_kernels.metadata import LoraBatch
    from valora_kernels.weights import LoraWeights

EXPAND_RANKS = 128
"""Rank rows that an expanding program holds at once."""

TURNS_FROM = 8
"""Expanding programs for each processor that are enough to occupy it, whatever the batch."""

SHRINK_TURNS_FROM = 4
"""The same of shrinking programs, which have more shared memory."""

SHRINK, EXPAND = "shrink", "expand"


class ShrinkExpand(Arrangement):
    """Two launches; the second is in flight, its weights loaded, when the first ends.

    The input width can be split over programs, whose parts of h are summed by the last shrinking
    program of a tile (`Tiling.gather`) or by every expanding one.
    """

    name: ClassVar[str] = "shrink_expand"

    def launch(
        self,
        tiling: Tiling,
        ys: Sequence[torch.Tensor],
        x: torch.Tensor,
        weights: LoraWeights,
        batch: LoraBatch,
        *,
        add: bool = True,
    ) -> None:
        """Shrink, then expand."""
        h, parts = shrink(tiling, x, weights, batch)
        expand(tiling, ys, h, parts, weights, batch, add=add)

    def call(
        self,
        step: str,
        tiling: Tiling,
        ys: Sequence[torch.Tensor],
        x: torch.Tensor,
        weights: LoraWeights,
        batch: LoraBatch,
    ) -> Callable[[], object]:
        """The call of one of the two steps, or of both."""
        if step == SHRINK:
            return partial(shrink, tiling, x, weights, batch)
        if step == EXPAND:
            h, _ = shrink(tiling, x, weights, batch)
            return partial(expand, tiling, ys, h, _parts(tiling, weights), weights, batch)
        return super().call(step, tiling, ys, x, weights, batch)

    def shared_memory(self, tiling: Tiling, rank: int) -> int:
        """Bytes that a program of the kernel that needs more of them holds."""
        stages = tiling.stages if tiling.split > tiling.inputs else 1
        ahead = tiling.expand_stages if tiling.loop > 1 else 1
        first = stages * (tiling.rows + min(rank, tiling.ranks)) * tiling.inputs
        return 2 * max(first, ahead * (tiling.rows + min(rank, EXPAND_RANKS)) * tiling.outputs)

    def programs(self, tiling: Tiling, shape: Shape) -> float:
        """Shrinking programs: they read x and A, the larger part of what is read."""
        splits = -(-shape.in_features // tiling.split)
        return tiles_of(tiling, shape) * (splits * -(-shape.rank // min(shape.rank, tiling.ranks)))

    def refit(self, tiling: Tiling, measured: int, in_features: int) -> Tiling:
        """Split another input width into as many parts as the measured one was."""
        if measured == in_features:
            return tiling
        parts = -(-measured // tiling.split)
        share = -(-in_features // parts)
        return replace(tiling, split=-(-share // tiling.inputs) * tiling.inputs)

    def default_tiling(self, shape: Shape) -> Tiling:
        """What usually does well: larger tiles for longer segments, more parts for fewer rows."""
        per = shape.rows / max(shape.adapters, 1)
        rows = 16 if per <= 64 else 32 if per <= 512 else 64
        inputs = 128
        parts = max(1, min(8, 256 * rows // max(shape.rows, 1)))
        split = -(-shape.in_features // parts // inputs) * inputs
        return Tiling(self.name, rows, 128, inputs, split, 64, gather=parts > 1)

    def candidates(
        self, group: ProjectionGroup, rows: int, adapters: int, gpu: Gpu
    ) -> list[Tiling]:
        """All pairs of a first and a second step; `search` times far fewer."""
        firsts = self.shrinks(group, rows, adapters, gpu)
        return [t for first in firsts for t in self.expands(first, group, rows, adapters, gpu)]

    def shrinks(self, group: ProjectionGroup, rows: int, adapters: int, gpu: Gpu) -> list[Tiling]:
        """Candidates of the first step; the second step's fields are still open."""
        found = []
        ranks = max(16, group.rank)
        for tile in row_tiles(rows, adapters):
            blocks = sorted({16, min(ranks, 64)}) if tile <= 32 else sorted({min(ranks, 64), ranks})
            steps = (128, 256) if tile == 16 else (64, 128)
            for block, splits, step in product(blocks, (1, 2, 4, 8, 16), steps):
                split = -(-group.in_features // splits // step) * step
                count = len(group.out_features) * ranks // block * splits
                programs = tile_count(rows, adapters, tile) * count
                if programs > gpu.share(2300) or (programs < gpu.share(40) and splits < 4):
                    continue  # far too many to start, or most processors idle
                if block > 128 or block * step > 32768 or (splits == 16 and tile >= 64):
                    continue
                for stages in (2,) if split == step else (3, 5) if tile >= 32 else (4,):
                    if stages * (tile + block) * step * 2 > gpu.shared_memory:
                        continue
                    for gather in (False, True) if splits > 1 else (False,):
                        if not gather and splits * tile > 256:
                            continue  # every expanding program would sum too much
                        warps = 8 if tile == 128 or (tile == 64 and step == 128) else 4
                        found.append(
                            Tiling(
                                self.name,
                                rows=tile,
                                inputs=step,
                                split=split,
                                ranks=block,
                                gather=gather,
                                warps=warps,
                                stages=stages,
                            )
                        )
        return list(dict.fromkeys(found))

    def expands(
        self, first: Tiling, group: ProjectionGroup, rows: int, adapters: int, gpu: Gpu
    ) -> list[Tiling]:
        """Candidates of the second step for a given first one."""
        found = []
        tiles = tile_count(rows, adapters, first.rows)
        for outputs, loop, warps in product((64, 128, 256), (1, 2, 4, 8), (4, 8)):
            programs = tiles * sum(-(-n // (outputs * loop)) for n in group.out_features)
            enough = gpu.share(24) <= programs <= gpu.share(4800)
            if not enough and (outputs, loop) != (64, 1):
                continue
            if (warps == 8) != (first.rows * outputs > 8192):
                continue
            if first.rows * outputs > 128 * 256:
                continue
            for stages in (3,) if loop < 4 else (2, 4):
                memory = stages * (first.rows + max(16, group.rank)) * outputs * 2
                if loop > 1 and memory > gpu.shared_memory:
                    continue
                found.append(
                    replace(
                        first, outputs=outputs, loop=loop, expand_warps=warps, expand_stages=stages
                    )
                )
        return found

    def search(
        self, group: ProjectionGroup, rows: int, adapters: int, gpu: Gpu
    ) -> Generator[Trial, Times, Times]:
        """Time the steps apart, and only the best of each together: a sum instead of a product."""
        times = yield Trial(SHRINK, self.shrinks(group, rows, adapters, gpu))
        best: dict[tuple[int, int], tuple[float, Tiling]] = {}
        for us, tiling in times:  # the second step sees only these properties of the first
            parts = 1 if tiling.gather else -(-group.in_features // tiling.split)
            best.setdefault((tiling.rows, parts), (us, tiling))
        leading = sorted(best.values(), key=lambda pair: pair[0])[:5]
        seconds = [(us, self.expands(t, group, rows, adapters, gpu)) for us, t in leading]
        times = yield Trial(EXPAND, [t for _, tilings in seconds for t in tilings])
        sums: list[tuple[float, Tiling]] = []
        for us, tilings in seconds:
            mine = set(tilings)
            sums += [(us + more, t) for more, t in times if t in mine][:3]
        together = [t for _, t in sorted(sums, key=lambda pair: pair[0])[:12]]
        return (yield Trial(ALL, together, repeats=5, compiled=True))


def shrink(
    tiling: Tiling,
    x: torch.Tensor,
    weights: LoraWeights,
    batch: LoraBatch,
    *,
    by_row: bool = False,
    beside: bool = False,
) -> tuple[torch.Tensor, int]:
    """Compute h = coefficient · scaling · x Aᵀ, the first of the two steps.

    Args:
        tiling: Tile sizes.
        x: [rows, in_features].
        weights: A and B of every adapter.
        batch: Which rows have which adapters.
        by_row: Leave h in the order of the rows.
        beside: The launch before was `base_kernel` on the same x, and runs on meanwhile.

    Returns:
        h and the number of parts that it consists of: one part is [P, terms, places or rows, ranks]
        in x's dtype, several are [parts, P, terms, places, ranks] in fp32, to be summed.
    """
    table = batch.tiles(tiling.rows)
    projections, terms = len(weights.out_features), batch.terms
    ranks = padded_ranks(weights)
    block = min(ranks, tiling.ranks)
    splits = -(-weights.in_features // tiling.split)
    gather = tiling.gather and splits > 1
    sizes = sizes_of(table, x, weights)
    size = projections * terms * sizes[0] * ranks
    parts = batch.scratch.take("parts", splits * size if splits > 1 else 1, torch.float32)
    h = batch.scratch.take("h", size if gather or splits == 1 else 1, x.dtype)
    counts = table.capacity * projections * terms * (ranks // block)
    counters = batch.scratch.take("counters", counts if gather else 1, torch.int32)
    tiles = tiles_to_launch(table, batch, x)
    if tiles:
        each = projections * terms * (ranks // block) * splits
        launched = _tiles_at_once(tiles, x.shape[0], each, tiling, batch, SHRINK_TURNS_FROM)
        start(
            kernels().shrink_kernel,
            launched * each,
            x,
            x.stride(0) // ALIGNMENT,
            weights.a,
            weights.a_table,
            table.records,
            table.rows,
            table.scale,
            table.ends,
            parts,
            h,
            counters,
            *sizes,
            weights.in_features // ALIGNMENT,
            BR=block,
            BK=tiling.inputs,
            K_SPLIT=tiling.split,
            SPLITS=splits,
            EVEN_K=weights.in_features % tiling.split == 0,
            GATHER=gather,
            CHUNK=_chunk(splits, tiling.rows * block, tiling.warps, batch.gpu),
            BY_ROW=by_row,
            BESIDE=beside,
            TURNS=launched < tiles,
            num_warps=tiling.warps,
            num_stages=tiling.stages,
            **common_arguments(tiling, x, weights, batch),
        )
    return (h, 1) if gather or splits == 1 else (parts, splits)


def expand(
    tiling: Tiling,
    ys: Sequence[torch.Tensor],
    h: torch.Tensor,
    parts: int,
    weights: LoraWeights,
    batch: LoraBatch,
    *,
    add: bool = True,
) -> None:
    """Compute y += h Bᵀ, the second step.

    Args:
        tiling: Tile sizes, of the same `rows` as in the first step.
        ys: [P] tensors [rows, out_features[p]], changed in place.
        h: Result of `shrink`.
        parts: Number of parts of h, as `shrink` returned it.
        weights: A and B of every adapter.
        batch: Which rows have which adapters.
        add: Add to y; otherwise overwrite it, with zeros where a row has no adapter.
    """
    table = batch.tiles(tiling.rows)
    tiles = tiles_to_launch(table, batch, ys[0], add=add)
    if not tiles:
        return
    block = min(padded_ranks(weights), EXPAND_RANKS)
    groups = sum(-(-y.shape[1] // (tiling.outputs * tiling.loop)) for y in ys)
    launched = _tiles_at_once(tiles, ys[0].shape[0], groups, tiling, batch, TURNS_FROM)
    start(
        kernels().expand_kernel,
        launched * groups,
        *outputs_of(ys),
        weights.b,
        weights.b_table,
        table.records,
        table.rows,
        table.ends,
        h,
        *sizes_of(table, ys[0], weights),
        groups,
        BN=tiling.outputs,
        ER=block,
        SPLITS=parts,
        ADD=add,
        LOOP=tiling.loop,
        STAGES=tiling.expand_stages,
        CHUNK=_chunk(parts, tiling.rows * block, tiling.expand_warps, batch.gpu),
        TURNS=launched < tiles,
        num_warps=tiling.expand_warps,
        num_stages=tiling.expand_stages,
        **common_arguments(tiling, ys[0], weights, batch),
    )


def _tiles_at_once(
    tiles: int, rows: int, each: int, tiling: Tiling, batch: LoraBatch, programs: int
) -> int:
    """Tiles that a grid has; with fewer than all, its programs take turns.

    A batch for CUDA graphs has room for the tiles of any mix of adapters, and most of them are
    empty in most steps: beside 1,024 rows, tiles for 128 more adapters made an expansion to 22,016
    columns 28 us longer on an H100, by a tenth of the base product. So only as many are launched as
    rows of few adapters fill, or as occupy the processors.
    """
    if not batch.fixed:
        return tiles
    enough = max(-(-rows // tiling.rows) + 1, -(-programs * batch.gpu.processors // each))
    return enough if tiles >= 2 * enough else tiles


def whole_shrink(tiling: Tiling, in_features: int) -> Tiling:
    """A shrink that leaves h in one piece, whichever tiling was chosen for the whole operator."""
    if tiling.arrangement == ShrinkExpand.name:
        return replace(tiling, gather=True)
    return Tiling(
        ShrinkExpand.name,
        max(tiling.rows, 16),
        inputs=128,
        split=-(-in_features // 128) * 128,
    )


def beside_product(tiling: Tiling, in_features: int) -> Tiling:
    """The two steps beside a base product, whichever tiling was chosen for the operator alone.

    There is time to sum h up, and few programs leave the base product its place.
    """
    split = -(-in_features // (4 * 128)) * 128
    return Tiling(
        ShrinkExpand.name, max(tiling.rows, 16), 256, 128, split, 64, gather=True, stages=4
    )


def _parts(tiling: Tiling, weights: LoraWeights) -> int:
    """Parts of h that the shrink leaves."""
    return 1 if tiling.gather else -(-weights.in_features // tiling.split)


def _chunk(parts: int, elements: int, warps: int, gpu: Gpu) -> int:
    """Parts of h that a program's registers hold at once."""
    return min(power_of_two(parts), max(1, gpu.sum_registers * 32 * warps // elements))
