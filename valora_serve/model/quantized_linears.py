"""Linear layers of a base model whose weights are quantized: into them no adapter is ever merged.

FP8 (E4M3) rounds weights once, with a scale for each output, and activations in every step, with a
scale for each row; LoRA terms see unquantized activations. NF4, through bitsandbytes, keeps the
numbers that adapters are trained on with ``model.quantize=nf4``, in 4.5 bits a weight.
"""

from collections.abc import Callable, Sequence
from functools import cache
from math import prod
from typing import ClassVar

import torch
from torch import Tensor, nn

from valora_data.contract.quantized import BLOCK, PackedMatrix, quantized_matrix, shape_of
from valora_serve.errors import SettingsError
from valora_serve.memory.unified import GroupSpec
from valora_serve.model.linears import LinearGroup, LoraScope, MakeGroup

FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max
SMALLEST = 1e-12  # magnitude that a row's scale is computed from: a row of zeros has one, too
ALIGNMENT = 16  # of inputs and outputs, as torch's products need it
CAPABILITY = (8, 9)  # first CUDA compute capability with products of 8-bit floats


def check_device(device: torch.device) -> None:
    """Refuse a GPU that cannot multiply numbers of 8 bits; a CPU multiplies the quantized ones."""
    if device.type == "cuda" and (has := torch.cuda.get_device_capability(device)) < CAPABILITY:
        raise SettingsError(
            f"quantize=fp8 needs a GPU of compute capability {CAPABILITY[0]}.{CAPABILITY[1]} or "
            f"newer, this one has {has[0]}.{has[1]}: use quantize=none"
        )


def round_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Round [rows, width] to FP8; also returns what rows are multiplied by, [rows, 1] float32."""
    wide = x.float()
    scale = wide.abs().amax(-1, keepdim=True).clamp(min=SMALLEST) / LARGEST
    return (wide / scale).clamp(-LARGEST, LARGEST).to(FP8), scale


@cache
def _fused(cuda: bool) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """`round_rows` in one kernel where there is a GPU."""
    return torch.compile(round_rows, dynamic=True) if cuda else round_rows


def multiply(x: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    """Compute x·Wᵀ: x [rows, inputs] is quantized here, W [outputs, inputs] by `scales`."""
    quantized, scale = _fused(x.is_cuda)(x)
    if not x.is_cuda:
        return ((quantized.float() * scale) @ (weight.float() * scales).T).to(x.dtype)
    out = torch.bfloat16  # the only type that products with scales by row return
    found: Tensor = torch._scaled_mm(
        quantized, weight.T, scale_a=scale, scale_b=scales.T, out_dtype=out
    )
    return found.to(x.dtype)


class Fp8Group(LinearGroup):
    """Linear layers that share their input: one FP8 weight, with `scales` [outputs, 1] float32."""

    quantized: ClassVar[bool] = True

    def _stack(self, linears: Sequence[nn.Linear]) -> tuple[Tensor, ...]:
        (weight,) = super()._stack(linears)
        quantized, self.scales = round_rows(weight)
        self._dtype = weight.dtype
        for linear in linears:
            linear.weight = None  # type: ignore[assignment]  # frees the unquantized weights
        return (quantized,)

    def matrix(self, index: int) -> Tensor:
        """Weight of the layer at `index` after quantization: [outputs, inputs]."""
        rows = self._columns[index]
        return (self.weights[0][rows].float() * self.scales[rows]).to(self._dtype)

    def _base(self, x: Tensor) -> Tensor:
        y = multiply(x, self.weights[0], self.scales)
        return y if self.bias is None else y + self.bias


def make_fp8(spec: GroupSpec, linears: Sequence[nn.Linear], scope: LoraScope) -> LinearGroup:
    """Make a group of the language model with 8-bit weights; others keep theirs."""
    sizes = (spec.in_features, *spec.out_features)
    fits = spec.part == "text" and all(size % ALIGNMENT == 0 for size in sizes)
    return (Fp8Group if fits else LinearGroup)(spec, linears, scope)


class Nf4Group(LinearGroup):
    """Linear layers that share their input, with one [bytes, 1] of packed weights."""

    quantized: ClassVar[bool] = True

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
        """Weight of the layer at `index` after quantization: [outputs, inputs]."""
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
            numbers = quantized_matrix(linear.weight).to(dtype)
            linear.weight = nn.Parameter(numbers, requires_grad=False)
        return LinearGroup(spec, linears, scope)

    return make
