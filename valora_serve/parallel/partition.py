"""Which part of every weight each rank of a tensor-parallel group holds; needs no torch.

As in Megatron-LM, layers that read the hidden states (q, k, v, gate, up) are split by their
outputs, those that write them (o, down) by their inputs.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from valora_data.models.base import LLAMA, LinearNames
from valora_serve.errors import SettingsError

LARGEST_GROUP = 64  # GPUs that messages propose at most
ALIGNMENT = 8  # the kernels need widths that are multiples of it

SLORA, REPLICATE_A = LORA_PARALLEL = ("slora", "replicate_a")
"""How the LoRA matrices of a linear layer are split over the GPUs.

`replicate_a`: A is whole where the layer is split by its outputs, B where it is split by its
inputs, so that LoRA needs no communication but the base's all-reduce. `slora`: nothing is whole,
and x·Aᵀ has an all-reduce (S-LoRA §6.1, whose A of column layers is split by rank rows instead).
"""


@dataclass(frozen=True, slots=True)
class Slice:
    """The inputs (of a `row` layer) or outputs of a linear layer that a rank holds."""

    row: bool
    start: int
    stop: int

    def of(self, values: Any, ndim: int = 2) -> Any:
        """The part of a weight, or of a bias, which is whole where the inputs are split."""
        own = slice(self.start, self.stop)
        if not self.row:
            return values[own]
        return values[:, own] if ndim > 1 else values[...]


@dataclass(frozen=True, slots=True)
class Share:
    """A rank's part of linear layers that share their input."""

    rank: int
    size: int
    slices: tuple[Slice, ...]
    exchanges: bool  # whether no LoRA matrix is whole, so that x·Aᵀ must be summed

    @property
    def row(self) -> bool:
        """Whether the layers are split by their inputs."""
        return self.slices[0].row

    def part(self, index: int, width: int, *, inputs: bool) -> slice:
        """Columns of an A [rank, `width`], or rows of a B [`width`, rank], of a layer."""
        if inputs == self.row:  # the base weights are split by them
            return slice(self.slices[index].start, self.slices[index].stop)
        if not self.exchanges:
            return slice(0, width)
        each = width // self.size
        return slice(each * self.rank, each * (self.rank + 1))


def partition(
    linears: Mapping[str, tuple[int, int]], heads: int, kv_heads: int, head_dim: int,
    rank: int, size: int, base: str, names: LinearNames = LLAMA,
) -> dict[str, Slice]:  # fmt: skip
    """A rank's part of every linear layer of a decoder, given as (outputs, inputs) by path.

    Query heads are dealt out in runs of equal length; where there are fewer heads of keys and
    values than ranks, each is on all ranks whose query heads read it.
    """
    known, widths = (*itertools.chain(*names.column), *names.row), set()
    found: dict[str, Slice] = {}
    for path, (outputs, inputs) in linears.items():
        leaf = path.rpartition(".")[2]
        if leaf not in known:
            raise SettingsError(
                f"tensor_parallel: {path} of base model {base} cannot be split (known layers: "
                f"{', '.join(known)}); serve it on one GPU"
            )
        if leaf in names.kv:
            first, count = rank * kv_heads // size, max(kv_heads // size, 1)
            found[path] = Slice(False, first * head_dim, (first + count) * head_dim)
        else:
            width = inputs if leaf in names.row else outputs
            widths.add(width)
            part = width // size
            found[path] = Slice(leaf in names.row, rank * part, (rank + 1) * part)
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
    return found
