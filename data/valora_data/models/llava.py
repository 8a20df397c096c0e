"""LLaVA-1.5, whose images become one square of tokens."""

from collections.abc import Mapping
from typing import Any

from valora_data.models.base import PIXELS, Architecture, EncoderInput


class Llava(Architecture):
    """LLaVA-1.5, and families that differ from it in the names of their modules only."""

    vision_modules: tuple[str, ...] = ("vision_tower", "multi_modal_projector")
    projector = token_projector = "multi_modal_projector"
    tower_targets: tuple[str, ...] = (r".*vision_tower.*\.(q_proj|k_proj|v_proj|out_proj)",)
    projector_targets: tuple[str, ...] = (r".*multi_modal_projector\.linear_[12]",)

    def fixed_grid(self, config: Any) -> tuple[int, int] | None:
        side = int(config.vision_config.image_size) // int(config.vision_config.patch_size)
        return side, side

    def pixel_shape(self, config: Any) -> tuple[int, int, int] | None:
        side = int(config.vision_config.image_size)
        return int(config.vision_config.num_channels), side, side

    def split(
        self, kind: str, inputs: Mapping[str, Any], tokens: int, config: Any
    ) -> list[EncoderInput]:
        pixels, fixed = inputs[PIXELS[kind]], self.fixed_grid(config)
        grid = None if fixed is None else (1, *fixed)
        each, size = tokens // len(pixels), (int(pixels.shape[-1]), int(pixels.shape[-2]))
        return [EncoderInput(kind, {PIXELS[kind]: row[None]}, each, grid, size) for row in pixels]
