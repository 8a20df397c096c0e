"""Idefics3 and SmolVLM: rows of crops, each shuffled to fewer tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from valora_data.models.crops import Crops

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor


class Idefics3(Crops):
    """Idefics3 and SmolVLM; only the latter's processor takes videos."""

    decoder = "text_model"
    vision_modules: tuple[str, ...] = ("vision_model", "connector")
    projector = "connector"
    tower_targets: tuple[str, ...] = (r".*vision_model.*\.(q_proj|k_proj|v_proj|out_proj|fc1|fc2)",)
    projector_targets: tuple[str, ...] = (r".*connector\.modality_projection\.proj",)
    pixels_per_token = 4096  # of SmolVLM2-500M: a crop of 512 x 512 is 64 tokens

    def side(self, config: Any) -> int:
        vision = config.vision_config
        return int(vision.image_size // vision.patch_size // config.scale_factor)

    def video_token(self, config: Any) -> int | None:
        return super().video_token(config) if config.model_type == "smolvlm" else None

    def resized_pixels(self, image_processor: Any, width: int, height: int) -> int:
        number, _, _ = image_processor.get_number_of_image_patches(height, width)
        return int(max(number, 1) * image_processor.max_image_size["longest_edge"] ** 2)

    def crops(
        self, image_processor: Any, made: Mapping[str, Any], sizes: Sequence[tuple[int, int]]
    ) -> list[tuple[int, int]] | None:
        (rows,), (columns,) = made["rows"], made["cols"]
        return [(max(down, 1), max(across, 1)) for down, across in zip(rows, columns, strict=True)]

    def encode(self, model: Any, pixels: Tensor) -> Tensor:
        output = model.model.get_image_features(pixels[None], return_dict=True)
        # By image, or by crop, as the version of transformers has it.
        found = tuple(output.pooler_output)
        features: Tensor = torch.cat(found).unflatten(0, (len(pixels), -1))
        return features
