"""What all launches of the kernels share: whether they can run, and common arguments."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from valora_kernels.gpus.detect import gpu_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from valora_kernels.metadata import LoraBatch
    from valora_kernels.tables import DeviceTiles
    from valora_kernels.tiling import Tiling
    from valora_kernels.weights import LoraWeights

log = logging.getLogger(__name__)

_compile_only: ContextVar[bool] = ContextVar("_compile_only", default=False)

ALIGNMENT = 8
"""Elements. A row of 16-bit numbers that starts at a multiple of it starts at one of 16 bytes."""


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
    """Launch a kernel, or only compile it within `compiling_together`."""
    if _compile_only.get():
        kernel.warmup(*arguments, grid=(programs,), **options)
    else:
        kernel[(programs,)](*arguments, **options)


@contextmanager
def compiling_together(threads: int) -> Iterator[None]:
    """Compile the kernels that are started within a block instead of launching them.

    They are compiled in several threads; the block ends when all are ready.

    Args:
        threads: Number of threads.

    Raises:
        ImportError: This version of Triton compiles one after the other only.
    """
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


def common_arguments(
    tiling: Tiling, tensor: torch.Tensor, weights: LoraWeights, batch: LoraBatch
) -> dict[str, object]:
    """Compile-time arguments that all kernels of the operator have."""
    common: dict[str, object] = {
        "P": len(weights.out_features),
        "TERMS": batch.terms,
        "BM": tiling.rows,
        "RANKS": padded_ranks(weights),
        "PAGED": weights.paged,
        "PDL": has_dependent_launch(tensor.device),
        "PRECISION": precision_of(tensor),
    }
    if common["PDL"]:
        common["launch_pdl"] = True
    return common


def sizes_of(
    table: DeviceTiles, tensor: torch.Tensor, weights: LoraWeights
) -> tuple[int, int, int]:
    """Places of h, and slots and rank rows of the weights."""
    return max(table.capacity * table.block, tensor.shape[0]), weights.slots, weights.max_rank


def outputs_of(ys: Sequence[torch.Tensor]) -> tuple[Any, ...]:
    """Three tensors, their row strides and their widths, both in steps of `ALIGNMENT`.

    The kernels take three; with fewer projections the first one fills up.
    """
    three = [*ys, ys[0], ys[0]][:3]
    strides = [y.stride(0) // ALIGNMENT for y in three]
    return (*three, *strides, *(y.shape[1] // ALIGNMENT for y in three))


def tiles_to_launch(
    table: DeviceTiles, batch: LoraBatch, tensor: torch.Tensor, *, add: bool = True
) -> int:
    """Tiles in use; in a batch for CUDA graphs, as many as any mix can need.

    Raises:
        ValueError: A CUDA graph is being captured with a batch that is not for graphs.
    """
    if batch.fixed:
        return table.capacity
    if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
        raise ValueError("batch: a graph expected LoraBatch(fixed=True), got a growing one")
    return table.count if add else table.total
