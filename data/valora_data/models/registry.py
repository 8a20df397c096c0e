"""Families of base models by ``model_type``, and those like LLaVA or Qwen-VL by their shape."""

from __future__ import annotations

from inspect import Parameter, signature
from typing import Any

from valora_data.errors import BundleError
from valora_data.models.base import Architecture
from valora_data.models.llava import Llava
from valora_data.models.qwen_vl import QwenVL
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
VISION_MODULES = ("vision_tower", "visual", "multi_modal_projector")


def family_of(name: str, base: str = "custom") -> Architecture:
    """The family of a ``model_type``, or what loads any model of images; or a `BundleError`."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

    if name in ARCHITECTURES:
        return ARCHITECTURES[name]()
    if name in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES:
        return Architecture()
    raise _unknown(name, base, "it takes no images")


def empty_model(config: Any) -> Any:
    """Build the model of a configuration without weights, on the meta device."""
    import torch

    with torch.device("meta"):
        return family_of(config.model_type).auto_class().from_config(config)


def architecture_of(model: Any, base: str = "custom") -> Architecture:
    """The family of a transformers model, by type or by its shape; or a `BundleError`."""
    name = str(model.config.model_type)
    if name in ARCHITECTURES:
        return ARCHITECTURES[name]()
    own_positions = hasattr(getattr(model, "model", None), "get_rope_index")
    generic = GenericGrid() if own_positions else GenericSquare()
    unmet = generic.unmet(model)
    if unmet is None:
        return generic
    raise _unknown(name, base, unmet)


def _unknown(name: str, base: str, unmet: str) -> BundleError:
    return BundleError(
        f"base model {base} has the architecture {name!r}, which is not one of "
        f"{', '.join(sorted(ARCHITECTURES))}, nor like one of them ({unmet}): choose another base "
        "model, or register the architecture in the entry-point group valora.architectures"
    )


class _Generic(Architecture):
    """What both have: modules by the names of either."""

    vision_modules: tuple[str, ...] = VISION_MODULES
    projector = r"multi_modal_projector|mm_projector|connector|aligner|\w*merger\w*"
    tower_targets: tuple[str, ...] = Llava.tower_targets + QwenVL.tower_targets
    projector_targets: tuple[str, ...] = Llava.projector_targets + QwenVL.projector_targets
    given: frozenset[str]  # the arguments that its encoder of images gets

    def language_model(self, model: Any) -> Any:
        inner = getattr(model.model, "language_model", None)
        return model.get_decoder() if inner is None else inner

    def unmet(self, model: Any) -> str | None:
        """Return what a model lacks to be read like this, None if nothing."""
        function = getattr(getattr(model, "model", None), "get_image_features", None)
        if getattr(model.config, "image_token_id", None) is None:
            return "it has no image token"
        if function is None:
            return "it has no get_image_features"
        missing = [
            name
            for name, parameter in signature(function).parameters.items()
            if parameter.default is Parameter.empty
            and parameter.kind in (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
            and name not in self.given
        ]
        if missing:
            return f"its get_image_features needs {', '.join(missing)}"
        if "token_type_ids" in signature(model.model.forward).parameters:
            return "its visual tokens attend to those behind them"
        layered = hasattr(self.language_model(model), "layers")
        return None if layered else "its decoder has no layers"


class GenericSquare(_Generic, Llava):
    """Like LLaVA: one row of pixels for each image, and positions are indices."""

    given = frozenset({"pixel_values"})

    def fixed_grid(self, config: Any) -> tuple[int, int] | None:
        vision = getattr(config, "vision_config", None)
        known = hasattr(vision, "image_size") and hasattr(vision, "patch_size")
        return super().fixed_grid(config) if known else None

    def pixel_shape(self, config: Any) -> tuple[int, int, int] | None:
        """Return None: an unknown encoder may wait for the host."""
        return None


class GenericGrid(_Generic, QwenVL):
    """Like Qwen-VL: the grid follows from an image's size, ``get_rope_index`` gives positions."""

    given = frozenset({"pixel_values", "image_grid_thw"})

    def unmet(self, model: Any) -> str | None:
        """Return what a model lacks to be read like this, None if nothing."""
        taken = signature(model.model.get_rope_index).parameters
        if not {"input_ids", "mm_token_type_ids", "image_grid_thw"} <= taken.keys():
            return "its get_rope_index takes other arguments than that of Qwen-VL"
        vision = getattr(model.config, "vision_config", None)
        if not hasattr(vision, "spatial_merge_size") or not hasattr(vision, "patch_size"):
            return "its vision_config has no spatial_merge_size or no patch_size"
        return super().unmet(model)
