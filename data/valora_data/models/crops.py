"""Families that split an image into a grid of crops of one size: Idefics3, SmolVLM, InternVL."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from valora_data.models.base import IMAGE, PIXELS, VIDEO, Architecture, EncoderInput

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor


class Crops(Architecture):
    """Crops in rows, then the whole image, whose tokens stand beside the grid; frames are whole."""

    in_crops = True

    def side(self, config: Any) -> int:
        """Return the rows, which are also the columns, of a crop's visual tokens."""
        raise NotImplementedError

    def encode(self, model: Any, pixels: Tensor) -> Tensor:
        """Encode crops [crops, channels, height, width] to [crops, tokens, width]."""
        raise NotImplementedError

    def video_token(self, config: Any) -> int | None:
        return int(config.image_token_id)

    def split(
        self, kind: str, inputs: Mapping[str, Any], tokens: int, config: Any
    ) -> list[EncoderInput]:
        import torch

        side, pixels = self.side(config), inputs[PIXELS[kind]]
        if kind == VIDEO:
            layouts, counts = [], list(map(int, inputs["frames"]))
            if pixels.dim() == 5:  # videos are filled up to the frames of the longest
                pixels = torch.cat([video[:n] for video, n in zip(pixels, counts, strict=True)])
            layouts = [(1, 1)] * len(counts)
        else:
            pixels = pixels.flatten(0, -4)
            layouts = [(int(rows), int(columns)) for rows, columns in inputs["crops"]]
            counts = [rows * columns + (rows * columns > 1) for rows, columns in layouts]
        found = []
        for (rows, columns), part in zip(layouts, pixels.split(counts), strict=True):
            tensors = {PIXELS[IMAGE]: part, "crops": torch.tensor([len(part)])}
            grid = (len(part) if kind == VIDEO else 1, rows * side, columns * side)
            size = (int(part.shape[-1]) * columns, int(part.shape[-2]) * rows)
            cells = None
            if rows * columns > 1:
                cells = torch.arange(rows * columns * side**2).view(rows, columns, side, side)
                cells = cells.transpose(1, 2).flatten()
            found.append(EncoderInput(kind, tensors, len(part) * side**2, grid, size, cells))
        return found

    def visual_features(
        self, model: Any, inputs: Mapping[str, Tensor]
    ) -> tuple[list[Tensor], list[Tensor]]:
        features = self.encode(model, inputs[PIXELS[IMAGE]])
        return [part.flatten(0, 1) for part in features.split(inputs["crops"].tolist())], []


class Idefics3(Crops):
    """Rows of crops, each shuffled to fewer tokens; only SmolVLM's processor takes videos."""

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
        features: Tensor = output.pooler_output[0].unflatten(0, (len(pixels), -1))
        return features


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
