"""ATMM: the adaptive-tiling LoRA operator (VaLoRA §4.3)."""

from __future__ import annotations

import logging
import os
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from valora_kernels.reference import atmm_reference
from valora_kernels.tiling import Kind, Tiling

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
    """Whether the kernels can run on this tensor's device: a GPU, or Triton's CPU interpreter."""
    if not tensor.is_cuda and os.environ.get("TRITON_INTERPRET") != "1":
        _say_no_gpu()
        return False
    return _kernels() is not None


def _power_of_two(value: int) -> int:
    return 1 << max(value - 1, 0).bit_length()


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
    chunk = min(_power_of_two(splits), max(1, 64 * 32 * tiling.warps // (tiling.rows * expand_block)))
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
