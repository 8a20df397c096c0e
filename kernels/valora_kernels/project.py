"""Base projection and LoRA together: y = x·Wᵀ + bias + Σ coefficient · scaling · (x Aᵀ) Bᵀ.

The record of the GPU says which way is the fastest: a shrink beside our own base product, an
expansion within its sum (`_fold`), or the library's product with LoRA before or after (`_apart`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from valora_kernels.arrangements import beside_product, whole_shrink
from valora_kernels.atmm import atmm, check, launch_fitting, table_choice
from valora_kernels.gpus import Gpu, gpu_of
from valora_kernels.launching import (
    ALIGNMENT,
    expand,
    has_dependent_launch,
    outputs_of,
    padded_ranks,
    places_of,
    precision_of,
    readable,
    shrink,
    start,
    tiles_to_launch,
    use_triton,
)

if TYPE_CHECKING:
    from valora_kernels.metadata import LoraBatch
    from valora_kernels.tiling import ProjectTiling
    from valora_kernels.weights import LoraWeights, Tensors

    Biases = Sequence[torch.Tensor | None]

FOLD_RANKS = 128  # largest rank that a folded expansion can hold in one tile


@lru_cache(maxsize=4096)  # every layer of a step asks
def project_tiling(
    gpu: Gpu, rows: int, out_features: tuple[int, ...], *, lora: bool = True
) -> ProjectTiling | None:
    """The tiling of a base product, with LoRA or without; None where the library's is faster."""
    rules = gpu.projections if lora else gpu.products
    return next((rule.tiling for rule in rules if rule.applies(rows, out_features)), None)


def add_projection(
    ys: Tensors,
    x: Tensor,
    bases: Tensors,
    weights: LoraWeights,
    batch: LoraBatch,
    *,
    biases: Biases | None = None,
    tiling: ProjectTiling | None = None,
) -> None:
    """Compute y = x·Wᵀ + bias + LoRA for each projection that shares x, in the fastest way.

    As `atmm`, but `ys` are overwritten. `bases` are [P] weights [out_features[p], in_features],
    `biases` [P] biases [out_features[p]] or None, none by default; a ValueError may be of them.
    """
    check(ys, x, weights, batch)
    biases = biases or [None] * len(bases)
    _check_bases(ys, x, bases, biases)
    if tiling is not None and tiling.fold and batch.terms > 1:
        raise ValueError(f"batch: folding expected one term a row, got {batch.terms}")
    rows = x.shape[0]
    if tiling is None and use_triton(x) and _aligned(x, ys, bases):
        tiling = project_tiling(batch.gpu, rows, weights.out_features)
        if tiling and tiling.fold and (batch.terms > 1 or weights.max_rank > FOLD_RANKS):
            tiling = None
    if tiling is None or not rows:
        _apart(ys, x, bases, biases, weights, batch)
    elif tiling.fold:
        _fold(ys, x, bases, biases, weights, batch, tiling)
    else:
        _product(ys, x, bases, biases, tiling)
        chosen = beside_product(table_choice(weights, batch), weights.in_features)
        if tiles_to_launch(batch.tiles(chosen.rows), batch, x):
            h, parts = shrink(chosen, x, weights, batch, beside=True)
            expand(chosen, ys, h, parts, weights, batch)


def _apart(
    ys: Tensors, x: Tensor, bases: Tensors, biases: Biases, weights: LoraWeights, batch: LoraBatch
) -> None:
    """Compute the base product with the library, and LoRA before or after it."""
    plain = all(bias is None for bias in biases)
    first = plain and len(x) >= batch.gpu.lora_first_rows and use_triton(x)
    first = first and _aligned(x, ys, bases)
    if first:
        # The base product adds to y, which hides the time to read it.
        choice = table_choice(weights, batch, first=True)
        first = tiles_to_launch(batch.tiles(choice.rows), batch, x) > 0
        if first:
            launch_fitting(choice, ys, x, weights, batch, first=True)
    one_base, one_y, ys_ = _as_one(bases, 0), _as_one(ys, 1), list(ys)
    some = [bias for bias in biases if bias is not None]
    one_bias = _as_one(some, 0) if len(some) == len(ys) else None
    if one_base is not None and one_y is not None and (plain or one_bias is not None):
        ys_, bases, biases = [one_y], [one_base], [one_bias]
    for y, base, bias in zip(ys_, bases, biases, strict=True):
        if bias is not None:
            torch.addmm(bias, x, base.T, out=y)
        elif first:
            y.addmm_(x, base.T)
        else:
            torch.mm(x, base.T, out=y)
    if not first:
        atmm(ys, x, weights, batch)


def _as_one(parts: Tensors, dim: int) -> torch.Tensor | None:
    """The matrix whose neighbouring slices the parts are; None if they are not."""
    first, end = parts[0], parts[0].storage_offset()
    for part in parts:
        same = part.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not same or part.stride() != first.stride() or part.storage_offset() != end:
            return None
        end += part.shape[dim] * part.stride(dim)
    size = list(first.shape)
    size[dim] = sum(part.shape[dim] for part in parts)
    return first.as_strided(size, first.stride())


def _check_bases(ys: Tensors, x: Tensor, bases: Tensors, biases: Biases) -> None:
    if len(bases) != len(ys) or len(biases) != len(ys):
        raise ValueError(
            f"bases and biases: expected {len(ys)}, got {len(bases)} and {len(biases)}"
        )
    for y, base, bias in zip(ys, bases, biases, strict=True):
        for tensor, shape in ((base, [y.shape[1], x.shape[1]]), (bias, [y.shape[1]])):
            if tensor is not None and (
                list(tensor.shape) != shape or tensor.dtype != x.dtype or tensor.device != x.device
            ):
                raise ValueError(
                    f"bases and biases: expected {x.dtype} {shape} on {x.device}, "
                    f"got {tensor.dtype} {list(tensor.shape)} on {tensor.device}"
                )


def _aligned(x: Tensor, ys: Tensors, bases: Tensors) -> bool:
    """Whether our products can compute it: 16 bits, aligned dense rows, one row stride of all W."""
    return (
        x.dtype != torch.float32
        and readable([x, *ys, *bases])
        and len({base.stride(0) for base in bases}) == 1
    )


def linear(x: Tensor, w: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Compute x [rows, inputs] · W [outputs, inputs]ᵀ + bias without LoRA."""
    if not x.is_cuda:
        return F.linear(x, w, bias)
    tiling = project_tiling(gpu_of(x.device), len(x), (len(w),), lora=False)
    if tiling is None or len(w) % ALIGNMENT or x.shape[1] % ALIGNMENT or not use_triton(x):
        return F.linear(x, w, bias)
    y = x.new_empty(len(x), len(w))
    if not _aligned(x, [y], [w]):
        return F.linear(x, w, bias)
    _product([y], x, [w], [bias], tiling)
    return y


def _product(ys: Tensors, x: Tensor, bases: Tensors, biases: Biases, tiling: ProjectTiling) -> None:
    from valora_kernels import project_kernels as k

    width = x.shape[1]
    down = -(-x.shape[0] // tiling.rows)
    across = sum(-(-y.shape[1] // tiling.outputs) for y in ys)
    step = ALIGNMENT * x.element_size()
    begins = [(base.data_ptr() - bases[0].data_ptr()) // step for base in bases]
    start(
        k.base_kernel, down * across,
        *outputs_of(ys), x, x.stride(0) // ALIGNMENT, bases[0], bases[0].stride(0) // ALIGNMENT,
        *[*begins, 0, 0][1:3], *[*biases, None, None][:3], x.shape[0], down, width // ALIGNMENT,
        P=len(ys), BM=tiling.rows, BN=tiling.outputs, BK=tiling.inputs,
        EVEN_K=width % tiling.inputs == 0, STAGES=tiling.stages, AHEAD=tiling.ahead,
        PDL=has_dependent_launch(x.device), PRECISION=precision_of(x), num_warps=tiling.warps,
        num_stages=tiling.stages,
    )  # fmt: skip


def _fold(
    ys: Tensors,
    x: Tensor,
    bases: Tensors,
    biases: Biases,
    weights: LoraWeights,
    batch: LoraBatch,
    tiling: ProjectTiling,
) -> None:
    """Shrink, then expand within the sum of our own base product, one launch per projection."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    from valora_kernels import project_kernels as k

    width = weights.in_features
    first = whole_shrink(table_choice(weights, batch), width)
    h, _ = shrink(first, x, weights, batch, by_row=True)
    tiles, blocks = batch.tiles(first.rows), batch.blocks(tiling.rows)
    started = has_dependent_launch(x.device) and tiles_to_launch(tiles, batch, x) > 0
    programs = batch.gpu.processors
    # Only the first of several projections directly follows the shrink; the others wait for it.
    for p, (y, base, bias) in enumerate(zip(ys, bases, biases, strict=True)):
        start(
            k.many_rows_kernel, programs,
            TensorDescriptor.from_tensor(y, [tiling.rows, tiling.outputs]),
            TensorDescriptor.from_tensor(x, [tiling.rows, tiling.inputs]),
            TensorDescriptor.from_tensor(base, [tiling.outputs, tiling.inputs]),
            bias, h, weights.b, weights.b_table, blocks.slot_of_row, blocks.counts, blocks.lists,
            p, places_of(tiles, x), weights.slots, weights.max_rank, len(x),
            y.shape[1] // ALIGNMENT, width // ALIGNMENT, GROUP=8, PROGRAMS=programs,
            CAPACITY=blocks.capacity, BM=tiling.rows, BN=tiling.outputs, BK=tiling.inputs,
            RANKS=padded_ranks(weights), PDL=started and p == 0, PRECISION=precision_of(x),
            num_warps=tiling.warps, num_stages=tiling.stages,
        )  # fmt: skip
