"""LoRA operators: ATMM, and the seam at which others register to be compared with it."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from valora_kernels.registry import Registry

if TYPE_CHECKING:
    from valora_kernels.atmm import LoraOperator

ATMM = "atmm"
"""The operator that engines use unless they compare."""


OPERATORS: Registry[type[LoraOperator]] = Registry(
    "valora.operators", "LoRA operator", {ATMM: "valora_kernels.atmm:Atmm"}
)
"""Operators by name; those of other systems are in `tests/bench/valora_kernels/operators`."""


@cache
def operator(name: str) -> LoraOperator:
    """The operator of a name; the same instance every time.

    Raises:
        UnknownNameError: The name is not registered.
    """
    return OPERATORS[name]()
