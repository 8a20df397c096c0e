"""ATMM: the adaptive-tiling LoRA operator (VaLoRA §4.3)."""

from __future__ import annotations

import logging
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from valora_kernels.reference import atmm_reference
from valora_kernels.tiling import Kind, Shape, Tiling, choose

if TYPE_CHECKING:
    from collections.abc import Sequence

    from valora_kernels.metadata import LoraBatch
    from valora_kernels.weights import LoraWeights

log = logging.getLogger(__name__)

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
ALIGNMENT = 8
"""Elements; a row of 16-bit numbers that starts at a multiple of it starts at one of 16 bytes."""


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
def _has_dependent_launch(device: torch.device) -> bool:
    """Programmatic dependent launch exists from compute capability 9.0 on."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


EXPAND_RANKS = 128
"""Rank rows that an expanding program holds at once."""


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
    _check(ys, x, weights, batch)
    if tiling is None and not use_triton(x):
        atmm_reference(ys, x, weights, batch)
        return
    _check_alignment(ys, x, weights)
    launch(tiling or _choice(weights, batch, x.device), ys, x, weights, batch)


def _choice(weights: LoraWeights, batch: LoraBatch, device: torch.device) -> Tiling:
    grouping = batch.grouping
    shape = Shape(
        in_features=weights.in_features,
        out_features=sum(weights.out_features),
        projections=len(weights.out_features),
        rank=weights.max_rank,
        rows=grouping.active,
        adapters=batch.effective_adapters,
    )
    return choose(_gpu_name(device), shape).tiling


@cache
def _gpu_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "interpreter"


def _check(
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
    k = _kernels()
    table = batch.tiles(tiling.rows)
    fixed = batch.fixed or (x.is_cuda and torch.cuda.is_current_stream_capturing())
    tiles = table.capacity if fixed else table.count if add else table.total
    if not tiles:
        return
    projections = len(ys)
    terms = batch.terms
    ranks = max(16, _power_of_two(weights.max_rank))
    rank_block = min(ranks, tiling.ranks)
    expand_block = min(ranks, EXPAND_RANKS)
    places = table.capacity * tiling.rows
    width = weights.in_features
    pdl = _has_dependent_launch(x.device)
    three = [*ys, ys[0], ys[0]][:3]
    outputs = (
        *three,
        *(y.stride(0) // ALIGNMENT for y in three),
        *(y.shape[1] // ALIGNMENT for y in three),
    )
    inputs = (x, x.stride(0) // ALIGNMENT)
    a = (weights.a, weights.a_table)
    b = (weights.b, weights.b_table)
    lists = (table.records, table.rows, table.scale)
    common = {
        "P": projections,
        "TERMS": terms,
        "BM": tiling.rows,
        "RANKS": ranks,
        "PAGED": weights.paged,
        "PDL": pdl,
        "PRECISION": "ieee" if x.dtype == torch.float32 else "tf32",
        "num_warps": tiling.warps,
        "num_stages": tiling.stages,
    }
    if pdl:
        common["launch_pdl"] = True
    sizes = (places, weights.slots, weights.max_rank)
    if tiling.kind is Kind.ROWS:
        k.rows_kernel[(tiles * projections * tiling.parts,)](
            *outputs,
            *inputs,
            *a,
            *b,
            *lists,
            *sizes,
            width // ALIGNMENT,
            BN=tiling.outputs,
            BK=tiling.inputs,
            PARTS=tiling.parts,
            EVEN_K=width % tiling.inputs == 0,
            STAGES=tiling.stages,
            ADD=add,
            **common,
        )
        return
    splits = -(-width // tiling.split)
    blocks = sum(-(-y.shape[1] // tiling.outputs) for y in ys)
    shrinks = tiles * projections * terms * (ranks // rank_block) * splits
    part = batch.scratch(
        splits * projections * terms * places * ranks,
        x.dtype if splits == 1 else torch.float32,
    )
    shrink = {
        "BR": rank_block,
        "BK": tiling.inputs,
        "K_SPLIT": tiling.split,
        "SPLITS": splits,
        "EVEN_K": width % tiling.split == 0,
    }
    # As many parts of h at once as 64 registers a thread hold.
    chunk = min(
        _power_of_two(splits), max(1, 64 * 32 * tiling.warps // (tiling.rows * expand_block))
    )
    if tiling.kind is Kind.FLOW:
        counters = batch.scratch(2 * table.capacity * projections, torch.int32, zeroed=True)
        k.flow_kernel[(shrinks + tiles * blocks,)](
            *outputs,
            *inputs,
            *a,
            *b,
            *lists,
            part,
            counters,
            *sizes,
            width // ALIGNMENT,
            shrinks,
            blocks,
            BN=tiling.outputs,
            ER=expand_block,
            CHUNK=chunk,
            ADD=add,
            **shrink,
            **common,
        )
        return
    k.shrink_kernel[(shrinks,)](
        *inputs, *a, *lists, part, *sizes, width // ALIGNMENT, **shrink, **common
    )
    common["num_warps"] = tiling.expand_warps
    k.expand_kernel[(tiles * blocks,)](
        *outputs,
        *b,
        table.records,
        table.rows,
        part,
        *sizes,
        blocks,
        BN=tiling.outputs,
        ER=expand_block,
        SPLITS=splits,
        CHUNK=chunk,
        ADD=add,
        **common,
    )
