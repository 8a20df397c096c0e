"""Families of base models by the ``model_type`` of transformers' configuration."""

from __future__ import annotations

from typing import Any

from valora_data.errors import BundleError
from valora_data.models.base import Architecture
from valora_data.models.generic import GenericGrid, GenericSquare
from valora_data.registry import Registry

ARCHITECTURES: Registry[type[Architecture]] = Registry(
    "valora.architectures",
    "LMM architecture",
    {
        "llava": "valora_data.models.llava:Llava",
        "qwen2_vl": "valora_data.models.qwen_vl:QwenVL",
        "qwen2_5_vl": "valora_data.models.qwen_vl:QwenVL",
        "qwen3_vl": "valora_data.models.qwen_vl:QwenVL",
    },
    BundleError,
)


def architecture_of(model: Any, base: str = "custom") -> Architecture:
    """Return the family of a transformers model, which may lie on the meta device.

    Raises:
        BundleError: Its type is not registered, and it does not have the shape of a known one.
    """
    name = str(model.config.model_type)
    if name in ARCHITECTURES:
        return ARCHITECTURES[name]()
    own_positions = hasattr(getattr(model, "model", None), "get_rope_index")
    generic = GenericGrid() if own_positions else GenericSquare()
    unmet = generic.unmet(model)
    if unmet is None:
        return generic
    raise BundleError(
        f"base model {base} has the architecture {name!r}, which is not one of "
        f"{', '.join(sorted(ARCHITECTURES))}, nor like one of them ({unmet}): choose another base "
        "model, or register the architecture in the entry-point group valora.architectures"
    )
