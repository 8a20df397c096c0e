"""What families that split an image into a grid of crops of one size share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from valora_data.models.base import IMAGE, PIXELS, VIDEO, Architecture, EncoderInput

if TYPE_CHECKING:
    from collections.abc import Mapping

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
