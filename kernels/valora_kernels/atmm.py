"""ATMM: the adaptive-tiling LoRA operator (VaLoRA §4.3)."""

from __future__ import annotations

import logging
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from valora_kernels.reference import atmm_reference
from valora_kernels.tiling import EXPAND_RANKS, Kind, Shape, Tiling, choose, default_tiling

if TYPE_CHECKING:
    from collections.abc import Sequence

    from valora_kernels.metadata import DeviceTiles, LoraBatch
    from valora_kernels.weights import LoraWeights

log = logging.getLogger(__name__)

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
ALIGNMENT = 8
"""Elements; a row of 16-bit numbers that starts at a multiple of it starts at one of 16 bytes."""

DENSE_RANK, DENSE_ROWS, DENSE_Y = 96, 3072, 7 << 22
"""Rank and rows from which on, and elements of y up to which, one adapter is fastest by the
library's products, on an H200; above a rank of 128, and where y is not read, already earlier."""


@cache
def _kernels() -> Any:
    """The module of Triton kernels, or None, said once, where there is no Triton."""
    try:
        from valora_kernels import atmm_kernels
    except ImportError:
        log.warning("Triton is not installed: LoRA runs through the plain torch reference, slowly")
        return None
    return atmm_kernels


@cache
def _say_no_gpu() -> None:
    log.warning("no CUDA GPU: LoRA runs through the plain torch reference")


@cache
def has_dependent_launch(device: torch.device) -> bool:
    """Programmatic dependent launch exists from compute capability 9.0 on."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def use_triton(tensor: torch.Tensor) -> bool:
    """Whether the kernels serve tensors of this device; if not, the reason is logged once."""
    if not tensor.is_cuda:
        _say_no_gpu()
        return False
    return _kernels() is not None


def _power_of_two(value: int) -> int:
    return 1 << max(value - 1, 0).bit_length()


def atmm(
    ys: Sequence[torch.Tensor],
    x: torch.Tensor,
    weights: LoraWeights,
    batch: LoraBatch,
    *,
    tiling: Tiling | None = None,
) -> None:
    """y[m] += Σ_t coefficient_t · scaling(a_t) · (x[m] Aᵀ) Bᵀ, for each projection that shares x.

    Sums are in fp32 and y is rounded once. Nothing waits for the device, and after one call to warm
    up, everything can be captured in a CUDA graph (see `LoraBatch`). Where there is no GPU or no
    Triton the reference computes the same.

    Args:
        ys: [P] tensors [rows, out_features[p]], changed in place.
        x: [rows, in_features].
        weights: A and B of every adapter, of the same dtype.
        batch: Which rows have which adapters.
        tiling: How to compute it, with the kernels wherever x is (on a CPU they need Triton's
            interpreter); by default the table's choice.

    Raises:
        ValueError: Shapes, dtypes, devices, strides, ranks or adapters that do not fit, before
            anything is launched.
    """
    check(ys, x, weights, batch)
    if tiling is None and not use_triton(x):
        atmm_reference(ys, x, weights, batch)
        return
    _check_alignment(ys, x, weights)
    if tiling is not None:
        launch(tiling, ys, x, weights, batch)
        return
    if dense_pays(weights, batch):
        dense(ys, x, weights, batch)
        return
    shape = shape_of(weights, batch)
    chosen = _instead.get(shape) or choose(_gpu_name(x.device), shape).tiling
    try:
        launch(chosen, ys, x, weights, batch)
    except _out_of_resources() as error:  # raised before anything is added to y
        _instead[shape] = smaller = default_tiling(shape)
        log.warning("%s does not fit (%s): taking %s for %s", chosen, error, smaller, shape)
        launch(smaller, ys, x, weights, batch)


_instead: dict[Shape, Tiling] = {}
"""Shapes whose tiling, measured for another shape, turned out not to fit this GPU."""


@cache
def _out_of_resources() -> type[Exception]:
    from triton.runtime.errors import OutOfResources

    found: type[Exception] = OutOfResources
    return found


def shape_of(weights: LoraWeights, batch: LoraBatch) -> Shape:
    """What the table is asked for."""
    return Shape(
        in_features=weights.in_features,
        out_features=sum(weights.out_features),
        projections=len(weights.out_features),
        rank=padded_ranks(weights),
        rows=batch.grouping.active,
        adapters=batch.effective_adapters,
    )


def choice_of(weights: LoraWeights, batch: LoraBatch, device: torch.device) -> Tiling:
    """What the table says for this call."""
    return choose(_gpu_name(device), shape_of(weights, batch)).tiling


@cache
def _gpu_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "interpreter"


def check(
    ys: Sequence[torch.Tensor], x: torch.Tensor, weights: LoraWeights, batch: LoraBatch
) -> None:
    """What every way to compute it relies on."""
    rows = batch.max_rows if batch.fixed else batch.grouping.rows
    if len(ys) != len(weights.out_features):
        raise ValueError(f"ys: expected {len(weights.out_features)} tensors, got {len(ys)}")
    if x.dtype not in DTYPES:
        raise ValueError(f"x: expected a dtype of {DTYPES}, got {x.dtype}")
    if tuple(x.shape) != (rows, weights.in_features):
        raise ValueError(f"x: expected [{rows}, {weights.in_features}], got {list(x.shape)}")
    for y, width in zip(ys, weights.out_features, strict=True):
        if tuple(y.shape) != (rows, width):
            raise ValueError(f"y: expected [{rows}, {width}], got {list(y.shape)}")
    named = [("x", x), *(("y", y) for y in ys), ("weights", weights.a)]
    for name, tensor in named:
        if tensor.dtype != x.dtype:
            raise ValueError(f"{name}: expected {x.dtype} like x, got {tensor.dtype}")
        if tensor.device != batch.device:
            raise ValueError(f"{name}: expected {batch.device}, got {tensor.device}")
    if batch.max_rank > weights.max_rank:
        raise ValueError(
            f"batch: expected ranks up to the weights' {weights.max_rank}, got {batch.max_rank}"
        )
    if batch.last_adapter >= weights.slots:
        raise ValueError(
            f"batch: expected adapters below the weights' {weights.slots} slots, "
            f"got {batch.last_adapter}"
        )


def _check_alignment(ys: Sequence[torch.Tensor], x: torch.Tensor, weights: LoraWeights) -> None:
    """What the kernels rely on besides: they load 16 bytes at a time."""
    if weights.in_features % ALIGNMENT or any(n % ALIGNMENT for n in weights.out_features):
        raise ValueError(
            f"weights: expected widths that are multiples of {ALIGNMENT}, "
            f"got {weights.in_features} and {weights.out_features}"
        )
    for name, tensor in (("x", x), *(("y", y) for y in ys)):
        if tensor.stride(1) != 1 or tensor.stride(0) % ALIGNMENT or tensor.data_ptr() % 16:
            raise ValueError(
                f"{name}: expected neighbouring columns and rows at multiples of {ALIGNMENT} "
                f"elements, got strides {tensor.stride()}, address {tensor.data_ptr():#x}"
            )


def padded_ranks(weights: LoraWeights) -> int:
    """Ranks that the kernels compute with: tiles are powers of two, of at least 16."""
    return max(16, _power_of_two(weights.max_rank))


def launch(
    tiling: Tiling,
    ys: Sequence[torch.Tensor],
    x: torch.Tensor,
    weights: LoraWeights,
    batch: LoraBatch,
    *,
    add: bool = True,
) -> None:
    """Run one arrangement of the kernels; arguments are taken to be right.

    Args:
        tiling: Which arrangement.
        ys: As in `atmm`.
        x: As in `atmm`.
        weights: As in `atmm`.
        batch: As in `atmm`.
        add: Add to y; otherwise overwrite it, with zeros where a row has no adapter.
    """
    if tiling.kind is Kind.PAIR:
        h, parts = shrink(tiling, x, weights, batch)
        expand(tiling, ys, h, parts, weights, batch, add=add)
        return
    table = batch.tiles(tiling.rows)
    tiles = tiles_to_launch(table, batch, x, add=add)
    if not tiles:
        return
    _kernels().rows_kernel[(tiles * len(ys) * tiling.parts,)](
        *outputs_of(ys),
        x,
        x.stride(0) // ALIGNMENT,
        weights.a,
        weights.a_table,
        weights.b,
        weights.b_table,
        table.records,
        table.rows,
        table.scale,
        *_sizes(table, x, weights),
        weights.in_features // ALIGNMENT,
        BN=tiling.outputs,
        BK=tiling.inputs,
        PARTS=tiling.parts,
        EVEN_K=weights.in_features % tiling.inputs == 0,
        STAGES=tiling.stages,
        ADD=add,
        num_warps=tiling.warps,
        num_stages=tiling.stages,
        **_common(tiling, x, weights, batch),
    )


def dense_pays(weights: LoraWeights, batch: LoraBatch, *, add: bool = True) -> bool:
    """Whether all rows have one adapter, many and wide enough for the library's products.

    A graph's batch may have any mix at its next replay, and paged rows cannot be multiplied as one
    matrix.
    """
    grouping = batch.grouping
    rows, rank = grouping.rows, batch.max_rank
    if batch.fixed or weights.paged:
        return False
    if (batch.terms, grouping.segments, grouping.active) != (1, 1, rows):
        return False
    if not add:
        pays = rank >= DENSE_RANK * 2 // 3 and rows >= DENSE_ROWS * 2 // 3
    elif rank > 128:
        pays = rows >= DENSE_ROWS // 3
    else:
        few = rows * sum(weights.out_features) <= DENSE_Y
        pays = rank >= DENSE_RANK and rows >= DENSE_ROWS and few
    return pays and bool(np.ptp(grouping.scale[:, 0]) == 0)


def dense(
    ys: Sequence[torch.Tensor],
    x: torch.Tensor,
    weights: LoraWeights,
    batch: LoraBatch,
    *,
    add: bool = True,
) -> None:
    """Two dense products for a batch of one adapter (`dense_pays`); arguments as in `launch`."""
    grouping = batch.grouping
    slot, rank = int(grouping.adapters[0, 0]), int(grouping.ranks[0, 0])
    for p, y in enumerate(ys):
        a, b = weights.rows_of(p, slot, rank)
        y.addmm_(x @ a.T, b, beta=1.0 if add else 0.0, alpha=float(grouping.scale[0, 0]))


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
        tiling: How.
        x: As in `atmm`.
        weights: As in `atmm`.
        batch: As in `atmm`.
        by_row: Leave h in the order of the rows.
        beside: The launch before was `base_kernel` on the same x, and goes on meanwhile.

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
    sizes = _sizes(table, x, weights)
    size = projections * terms * sizes[0] * ranks
    parts = batch.scratch("parts", splits * size if splits > 1 else 1, torch.float32)
    h = batch.scratch("h", size if gather or splits == 1 else 1, x.dtype)
    counts = table.capacity * projections * terms * (ranks // block)
    counters = batch.scratch("counters", counts if gather else 1, torch.int32)
    tiles = tiles_to_launch(table, batch, x)
    if tiles:
        _kernels().shrink_kernel[(tiles * projections * terms * (ranks // block) * splits,)](
            x,
            x.stride(0) // ALIGNMENT,
            weights.a,
            weights.a_table,
            table.records,
            table.rows,
            table.scale,
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
            CHUNK=_chunk(splits, tiling.rows * block, tiling.warps),
            BY_ROW=by_row,
            BESIDE=beside,
            num_warps=tiling.warps,
            num_stages=tiling.stages,
            **_common(tiling, x, weights, batch),
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
    """Add h Bᵀ to y, the second step; `h` and `parts` are what `shrink` returned."""
    table = batch.tiles(tiling.rows)
    tiles = tiles_to_launch(table, batch, ys[0], add=add)
    if not tiles:
        return
    block = min(padded_ranks(weights), EXPAND_RANKS)
    groups = sum(-(-y.shape[1] // (tiling.outputs * tiling.loop)) for y in ys)
    _kernels().expand_kernel[(tiles * groups,)](
        *outputs_of(ys),
        weights.b,
        weights.b_table,
        table.records,
        table.rows,
        h,
        *_sizes(table, ys[0], weights),
        groups,
        BN=tiling.outputs,
        ER=block,
        SPLITS=parts,
        ADD=add,
        LOOP=tiling.loop,
        STAGES=tiling.expand_stages,
        CHUNK=_chunk(parts, tiling.rows * block, tiling.expand_warps),
        num_warps=tiling.expand_warps,
        num_stages=tiling.expand_stages,
        **_common(tiling, ys[0], weights, batch),
    )


def _common(
    tiling: Tiling, tensor: torch.Tensor, weights: LoraWeights, batch: LoraBatch
) -> dict[str, object]:
    """What all three kernels are compiled for."""
    common: dict[str, object] = {
        "P": len(weights.out_features),
        "TERMS": batch.terms,
        "BM": tiling.rows,
        "RANKS": padded_ranks(weights),
        "PAGED": weights.paged,
        "PDL": has_dependent_launch(tensor.device),
        "PRECISION": "ieee" if tensor.dtype == torch.float32 else "tf32",
    }
    if common["PDL"]:
        common["launch_pdl"] = True
    return common


def _sizes(table: DeviceTiles, tensor: torch.Tensor, weights: LoraWeights) -> tuple[int, int, int]:
    """Places of h, slots and rank rows of the weights."""
    return max(table.capacity * table.block, tensor.shape[0]), weights.slots, weights.max_rank


def _three(values: Sequence[Any]) -> list[Any]:
    """As many as the kernels have places for; with fewer projections the first again."""
    return [*values, values[0], values[0]][:3]


def outputs_of(ys: Sequence[torch.Tensor]) -> tuple[Any, ...]:
    """Three tensors with their row strides and widths in steps of `ALIGNMENT`."""
    three = _three(ys)
    strides = [y.stride(0) // ALIGNMENT for y in three]
    return (*three, *strides, *(y.shape[1] // ALIGNMENT for y in three))


def _chunk(parts: int, elements: int, warps: int) -> int:
    """As many parts of h at once as 64 registers a thread hold."""
    return min(_power_of_two(parts), max(1, 64 * 32 * warps // elements))


def tiles_to_launch(
    table: DeviceTiles, batch: LoraBatch, tensor: torch.Tensor, *, add: bool = True
) -> int:
    """Tiles in use; in a batch for CUDA graphs, as many as any mix can need."""
    if batch.fixed:
        return table.capacity
    if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
        raise ValueError("batch: a graph expected LoraBatch(fixed=True), got a growing one")
    return table.count if add else table.total
