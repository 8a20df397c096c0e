"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL: images of any size, videos, positions with three parts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from valora_data.contract.architectures.base import IMAGE, PIXELS, VIDEO, Architecture, EncoderInput

if TYPE_CHECKING:
    from collections.abc import Mapping

    from PIL.Image import Image
    from torch import Tensor

    from valora_data.contract.architectures.windows import WindowEncoder

GRIDS = {IMAGE: "image_grid_thw", VIDEO: "video_grid_thw"}
"""Name of the patches' grids (frames, rows, columns) in a processor's output, by kind."""

SECONDS = "second_per_grid_ts"


class QwenVL(Architecture):
    """The Qwen-VL family.

    The grid of an image follows from its size. Text, images and videos have rotary positions in
    time, height and width (M-RoPE). Qwen3-VL also adds visual features to the outputs of its
    first layers (DeepStack).
    """

    vision_modules: tuple[str, ...] = ("visual",)
    projector = r"\w*merger\w*"
    tower_targets: tuple[str, ...] = (r".*visual\.blocks.*\.attn\.(qkv|proj)",)
    projector_targets: tuple[str, ...] = (r".*visual\..*merger.*\.(mlp\.[02]|linear_fc[12])",)
    three_positions = True

    def video_token(self, config: Any) -> int | None:
        """Return ``video_token_id`` of the configuration."""
        return getattr(config, "video_token_id", None)

    def window_encoder(self, model: Any) -> WindowEncoder | None:
        """Return that of Qwen2.5-VL, whose attention is split into windows."""
        visual = model.model.visual
        if not hasattr(visual.config, "fullatt_block_indexes"):
            return None
        from valora_data.contract.architectures.windows import WindowEncoder

        return WindowEncoder(visual)

    def grid_of(self, image: Image, processor: Any, config: Any) -> tuple[int, int]:
        """Return the grid that the image processor chooses for the image's size."""
        grid = processor.image_processor(image, return_tensors="pt")[GRIDS[IMAGE]][0]
        merge = int(config.vision_config.spatial_merge_size)
        return int(grid[1]) // merge, int(grid[2]) // merge

    def split(
        self, kind: str, inputs: Mapping[str, Any], tokens: int, config: Any
    ) -> list[EncoderInput]:
        """Return one entry for each grid; the pixels of all are concatenated."""
        pixels, grids = PIXELS[kind], GRIDS[kind]
        merge = int(config.vision_config.spatial_merge_size)
        patch = int(config.vision_config.patch_size)
        found = []
        pieces = inputs[pixels].split(inputs[grids].prod(-1).tolist())
        for piece, row in zip(pieces, inputs[grids], strict=True):
            times, rows, columns = (int(n) for n in row)
            found.append(
                EncoderInput(
                    kind,
                    {pixels: piece, grids: row[None]},
                    times * rows * columns // merge**2,
                    (times, rows // merge, columns // merge),
                    (columns * patch, rows * patch),
                )
            )
        return found

    def positions(
        self, model: Any, inputs: Mapping[str, Any], config: Any
    ) -> tuple[Tensor, int] | None:
        """Return what transformers' ``get_rope_index`` says."""
        import torch

        ids = inputs["input_ids"]
        kinds = torch.zeros_like(ids, dtype=torch.int32)
        kinds[ids == config.image_token_id] = 1
        video = self.video_token(config)
        if video is not None:
            kinds[ids == video] = 2
        extra = {name: inputs[name] for name in GRIDS.values() if name in inputs}
        if SECONDS in inputs:
            extra[SECONDS] = torch.as_tensor(inputs[SECONDS])
        positions, delta = model.model.get_rope_index(ids, kinds, **extra)
        return positions[:, 0], int(delta[0, 0])

    def deep_features(self, output: Any) -> list[Tensor]:
        """Return the features that DeepStack adds to the first layers' outputs (Qwen3-VL)."""
        import torch

        # Versions of transformers differ in whether they are split by image.
        return [
            layer if torch.is_tensor(layer) else torch.cat(tuple(layer))
            for layer in getattr(output, "deepstack_features", None) or ()
        ]

    def deep_arguments(self, visual: Tensor, deep: list[Tensor]) -> dict[str, Any]:
        """Return the arguments of Qwen3-VL's decoder."""
        return {"visual_pos_masks": visual, "deepstack_visual_embeds": deep}
