"""Base projection and LoRA together: y = x·Wᵀ + bias + Σ coefficient · scaling · (x Aᵀ) Bᵀ."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch.nn import functional as F

from valora_kernels import atmm as operator
from valora_kernels.tiling import Kind, Tiling

if TYPE_CHECKING:
    from collections.abc import Sequence

    from valora_kernels.metadata import LoraBatch
    from valora_kernels.weights import LoraWeights

FEW_ROWS = 16
"""Up to here a product without LoRA is ours, on an H200."""

FEW_OUTPUTS = 3072
"""Below, columns are too few to occupy the processors; the library splits the inputs too."""

MOST_BESIDE = (256, 6 << 18)
"""Rows and elements of y up to which the shrink runs beside our own product, on an H200."""

FOLDED = (1024, 1 << 24)
"""Rows from which on, and elements of y up to which one projection's expansion is folded in."""

FIRST_ROWS = 256
"""From here on LoRA writes y, and the library's product adds to it; below, LoRA adds."""


@dataclass(frozen=True, slots=True)
class ProjectTiling:
    """How a projection is computed.

    Attributes:
        rows: Rows a tile.
        outputs: Output columns a tile.
        inputs: Input columns a step.
        warps: Warps a program.
        stages: Steps whose loads are in flight.
        fold: Expand within the base product's sum; otherwise shrink beside it and expand after it.
        ahead: Steps of W that are fetched before x is ready.
        halves: Store the two halves of a tile apart (`fold` only).
    """

    rows: int
    outputs: int
    inputs: int
    warps: int
    stages: int
    fold: bool = False
    ahead: int = 2
    halves: bool = False


def project_tiling(rows: int, out_features: Sequence[int]) -> ProjectTiling | None:
    """What is fast on an H200; None where the library's product and LoRA apart are faster."""
    outputs = sum(out_features)
    if rows >= FOLDED[0] and len(out_features) == 1 and rows * outputs <= FOLDED[1]:
        return ProjectTiling(128, 256, 64, 8, 3, fold=True)
    if outputs < FEW_OUTPUTS or rows > MOST_BESIDE[0] or rows * outputs > MOST_BESIDE[1]:
        return None
    once = outputs <= 4224  # columns that all processors together can take at once
    if rows <= 16:
        tile = (16, 32, 128, 4, 6)
    elif rows <= 64 and outputs <= 16384:  # Hopper's own matrix instructions take 64 rows or more
        tile = (64, 32, 128, 4, 6) if once else (64, 64, 64, 4, 6)
    elif rows <= 128 and once:
        tile = (64, 64, 128, 4, 4)
    else:
        tile = (64, 128, 64, 4, 6) if once else (64, 128, 64, 4, 4)
    return ProjectTiling(*tile)


def add_projection(
    ys: Sequence[torch.Tensor],
    x: torch.Tensor,
    bases: Sequence[torch.Tensor],
    weights: LoraWeights,
    batch: LoraBatch,
    *,
    biases: Sequence[torch.Tensor | None] | None = None,
    tiling: ProjectTiling | None = None,
) -> None:
    """Compute y = x·Wᵀ + bias + LoRA for each projection that shares x, in one pass where faster.

    Args:
        ys: [P] tensors [rows, out_features[p]], overwritten.
        x: [rows, in_features].
        bases: [P] base weights W [out_features[p], in_features].
        weights: A and B of every adapter.
        batch: Which rows have which adapters.
        biases: [P] biases [out_features[p]] or None; none by default.
        tiling: With the kernels, wherever x is; by default what suits the number of rows.

    Raises:
        ValueError: As `atmm`; also base weights or biases that do not fit.
    """
    operator.check(ys, x, weights, batch)
    biases = biases or [None] * len(bases)
    _check_bases(ys, x, bases, biases)
    if tiling is not None and tiling.fold and batch.terms > 1:
        raise ValueError(f"batch: folding expected one term a row, got {batch.terms}")
    rows = x.shape[0]
    if tiling is None and operator.use_triton(x) and _aligned(x, ys, bases) and _roomy(x.device):
        tiling = project_tiling(rows, weights.out_features)
        if tiling and tiling.fold and (batch.terms > 1 or weights.max_rank > 128):
            tiling = None
    if tiling is not None and rows:
        run = _fold if tiling.fold else _beside
        run(ys, x, bases, biases, weights, batch, tiling)
        return
    _apart(ys, x, bases, biases, weights, batch)


def _apart(
    ys: Sequence[torch.Tensor],
    x: torch.Tensor,
    bases: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    weights: LoraWeights,
    batch: LoraBatch,
) -> None:
    """The library's product, and LoRA before or after it."""
    plain = all(bias is None for bias in biases)
    first = plain and len(x) >= FIRST_ROWS and operator.use_triton(x) and _aligned(x, ys, bases)
    dense = first and operator.dense_pays(weights, batch, add=False)
    if dense:
        operator.dense(ys, x, weights, batch, add=False)
    elif first:
        choice = operator.choice_of(weights, batch, x.device)
        table = batch.tiles(choice.rows)
        first = operator.tiles_to_launch(table, batch, x) > 0
    if first and not dense:  # y is read only once, and its reading hides in the product
        operator.launch(choice, ys, x, weights, batch, add=False)
    one_base, one_y = _as_one(bases, 0), _as_one(ys, 1)
    if plain and one_base is not None and one_y is not None:
        ys_, bases, biases = [one_y], [one_base], [None]
    else:
        ys_ = list(ys)
    for y, base, bias in zip(ys_, bases, biases, strict=True):
        if bias is not None:
            torch.addmm(bias, x, base.T, out=y)
        elif first:
            y.addmm_(x, base.T)
        else:
            torch.mm(x, base.T, out=y)
    if not first:
        operator.atmm(ys, x, weights, batch)


def _as_one(parts: Sequence[torch.Tensor], dim: int) -> torch.Tensor | None:
    """The matrix that the parts are neighbouring slices of, if they are."""
    first, end = parts[0], parts[0].storage_offset()
    for part in parts:
        same = part.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not same or part.stride() != first.stride() or part.storage_offset() != end:
            return None
        end += part.shape[dim] * part.stride(dim)
    size = list(first.shape)
    size[dim] = sum(part.shape[dim] for part in parts)
    return first.as_strided(size, first.stride())


def _check_bases(
    ys: Sequence[torch.Tensor],
    x: torch.Tensor,
    bases: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
) -> None:
    """Base weights and biases must fit x and the outputs."""
    if len(bases) != len(ys) or len(biases) != len(ys):
        raise ValueError(
            f"bases and biases: expected {len(ys)}, got {len(bases)} and {len(biases)}"
        )
    for y, base, bias in zip(ys, bases, biases, strict=True):
        named = [("base", base, [y.shape[1], x.shape[1]])]
        named += [("bias", bias, [y.shape[1]])] if bias is not None else []
        for name, tensor, shape in named:
            if list(tensor.shape) != shape or tensor.dtype != x.dtype or tensor.device != x.device:
                raise ValueError(
                    f"{name}: expected {x.dtype} {shape} on {x.device}, "
                    f"got {tensor.dtype} {list(tensor.shape)} on {tensor.device}"
                )


@cache
def _roomy(device: torch.device) -> bool:
    """Tiles like those of `project_tiling` need a data-centre GPU's 227 KB of shared memory."""
    return torch.cuda.get_device_capability(device)[0] in (9, 10)


def _aligned(x: torch.Tensor, ys: Sequence[torch.Tensor], bases: Sequence[torch.Tensor]) -> bool:
    """The kernels serve 16-bit tensors with aligned, dense rows, and W's of one row stride."""
    return (
        x.dtype != torch.float32
        and all(
            t.stride(1) == 1 and t.stride(0) % operator.ALIGNMENT == 0 and t.data_ptr() % 16 == 0
            for t in (x, *ys, *bases)
        )
        and len({base.stride(0) for base in bases}) == 1
    )


def shrink_tiling(choice: Tiling, in_features: int) -> Tiling:
    """A shrink that leaves h in one piece, whatever the table's choice for the whole was."""
    if choice.kind is Kind.ROWS:
        return Tiling(
            Kind.PAIR, max(choice.rows, 16), inputs=128, split=-(-in_features // 128) * 128
        )
    return replace(choice, gather=True)


def lora_tiling(choice: Tiling, in_features: int) -> Tiling:
    """Beside a base product there is time to sum h up; few programs leave that one its place."""
    split = -(-in_features // (4 * 128)) * 128
    return Tiling(Kind.PAIR, max(choice.rows, 16), 256, 128, split, 64, gather=True, stages=4)


def linear(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x·Wᵀ + bias without LoRA: for few rows by our own product, else by the library's.

    The library's reads W at 60 to 90 % of an H200's bandwidth there, and splits its sum into two
    kernels; ours starts while what came before still ends (programmatic dependent launch).

    Args:
        x: [rows, inputs].
        w: [outputs, inputs].
        bias: [outputs] or None.

    Returns:
        [rows, outputs].
    """
    if (
        not 0 < len(x) <= FEW_ROWS
        or not x.is_cuda
        or len(w) < FEW_OUTPUTS
        or len(w) % operator.ALIGNMENT
        or x.shape[1] % operator.ALIGNMENT
        or not operator.use_triton(x)
        or not _roomy(x.device)
    ):
        return F.linear(x, w, bias)
    y = x.new_empty(len(x), len(w))
    if not _aligned(x, [y], [w]):
        return F.linear(x, w, bias)
    tile = (64, 128, 4, 4) if len(w) >= 8192 else (32, 256, 4, 6)
    _product([y], x, [w], [bias], ProjectTiling(16, *tile, ahead=0))
    return y


def _product(
    ys: Sequence[torch.Tensor],
    x: torch.Tensor,
    bases: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    tiling: ProjectTiling,
) -> None:
    """Compute x·Wᵀ + bias of projections that share x, in one launch."""
    from valora_kernels import project_kernels as k

    width = x.shape[1]
    down = -(-x.shape[0] // tiling.rows)
    across = sum(-(-y.shape[1] // tiling.outputs) for y in ys)
    step = operator.ALIGNMENT * x.element_size()
    begins = [(base.data_ptr() - bases[0].data_ptr()) // step for base in bases]
    pdl = operator.has_dependent_launch(x.device)
    k.base_kernel[(down * across,)](
        *operator.outputs_of(ys),
        x,
        x.stride(0) // operator.ALIGNMENT,
        bases[0],
        bases[0].stride(0) // operator.ALIGNMENT,
        *[*begins, 0, 0][1:3],
        *[*biases, None, None][:3],
        x.shape[0],
        down,
        width // operator.ALIGNMENT,
        P=len(ys),
        BM=tiling.rows,
        BN=tiling.outputs,
        BK=tiling.inputs,
        EVEN_K=width % tiling.inputs == 0,
        STAGES=tiling.stages,
        AHEAD=tiling.ahead,
        PDL=pdl,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=tiling.warps,
        num_stages=tiling.stages,
        **({"launch_pdl": True} if pdl else {}),
    )


def _beside(
    ys: Sequence[torch.Tensor],
    x: torch.Tensor,
    bases: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    weights: LoraWeights,
    batch: LoraBatch,
    tiling: ProjectTiling,
) -> None:
    """The shrink starts beside the base product and mostly hides in it; the expansion follows."""
    _product(ys, x, bases, biases, tiling)
    chosen = lora_tiling(operator.choice_of(weights, batch, x.device), weights.in_features)
    if operator.tiles_to_launch(batch.tiles(chosen.rows), batch, x):
        h, parts = operator.shrink(chosen, x, weights, batch, beside=True)
        operator.expand(chosen, ys, h, parts, weights, batch)


def _fold(
    ys: Sequence[torch.Tensor],
    x: torch.Tensor,
    bases: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    weights: LoraWeights,
    batch: LoraBatch,
    tiling: ProjectTiling,
) -> None:
    from triton.tools.tensor_descriptor import TensorDescriptor

    from valora_kernels import project_kernels as k

    rows = x.shape[0]
    width = weights.in_features
    shrink = shrink_tiling(operator.choice_of(weights, batch, x.device), width)
    h, _ = operator.shrink(shrink, x, weights, batch, by_row=True)
    places = max(batch.tiles(shrink.rows).capacity * shrink.rows, rows)
    blocks = batch.blocks(tiling.rows)
    pdl = operator.has_dependent_launch(x.device)
    started = pdl and operator.tiles_to_launch(batch.tiles(shrink.rows), batch, x) > 0
    lists = (blocks.slot_of_row, blocks.counts, blocks.lists)
    sizes = (places, weights.slots, weights.max_rank)
    common = {
        "BM": tiling.rows,
        "BN": tiling.outputs,
        "BK": tiling.inputs,
        "RANKS": operator.padded_ranks(weights),
        "PAGED": weights.paged,
        "PRECISION": "ieee" if x.dtype == torch.float32 else "tf32",
        "num_warps": tiling.warps,
        "num_stages": tiling.stages,
    }
    # Only the first of several projections directly follows the shrink; the others wait for it.
    for p, (y, base, bias) in enumerate(zip(ys, bases, biases, strict=True)):
        early = started and p == 0
        common["PDL"] = early
        if pdl:
            common["launch_pdl"] = early
        n = weights.out_features[p]
        before = sum(weights.out_features[:p]) // operator.ALIGNMENT
        last = (n // operator.ALIGNMENT, width // operator.ALIGNMENT)
        programs = _processors(x.device)
        store = tiling.outputs // 2 if tiling.halves else tiling.outputs
        k.many_rows_kernel[(programs,)](
            TensorDescriptor.from_tensor(y, [tiling.rows, store]),
            TensorDescriptor.from_tensor(x, [tiling.rows, tiling.inputs]),
            TensorDescriptor.from_tensor(base, [tiling.outputs, tiling.inputs]),
            bias,
            h,
            weights.b,
            weights.b_table,
            *lists,
            p,
            before,
            *sizes,
            rows,
            *last,
            GROUP=8,
            PROGRAMS=programs,
            HALVES=tiling.halves,
            CAPACITY=blocks.capacity,
            **common,
        )


def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 3
    return torch.cuda.get_device_properties(device).multi_processor_count
