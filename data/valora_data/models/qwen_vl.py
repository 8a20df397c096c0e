"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL: images of any size, videos, positions with three parts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from valora_data.models.base import IMAGE, PIXELS, VIDEO, Architecture, EncoderInput

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray
    from torch import Tensor

GRIDS = {IMAGE: "image_grid_thw", VIDEO: "video_grid_thw"}  # frames, rows, columns of patches
SECONDS = "second_per_grid_ts"


class QwenVL(Architecture):
    """The Qwen-VL family: images and videos have rotary positions with three parts (M-RoPE)."""

    vision_modules: tuple[str, ...] = ("visual",)
    projector = r"\w*merger\w*"
    tower_targets: tuple[str, ...] = (r".*visual\.blocks.*\.attn\.(qkv|proj)",)
    projector_targets: tuple[str, ...] = (r".*visual\..*merger.*\.(mlp\.[02]|linear_fc[12])",)
    three_positions = True

    def video_token(self, config: Any) -> int | None:
        return getattr(config, "video_token_id", None)

    def resized_pixels(self, image_processor: Any, width: int, height: int) -> int:
        size = getattr(image_processor, "size", None) or {}
        low, high = size.get("shortest_edge"), size.get("longest_edge")
        if low and high and getattr(image_processor, "do_resize", False):
            return int(min(max(width * height, low), high))
        return super().resized_pixels(image_processor, width, height)

    def split(
        self, kind: str, inputs: Mapping[str, Any], tokens: int, config: Any
    ) -> list[EncoderInput]:
        pixels, grids = inputs[PIXELS[kind]], inputs[GRIDS[kind]]
        merge = int(config.vision_config.spatial_merge_size)
        patch = int(config.vision_config.patch_size)
        found = []
        for piece, row in zip(pixels.split(grids.prod(-1).tolist()), grids, strict=True):
            times, rows, columns = row.tolist()
            grid = (times, rows // merge, columns // merge)
            tensors = {PIXELS[kind]: piece, GRIDS[kind]: row[None]}
            size = (columns * patch, rows * patch)
            found.append(EncoderInput(kind, tensors, math.prod(grid), grid, size))
        return found

    def positions(
        self, model: Any, inputs: Mapping[str, Any], config: Any
    ) -> tuple[Tensor, int] | None:
        import torch

        ids = inputs["input_ids"]
        kinds = torch.zeros_like(ids, dtype=torch.int32)
        kinds[ids == config.image_token_id] = 1
        if (video := self.video_token(config)) is not None:
            kinds[ids == video] = 2
        extra = {name: inputs[name] for name in GRIDS.values() if name in inputs}
        if SECONDS in inputs:
            extra[SECONDS] = torch.as_tensor(inputs[SECONDS])
        positions, delta = model.model.get_rope_index(ids, kinds, **extra)
        return positions[:, 0], int(delta[0, 0])

    def window_encoder(self, model: Any) -> WindowEncoder | None:
        visual = model.model.visual
        return WindowEncoder(visual) if hasattr(visual.config, "fullatt_block_indexes") else None


@dataclass(frozen=True, slots=True)
class Arrangement:
    """Where the patches of an image, or of a video's frame, lie in its windows."""

    windows: int
    slots: NDArray[np.int64]  # [patches], slot of each patch in the processor's order
    places: NDArray[np.int64]  # [patches, 2], row and column of each patch
    tokens: NDArray[np.int64]  # [visual tokens], index of each among the merged slots


class WindowEncoder:
    """Qwen2.5-VL's encoder for CUDA graphs: all windows have the slots of the largest, masked."""

    def __init__(self, visual: Any) -> None:
        config = visual.config
        self._visual, self._merge = visual, int(config.spatial_merge_size)
        self._side = int(config.window_size) // self._merge // int(config.patch_size)
        self._heads = int(config.num_heads)
        self._head_dim = int(config.hidden_size) // self._heads
        self._whole = frozenset(config.fullatt_block_indexes)
        self._theta = float((getattr(config, "rope_parameters", None) or {}).get("rope_theta", 1e4))
        self.tokens = self._side**2  # of a window
        self.slots = self.tokens * self._merge**2  # patches of a window
        pixels = int(config.temporal_patch_size) * int(config.patch_size) ** 2
        self.columns = int(config.in_channels) * pixels  # numbers of a patch

    def windows(self, rows: int, columns: int) -> int:
        side = self._side * self._merge
        return -(-rows // side) * -(-columns // side)

    def arrange(self, rows: int, columns: int) -> Arrangement:
        merge, side = self._merge, self._side
        down, across = np.divmod(np.arange(rows * columns // merge**2), columns // merge)
        window = down // side * -(-columns // (side * merge)) + across // side
        tokens = window * self.tokens + down % side * side + across % side
        inner = np.arange(merge**2)  # the patches of a token follow each other
        slots = tokens[:, None] * merge**2 + inner
        row = down[:, None] * merge + inner // merge
        column = across[:, None] * merge + inner % merge
        places = np.stack([row, column], -1).reshape(-1, 2)
        return Arrangement(self.windows(rows, columns), slots.reshape(-1), places, tokens)

    def encode(self, pixels: Tensor, places: Tensor, present: Tensor) -> Tensor:
        """Encode an image to [windows · tokens, width]; nothing waits for the device.

        `pixels` [windows · slots, columns] are zeros without a patch; `places` [windows · slots, 2]
        row and column of each patch; `present` [windows · slots] says which slots hold one.
        """
        from torch.nn import functional as F
        from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import apply_rotary_pos_emb_vision

        visual, heads, size = self._visual, self._heads, self._head_dim
        x = visual.patch_embed(pixels)
        cos, sin = self._rotations(places)
        inside = present.view(-1, 1, 1, self.slots)
        inside = inside | ~inside.any(-1, keepdim=True)  # a row must attend to something
        for number, block in enumerate(visual.blocks):
            whole = number in self._whole
            batch = 1 if whole else len(inside)
            mask = present.view(1, 1, 1, -1) if whole else inside
            qkv = block.attn.qkv(block.norm1(x)).view(len(x), 3, heads, size)
            query, key, value = (part.to(x.dtype) for part in qkv.unbind(1))
            query, key = apply_rotary_pos_emb_vision(query, key, cos, sin)
            query, key, value = (
                part.view(batch, -1, heads, size).transpose(1, 2) for part in (query, key, value)
            )
            found = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
            x = x + block.attn.proj(found.transpose(1, 2).reshape(len(x), -1))
            x = x + block.mlp(block.norm2(x))
        encoded: Tensor = visual.merger(x)
        return encoded

    def _rotations(self, places: Tensor) -> tuple[Tensor, Tensor]:
        import torch

        half = self._head_dim // 2
        steps = torch.arange(0, half, 2, dtype=torch.float32, device=places.device)
        angles = places[:, :, None].float() / self._theta ** (steps / half)
        angles = angles.flatten(1).repeat(1, 2)
        return angles.cos(), angles.sin()
