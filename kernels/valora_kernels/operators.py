"""LoRA operators: ATMM, and the seam at which others register to be compared with it."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from valora_kernels.atmm import LoraOperator

ATMM = "atmm"  # the operator that engines use unless they compare

OPERATORS = {entry.name: entry.value for entry in entry_points(group="valora.operators")}
"""``module:class`` by name, of an entry-point group; `tests/bench/valora_kernels` adds others'."""

OPERATORS[ATMM] = "valora_kernels.atmm:Atmm"


@cache
def operator(name: str) -> LoraOperator:
    """The one instance of a registered operator; others are a `ValueError`."""
    if name not in OPERATORS:
        known = ", ".join(sorted(OPERATORS))
        raise ValueError(f"unknown LoRA operator {name!r}: choose one of {known}")
    module, _, attribute = OPERATORS[name].partition(":")
    found: LoraOperator = getattr(import_module(module), attribute)()
    return found
