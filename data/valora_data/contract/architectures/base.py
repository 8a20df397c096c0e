"""What an LMM architecture declares, so that training and serving read it in the same way."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from PIL.Image import Image
    from torch import Tensor

    from valora_data.contract.architectures.windows import WindowEncoder

IMAGE, VIDEO = "image", "video"
PIXELS = {IMAGE: "pixel_values", VIDEO: "pixel_values_videos"}
"""Name of the pixels in a processor's output, by kind."""


class ModelPart(StrEnum):
    """Part of an LMM that an adapter can change."""

    LANGUAGE = "language"
    PROJECTOR = "projector"
    VISION = "vision"


@dataclass(frozen=True, slots=True)
class EncoderInput:
    """One image or video as the vision encoder takes it.

    Attributes:
        kind: ``image`` or ``video``.
        tensors: Arguments of the encoder by name, the pixels first.
        tokens: Number of visual tokens in the prompt.
        grid: Frames, rows and columns of visual tokens; None if the architecture does not say.
        size: Width and height that the encoder sees, in pixels.
    """

    kind: str
    tensors: dict[str, Tensor]
    tokens: int
    grid: tuple[int, int, int] | None
    size: tuple[int, int]


class Architecture:
    """A family of LMMs: what differs between families and transformers does not unify.

    A subclass is registered under the ``model_type`` of transformers' configuration, see
    `valora_data.contract.architectures.registry`. It holds no state. The model is expected to
    have the two parts that transformers gives LMMs: ``model.model`` with ``get_image_features``
    and ``language_model``, and ``model.lm_head``.

    Attributes:
        vision_modules: Last component of the paths of the modules that encode images: vision
            tower and projector. Adapters may change every linear layer in them.
        projector: Regular expression over one component of a path: the module that is the
            projector, or holds it.
        tower_targets: Regular expressions over full module paths: linear layers that
            `train.lora.vision_tower` adapts.
        projector_targets: Regular expressions over full module paths: linear layers that
            `train.lora.projector` adapts.
        three_positions: Whether rotary positions have three parts: time, height and width.
    """

    vision_modules: tuple[str, ...] = ()
    projector: str = ""
    tower_targets: tuple[str, ...] = ()
    projector_targets: tuple[str, ...] = ()
    three_positions: bool = False

    def language_model(self, model: Any) -> Any:
        """Return the decoder: a module with ``layers``, without the output embeddings."""
        return model.model.language_model

    def adaptable(self, model: Any) -> dict[str, ModelPart]:
        """Return the modules whose linear layers adapters may change, by path.

        Those of the vision side are `ModelPart.VISION`; `part_of` tells which of their layers are
        the projector's.
        """
        modules = dict(model.named_modules())
        decoder = self.language_model(model)
        text = next(path for path, module in modules.items() if module is decoder)
        found = {f"{text}.layers": ModelPart.LANGUAGE}
        for leaf in self.vision_modules:
            found |= {path: ModelPart.VISION for path in modules if path.split(".")[-1] == leaf}
        return found

    def part_of(self, path: str) -> ModelPart:
        """Return the part of the vision side that a linear layer belongs to."""
        inside = re.fullmatch(rf"(.*\.)?({self.projector})(\..*)?", path)
        return ModelPart.PROJECTOR if inside else ModelPart.VISION

    def video_token(self, config: Any) -> int | None:
        """Return the id of the placeholder of videos; None if frames are passed as images."""
        return None

    def fixed_grid(self, config: Any) -> tuple[int, int] | None:
        """Return rows and columns of visual tokens if all images have the same, else None."""
        return None

    def pixel_shape(self, config: Any) -> tuple[int, int, int] | None:
        """Return channels, height and width of pixels if all images have the same, else None.

        An encoder with a fixed shape must not wait for the host, so that it can be captured in a
        CUDA graph.
        """
        return None

    def window_encoder(self, model: Any) -> WindowEncoder | None:
        """Return an encoder of images of any size in windows that a CUDA graph can hold, or None.

        Args:
            model: The transformers model.
        """
        return None

    def grid_of(self, image: Image, processor: Any, config: Any) -> tuple[int, int]:
        """Return rows and columns of visual tokens of an image."""
        raise NotImplementedError

    def split(
        self, kind: str, inputs: Mapping[str, Any], tokens: int, config: Any
    ) -> list[EncoderInput]:
        """Split a processor's output into the images or the videos of a prompt.

        Args:
            kind: ``image`` or ``video``.
            inputs: Output of the processor; it holds pixels of this kind.
            tokens: Number of visual tokens of this kind in the prompt.
            config: Configuration of the model.

        Returns:
            One entry for each image or video, in the order of the prompt.
        """
        raise NotImplementedError

    def positions(
        self, model: Any, inputs: Mapping[str, Any], config: Any
    ) -> tuple[Tensor, int] | None:
        """Return the rotary positions of one prompt with images or videos.

        Args:
            model: The transformers model.
            inputs: Output of the processor for the prompt.
            config: Configuration of the model.

        Returns:
            None if a token's position is its index; otherwise [3, tokens] int64, and the
            position minus the index of every token that follows the prompt.
        """
        return None

    def visual_features(
        self, model: Any, inputs: Mapping[str, Tensor]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Encode images, or videos.

        Args:
            model: The transformers model.
            inputs: Tensors of `EncoderInput.tensors`, concatenated, on the model's device.

        Returns:
            For each image [visual tokens, width]; and for each of the first decoder layers to
            whose output features are added (DeepStack), [all visual tokens, width].
        """
        video = PIXELS[VIDEO] in inputs
        function = model.model.get_video_features if video else model.model.get_image_features
        output = function(**inputs, return_dict=True)
        return list(output.pooler_output), self.deep_features(output)

    def deep_features(self, output: Any) -> list[Tensor]:
        """Return what the encoder's output holds for deeper layers, one tensor for each layer."""
        return []

    def deep_arguments(self, visual: Tensor, deep: list[Tensor]) -> dict[str, Any]:
        """Return the decoder's arguments that pass on the features of `deep_features`.

        Args:
            visual: [batch, tokens] bool, which tokens are visual.
            deep: For each layer [visual tokens, width].
        """
        raise NotImplementedError
