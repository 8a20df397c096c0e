"""Base models and adapters in folders, as the processes of a tensor-parallel group read them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file

from tests.bench.valora_serve.serve_models import ATTENTION, llava_7b
from valora_data.contract.base_model import base_folder

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedModel

MLP = ("gate_proj", "up_proj", "down_proj")


def save_base(folder: Path, device: str, layers: int, width: int, *, vision: bool = False) -> Path:
    """Write a model of LLaVA-1.5-7B's shape with random weights, and a processor for its texts.

    With `vision`, the vision tower is whole, and the processor is for its pictures, too.
    """
    from transformers import AutoProcessor

    processor = AutoProcessor.from_pretrained(base_folder("tiny"))
    model = llava_7b(torch.device(device), layers=layers, width=width, vision=vision)
    model.config.image_token_index = processor.tokenizer.convert_tokens_to_ids(
        processor.image_token
    )
    if vision:
        tower = model.config.vision_config
        pixels = {"height": tower.image_size, "width": tower.image_size}
        processor.patch_size = tower.patch_size
        processor.image_processor.size = processor.image_processor.crop_size = pixels
    model.generation_config.eos_token_id = processor.tokenizer.eos_token_id
    save_as_published(model, folder)
    processor.save_pretrained(folder)
    return folder


def save_as_published(model: PreTrainedModel, folder: Path) -> None:
    """Write a LLaVA with the names that its published checkpoints have.

    transformers 5.17 writes the tower without `vision_model`, which vLLM 0.26 cannot read.
    """
    from huggingface_hub import save_torch_state_dict

    inner, published = "model.vision_tower.", "model.vision_tower.vision_model."
    named = {key.replace(inner, published): value for key, value in model.state_dict().items()}
    folder.mkdir(parents=True, exist_ok=True)
    save_torch_state_dict(named, folder, max_shard_size="2GB", metadata={"format": "pt"})
    model.config.architectures = [type(model).__name__]
    model.config.dtype = model.dtype
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)


def save_language(base: Path, folder: Path) -> Path:
    """Write the language model of a base model as a model of its own, with its tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlavaForConditionalGeneration

    whole = LlavaForConditionalGeneration.from_pretrained(base, dtype=torch.bfloat16)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(whole.config.text_config)
    model.model, model.lm_head = whole.model.language_model, whole.lm_head
    model.save_pretrained(folder, max_shard_size="2GB")
    AutoTokenizer.from_pretrained(base).save_pretrained(folder)
    return folder


def save_adapters(
    folder: Path, layers: int, width: int, ranks: list[int], modules: tuple[str, ...] = ATTENTION
) -> dict[str, Path]:
    """Write adapters with random weights; returns their folders by name."""
    wide = width * 43 // 16
    shapes = {"down_proj": (width, wide), "gate_proj": (wide, width), "up_proj": (wide, width)}
    found = {}
    for number, rank in enumerate(ranks):
        generator = torch.Generator().manual_seed(number)
        tensors = {}
        for layer in range(layers):
            for leaf in modules:
                outputs, inputs = shapes.get(leaf, (width, width))
                part = "mlp" if leaf in MLP else "self_attn"
                path = f"base_model.model.model.language_model.layers.{layer}.{part}.{leaf}"
                a = torch.empty(rank, inputs).normal_(std=inputs**-0.5, generator=generator)
                b = torch.empty(outputs, rank).normal_(std=0.01, generator=generator)
                tensors[f"{path}.lora_A.weight"] = a.bfloat16()
                tensors[f"{path}.lora_B.weight"] = b.bfloat16()
        place = folder / f"adapter-{number}"
        place.mkdir(parents=True)
        save_file(tensors, place / "adapter_model.safetensors")
        config = {
            "peft_type": "LORA", "r": rank, "lora_alpha": rank, "bias": "none",
            "target_modules": [*modules], "base_model_name_or_path": "", "task_type": "CAUSAL_LM",
        }  # fmt: skip
        (place / "adapter_config.json").write_text(json.dumps(config))
        found[place.name] = place
    return found
