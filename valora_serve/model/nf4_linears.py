"""Linear layers of a base model whose weights stay packed in 4 bits (NF4, through bitsandbytes).

The numbers are those that adapters are trained on with ``model.quantize=nf4``, in 4.5 bits a
weight. Adapters are never merged: a sum with one would have to be rounded again.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor, nn

from valora_data.contract.quantized import BLOCK, PackedMatrix, rounded_matrix, shape_of
from valora_serve.model.linears import LinearGroup, LoraScope, MakeGroup

if TYPE_CHECKING:
    import torch

    from valora_serve.memory.unified import GroupSpec


class Nf4Group(LinearGroup):
    """Linear layers that share their input, with one [bytes, 1] of packed weights."""

    rounded: ClassVar[bool] = True

    def __init__(
        self, spec: GroupSpec, linears: Sequence[nn.Linear], scope: LoraScope, dtype: torch.dtype
    ) -> None:
        self._dtype = dtype
        super().__init__(spec, linears, scope)

    def _stack(self, linears: Sequence[nn.Linear]) -> tuple[Tensor, ...]:
        self._packed = PackedMatrix([linear.weight for linear in linears], self._dtype)
        for linear in linears:
            linear.weight = None  # type: ignore[assignment]  # frees it
        return (self._packed.packed,)

    def matrix(self, index: int) -> Tensor:
        """Weight of the layer at `index` after rounding: [outputs, inputs]."""
        return self._packed.matrix()[self._columns[index]]

    def _base(self, x: Tensor) -> Tensor:
        return self._packed.multiply(x, self.bias)


def make_nf4(dtype: torch.dtype) -> MakeGroup:
    """Return what makes groups: of the language model with packed weights; others keep theirs."""

    def make(spec: GroupSpec, linears: Sequence[nn.Linear], scope: LoraScope) -> LinearGroup:
        if spec.part != "text":
            return LinearGroup(spec, linears, scope)
        if all(prod(shape_of(linear.weight)) % BLOCK == 0 for linear in linears):
            return Nf4Group(spec, linears, scope, dtype)
        for linear in linears:  # blocks do not fill the matrices
            numbers = rounded_matrix(linear.weight).to(dtype)
            linear.weight = nn.Parameter(numbers, requires_grad=False)
        return LinearGroup(spec, linears, scope)

    return make
