"""The large multimodal model: any of transformers' LLaVA family, and the LoRA adapters on it."""

from __future__ import annotations

import copy
import re
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from valora_data.bundle import base_folder
from valora_data.errors import BundleError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from PIL.Image import Image

    from valora_train.settings import LoraSettings, ModelSettings


class Lmm:
    """A frozen LMM whose visual tokens' last hidden states can be read.

    The prompt stands *before* the image: in a causal language model, visual tokens that follow
    the prompt know what is asked of them, so that a linear head on them can answer in one pass.

    Args:
        settings: Which model.
        lora: What will be adapted. While neither the vision tower nor the projector is, images
            are encoded once and their features kept.

    Attributes:
        model: The transformers model.
        processor: Its processor.
        width: Size of the hidden states.
        grid: Rows and columns of visual tokens per image.
    """

    def __init__(self, settings: ModelSettings, lora: LoraSettings) -> None:
        from transformers import AutoModelForImageTextToText, AutoProcessor

        source = base_folder(settings.id)
        try:
            self.processor = AutoProcessor.from_pretrained(source)
            self.model: Any = AutoModelForImageTextToText.from_pretrained(
                source, dtype=getattr(torch, settings.dtype)
            )
        except (OSError, ValueError) as error:
            reason = str(error).strip().splitlines()[0]
            raise BundleError(f"cannot load base model {settings.id}: {reason}") from error
        self.model.requires_grad_(False).eval().to(settings.device)
        self._batch_size = settings.batch_size
        self._adapts_vision = lora.vision_tower or lora.projector
        self._lora = lora
        self._prompts: dict[str, Tensor] = {}
        vision = self.model.config.vision_config
        side = vision.image_size // vision.patch_size
        self.grid = (side, side)
        self.width = int(self.model.config.get_text_config().hidden_size)
        self.device: torch.device = self.model.device

    def inputs(self, images: Sequence[Image]) -> Tensor:
        """What `hidden` wants to know of images.

        Args:
            images: RGB images of any size.

        Returns:
            (n, tokens, width) visual features, or (n, 3, height, width) pixels if the vision side
            is adapted, in the model's dtype.
        """
        parts = []
        for start in range(0, len(images), self._batch_size):
            batch = list(images[start : start + self._batch_size])
            pixels = self.processor.image_processor(batch, return_tensors="pt")["pixel_values"]
            pixels = pixels.to(self.device, self.model.dtype)
            if not self._adapts_vision:
                with torch.no_grad():
                    pixels = self._features(pixels)
            parts.append(pixels)
        return torch.cat(parts)

    def _features(self, pixels: Tensor) -> Tensor:
        features = self.model.get_image_features(pixels).pooler_output
        return torch.stack(list(features))

    def hidden(self, prompts: Sequence[str], inputs: Tensor) -> Tensor:
        """Last hidden states of the visual tokens, with whatever adapter is active.

        Args:
            prompts: One for each image.
            inputs: (n, …) from `inputs`.

        Returns:
            (n, tokens, width), after the language model's final norm.
        """
        features = self._features(inputs) if inputs.ndim == 4 else inputs
        tokens = [self._prompt(prompt) for prompt in prompts]
        # Padded on the right of a causal model, and only up to the last visual token: what is
        # read never sees the padding, so no attention mask is needed.
        ids = torch.nn.utils.rnn.pad_sequence(tokens, batch_first=True)
        visual = torch.nn.utils.rnn.pad_sequence(
            [token == self.model.config.image_token_id for token in tokens], batch_first=True
        )
        embedded = self.model.get_input_embeddings()(ids)
        embedded = embedded.masked_scatter(visual[..., None].to(embedded.device), features)
        output = self.model.model.language_model(inputs_embeds=embedded, use_cache=False)
        hidden: Tensor = output.last_hidden_state[visual].view(features.shape)
        return hidden

    def _prompt(self, prompt: str) -> Tensor:
        """Token ids of a prompt with one image after it, up to the last visual token: (length,)."""
        if prompt not in self._prompts:
            from PIL import Image

            turn = [{"type": "text", "text": prompt}, {"type": "image"}]
            text = self.processor.apply_chat_template(
                [{"role": "user", "content": turn}], add_generation_prompt=True
            )
            ids = self.processor(text=text, images=Image.new("RGB", (8, 8)), return_tensors="pt")
            row = ids["input_ids"][0]
            visual = torch.nonzero(row == self.model.config.image_token_id).flatten()
            if len(visual) != self.grid[0] * self.grid[1]:
                raise BundleError(
                    f"expected {self.grid[0] * self.grid[1]} visual tokens for an image, got "
                    f"{len(visual)}: check the processor of the base model"
                )
            self._prompts[prompt] = row[: visual[-1] + 1].to(self.device)
        return self._prompts[prompt]

    def adapt(self, name: str, seed: int) -> None:
        """Add a LoRA adapter that changes nothing yet (B = 0).

        Args:
            name: Its name.
            seed: Seed of A.
        """
        from peft import LoraConfig, get_peft_model

        config = LoraConfig(
            r=self._lora.rank,
            lora_alpha=self._lora.alpha,
            use_rslora=self._lora.rslora,
            target_modules=target_pattern(self._lora),
        )
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            if not hasattr(self, "peft"):
                self.peft: Any = get_peft_model(self.model, config, adapter_name=name)
            else:
                self.peft.add_adapter(name, config)
        self.activate(name)

    def load_adapter(self, name: str, folder: Path) -> None:
        """Load an adapter from a PEFT folder."""
        from peft import PeftModel

        if not hasattr(self, "peft"):
            self.peft = PeftModel.from_pretrained(self.model, folder, adapter_name=name)
        else:
            self.peft.load_adapter(folder, adapter_name=name)

    def activate(self, name: str | None) -> None:
        """Make an adapter the one that acts, or none."""
        if not hasattr(self, "peft"):
            return
        if name is None:
            self.peft.base_model.disable_adapter_layers()
            return
        self.peft.base_model.enable_adapter_layers()
        self.peft.set_adapter(name)

    def save_adapter(self, name: str, folder: Path, base: str) -> None:
        """Write an adapter in PEFT's format, such that plain PEFT loads it onto the base.

        Args:
            name: The adapter.
            folder: Where `adapter_config.json` and `adapter_model.safetensors` go.
            base: Id of the base model, which the configuration names.
        """
        from peft.utils import get_peft_model_state_dict
        from safetensors.torch import save_file

        folder.mkdir(parents=True, exist_ok=True)
        weights = get_peft_model_state_dict(self.peft, adapter_name=name)
        save_file(
            {key: value.detach().cpu().contiguous() for key, value in weights.items()},
            folder / "adapter_model.safetensors",
            {"format": "pt"},
        )
        config = copy.copy(self.peft.peft_config[name])
        config.base_model_name_or_path = base
        config.inference_mode = True
        config.save_pretrained(folder)

    def remove(self, name: str) -> None:
        """Delete an adapter."""
        self.peft.delete_adapter(name)

    def lora_parameters(self, name: str) -> dict[str, torch.nn.Parameter]:
        """An adapter's weights by module path, e.g. ``…layers.0.self_attn.q_proj.lora_A``."""
        suffix = f".{name}.weight"
        return {
            key.removesuffix(suffix): value
            for key, value in self.model.named_parameters()
            if key.endswith(suffix) and ".lora_" in key
        }


def target_pattern(lora: LoraSettings) -> str:
    """The regular expression, over full module names, of what PEFT shall adapt."""
    parts = [rf".*language_model.*\.({'|'.join(map(re.escape, lora.targets))})"]
    if lora.vision_tower:
        parts.append(r".*vision_tower.*\.(q_proj|k_proj|v_proj|out_proj)")
    if lora.projector:
        parts.append(r".*multi_modal_projector\.linear_[12]")
    return "|".join(f"({part})" for part in parts)
