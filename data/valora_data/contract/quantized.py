"""A base model whose language model is held in 4 bits (QLoRA), through bitsandbytes."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from types import MethodType
from typing import TYPE_CHECKING, Any

from valora_data.errors import BundleError
from valora_data.models.base import ModelPart
from valora_data.models.registry import architecture_of, empty_model

if TYPE_CHECKING:
    import torch

NF4 = "nf4"  # 4-bit NormalFloat with double quantisation
PACKAGE = "bitsandbytes"
INSTALL = "pip install 'valora[quantize]'"
BLOCK = 64  # weights that share a scale


def is_installed() -> bool:
    """Whether the library that rounds weights is installed."""
    return importlib.util.find_spec(PACKAGE) is not None


def loading_options(
    base: str, source: str, dtype: torch.dtype, device: torch.device | str
) -> dict[str, Any]:
    """Arguments of ``from_pretrained`` that round the language model to NF4; or a `BundleError`."""
    import torch
    from torch import nn
    from transformers import BitsAndBytesConfig

    check_library(torch.device(device).type)
    model = empty_base(base, source)
    linears = {path for path, module in model.named_modules() if type(module) is nn.Linear}
    parts = architecture_of(model, base).adaptable(model)
    inside = tuple(f"{path}." for path, part in parts.items() if part is ModelPart.LANGUAGE)
    quantization = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=NF4,
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
        llm_int8_skip_modules=sorted(path for path in linears if not path.startswith(inside)),
    )
    return {"quantization_config": quantization, "device_map": {"": device}}


def empty_base(base: str, source: str) -> Any:
    """Build a base model without weights, on the meta device; one saved quantised is refused."""
    from transformers import AutoConfig

    import valora_data.models.lite_tower  # noqa: F401 (registers it with transformers)

    config: Any = AutoConfig.from_pretrained(source)
    check_plain(base, vars(config))
    return empty_model(config)


def check_plain(base: str, described: Mapping[str, Any]) -> None:
    """Refuse a base model that is saved in a quantised form: its scales would be ignored."""
    form = described.get("quantization_config")
    if form is not None:
        method = form.get("quant_method") if isinstance(form, dict) else None
        raise BundleError(
            f"base model {base} is saved in a quantised form already"
            f"{f' ({method})' if method else ''}, which adapters are neither trained nor served "
            f"on: name the model that it was made from, with quantize={NF4} to round it to 4 bits"
        )


def check_library(device: str) -> None:
    """Check that the library is installed and rounds weights on a device."""
    if not is_installed():
        text = f"a base model in 4 bits ({NF4}) needs the package {PACKAGE}: {INSTALL}"
        raise BundleError(f"{text}, or set quantize to null")
    import bitsandbytes

    known = sorted(bitsandbytes.supported_torch_devices)
    if device not in known:
        text = f"{PACKAGE} {bitsandbytes.__version__} holds no 4-bit weights on device {device}"
        raise BundleError(f"{text}: use one of {', '.join(known)}, or set quantize to null")


def prepare_packed(model: Any) -> None:
    """Work around bitsandbytes on AVX512: lost gradients, blocks that reach into the next row."""
    from torch.nn import functional as F

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.linear(x, quantized_matrix(self.weight).to(x.dtype), bias)

    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
            if module.weight.device.type == "cpu" and module.in_features % BLOCK:
                module.forward = MethodType(forward, module)


def unpack(model: Any, dtype: torch.dtype) -> Any:
    """Give a packed model ordinary linear layers with the same quantized weights, in place."""
    from torch import nn

    for path, module in list(model.named_modules()):
        if hasattr(getattr(module, "weight", None), "quant_state"):
            plain = nn.Linear(module.in_features, module.out_features, bias=False, device="meta")
            numbers = quantized_matrix(module.weight).to(dtype)
            plain.weight, plain.bias = nn.Parameter(numbers, requires_grad=False), module.bias
            model.set_submodule(path, plain)
    return model


def quantized_matrix(weight: Any) -> torch.Tensor:
    """Return the numbers of a matrix [outputs, inputs] that is packed, or quantized to NF4 now."""
    return _unpack(*_packed(weight))


def shape_of(weight: Any) -> torch.Size:
    """Return the shape of a matrix, packed or not: [outputs, inputs]."""
    found: torch.Size = getattr(weight, "quant_state", weight).shape
    return found


class PackedMatrix:
    """Matrices [outputs, inputs] of 4 bits one below the other, multiplied without being unpacked.

    They are packed already or quantized now; scales are kept in 32 bits; `dtype` computes.
    """

    def __init__(self, weights: Sequence[Any], dtype: torch.dtype) -> None:
        import torch
        from bitsandbytes.functional import QuantState, dequantize_blockwise

        scales, parts = [], [_packed(weight) for weight in weights]
        states = [state for _, state in parts]
        for state in states:
            absmax = state.absmax
            if state.nested:
                absmax = dequantize_blockwise(absmax, state.state2) + state.offset
            scales.append(absmax.float())
        self.packed = torch.cat([packed.reshape(-1, 1) for packed, _ in parts])
        shape = torch.Size((sum(state.shape[0] for state in states), states[0].shape[1]))
        self._state = QuantState(torch.cat(scales), shape, states[0].code, BLOCK, NF4, dtype)

    def matrix(self) -> torch.Tensor:
        """Return the numbers: [sum of outputs, inputs]."""
        return _unpack(self.packed, self._state)

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Compute x·Wᵀ + bias: [rows, inputs] → [rows, sum of outputs]."""
        from bitsandbytes import matmul_4bit
        from torch.nn import functional as F

        if x.shape[1] % BLOCK:  # some of its kernels expect whole blocks in a row
            return F.linear(x, self.matrix(), bias)
        found: torch.Tensor = matmul_4bit(x, self.packed.t(), self._state, bias=bias)
        return found


def _packed(weight: Any) -> tuple[torch.Tensor, Any]:
    """A matrix quantized to NF4, as bytes and what they mean."""
    from bitsandbytes.functional import quantize_4bit

    if (state := getattr(weight, "quant_state", None)) is not None:
        return weight.data, state
    rows = weight.detach().contiguous().view(_blocks(weight.shape))
    packed, state = quantize_4bit(rows, compress_statistics=True, quant_type=NF4)
    state.shape = weight.shape
    return packed, state


def _unpack(packed: torch.Tensor, state: Any) -> torch.Tensor:
    from bitsandbytes.functional import dequantize_4bit

    shape, state.shape = state.shape, _blocks(state.shape)
    try:
        found: torch.Tensor = dequantize_4bit(packed, state)
    finally:
        state.shape = shape
    return found.view(shape)


def _blocks(shape: torch.Size) -> torch.Size:
    """A row for each block, where blocks fill the matrix: bitsandbytes 0.50 unpacks these right."""
    import torch

    count = shape.numel()
    return torch.Size((1, count) if count % BLOCK else (count // BLOCK, BLOCK))
