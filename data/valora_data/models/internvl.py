"""InternVL: crops in the grid whose ratio is closest to the image's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from valora_data.models.crops import Crops

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor


class InternVL(Crops):
    """Crops in the grid whose ratio is closest to the image's."""

    vision_modules: tuple[str, ...] = ("vision_tower", "multi_modal_projector")
    projector = "multi_modal_projector"
    tower_targets: tuple[str, ...] = (
        r".*vision_tower.*\.(q_proj|k_proj|v_proj|projection_layer|fc1|fc2)",
    )
    projector_targets: tuple[str, ...] = (r".*multi_modal_projector\.linear_[12]",)

    def side(self, config: Any) -> int:
        vision = config.vision_config
        size, patch = _side(vision.image_size), _side(vision.patch_size)
        return int(size // patch * config.downsample_ratio)

    def resized_pixels(self, image_processor: Any, width: int, height: int) -> int:
        size = image_processor.size
        number = image_processor.get_number_of_image_patches(
            height, width, {"crop_to_patches": True}
        )
        return int(size["height"] * size["width"] * number)

    def crops(
        self, image_processor: Any, made: Mapping[str, Any], sizes: Sequence[tuple[int, int]]
    ) -> list[tuple[int, int]] | None:
        """Return the grids that the image processor chose, which says only how many crops."""
        from transformers.models.got_ocr2.image_processing_got_ocr2 import get_optimal_tiled_canvas

        side = (image_processor.size["height"], image_processor.size["width"])
        limits = (image_processor.min_patches, image_processor.max_patches)
        found = []
        for (width, height), number in zip(sizes, made["num_patches"], strict=True):
            columns, rows = get_optimal_tiled_canvas((height, width), side, *limits)
            found.append((rows, columns) if number > 1 else (1, 1))
        return found

    def encode(self, model: Any, pixels: Tensor) -> Tensor:
        features: Tensor = model.model.get_image_features(pixels, return_dict=True).pooler_output
        return features


def _side(sides: Any) -> int:  # configurations give one number or two
    return int(sides[0] if isinstance(sides, list | tuple) else sides)
