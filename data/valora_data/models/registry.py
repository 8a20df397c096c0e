"""Families of base models by ``model_type``."""

from typing import Any

from valora_data.errors import BundleError
from valora_data.models.base import Architecture
from valora_data.registry import Registry

_FAMILIES = {
    "gemma3:Gemma3": ("gemma3",),
    "idefics3:Idefics3": ("idefics3", "smolvlm"), "internvl:InternVL": ("internvl",),
    "llava:Llava": ("llava",), "llava_next:LlavaNext": ("llava_next",),
    "qwen_vl:QwenVL": ("qwen2_vl", "qwen2_5_vl", "qwen3_vl"),
    "text:TextModel": ("gemma3_text", "llama", "mistral", "qwen2", "qwen3"),
}  # fmt: skip
_PLACES = {name: f"valora_data.models.{at}" for at, names in _FAMILIES.items() for name in names}
ARCHITECTURES: Registry[type[Architecture]] = Registry(
    "valora.architectures", "architecture", _PLACES, BundleError
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
