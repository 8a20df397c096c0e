"""A base model whose language model is held in 4 bits (QLoRA), through bitsandbytes.

Adapters that were trained on rounded weights keep their accuracy on these weights. Training holds
them packed, in about half a byte a weight. Serving unpacks them into the type that it computes in,
the same numbers in as much memory as the base model always takes, or keeps them packed, too.
"""

from __future__ import annotations

import importlib.util
from types import MethodType
from typing import TYPE_CHECKING, Any

from valora_data.contract.architectures.base import ModelPart
from valora_data.contract.architectures.registry import architecture_of
from valora_data.contract.bundle import NF4
from valora_data.errors import BundleError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

PACKAGE = "bitsandbytes"
BLOCK = 64
"""Weights that share a scale."""
INSTALL = "pip install 'valora[quantize]'"


def is_installed() -> bool:
    """Whether the library that rounds weights is installed."""
    return importlib.util.find_spec(PACKAGE) is not None


def loading_options(
    base: str, source: str, dtype: torch.dtype, device: torch.device | str
) -> dict[str, Any]:
    """Return the arguments of transformers' ``from_pretrained`` that round a base model to NF4.

    NF4 is 4-bit NormalFloat with double quantisation: blocks of 64 weights share a scale of 8 bits.
    The linear layers of the language model are rounded while they are read, one after the other, so
    that the device never holds the unrounded model. Vision tower, projector, embeddings and norms,
    a small part of the weights, stay as they are.

    Args:
        base: Id of the base model, for messages.
        source: Its folder, or its name on the hub.
        dtype: Type of the weights that are not rounded, and of the computation.
        device: Device that the model is read to.

    Raises:
        BundleError: The library is missing or does not know the device, or the model cannot be
            rounded.
    """
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText, BitsAndBytesConfig

    check_library(torch.device(device).type)
    config: Any = AutoConfig.from_pretrained(source)
    check_plain(base, vars(config))
    with torch.device("meta"):
        model: Any = AutoModelForImageTextToText.from_config(config)
    rounded = _rounded(base, model)
    kept = [
        path
        for path, module in model.named_modules()
        if type(module) is torch.nn.Linear and path not in rounded
    ]
    quantization = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=NF4,
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
        llm_int8_skip_modules=kept,
    )
    return {"quantization_config": quantization, "device_map": {"": device}}


def check_plain(base: str, described: Mapping[str, Any]) -> None:
    """Check that a base model's weights are saved as numbers.

    Adapters are served on weights that are read or rounded here. transformers would load others
    all the same, and each request would then fail, or multiply by numbers without their scales.

    Args:
        base: Id of the base model, for messages.
        described: Its ``config.json``.

    Raises:
        BundleError: They are saved in a quantised form.
    """
    form = described.get("quantization_config")
    if form is not None:
        method = form.get("quant_method") if isinstance(form, dict) else None
        raise BundleError(
            f"base model {base} is saved in a quantised form already"
            f"{f' ({method})' if method else ''}, which adapters are neither trained nor served "
            f"on: name the model that it was made from, with quantize={NF4} to round it to 4 bits"
        )


def check_library(device: str) -> None:
    """Check that the library rounds weights on a device.

    Raises:
        BundleError: It is missing, or does not know the device.
    """
    if not is_installed():
        raise BundleError(
            f"a base model in 4 bits ({NF4}) needs the package {PACKAGE}: {INSTALL}, or set "
            "quantize to null"
        )
    import bitsandbytes

    known = set(bitsandbytes.supported_torch_devices)
    if device not in known:
        raise BundleError(
            f"{PACKAGE} {bitsandbytes.__version__} holds no 4-bit weights on device {device}: use "
            f"one of {', '.join(sorted(known))}, or set quantize to null"
        )


def _rounded(base: str, model: Any) -> set[str]:
    """Paths of the linear layers that are rounded: all those in the language model's layers.

    Raises:
        BundleError: A layer keeps matrices elsewhere, such as experts in one tensor.
    """
    import torch

    inside = architecture_of(model, base).adaptable(model)
    layers = [f"{path}." for path, part in inside.items() if part is ModelPart.LANGUAGE]
    found = {
        path
        for path, module in model.named_modules()
        if type(module) is torch.nn.Linear and path.startswith(tuple(layers))
    }
    others = sorted(
        name
        for name, weight in model.named_parameters()
        if name.startswith(tuple(layers))
        and weight.ndim > 1
        and name.rpartition(".")[0] not in found
    )
    if others or not found:
        what = f"weights such as {others[0]} are no" if others else "there are no"
        raise BundleError(
            f"base model {base} cannot be held in 4 bits, because {what} linear layers: set "
            "quantize to null"
        )
    return found


def prepare_packed(model: Any) -> None:
    """Work around two faults of bitsandbytes on CPUs with AVX512.

    It repacks weights at the first forward pass without gradients, and later ones with gradients
    then give none. And it unpacks blocks that reach into the next row wrongly: layers that have
    such blocks multiply with weights that `unpacked` gives.

    Args:
        model: The transformers model, in place.
    """
    from torch.nn import functional as F

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.linear(x, unpacked(self.weight).to(x.dtype), bias)

    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
            if module.weight.device.type == "cpu" and module.in_features % BLOCK:
                module.forward = MethodType(forward, module)


def unpacked(weight: Any) -> torch.Tensor:
    """Return the numbers of a packed weight: [outputs, inputs]."""
    return _unpack(weight.data, weight.quant_state)


def _unpack(packed: torch.Tensor, state: Any) -> torch.Tensor:
    from bitsandbytes.functional import dequantize_4bit

    shape = state.shape
    state.shape = _blocks(shape)
    try:
        found: torch.Tensor = dequantize_4bit(packed, state)
    finally:
        state.shape = shape
    return found.view(shape)


class PackedMatrix:
    """Matrices of 4 bits one below the other, which are multiplied without being unpacked for good.

    Scales of blocks are kept in 32 bits: a weight takes 4.5 bits, and all matrices are one product.

    Args:
        weights: [outputs, inputs] of each matrix; packed weights of a loaded model, or others,
            which are rounded. Blocks must fill each of them.
        dtype: Type of the computation.
    """

    def __init__(self, weights: Sequence[Any], dtype: torch.dtype) -> None:
        import torch
        from bitsandbytes.functional import QuantState

        parts = [_packed(weight) for weight in weights]
        states = [state for _, state in parts]
        self.packed = torch.cat([packed.reshape(-1, 1) for packed, _ in parts])
        self._state = QuantState(
            torch.cat([_scales(state) for state in states]),
            torch.Size((sum(int(state.shape[0]) for state in states), int(states[0].shape[1]))),
            states[0].code,
            BLOCK,
            NF4,
            dtype,
        )

    def matrix(self) -> torch.Tensor:
        """Return the numbers: [sum of outputs, inputs]."""
        return _unpack(self.packed, self._state)

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Compute x·Wᵀ + bias: [rows, inputs] → [rows, sum of outputs].

        bitsandbytes multiplies by packed weights where that is faster, and otherwise unpacks them
        for the call.
        """
        from bitsandbytes import matmul_4bit
        from torch.nn import functional as F

        if x.shape[1] % BLOCK:  # some of its kernels expect whole blocks in a row
            return F.linear(x, self.matrix(), bias)
        found: torch.Tensor = matmul_4bit(x, self.packed.t(), self._state, bias=bias)
        return found


def shape_of(weight: Any) -> torch.Size:
    """Return the shape of a matrix, packed or not: [outputs, inputs]."""
    state = getattr(weight, "quant_state", None)
    found: torch.Size = weight.shape if state is None else state.shape
    return found


def _packed(weight: Any) -> tuple[torch.Tensor, Any]:
    """Return a matrix rounded to NF4, as bytes and what they mean."""
    from bitsandbytes.functional import quantize_4bit

    if (state := getattr(weight, "quant_state", None)) is not None:
        return weight.data, state
    rows = weight.detach().contiguous().view(_blocks(weight.shape))
    packed, state = quantize_4bit(rows, compress_statistics=True, quant_type=NF4)
    state.shape = weight.shape
    return packed, state


def _scales(state: Any) -> torch.Tensor:
    """Return the scale of each block: [blocks] float32."""
    from bitsandbytes.functional import dequantize_blockwise

    if not state.nested:
        plain: torch.Tensor = state.absmax.float()
        return plain
    scales: torch.Tensor = dequantize_blockwise(state.absmax, state.state2) + state.offset
    return scales.float()


def rounded_matrix(weight: torch.Tensor) -> torch.Tensor:
    """Return the numbers that a matrix has after it was rounded to NF4 and unpacked again.

    Args:
        weight: [outputs, inputs], the whole matrix.
    """
    return _unpack(*_packed(weight))


def _blocks(shape: torch.Size) -> torch.Size:
    """Return the shape of a matrix with a row for each block, where blocks fill it.

    bitsandbytes 0.50 unpacks blocks that reach into the next row wrongly on CPUs with AVX512.
    """
    import torch

    count = shape.numel()
    return torch.Size((1, count) if count % BLOCK else (count // BLOCK, BLOCK))


def unpack(model: Any, dtype: torch.dtype) -> Any:
    """Return a packed model with ordinary linear layers that hold the same rounded weights.

    Args:
        model: The transformers model, in place.
        dtype: Type of the weights.
    """
    from torch import nn
    from transformers.utils import logging

    shapes = {}
    for name, module in model.named_modules():
        state = getattr(getattr(module, "weight", None), "quant_state", None)
        if state is not None:
            shapes[name], state.shape = state.shape, _blocks(state.shape)
    level = logging.get_verbosity()
    logging.set_verbosity_error()  # it warns of the loss that is wanted here
    try:
        found = model.dequantize(dtype)
    finally:
        logging.set_verbosity(level)
    for name, shape in shapes.items():
        linear = found.get_submodule(name)
        linear.weight = nn.Parameter(linear.weight.detach().view(shape))
    return found.requires_grad_(False)
