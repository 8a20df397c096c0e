"""The operators: the built-in ones, and those that other packages register."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from valora_kernels.registry import Registry

if TYPE_CHECKING:
    from valora_kernels.operators.base import LoraOperator

ATMM = "atmm"
"""The operator that engines use unless they compare."""

OPERATORS: Registry[type[LoraOperator]] = Registry(
    "valora.operators",
    "LoRA operator",
    {
        ATMM: "valora_kernels.operators.atmm:Atmm",
        "static": "valora_kernels.operators.static:Static",
        "bgmv": "valora_kernels.operators.bgmv:Bgmv",
        "padded": "valora_kernels.operators.padded:Padded",
        "einsum": "valora_kernels.operators.einsum:Einsum",
    },
)


@cache
def operator(name: str) -> LoraOperator:
    """The operator of a name; the same instance every time.

    Raises:
        UnknownNameError: The name is not registered.
    """
    return OPERATORS[name]()
