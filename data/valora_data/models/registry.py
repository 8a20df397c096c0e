"""Families of base models by ``model_type``."""

from typing import Any

from valora_data.errors import BundleError
from valora_data.models.base import Architecture
from valora_data.registry import Registry

ARCHITECTURES: Registry[type[Architecture]] = Registry(
    "valora.architectures",
    "architecture",
    {
        "idefics3": "valora_data.models.idefics3:Idefics3",
        "internvl": "valora_data.models.internvl:InternVL",
        "llama": "valora_data.models.text:TextModel",
        "llava": "valora_data.models.llava:Llava",
        "llava_next": "valora_data.models.llava_next:LlavaNext",
        "mistral": "valora_data.models.text:TextModel",
        "qwen2": "valora_data.models.text:TextModel",
        "qwen2_vl": "valora_data.models.qwen_vl:QwenVL",
        "qwen2_5_vl": "valora_data.models.qwen_vl:QwenVL",
        "qwen3": "valora_data.models.text:TextModel",
        "qwen3_vl": "valora_data.models.qwen_vl:QwenVL",
        "smolvlm": "valora_data.models.idefics3:Idefics3",
    },
    BundleError,
)


def family_of(name: str, base: str = "custom") -> Architecture:
    """The family of a ``model_type``; or a `BundleError`."""
    if name in ARCHITECTURES:
        return ARCHITECTURES[name]()
    raise BundleError(
        f"base model {base} has the architecture {name!r}, which is not one of "
        f"{', '.join(sorted(ARCHITECTURES))}: choose another base model, or register the "
        "architecture in the entry-point group valora.architectures"
    )


def empty_model(config: Any) -> Any:
    """Build the model of a configuration without weights, on the meta device."""
    import torch

    with torch.device("meta"):
        return family_of(config.model_type).auto_class().from_config(config)


def architecture_of(model: Any, base: str = "custom") -> Architecture:
    """The family of a transformers model; or a `BundleError`."""
    return family_of(str(model.config.model_type), base)
