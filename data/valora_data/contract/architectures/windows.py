"""Qwen2.5-VL's encoder on windows of one fixed size, so that it can be captured in a CUDA graph.

transformers splits attention into windows on the host. Here every window of an image has as many
slots as the largest one, those at the edges are filled up, and masks say which slots hold a patch:
all shapes follow from the number of windows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Arrangement:
    """Where the patches of an image, or of a video's frame, lie in its windows.

    Attributes:
        windows: Number of windows.
        slots: [patches] int64, slot of each patch in the processor's order.
        places: [patches, 2] int64, row and column of each patch.
        tokens: [visual tokens] int64, index of each among the merged slots.
    """

    windows: int
    slots: NDArray[np.int64]
    places: NDArray[np.int64]
    tokens: NDArray[np.int64]


class WindowEncoder:
    """The encoder for one image at a time.

    Args:
        visual: transformers' module, vision tower and merger.

    Attributes:
        slots: Patches of a window.
        tokens: Visual tokens of a window.
        columns: Numbers of a patch's pixels.
    """

    def __init__(self, visual: Any) -> None:
        config = visual.config
        self._visual, self._merge = visual, int(config.spatial_merge_size)
        self._side = int(config.window_size) // self._merge // int(config.patch_size)
        self._heads = int(config.num_heads)
        self._head_dim = int(config.hidden_size) // self._heads
        self._whole = frozenset(config.fullatt_block_indexes)
        self._theta = float((getattr(config, "rope_parameters", None) or {}).get("rope_theta", 1e4))
        self.tokens = self._side**2
        self.slots = self.tokens * self._merge**2
        pixels = int(config.temporal_patch_size) * int(config.patch_size) ** 2
        self.columns = int(config.in_channels) * pixels

    def windows(self, rows: int, columns: int) -> int:
        """Return the number of windows of an image of so many rows and columns of patches."""
        side = self._side * self._merge
        return -(-rows // side) * -(-columns // side)

    def arrange(self, rows: int, columns: int) -> Arrangement:
        """Return where the patches of an image of so many rows and columns of patches lie."""
        merge, side = self._merge, self._side
        down, across = np.divmod(np.arange(rows * columns // merge**2), columns // merge)
        window = down // side * -(-columns // (side * merge)) + across // side
        tokens = window * self.tokens + down % side * side + across % side
        inner = np.arange(merge**2)  # the patches of a token follow each other
        slots = tokens[:, None] * merge**2 + inner
        places = np.stack(
            [down[:, None] * merge + inner // merge, across[:, None] * merge + inner % merge], -1
        )
        return Arrangement(
            self.windows(rows, columns), slots.reshape(-1), places.reshape(-1, 2), tokens
        )

    def encode(
        self, pixels: torch.Tensor, places: torch.Tensor, present: torch.Tensor
    ) -> torch.Tensor:
        """Encode an image; nothing waits for the device.

        Args:
            pixels: [windows · slots, columns], zeros where there is no patch.
            places: [windows · slots, 2] int64, row and column of each patch.
            present: [windows · slots] bool, which slots hold a patch.

        Returns:
            [windows · tokens, width]; those without a patch have no meaning.
        """
        from torch.nn import functional as F

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
            query, key, value = (
                part.view(batch, -1, heads, size).transpose(1, 2)
                for part in (_rotated(query, cos, sin), _rotated(key, cos, sin), value)
            )
            found = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
            x = x + block.attn.proj(found.transpose(1, 2).reshape(len(x), -1))
            x = x + block.mlp(block.norm2(x))
        encoded: torch.Tensor = visual.merger(x)
        return encoded

    def _rotations(self, places: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines of the rotary positions: [slots, 1, head_dim] float32."""
        import torch

        half = self._head_dim // 2
        steps = torch.arange(0, half, 2, dtype=torch.float32, device=places.device)
        angles = places[:, :, None].float() / self._theta ** (steps / half)
        angles = angles.flatten(1).repeat(1, 2)[:, None]
        return angles.cos(), angles.sin()


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate [slots, heads, head_dim] in float32."""
    import torch

    wide = x.float()
    first, second = wide.chunk(2, -1)
    return (wide * cos + torch.cat((-second, first), -1) * sin).to(x.dtype)
