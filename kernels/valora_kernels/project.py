"""Base projection and LoRA together: y = x·Wᵀ + bias + Σ coefficient · scaling · (x Aᵀ) Bᵀ."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from valora_kernels import atmm as operator
from valora_kernels.tiling import Kind, Tiling

if TYPE_CHECKING:
    from collections.abc import Sequence

    from valora_kernels.metadata import LoraBatch
    from valora_kernels.weights import LoraWeights

FEW_ROWS = 64
"""Up to here one program holds all rows of a column block; W is read once."""

MANY_ROWS = 1024
"""From here on the persistent kernel keeps up with the vendor's library."""


@dataclass(frozen=True, slots=True)
class ProjectTiling:
    """Tile of a projection kernel: rows × outputs × inputs, warps, loads in flight."""

    rows: int
    outputs: int
    inputs: int
    warps: int
    stages: int
    halves: bool = False


def few_rows_tiling(rows: int) -> ProjectTiling:
    """Fast on an H200: many loads of W in flight, few columns a program."""
    return ProjectTiling(max(16, 1 << (rows - 1).bit_length()), 32, 128, 4, 6)


MANY_ROWS_TILING = ProjectTiling(128, 256, 64, 8, 3)


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
        tiling: Of the folding kernels, wherever x is; by default what suits the number of rows.

    Raises:
        ValueError: As `atmm`; also base weights or biases that do not fit.
    """
    operator.check(ys, x, weights, batch)
    biases = biases or [None] * len(bases)
    _check_bases(ys, x, bases, biases)
    if tiling is not None and batch.terms > 1:
        raise ValueError(f"batch: folding expected one term a row, got {batch.terms}")
    rows = x.shape[0]
    if tiling is None and operator.use_triton(x) and _foldable(x, ys, bases, weights, batch):
        if rows <= FEW_ROWS:
            tiling = few_rows_tiling(rows)
        elif rows >= MANY_ROWS:
            tiling = MANY_ROWS_TILING
    if tiling is not None and rows:
        _fold(ys, x, bases, biases, weights, batch, tiling)
        return
    for y, base, bias in zip(ys, bases, biases, strict=True):
        if bias is None:
            torch.mm(x, base.T, out=y)
        else:
            torch.addmm(bias, x, base.T, out=y)
    operator.atmm(ys, x, weights, batch)


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


def _foldable(
    x: torch.Tensor,
    ys: Sequence[torch.Tensor],
    bases: Sequence[torch.Tensor],
    weights: LoraWeights,
    batch: LoraBatch,
) -> bool:
    """Folding serves one term a row, ranks up to 128 and tensors with aligned, dense rows."""
    aligned = all(
        t.stride(1) == 1 and t.stride(0) % operator.ALIGNMENT == 0 and t.data_ptr() % 16 == 0
        for t in (x, *ys, *bases)
    )
    return aligned and batch.terms == 1 and weights.max_rank <= 128 and x.dtype != torch.float32


def shrink_tiling(choice: Tiling, in_features: int) -> Tiling:
    """A shrink that leaves h in one piece, whatever the table's choice for the whole was."""
    if choice.kind is Kind.ROWS:
        return Tiling(
            Kind.PAIR, max(choice.rows, 16), inputs=128, split=-(-in_features // 128) * 128
        )
    return replace(choice, gather=True)


def _fold(
    ys: Sequence[torch.Tensor],
    x: torch.Tensor,
    bases: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    weights: LoraWeights,
    batch: LoraBatch,
    tiling: ProjectTiling,
) -> None:
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
        if rows <= tiling.rows:
            k.few_rows_kernel[(-(-n // tiling.outputs),)](
                y,
                y.stride(0) // operator.ALIGNMENT,
                x,
                x.stride(0) // operator.ALIGNMENT,
                base,
                base.stride(0) // operator.ALIGNMENT,
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
                EVEN_K=width % tiling.inputs == 0,
                STAGES=tiling.stages,
                TOGETHER=max(1, 256 // operator.padded_ranks(weights)),
                **common,
            )
            continue
        from triton.tools.tensor_descriptor import TensorDescriptor

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
