"""What a family of base models declares, so that training and serving read it alike."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

IMAGE, VIDEO = "image", "video"
PIXELS = {IMAGE: "pixel_values", VIDEO: "pixel_values_videos"}  # as processors call them


class ModelPart(StrEnum):
    """Part of an LMM that an adapter can change."""

    LANGUAGE = "language"
    PROJECTOR = "projector"
    VISION = "vision"


@dataclass(frozen=True, slots=True)
class EncoderInput:
    """One image or video as the vision encoder takes it."""

    kind: str  # `IMAGE` or `VIDEO`
    tensors: dict[str, Tensor]  # arguments of the encoder by name, the pixels first
    tokens: int  # visual tokens in the prompt
    grid: tuple[int, int, int] | None  # frames, rows and columns of them, if the family says
    size: tuple[int, int]  # width and height that the encoder sees, in pixels
    # [cells of the grid] int64, which of its tokens they are; None: all of them, in order.
    cells: Tensor | None = None


@dataclass(frozen=True, slots=True)
class LinearNames:
    """Names of the linear layers in a decoder layer, and how tensor parallelism splits them.

    `column` layers are split by outputs, those of one tuple share their input; `row` layers by
    inputs. Outputs of `kv` are heads.
    """

    column: tuple[tuple[str, ...], ...] = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
    row: tuple[str, ...] = ("o_proj", "down_proj")
    kv: tuple[str, ...] = ("k_proj", "v_proj")


LLAMA = LinearNames()  # also those of Mistral, Qwen and most others


class Architecture:
    """A family of base models: what differs between families and transformers does not unify.

    A subclass is registered under its ``model_type``. Models have ``model.model`` with
    ``get_image_features`` and ``language_model``, and ``model.lm_head``; or those of `text`.
    """

    takes_images: bool = True
    auto: str = "AutoModelForImageTextToText"  # the class of transformers that loads the model
    linears: LinearNames = LLAMA
    decoder: str = "language_model"  # the component of a path that is the decoder
    # Last component of the paths of the modules that encode images, tower and projector: adapters
    # may change every linear layer in them.
    vision_modules: tuple[str, ...] = ()
    projector: str = ""  # matches the component of a path that is, or holds, the projector
    token_projector: str = ""  # attribute of ``model.model`` that maps each visual token alone
    # Match whole paths of the linear layers that train.lora.vision_tower and .projector adapt.
    tower_targets: tuple[str, ...] = ()
    projector_targets: tuple[str, ...] = ()
    three_positions: bool = False  # whether rotary positions are time, height and width
    pixels_per_token: int = 2048  # most that a visual token stands for: two frames' 32 x 32
    in_crops: bool = False  # whether images are split into crops that are encoded one by one

    # --- loading and prompts

    def load_processor(self, source: str) -> Any:
        """Load the processor from a folder or a name on the hub."""
        from transformers import AutoProcessor

        return AutoProcessor.from_pretrained(source)

    def auto_class(self) -> Any:
        """Return transformers' class of the name `auto`."""
        import transformers

        return getattr(transformers, self.auto)

    def render(self, processor: Any, messages: Sequence[Mapping[str, Any]], generate: bool) -> str:
        """Write turns of parts as a prompt, up to where an answer begins if `generate`."""
        return str(processor.apply_chat_template(messages, add_generation_prompt=generate))

    # --- parts of the model

    def language_model(self, model: Any) -> Any:
        """Return the decoder: a module with ``layers``, without the output embeddings."""
        return getattr(model.model, self.decoder)

    def adaptable(self, model: Any) -> dict[str, ModelPart]:
        """Modules whose linear layers adapters may change, by path; see also `part_of`."""
        modules = dict(model.named_modules())
        decoder = self.language_model(model)
        text = next(path for path, module in modules.items() if module is decoder)
        vision = [path for path in modules if path.split(".")[-1] in self.vision_modules]
        return {f"{text}.layers": ModelPart.LANGUAGE, **dict.fromkeys(vision, ModelPart.VISION)}

    def part_of(self, path: str) -> ModelPart:
        """Return the part of the vision side that a linear layer belongs to."""
        inside = re.fullmatch(rf"(.*\.)?({self.projector})(\..*)?", path)
        return ModelPart.PROJECTOR if inside else ModelPart.VISION

    # --- visual tokens

    def video_token(self, config: Any) -> int | None:
        """Return the id of a video's visual tokens; None if frames are passed as images."""
        return None

    def crops(
        self, image_processor: Any, made: Mapping[str, Any], sizes: Sequence[tuple[int, int]]
    ) -> list[tuple[int, int]] | None:
        """Rows and columns of the crops of images of these sizes, for `split` as ``crops``."""
        return None

    def fixed_grid(self, config: Any) -> tuple[int, int] | None:
        """Return rows and columns of visual tokens if all images have the same, else None."""
        return None

    def resized_pixels(self, image_processor: Any, width: int, height: int) -> int:
        """Return to about how many pixels an image is resized, before it is cropped or padded."""
        size = getattr(image_processor, "size", None) or {}
        short, long = size.get("shortest_edge"), size.get("longest_edge")
        if not getattr(image_processor, "do_resize", False):
            return width * height
        if size.get("height") and size.get("width"):
            return int(size["height"] * size["width"])
        if short:  # the shorter side is enlarged to this length, and the longer one with it
            pixels = int(short * short * max(width, height) / min(width, height))
            return min(pixels, long * long) if long else pixels
        return int(long * long) if long else width * height

    def split(
        self, kind: str, inputs: Mapping[str, Any], tokens: int, config: Any
    ) -> list[EncoderInput]:
        """Split a processor's output into the images or videos of a prompt, of `tokens` in all."""
        raise NotImplementedError

    def positions(
        self, model: Any, inputs: Mapping[str, Any], config: Any
    ) -> tuple[Tensor, int] | None:
        """Rotary positions [3, tokens] int64 of a prompt; None if they are indices.

        With them, the position minus the index of every token that follows the prompt.
        """
        return None

    def visual_features(
        self, model: Any, inputs: Mapping[str, Tensor]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Encode images, or videos: `EncoderInput.tensors`, concatenated, on the device.

        Returns [visual tokens, width] for each image; and for each of the first decoder layers to
        whose outputs features are added (DeepStack of Qwen3-VL), [all visual tokens, width].
        """
        import torch

        video = PIXELS[VIDEO] in inputs
        function = model.model.get_video_features if video else model.model.get_image_features
        output = function(**inputs, return_dict=True)
        deep = getattr(output, "deepstack_features", None) or ()
        # Versions of transformers differ in whether those are split by image.
        layers = [part if torch.is_tensor(part) else torch.cat(tuple(part)) for part in deep]
        return list(output.pooler_output), layers

    def block(self, config: Any) -> int:
        """Return the tokens of an image if they attend to each other in both directions, else 0."""
        return 0

    def attention(self, model: Any, embedded: Tensor, visual: Tensor) -> dict[str, Any]:
        """Return the decoder's arguments for the attention among images' tokens in whole prompts.

        `embedded` is [batch, tokens, width], `visual` [batch, tokens] bool.
        """
        return {}

    def deep_arguments(self, visual: Tensor, deep: list[Tensor]) -> dict[str, Any]:
        """Return the decoder's arguments for DeepStack; `visual` [batch, tokens] says where."""
        return {"visual_pos_masks": visual, "deepstack_visual_embeds": deep}

    # --- CUDA graphs of the vision tower

    def pixel_shape(self, config: Any) -> tuple[int, int, int] | None:
        """Channels, height and width of all images' pixels; None if they differ or must wait."""
        return None

    def window_encoder(self, model: Any) -> Any:
        """Return an encoder like `qwen_vl.WindowEncoder` of images of any size, or None."""
        return None
