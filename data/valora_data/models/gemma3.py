"""Gemma 3: an image is one square of tokens, which attend to each other in both directions."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from valora_data.errors import BundleError
from valora_data.models.base import PIXELS, EncoderInput
from valora_data.models.llava import Llava

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor


class Gemma3(Llava):
    """Gemma 3 with images; those without any are `text.TextModel`.

    Adapters leave the projector alone: its weight is a bare parameter, and PEFT's LoRA as it is
    served changes linear layers.
    """

    token_projector = ""  # it pools the cells of a square before it maps them
    tower_targets: tuple[str, ...] = (r".*vision_tower.*\.(q_proj|k_proj|v_proj|out_proj|fc1|fc2)",)
    projector_targets: tuple[str, ...] = ()
    pixels_per_token = 3136  # 896 x 896 pixels are 256 tokens

    def load_processor(self, source: str) -> Any:
        processor = super().load_processor(source)
        if getattr(processor.image_processor, "do_pan_and_scan", None):
            text = f"the processor of base model {source} adds crops to images (do_pan_and_scan),"
            raise BundleError(f"{text} which is not served: save it with do_pan_and_scan=false")
        return processor

    def fixed_grid(self, config: Any) -> tuple[int, int] | None:
        side = math.isqrt(self.block(config))
        return side, side

    def block(self, config: Any) -> int:
        return int(config.mm_tokens_per_image)

    def split(
        self, kind: str, inputs: Mapping[str, Any], tokens: int, config: Any
    ) -> list[EncoderInput]:
        # Not a share of `tokens`, of which a prompt may name more by itself.
        pixels = inputs[PIXELS[kind]]
        return super().split(kind, inputs, self.block(config) * len(pixels), config)

    def attention(self, model: Any, embedded: Tensor, visual: Tensor) -> dict[str, Any]:
        import torch
        from torch.nn import functional as F

        if not bool(visual.any()):
            return {}
        kind = self.language_model(model).config._attn_implementation
        if kind not in ("sdpa", "eager"):
            text = f"model.attention={kind} cannot let the tokens of an image attend to each other,"
            raise BundleError(f"{text} as this base model needs: use sdpa")
        first = visual & ~F.pad(visual, (1, 0))[:, :-1]
        image = first.cumsum(1) * visual  # number of its image, 0 for a token of the text
        at = torch.arange(visual.shape[1], device=visual.device)
        together = (image[:, None] == image[..., None]) & visual[:, None]
        seen = ((at <= at[:, None]) | together)[:, None]
        if kind == "eager":
            lowest = torch.finfo(embedded.dtype).min
            seen = torch.zeros_like(seen, dtype=embedded.dtype).masked_fill(~seen, lowest)
        # Prompts are no longer than the window, so that both are the same.
        return {"attention_mask": dict.fromkeys(("full_attention", "sliding_attention"), seen)}
