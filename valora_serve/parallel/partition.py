"""Which part of every weight each rank of a tensor-parallel group holds; needs no torch.

The base model is split as Megatron-LM does: the layers that read the hidden states (q, k, v, gate,
up) by their outputs, those that write them (o, down) by their inputs.
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
    """The inputs (of a `row` layer) or outputs of a linear layer that a rank holds."""

    row: bool
    start: int
    stop: int

    @property
    def width(self) -> int:
        """Number of inputs or outputs."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Share:
    """The part of linear layers, which share their input, that a rank holds."""

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
        """Rows of an A of this rank that there is memory for; it is filled up with zeros."""
        return -(-rank // self.size) if self.splits_ranks else rank

    def rank_row(self, row: NDArray[np.int64]) -> NDArray[np.int64]:
        """Which rank rows the process's rows of A are: they are dealt out one by one."""
        return row * self.size + self.rank if self.splits_ranks else row

    def outputs(self, width: int) -> slice:
        """Which of the `width` outputs of a row layer the process expands."""
        part = width // self.size
        return slice(part * self.rank, part * (self.rank + 1))

    def a_slices(self, index: int) -> tuple[slice, slice]:
        """Rows and columns of the A [rank, inputs] of the layer at `index`."""
        if self.row:
            return slice(None), slice(self.slices[index].start, self.slices[index].stop)
        return slice(self.rank, None, self.size) if self.splits_ranks else slice(None), slice(None)

    def b_slice(self, index: int, width: int) -> slice:
        """Rows of the B [outputs, rank] of the layer at `index`, which has `width` outputs."""
        if not self.row:
            return slice(self.slices[index].start, self.slices[index].stop)
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
    """Return the part of every linear layer of a decoder that a rank holds.

    Query heads are dealt out in runs of equal length. If there are fewer heads of keys and values
    than ranks, each one is replicated on the ranks whose query heads read it.

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
        n for n in range(1, LARGEST_GROUP + 1)
        if not heads % n and not (kv_heads % n and n % kv_heads) and not any(w % n for w in widths)
    ]  # fmt: skip
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
            first, count = rank * kv_heads // size, max(kv_heads // size, 1)
            found[path] = Slice(False, first * head_dim, (first + count) * head_dim)
        else:
            part = (inputs if leaf in names.row else outputs) // size
            found[path] = Slice(leaf in names.row, rank * part, (rank + 1) * part)
    return found


def share_of(
    slices: Sequence[Slice], outputs: Sequence[int], lora: LoraParallel, *, rank: int, size: int
) -> Share:
    """Return the share of layers of so many `outputs` on this rank.

    The outputs of a row layer that cannot be split into equal, aligned parts stay whole.
    """
    if slices[0].row and outputs[0] % (size * SLICE_ALIGNMENT):
        lora = LoraParallel.REPLICATE_A
    return Share(rank, size, tuple(slices), lora)
