"""Launches of the LoRA operator's kernels, and what all launches share."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from valora_kernels.gpus import gpu_of

if TYPE_CHECKING:
    from valora_kernels.metadata import LoraBatch, Tiles
    from valora_kernels.tiling import Tiling
    from valora_kernels.weights import LoraWeights, Tensors

log = logging.getLogger(__name__)

_compile_only: ContextVar[bool] = ContextVar("_compile_only", default=False)

EXPAND_RANKS = 128  # rank rows that an expanding program holds at once

ALIGNMENT = 8
"""Elements. A row of 16-bit numbers that starts at a multiple of it starts at one of 16 bytes."""

TURNS_FROM = 8
"""Expanding programs for each processor that are enough to occupy it, whatever the batch."""

SHRINK_TURNS_FROM = 4  # the same of shrinking programs, which have more shared memory

SUM_REGISTERS = 64  # registers of a thread that hold partial sums while they are added up


@cache
def kernels() -> Any:
    """The module of Triton kernels; None, with one warning, where Triton is not installed."""
    try:
        from valora_kernels import atmm_kernels
    except ImportError:
        log.warning("Triton is not installed: LoRA runs through the plain torch reference, slowly")
        return None
    return atmm_kernels


@cache
def _warn_no_gpu() -> None:
    log.warning("no CUDA GPU: LoRA runs through the plain torch reference")


def use_triton(tensor: torch.Tensor) -> bool:
    """Whether the kernels serve tensors of this device; if not, the reason is logged once."""
    if not tensor.is_cuda:
        _warn_no_gpu()
        return False
    return kernels() is not None


@cache
def has_dependent_launch(device: torch.device) -> bool:
    """Whether the device has programmatic dependent launch (compute capability 9.0 and above)."""
    return gpu_of(device).capability >= (9, 0)


def start(kernel: Any, programs: int, *arguments: object, **options: object) -> None:
    """Launch a kernel, or only compile it within `compiling_together`; PDL: beside the last one."""
    if options.get("PDL"):
        options["launch_pdl"] = True
    if _compile_only.get():
        kernel.warmup(*arguments, grid=(programs,), **options)
    else:
        kernel[(programs,)](*arguments, **options)


@contextmanager
def compiling_together(threads: int) -> Iterator[None]:
    """Compile kernels started within a block in threads, and launch none; needs a recent Triton."""
    from triton import AsyncCompileMode

    with ThreadPoolExecutor(threads, "compile") as pool, AsyncCompileMode(pool):
        token = _compile_only.set(True)
        try:
            yield
        finally:
            _compile_only.reset(token)


def power_of_two(value: int) -> int:
    """The smallest power of two that is not below `value`."""
    return 1 << max(value - 1, 0).bit_length()


def padded_ranks(weights: LoraWeights) -> int:
    """Ranks that the kernels compute with: tiles are powers of two, of at least 16."""
    return max(16, power_of_two(weights.max_rank))


def precision_of(tensor: torch.Tensor) -> str:
    """Triton's precision of products of such tensors."""
    return "ieee" if tensor.dtype == torch.float32 else "tf32"


def readable(tensors: Tensors) -> bool:
    """Whether the kernels, which load 16 bytes at a time, can read the rows of all tensors."""
    return all(
        t.stride(1) == 1 and t.stride(0) % ALIGNMENT == 0 and t.data_ptr() % 16 == 0
        for t in tensors
    )


def _common(
    tiling: Tiling, tensor: torch.Tensor, weights: LoraWeights, batch: LoraBatch
) -> dict[str, object]:
    return {
        "P": len(weights.out_features),
        "TERMS": batch.terms,
        "BM": tiling.rows,
        "RANKS": padded_ranks(weights),
        "PDL": has_dependent_launch(tensor.device),
        "PRECISION": precision_of(tensor),
    }


def places_of(table: Tiles, tensor: torch.Tensor) -> int:
    """Places of h in each projection and term."""
    return max(table.capacity * table.block, tensor.shape[0])


def outputs_of(ys: Tensors) -> tuple[Any, ...]:
    """Three tensors (the first fills up), row strides and widths, both in steps of `ALIGNMENT`."""
    three = [*ys, ys[0], ys[0]][:3]
    strides = [y.stride(0) // ALIGNMENT for y in three]
    return (*three, *strides, *(y.shape[1] // ALIGNMENT for y in three))


def tiles_to_launch(
    table: Tiles, batch: LoraBatch, tensor: torch.Tensor, *, add: bool = True
) -> int:
    """Tiles in use; in a batch for CUDA graphs, as many as any mix can need."""
    if batch.fixed:
        return table.capacity
    if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
        raise ValueError("batch: a graph expected LoraBatch(fixed=True), got a growing one")
    return table.count if add else table.total


def _tiles_at_once(
    tiles: int, rows: int, each: int, tiling: Tiling, batch: LoraBatch, programs: int
) -> int:
    """Tiles that a grid has; with fewer than all, its programs take turns.

    Most tiles of a batch for graphs are empty: beside 1,024 rows, those for 128 more adapters
    made an expansion to 22,016 columns 28 us longer on an H100, by a tenth of the base product.
    """
    if not batch.fixed:
        return tiles
    enough = max(-(-rows // tiling.rows) + 1, -(-programs * batch.gpu.processors // each))
    return enough if tiles >= 2 * enough else tiles


def _chunk(parts: int, elements: int, warps: int) -> int:
    """Parts of h that a program's registers hold at once."""
    return min(power_of_two(parts), max(1, SUM_REGISTERS * 32 * warps // elements))


def shrink(
    tiling: Tiling,
    x: Tensor,
    weights: LoraWeights,
    batch: LoraBatch,
    *,
    by_row: bool = False,
    beside: bool = False,
) -> tuple[torch.Tensor, int]:
    """Compute h = coefficient · scaling · x Aᵀ, the first of two steps.

    With `by_row` h is left in the order of the rows; with `beside` the launch before was
    `base_kernel` on the same x, and runs on meanwhile. Returns h and the number of its parts: one
    is [P, terms, places or rows, ranks] in x's dtype, several are [parts, P, terms, places, ranks]
    in fp32, to be summed.
    """
    table = batch.tiles(tiling.rows)
    layers, ranks = len(weights.out_features) * batch.terms, padded_ranks(weights)
    block = min(ranks, tiling.ranks)
    splits = -(-weights.in_features // tiling.split)
    gather = tiling.gather and splits > 1
    places = places_of(table, x)
    size = layers * places * ranks
    parts = batch.scratch.take("parts", splits * size if splits > 1 else 1, torch.float32)
    h = batch.scratch.take("h", size if gather or splits == 1 else 1, x.dtype)
    counts = table.capacity * layers * (ranks // block)
    counters = batch.scratch.take("counters", counts if gather else 1, torch.int32)
    tiles = tiles_to_launch(table, batch, x)
    if tiles:
        each = layers * (ranks // block) * splits
        launched = _tiles_at_once(tiles, x.shape[0], each, tiling, batch, SHRINK_TURNS_FROM)
        start(
            kernels().shrink_kernel, launched * each,
            x, x.stride(0) // ALIGNMENT, weights.a, weights.a_table, table.records, table.rows,
            table.scale, table.ends, parts, h, counters, places, weights.slots, weights.max_rank,
            weights.in_features // ALIGNMENT, BR=block, BK=tiling.inputs, K_SPLIT=tiling.split,
            SPLITS=splits, EVEN_K=weights.in_features % tiling.split == 0, GATHER=gather,
            CHUNK=_chunk(splits, tiling.rows * block, tiling.warps), BY_ROW=by_row, BESIDE=beside,
            TURNS=launched < tiles, num_warps=tiling.warps, num_stages=tiling.stages,
            **_common(tiling, x, weights, batch),
        )  # fmt: skip
    return (h, 1) if gather or splits == 1 else (parts, splits)


def expand(
    tiling: Tiling,
    ys: Tensors,
    h: Tensor,
    parts: int,
    weights: LoraWeights,
    batch: LoraBatch,
    add: bool = True,
) -> None:
    """Compute y += h Bᵀ for what `shrink` returned (y = without `add`); `tiling.rows` as there."""
    table = batch.tiles(tiling.rows)
    tiles = tiles_to_launch(table, batch, ys[0], add=add)
    if not tiles:
        return
    block = min(padded_ranks(weights), EXPAND_RANKS)
    groups = sum(-(-y.shape[1] // (tiling.outputs * tiling.loop)) for y in ys)
    launched = _tiles_at_once(tiles, ys[0].shape[0], groups, tiling, batch, TURNS_FROM)
    start(
        kernels().expand_kernel, launched * groups,
        *outputs_of(ys), weights.b, weights.b_table, table.records, table.rows, table.ends, h,
        places_of(table, ys[0]), weights.slots, weights.max_rank, groups, BN=tiling.outputs,
        ER=block, SPLITS=parts, ADD=add, LOOP=tiling.loop, STAGES=tiling.expand_stages,
        CHUNK=_chunk(parts, tiling.rows * block, tiling.expand_warps), TURNS=launched < tiles,
        num_warps=tiling.expand_warps, num_stages=tiling.expand_stages,
        **_common(tiling, ys[0], weights, batch),
    )  # fmt: skip


def shrink_expand(
    tiling: Tiling, ys: Tensors, x: Tensor, weights: LoraWeights, batch: LoraBatch, add: bool = True
) -> None:
    """Two launches; the second is in flight, its weights loaded, when the first ends."""
    h, parts = shrink(tiling, x, weights, batch)
    expand(tiling, ys, h, parts, weights, batch, add=add)


def fused(
    tiling: Tiling, ys: Tensors, x: Tensor, weights: LoraWeights, batch: LoraBatch, add: bool = True
) -> None:
    """One launch, h stays in registers; few rows do not occupy the GPU, large ranks do not fit."""
    table = batch.tiles(tiling.rows)
    tiles = tiles_to_launch(table, batch, x, add=add)
    if not tiles:
        return
    start(
        kernels().fused_kernel, tiles * len(ys) * tiling.parts,
        *outputs_of(ys), x, x.stride(0) // ALIGNMENT, weights.a, weights.a_table, weights.b,
        weights.b_table, table.records, table.rows, table.scale, places_of(table, x),
        weights.slots, weights.max_rank, weights.in_features // ALIGNMENT, BN=tiling.outputs,
        BK=tiling.inputs, PARTS=tiling.parts, EVEN_K=weights.in_features % tiling.inputs == 0,
        STAGES=tiling.stages, ADD=add, num_warps=tiling.warps, num_stages=tiling.stages,
        **_common(tiling, x, weights, batch),
    )  # fmt: skip
