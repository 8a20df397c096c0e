"""Architectures by the ``model_type`` of transformers' configuration."""

from __future__ import annotations

from typing import Any

from valora_data.contract.architectures.base import Architecture
from valora_data.contract.architectures.generic import GenericGrid, GenericSquare
from valora_data.errors import BundleError
from valora_data.registry import Registry

GROUP = "valora.architectures"

ARCHITECTURES: Registry[type[Architecture]] = Registry(
    GROUP,
    "LMM architecture",
    {
        "llava": "valora_data.contract.architectures.llava:Llava",
        "qwen2_vl": "valora_data.contract.architectures.qwen_vl:QwenVL",
        "qwen2_5_vl": "valora_data.contract.architectures.qwen_vl:QwenVL",
        "qwen3_vl": "valora_data.contract.architectures.qwen_vl:QwenVL",
    },
    BundleError,
)


def architecture_of(model: Any, base: str = "custom") -> Architecture:
    """Return the architecture of a transformers model.

    A registered one is chosen by the model's ``model_type``. A model of another type gets a
    generic one if it has everything that this one builds on.

    Args:
        model: The model; it may lie on the meta device.
        base: Its id, for the error message.

    Raises:
        BundleError: The type is not registered and the model fits no generic architecture.
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
        f"model, or register the architecture in the entry-point group {GROUP}"
    )
