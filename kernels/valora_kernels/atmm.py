"""ATMM: the adaptive-tiling LoRA operator (VaLoRA §4.3)."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from functools import cache
from typing import TYPE_CHECKING, ClassVar

import torch

from valora_kernels.arrangements.registry import arrangement
from valora_kernels.launching import ALIGNMENT, padded_ranks, use_triton
from valora_kernels.lookup import choose, default_tiling
from valora_kernels.reference import atmm_reference
from valora_kernels.tiling import Shape, Tiling, apparent_adapters

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from valora_kernels.arrangements.base import Arrangement
    from valora_kernels.gpus.base import Gpu
    from valora_kernels.metadata import LoraBatch
    from valora_kernels.weights import LoraWeights

log = logging.getLogger(__name__)

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


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
            interpreter); by default what the table of the GPU says.

    Raises:
        ValueError: Shapes, dtypes, devices, strides, ranks or adapters that do not fit, or an
            unknown arrangement, before anything is launched.
    """
    check(ys, x, weights, batch)
    if tiling is None and not use_triton(x):
        atmm_reference(ys, x, weights, batch)
        return
    _check_alignment(ys, x, weights)
    if tiling is not None:
        refusal = arrangement(tiling.arrangement).refusal(weights, batch)
        if refusal:
            raise ValueError(f"batch: {tiling.arrangement} expected {refusal}, got another")
        launch(tiling, ys, x, weights, batch)
        return
    direct = direct_choice(weights, batch)
    if direct is not None:
        launch(direct, ys, x, weights, batch)
        return
    launch_fitting(table_choice(weights, batch), ys, x, weights, batch)


_instead: dict[tuple[Shape, Tiling], Tiling] = {}
"""What replaces a tiling, measured for another shape, that turned out not to fit this GPU."""


@cache
def _out_of_resources() -> type[Exception]:
    from triton.runtime.errors import OutOfResources

    found: type[Exception] = OutOfResources
    return found


class _Launches(dict[str, "Callable[..., None]"]):
    """The `launch` of each arrangement, resolved at its first use: every layer of a step asks."""

    def __missing__(self, name: str) -> Callable[..., None]:
        self[name] = found = arrangement(name).launch
        return found


_launches = _Launches()


def launch(
    tiling: Tiling,
    ys: Sequence[torch.Tensor],
    x: torch.Tensor,
    weights: LoraWeights,
    batch: LoraBatch,
    *,
    add: bool = True,
) -> None:
    """Run one arrangement of the kernels, without checks of the arguments.

    Args:
        tiling: The arrangement and its tile sizes.
        ys: As in `atmm`.
        x: As in `atmm`.
        weights: As in `atmm`.
        batch: As in `atmm`.
        add: Add to y; otherwise overwrite it, with zeros where a row has no adapter.

    Raises:
        UnknownNameError: No arrangement of this name is registered.
    """
    _launches[tiling.arrangement](tiling, ys, x, weights, batch, add=add)


def launch_fitting(
    chosen: Tiling,
    ys: Sequence[torch.Tensor],
    x: torch.Tensor,
    weights: LoraWeights,
    batch: LoraBatch,
    *,
    first: bool = False,
) -> None:
    """Run what `table_choice` has chosen, or what the rules say if that does not fit this GPU.

    Args:
        chosen: The tiling.
        ys: As in `atmm`.
        x: As in `atmm`.
        weights: As in `atmm`.
        batch: As in `atmm`.
        first: As in `Shape`; y is then overwritten.
    """
    try:
        launch(chosen, ys, x, weights, batch, add=not first)
    except _out_of_resources() as error:  # raised before anything is added to y
        shape = shape_of(weights, batch, first=first)
        _instead[shape, chosen] = smaller = default_tiling(batch.gpu, shape)
        log.warning("%s does not fit (%s): taking %s for %s", chosen, error, smaller, shape)
        launch(smaller, ys, x, weights, batch, add=not first)


@cache
def _direct(gpu: Gpu) -> tuple[tuple[Arrangement, Tiling], ...]:
    """The arrangements that are asked before the GPU's table."""
    return tuple((arrangement(name), Tiling(name)) for name in gpu.direct)


def direct_choice(weights: LoraWeights, batch: LoraBatch, *, add: bool = True) -> Tiling | None:
    """The tiling of an arrangement that takes this call without asking the table, if one does."""
    for way, tiling in _direct(batch.gpu):
        if way.takes(weights, batch, add=add):
            return tiling
    return None


def shape_of(weights: LoraWeights, batch: LoraBatch, *, first: bool = False) -> Shape:
    """The look-up key of a call; `first` as in `Shape`."""
    rows = batch.grouping.active
    return Shape(
        in_features=weights.in_features,
        out_features=sum(weights.out_features),
        projections=len(weights.out_features),
        rank=padded_ranks(weights),
        rows=rows,
        adapters=apparent_adapters(rows, batch.effective_adapters, first=first),
        first=first,
    )


def table_choice(weights: LoraWeights, batch: LoraBatch, *, first: bool = False) -> Tiling:
    """The tiling that the table of the batch's GPU has for a call; `first` as in `Shape`."""
    shape = shape_of(weights, batch, first=first)
    chosen = choose(batch.gpu, shape).tiling
    return _instead.get((shape, chosen), chosen) if _instead else chosen


def check(
    ys: Sequence[torch.Tensor], x: torch.Tensor, weights: LoraWeights, batch: LoraBatch
) -> None:
    """Check what every way to compute the operator relies on."""
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
    """Check what only the kernels rely on: they load 16 bytes at a time."""
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


class LoraOperator(ABC):
    """One way to compute y += Σ coefficient · scaling · (x Aᵀ) Bᵀ.

    Instances have no state; there is one of each class, see `operators.operator`. Where
    `batch.fixed` is set, a call is captured in a CUDA graph: its shapes may depend on the sizes of
    the batch only, and what it reads of the batch must lie on the device.

    Attributes:
        name: The name that it is registered under.
        adaptive: Whether the operator computes base product and LoRA together
            (`project.add_projection`); others add to the library's product.
    """

    name: ClassVar[str]
    adaptive: ClassVar[bool] = False

    @abstractmethod
    def add(
        self,
        ys: Sequence[torch.Tensor],
        x: torch.Tensor,
        weights: LoraWeights,
        batch: LoraBatch,
    ) -> None:
        """Add the LoRA terms of all rows.

        Args:
            ys: [P] tensors [rows, out_features[p]], changed in place.
            x: [rows, in_features].
            weights: A and B of every adapter.
            batch: Which rows have which adapters.
        """


class Atmm(LoraOperator):
    """VaLoRA's operator, with tiles chosen for each call (§4.3); plain torch for odd widths."""

    name: ClassVar[str] = "atmm"
    adaptive: ClassVar[bool] = True

    def add(
        self,
        ys: Sequence[torch.Tensor],
        x: torch.Tensor,
        weights: LoraWeights,
        batch: LoraBatch,
    ) -> None:
        """Add the LoRA terms of all rows."""
        (atmm if aligned(weights) else atmm_reference)(ys, x, weights, batch)


def aligned(weights: LoraWeights) -> bool:
    """Whether the kernels, which load 16 bytes at a time, can read all widths."""
    return all(n % ALIGNMENT == 0 for n in (weights.in_features, *weights.out_features))
