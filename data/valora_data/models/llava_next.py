"""LLaVA-NeXT: the whole image as one square of tokens, then a grid of crops."""

from collections.abc import Mapping
from typing import Any

from valora_data.models.base import PIXELS, EncoderInput
from valora_data.models.llava import Llava

SIZES = "image_sizes"  # height and width of each image


class LlavaNext(Llava):
    """LLaVA-NeXT: the rows of the grid end with a token each, which is no cell."""

    in_crops = True
    token_projector = ""  # its rows end with tokens that no projector maps
    tower_targets: tuple[str, ...] = (r".*vision_tower.*\.(q_proj|k_proj|v_proj|out_proj|fc1|fc2)",)

    def fixed_grid(self, config: Any) -> tuple[int, int] | None:
        return None  # the grid follows from an image's ratio

    def pixel_shape(self, config: Any) -> tuple[int, int, int] | None:
        return None  # images have different numbers of crops

    def resized_pixels(self, image_processor: Any, width: int, height: int) -> int:
        from transformers.image_processing_utils import select_best_resolution

        sizes, side = image_processor.image_grid_pinpoints, image_processor.crop_size["height"]
        rows, columns = select_best_resolution((height, width), sizes)
        return int(rows * columns + side**2)

    def split(
        self, kind: str, inputs: Mapping[str, Any], tokens: int, config: Any
    ) -> list[EncoderInput]:
        """One entry for each image; a `ValueError` if it is too narrow, so that all is padding."""
        import torch
        from transformers.models.llava_next.modeling_llava_next import (
            get_anyres_image_grid_shape,
            unpad_image,
        )

        side, patch = int(config.vision_config.image_size), int(config.vision_config.patch_size)
        each, found = side // patch, []  # rows of a crop's tokens
        for pixels, size in zip(inputs[PIXELS[kind]], inputs[SIZES], strict=True):
            down, across = get_anyres_image_grid_shape(size, config.image_grid_pinpoints, side)
            padded = torch.empty(1, down * each, across * each, device="meta")
            rows, columns = unpad_image(padded, size).shape[1:]
            if not (rows and columns):
                height, width = size.tolist()
                text = f"an image of {width} × {height} pixels is too narrow for the base model"
                raise ValueError(f"{text}: cut it into parts, or pad it")
            tensors = {PIXELS[kind]: pixels[: 1 + down * across], SIZES: size[None]}
            first = each**2  # the whole image comes first
            cells = torch.arange(rows)[:, None] * (columns + 1) + torch.arange(columns) + first
            found.append(
                EncoderInput(
                    kind, tensors, first + rows * (columns + 1), (1, rows, columns),
                    (columns * patch, rows * patch), cells.flatten(),
                )
            )  # fmt: skip
        return found
