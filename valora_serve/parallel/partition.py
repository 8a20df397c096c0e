"""Which part of every weight each process of a tensor-parallel group holds; needs no torch.

The base model is split as Megatron-LM does: the layers that read the hidden states (q, k, v, gate,
up) by their outputs, those that write them (o, down) by their inputs. Their LoRA matrices follow
S-LoRA §6, or are partly replicated; see `LoraParallel`.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from valora_data.models.base import LLAMA
from valora_serve.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from valora_data.models.base import LinearNames

LARGEST_GROUP = 64
"""Largest number of GPUs that messages propose."""

SLICE_ALIGNMENT = 8
"""The kernels need widths that are multiples of it."""


class LoraParallel(StrEnum):
    """How the LoRA matrices of a linear layer are split over the GPUs (S-LoRA §6.1)."""

    SLORA = "slora"
    """Nothing is replicated. Column layers: A by its rank rows, and an all-gather of x·Aᵀ; B by its
    outputs. Row layers: A by its inputs, and an all-reduce of x·Aᵀ; B by its outputs."""
    REPLICATE_A = "replicate_a"
    """No communication for LoRA. Column layers: every GPU holds the whole A. Row layers: every GPU
    holds the whole B, and multiplies its partial x·Aᵀ by it before the base's all-reduce."""


@dataclass(frozen=True, slots=True)
class Slice:
    """The part of one linear layer's weight that a process holds.

    Attributes:
        row: Whether the layer is split by its inputs; otherwise by its outputs.
        start: First input or output of the part.
        stop: End of the part.
    """

    row: bool
    start: int
    stop: int

    @property
    def width(self) -> int:
        """Number of inputs or outputs of the part."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Share:
    """The part of a group of linear layers, which share their input, that a process holds.

    Attributes:
        rank: Number of the process.
        size: Number of processes.
        slices: Part of each layer's weight, in the order of the layers.
        lora: How the LoRA matrices are split.
    """

    rank: int
    size: int
    slices: tuple[Slice, ...]
    lora: LoraParallel

    @property
    def row(self) -> bool:
        """Whether the layers are split by their inputs."""
        return self.slices[0].row

    @property
    def splits_ranks(self) -> bool:
        """Whether A is split by its rank rows, so that those of x·Aᵀ must be put together."""
        return not self.row and self.lora is LoraParallel.SLORA

    @property
    def splits_row_outputs(self) -> bool:
        """Whether the B of a row layer is split by its outputs, so that x·Aᵀ must be summed."""
        return self.row and self.lora is LoraParallel.SLORA

    def rank_rows(self, rank: int) -> int:
        """Return how many rows of an A of this rank the process has memory for.

        Ranks that the number of processes does not divide are padded with rows of zeros.
        """
        return -(-rank // self.size) if self.splits_ranks else rank

    def rank_row(self, row: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return which rank rows the process's rows of A are."""
        return row * self.size + self.rank if self.splits_ranks else row

    def outputs(self, width: int) -> slice:
        """Return which of the `width` outputs of a row layer the process expands."""
        part = width // self.size
        return slice(part * self.rank, part * (self.rank + 1))

    def a_slices(self, index: int) -> tuple[slice, slice]:
        """Return which rows and columns of an A [rank, inputs] the process holds.

        The rank rows are dealt out one by one. So row j of process k is rank row j·size + k,
        whatever the adapter's rank is.

        Args:
            index: Index of the layer in its group.
        """
        if self.row:
            part = self.slices[index]
            return slice(None), slice(part.start, part.stop)
        if self.splits_ranks:
            return slice(self.rank, None, self.size), slice(None)
        return slice(None), slice(None)

    def b_slice(self, index: int, width: int) -> slice:
        """Return which rows of a B [outputs, rank] the process holds.

        Args:
            index: Index of the layer in its group.
            width: Outputs of the whole layer.
        """
        if not self.row:
            part = self.slices[index]
            return slice(part.start, part.stop)
        return self.outputs(width) if self.splits_row_outputs else slice(None)


def partition(
    linears: Mapping[str, tuple[int, int]],
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    rank: int,
    size: int,
    base: str,
    names: LinearNames = LLAMA,
) -> dict[str, Slice]:
    """Return the part of every linear layer of a decoder that a process holds.

    Query heads are dealt out in runs of equal length. If there are fewer heads of keys and values
    than processes, each one is replicated on the processes whose query heads read it.

    Args:
        linears: (outputs, inputs) of every linear layer of the decoder, by path.
        heads: Query heads of an attention layer.
        kv_heads: Heads of keys and values.
        head_dim: Width of a head.
        rank: Number of the process.
        size: Number of processes.
        base: Name of the base model, for messages.
        names: Names of the linear layers in its family.

    Raises:
        SettingsError: The model cannot be split over so many processes.
    """
    known, widths = (*itertools.chain(*names.column), *names.row), set()
    for path, (outputs, inputs) in linears.items():
        leaf = path.rpartition(".")[2]
        if leaf not in known:
            raise SettingsError(
                f"tensor_parallel: {path} of base model {base} cannot be split (known layers: "
                f"{', '.join(known)}); serve it on one GPU"
            )
        if leaf not in names.kv:
            widths.add(inputs if leaf in names.row else outputs)
    fitting = [
        count for count in range(1, LARGEST_GROUP + 1) if _fits(count, heads, kv_heads, widths)
    ]
    if size not in fitting:
        raise SettingsError(
            f"tensor_parallel: {size} GPUs cannot share base model {base} with {heads} attention "
            f"heads, {kv_heads} of keys and values, and widths {sorted(widths)} equally: use "
            f"{', '.join(map(str, fitting))}"
        )
    found = {}
    for path, (outputs, inputs) in linears.items():
        leaf = path.rpartition(".")[2]
        if leaf in names.kv:
            count = max(kv_heads // size, 1)
            first = rank * kv_heads // size
            found[path] = Slice(False, first * head_dim, (first + count) * head_dim)
        else:
            part = (inputs if leaf in names.row else outputs) // size
            found[path] = Slice(leaf in names.row, rank * part, (rank + 1) * part)
    return found


def _fits(size: int, heads: int, kv_heads: int, widths: set[int]) -> bool:
    """Return whether so many processes can share a model equally."""
    kv = kv_heads % size == 0 or size % kv_heads == 0
    return heads % size == 0 and kv and all(width % size == 0 for width in widths)


def share_of(
    slices: Sequence[Slice],
    outputs: Sequence[int],
    lora: LoraParallel,
    *,
    rank: int,
    size: int,
) -> Share:
    """Return the share of a group of linear layers.

    Args:
        slices: Part of each layer's weight.
        outputs: Outputs of each layer on this process.
        lora: How their LoRA matrices should be split. The outputs of a row layer that cannot be
            split into equal, aligned parts stay whole.
        rank: Number of the process.
        size: Number of processes.
    """
    if slices[0].row and outputs[0] % (size * SLICE_ALIGNMENT):
        lora = LoraParallel.REPLICATE_A
    return Share(rank, size, tuple(slices), lora)
