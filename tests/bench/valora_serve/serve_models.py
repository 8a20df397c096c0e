"""Base models and adapters of true shapes with random weights, made on the device."""

from __future__ import annotations

import hashlib
from pathlib import Path
from types import SimpleNamespace

import torch

from valora_data.contract.boxes import BoxHead
from valora_data.contract.label_head import LabelHead, Pooling
from valora_data.models.base import ModelPart
from valora_serve.catalogue.adapters import Adapter, LoraPair
from valora_serve.catalogue.store import ResolvedModel, Staged
from valora_serve.types import ServedModel

IMAGE_TOKEN = 32000
"""Placeholder of images in the vocabulary of LLaVA-1.5."""


def llava_7b(
    device,
    layers=32,
    width=4096,
    vision=True,
    context=4096,
    intermediate=None,
    image_token=IMAGE_TOKEN,
):
    """LLaVA-1.5-7B: CLIP-L/336, a two-layer projector and Llama-7B, random weights of std 0.02."""
    from transformers import (
        CLIPVisionConfig,
        LlamaConfig,
        LlavaConfig,
        LlavaForConditionalGeneration,
    )

    text = LlamaConfig(
        vocab_size=32064, hidden_size=width, intermediate_size=intermediate or width * 43 // 16,
        num_hidden_layers=layers, num_attention_heads=width // 128, max_position_embeddings=context,
    )  # fmt: skip
    tower = CLIPVisionConfig(
        hidden_size=1024 if vision else 128, intermediate_size=4096 if vision else 256,
        num_hidden_layers=24 if vision else 2, num_attention_heads=16, image_size=336,
        patch_size=14, projection_dim=768,
    )  # fmt: skip
    config = LlavaConfig(
        text_config=text, vision_config=tower, image_token_index=image_token, image_seq_length=576
    )
    model = _made(device, LlavaForConditionalGeneration, config)
    for module in model.modules():  # what the empty initialisation has left
        if hasattr(module, "inv_freq"):
            fresh = type(module)(text).inv_freq.to(device)
            module.inv_freq = fresh
        if hasattr(module, "position_ids"):
            module.position_ids = torch.arange(
                module.position_ids.shape[-1], device=device
            ).unsqueeze(0)
    return model


def _made(device, kind, config):
    """A model with random weights, made on the device: in bf16, and in float32 on a CPU.

    Few CPUs have instructions for bf16, and on others the tests would take many times as long.
    """
    from transformers.initialization import no_init_weights

    device = torch.device(device)
    with device, no_init_weights():
        torch.set_default_dtype(torch.float32 if device.type == "cpu" else torch.bfloat16)
        try:
            model = kind(config)
        finally:
            torch.set_default_dtype(torch.float32)
    generator = torch.Generator(device).manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.02, generator=generator)
            else:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)
    return model.eval().requires_grad_(False)


def llava_13b(device, layers=40, width=5120, vision=True, context=4096, image_token=IMAGE_TOKEN):
    """LLaVA-1.5-13B: the same vision tower, and Llama-13B."""
    wide = 13824 if width == 5120 else None
    return llava_7b(device, layers, width, vision, context, wide, image_token)


def qwen_7b(device, layers=28, width=3584, vision=True, context=4096, image_token=None):
    """Qwen2.5-VL-7B: images of any size, four heads of keys and values, biases of q, k and v."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    ids = range(152000, 152004) if image_token is None else range(image_token, image_token + 4)
    names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    heads = width // 128
    text = {
        "model_type": "qwen2_5_vl_text",
        "vocab_size": 152064,
        "hidden_size": width,
        "intermediate_size": 18944 if width == 3584 else 4 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 4 if heads % 4 == 0 else 1,
        "max_position_embeddings": context,
        "tie_word_embeddings": False,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e6,
            "mrope_section": [16, 24, 24],
        },
    }
    tower = {
        "depth": 32 if vision else 2,
        "hidden_size": 1280 if vision else 64,
        "intermediate_size": 3420 if vision else 128,
        "num_heads": 16 if vision else 2,
        "patch_size": 14,
        "out_hidden_size": width,
        "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31] if vision else [1],
        "tokens_per_second": 2,
    }
    config = Qwen2_5_VLConfig(
        text_config=text,
        vision_config=tower,
        tie_word_embeddings=False,
        **dict(zip(names, ids, strict=True)),
    )
    model = _made(device, Qwen2_5_VLForConditionalGeneration, config)
    for path, module in model.named_modules():  # written in fp32, not in the weights' type
        if hasattr(module, "inv_freq"):
            count, theta = len(module.inv_freq), 1e4 if "visual" in path else 1e6
            module.inv_freq = theta ** -(torch.arange(count, device=device) / count)
    return model


BASES = {"llava-7b": llava_7b, "llava-13b": llava_13b, "qwen2.5-vl-7b": qwen_7b}
"""True shapes with random weights by name."""


class Tokens:
    """A tokenizer for random ids: nothing in a benchmark reads its text."""

    bos_token, eos_token_id = None, 2

    def __call__(self, text, **_):
        return {"input_ids": [3 + ord(letter) % 1000 for letter in text]}

    def decode(self, ids, **_):
        return "".join(chr(97 + i % 26) for i in ids)

    def convert_ids_to_tokens(self, token):
        return self.decode([token])

    def get_vocab(self):
        return {chr(32 + i): 3 + i for i in range(95)}


PROCESSOR = SimpleNamespace(tokenizer=Tokens())


ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
TARGETS = {
    "attention": "q, k, v, o",
    "language": "q, k, v, o, gate, up, down",
    "all": "q, k, v, o, gate, up, down, tower, projector",
}
"""What adapters change, and how tables name it."""


def modules_of(found, targets):
    """Paths of the linears that adapters change, and the parts they are in.

    Args:
        found: The model's `ModelTargets`.
        targets: A name in `TARGETS`.
    """
    kept = {
        path: part
        for path, part in found.parts.items()
        if targets == "all"
        or (part is ModelPart.LANGUAGE
            and (targets == "language" or path.rpartition(".")[2] in ATTENTION))
    }  # fmt: skip
    return list(kept), frozenset(kept.values())


def add_adapters(engine, count, ranks, distinct=16, seed=0, targets="attention"):
    """Register `count` adapters of the ranks in turn; returns their names.

    Their matrices repeat after `distinct` of a rank, which no measurement can tell: every adapter
    is loaded, placed and read for itself.

    Args:
        engine: The engine.
        count: Number of adapters.
        ranks: Their ranks, in turn.
        distinct: Number of adapters of a rank whose matrices differ.
        seed: Seed of the matrices.
        targets: A name in `TARGETS`.
    """
    linears = engine.lmm.targets.linears
    modules, parts = modules_of(engine.lmm.targets, targets)
    generator = torch.Generator().manual_seed(seed)
    largest = max(max(linears[path]) for path in modules) * max(ranks)
    pool = torch.randn(2 * largest, generator=generator)

    def drawn(*shape, std):
        """A part of the pool: drawing every matrix anew takes a second for each adapter of 7B."""
        start = int(torch.randint(largest, (), generator=generator))
        return (pool[start : start + shape[0] * shape[1]] * std).to(torch.bfloat16).view(shape)

    made = {}
    names = []
    for number in range(count):
        rank = ranks[number % len(ranks)]
        which = (rank, (number // len(ranks)) % distinct)
        name = f"adapter-{number}"
        content = hashlib.sha256(f"{seed}/{name}/{rank}/{targets}".encode()).hexdigest()
        vision = content if ModelPart.VISION in parts else ""
        if which not in made:
            pairs = {
                path: LoraPair(
                    drawn(rank, linears[path][1], std=linears[path][1] ** -0.5),
                    drawn(linears[path][0], rank, std=0.01),
                    1.0,
                )
                for path in modules
            }
            adapter = Adapter(Path(name), pairs, rank, 1.0, parts, content, vision)
            made[which] = engine.memory.pack(adapter)
        light = Adapter(Path(name), {}, rank, 1.0, parts, content, vision)
        model = ServedModel(name, "adapter", name, engine.lmm.base, name, rank=rank)
        staged = Staged(None, (ResolvedModel(model, light),), {content: light}, Path(name))
        engine.registry.register((staged, {content: made[which]}, {}, {}))
        names.append(name)
    return names


def add_head(engine, name, adapter, labels, seed=0, grid=None):
    """A domain on an adapter that is there: labels of a last token, or boxes of a grid."""
    generator = torch.Generator().manual_seed(seed)
    outputs = BoxHead.outputs(labels) if grid else len(labels)
    facts = {
        "kind": "detection" if grid else "action", "labels": tuple(labels),
        "weight": torch.randn(outputs, engine.lmm.width, generator=generator),
        "bias": torch.zeros(outputs),
    }  # fmt: skip
    if grid:
        facts["weight"] /= engine.lmm.width**0.5
        facts["bias"][0] = -2.5  # a few boxes an image
        head = BoxHead(
            **facts, grid=grid, calibration=torch.tensor([1.0, 0.0]), threshold=0.5, nms_iou=0.5,
            most=30,
        )  # fmt: skip
    else:
        head = LabelHead(**facts, pooling=Pooling.LAST)
    under = engine.store.resolve(adapter)
    model = ServedModel(name, "domain", name, adapter, adapter, facts["kind"], labels=labels)
    target = ResolvedModel(model, under.adapter, head.to(engine.device))
    engine.registry.register((Staged(None, (target,), {}, Path(name)), {}, {}, {}))
