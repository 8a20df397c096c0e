"""ATMM: the adaptive-tiling LoRA operator (VaLoRA §4.3)."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from functools import cache
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from valora_kernels.arrangements import arrangements, default_tiling
from valora_kernels.launching import ALIGNMENT, padded_ranks, readable, use_triton
from valora_kernels.lookup import choose
from valora_kernels.reference import atmm_reference
from valora_kernels.tiling import ProjectionGroup, Shape, Tiling

if TYPE_CHECKING:
    from valora_kernels.metadata import LoraBatch
    from valora_kernels.weights import LoraWeights, Tensors

log = logging.getLogger(__name__)

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def atmm(
    ys: Tensors, x: Tensor, weights: LoraWeights, batch: LoraBatch, *, tiling: Tiling | None = None
) -> None:
    """y[m] += Σ_t coefficient_t · scaling(a_t) · (x[m] Aᵀ) Bᵀ, for each projection that shares x.

    Sums are in fp32 and y is rounded once; without a GPU or Triton, `atmm_reference` in x's dtype.
    Nothing waits for the device; after a first call it can be captured in a graph (`LoraBatch`).

    Args:
        ys: [P] tensors [rows, out_features[p]], changed in place.
        x: [rows, in_features].
        weights: A and B of every adapter, of the same dtype.
        batch: Which rows have which adapters.
        tiling: Forces the kernels wherever x is; by default what the table of the GPU says.

    Raises:
        ValueError: Arguments that do not fit each other, before anything is launched.
    """
    check(ys, x, weights, batch)
    if tiling is None and not use_triton(x):
        atmm_reference(ys, x, weights, batch, x.dtype)
        return
    if not aligned(weights) or not readable([x, *ys]):
        raise ValueError(
            f"x and y: expected widths, and rows of neighbouring columns, at multiples of "
            f"{ALIGNMENT} elements, got widths {weights.in_features} and {weights.out_features}, "
            f"strides {[t.stride() for t in (x, *ys)]}"
        )
    if tiling is None:
        launch_fitting(table_choice(weights, batch), ys, x, weights, batch)
    elif tiling.arrangement in arrangements():
        launch(tiling, ys, x, weights, batch)
    else:
        raise ValueError(
            f"unknown arrangement {tiling.arrangement!r}: choose one of {', '.join(arrangements())}"
        )


_instead: dict[tuple[Shape, Tiling], Tiling] = {}
"""What replaces a tiling, measured for another shape, that turned out not to fit this GPU."""


@cache
def _out_of_resources() -> type[Exception]:
    from triton.runtime.errors import OutOfResources

    found: type[Exception] = OutOfResources
    return found


def launch(
    tiling: Tiling, ys: Tensors, x: Tensor, weights: LoraWeights, batch: LoraBatch, add: bool = True
) -> None:
    """Run one arrangement without checks, see `atmm`; without `add` all of y is overwritten."""
    arrangements()[tiling.arrangement].launch(tiling, ys, x, weights, batch, add=add)


def launch_fitting(
    chosen: Tiling,
    ys: Tensors,
    x: Tensor,
    weights: LoraWeights,
    batch: LoraBatch,
    *,
    first: bool = False,
) -> None:
    """Run what `table_choice` has chosen, or what the rules say if that does not fit this GPU."""
    try:
        launch(chosen, ys, x, weights, batch, add=not first)
    except _out_of_resources() as error:  # raised before anything is added to y
        shape = shape_of(weights, batch, first=first)
        _instead[shape, chosen] = smaller = default_tiling(shape)
        log.warning("%s does not fit (%s): taking %s for %s", chosen, error, smaller, shape)
        launch(smaller, ys, x, weights, batch, add=not first)


def shape_of(weights: LoraWeights, batch: LoraBatch, *, first: bool = False) -> Shape:
    """The look-up key of a call; `first` as in `Shape`."""
    group = ProjectionGroup(weights.in_features, weights.out_features, padded_ranks(weights))
    return group.shape(batch.grouping.active, batch.effective_adapters, first)


def table_choice(weights: LoraWeights, batch: LoraBatch, *, first: bool = False) -> Tiling:
    """The tiling that the table of the batch's GPU has for a call; `first` as in `Shape`."""
    shape = shape_of(weights, batch, first=first)
    chosen = choose(batch.gpu, shape)
    return _instead.get((shape, chosen), chosen) if _instead else chosen


def check(ys: Tensors, x: Tensor, weights: LoraWeights, batch: LoraBatch) -> None:
    """Check what every way to compute the operator relies on."""
    rows = batch.max_rows if batch.fixed else batch.grouping.rows
    if len(ys) != len(weights.out_features):
        raise ValueError(f"ys: expected {len(weights.out_features)} tensors, got {len(ys)}")
    if x.dtype not in DTYPES:
        raise ValueError(f"x: expected a dtype of {DTYPES}, got {x.dtype}")
    widths = (weights.in_features, *weights.out_features)
    for tensor, width in zip((x, *ys), widths, strict=True):
        if tuple(tensor.shape) != (rows, width):
            raise ValueError(f"x and y: expected [{rows}, {width}], got {list(tensor.shape)}")
    for tensor in (x, *ys, weights.a):
        if tensor.dtype != x.dtype:
            raise ValueError(f"y and weights: expected {x.dtype} like x, got {tensor.dtype}")
        if tensor.device != batch.device:
            raise ValueError(f"tensors: expected {batch.device}, got {tensor.device}")
    if batch.max_rank > weights.max_rank or batch.last_adapter >= weights.slots:
        raise ValueError(
            f"batch: expected ranks up to the weights' {weights.max_rank} and adapters below their "
            f"{weights.slots} slots, got {batch.max_rank} and {batch.last_adapter}"
        )


class LoraOperator(ABC):
    """One way to compute y += Σ coefficient · scaling · (x Aᵀ) Bᵀ, without state.

    Where `batch.fixed` is set a call is captured in a CUDA graph: its shapes may depend on the
    sizes of the batch only, and what it reads of the batch must lie on the device. An `adaptive`
    one computes base product and LoRA together (`project.add_projection`).
    """

    adaptive: ClassVar[bool] = False

    @abstractmethod
    def add(self, ys: Tensors, x: Tensor, weights: LoraWeights, batch: LoraBatch) -> None:
        """Add the LoRA terms of all rows; arguments as of `atmm`."""


class Atmm(LoraOperator):
    """VaLoRA's operator, with tiles chosen for each call (§4.3); plain torch for odd widths."""

    adaptive: ClassVar[bool] = True

    def add(self, ys: Tensors, x: Tensor, weights: LoraWeights, batch: LoraBatch) -> None:
        """Add the LoRA terms of all rows."""
        (atmm if aligned(weights) else atmm_reference)(ys, x, weights, batch)


def aligned(weights: LoraWeights) -> bool:
    """Whether the kernels, which load 16 bytes at a time, can read all widths."""
    return all(n % ALIGNMENT == 0 for n in (weights.in_features, *weights.out_features))
