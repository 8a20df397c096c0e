"""Checkpoints of the true architectures, tiny and with random weights, as the hub has them.

Each is a folder that `from_pretrained` loads: model, generation settings, tokenizer (that of the
shipped base model, with the special tokens that the family has) and processor. Weights are large
enough that every part of a prompt, and every adapter, changes which token comes next.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import (
    CLIPImageProcessor,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen2VLImageProcessor,
    Qwen2VLProcessor,
    Qwen2VLVideoProcessor,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
)

from valora_data.contract.base_model import base_folder

QWEN_TOKENS = [
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
]
QWEN_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for c in m['content'] %}"
    "{% if c['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif c['type'] == 'video' %}VIDEO{% else %}{{ c['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PATCH = 8
WIDTH, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 64, 3, 4, 2, 16


def _tokenizer(extra: list[str]) -> Any:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(base_folder("tiny"))
    if extra:
        tokenizer.add_special_tokens({"extra_special_tokens": extra})
        tokenizer.eos_token = "<|im_end|>"
    return tokenizer


def _randomize(model: Any, seed: int) -> None:
    """Weights that keep the size of what goes through; biases and norms that do something."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or "ln_q" in name:
                centre = 0.0 if name.endswith("bias") else 1.0
                parameter.normal_(centre, 0.1, generator=generator)
            elif parameter.ndim == 1:
                parameter.normal_(0, 0.1, generator=generator)
            elif "embed" in name and "patch" not in name:
                parameter.normal_(0, 1.0, generator=generator)
            else:
                parameter.normal_(0, parameter[0].numel() ** -0.5, generator=generator)
        # So that the likeliest token is so by far more than fp32 can blur.
        model.lm_head.weight.mul_(3.0)


def _save(folder: Path, model: Any, processor: Any, seed: int) -> Path:
    _randomize(model, seed)
    tokenizer = processor.tokenizer
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


def save_llava(folder: Path, seed: int = 0, *, side: int = 32) -> Path:
    """LLaVA-1.5 with grouped-query attention; an image is (side / 8)² tokens."""
    tokenizer = _tokenizer([])
    processor = LlavaProcessor(
        image_processor=CLIPImageProcessor(
            size={"height": side, "width": side}, do_center_crop=False
        ),
        tokenizer=tokenizer,
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=(Path(base_folder("tiny")) / "chat_template.jinja").read_text(),
    )
    config = LlavaConfig(
        vision_config={
            "model_type": "clip_vision_model", "hidden_size": 32, "intermediate_size": 64,
            "num_hidden_layers": 3, "num_attention_heads": 2, "image_size": side,
            "patch_size": PATCH,
        },
        text_config={
            "model_type": "llama", "vocab_size": len(tokenizer), "hidden_size": WIDTH,
            "intermediate_size": 96, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
            "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM,
            "max_position_embeddings": 1024, "tie_word_embeddings": False,
        },
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        image_seq_length=(side // PATCH) ** 2,
        vision_feature_layer=-2,
        tie_word_embeddings=False,
    )  # fmt: skip
    return _save(folder, LlavaForConditionalGeneration(config), processor, seed)


def _qwen_text(tokenizer: Any, model_type: str, rope: dict[str, Any]) -> dict[str, Any]:
    return {
        "model_type": model_type, "vocab_size": len(tokenizer), "hidden_size": WIDTH,
        "intermediate_size": 96, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS, "max_position_embeddings": 1024,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, **rope},
        "tie_word_embeddings": False, "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id,
    }  # fmt: skip


def _qwen_ids(tokenizer: Any) -> dict[str, int]:
    ids = tokenizer.convert_tokens_to_ids
    return {
        "image_token_id": ids("<|image_pad|>"),
        "video_token_id": ids("<|video_pad|>"),
        "vision_start_token_id": ids("<|vision_start|>"),
        "vision_end_token_id": ids("<|vision_end|>"),
    }


def _qwen_processor(kind: Any, video: Any, tokenizer: Any, placeholder: str) -> Any:
    limits = {"shortest_edge": (2 * PATCH) ** 2, "longest_edge": (6 * PATCH) ** 2}
    sizes: dict[str, Any] = {"patch_size": PATCH, "merge_size": 2, "temporal_patch_size": 2}
    return kind(
        image_processor=Qwen2VLImageProcessor(size=dict(limits), **sizes),
        video_processor=video(
            size={"shortest_edge": limits["shortest_edge"], "longest_edge": 8 * (4 * PATCH) ** 2},
            **sizes,
        ),
        tokenizer=tokenizer,
        chat_template=QWEN_TEMPLATE.replace("VIDEO", placeholder),
    )


FRAMED = "<|vision_start|><|video_pad|><|vision_end|>"


def save_qwen2_vl(folder: Path, seed: int = 0) -> Path:
    """Qwen2-VL: three positions a token, images of any size, videos."""
    tokenizer = _tokenizer(QWEN_TOKENS)
    config = Qwen2VLConfig(
        text_config=_qwen_text(tokenizer, "qwen2_vl_text", {"mrope_section": [2, 3, 3]}),
        vision_config={
            "depth": 3, "embed_dim": 32, "hidden_size": WIDTH, "num_heads": 2, "mlp_ratio": 2,
            "patch_size": PATCH,
        },
        tie_word_embeddings=False,
        **_qwen_ids(tokenizer),
    )  # fmt: skip
    processor = _qwen_processor(Qwen2VLProcessor, Qwen2VLVideoProcessor, tokenizer, FRAMED)
    return _save(folder, Qwen2VLForConditionalGeneration(config), processor, seed)


def save_qwen2_5_vl(folder: Path, seed: int = 0) -> Path:
    """Qwen2.5-VL: also attends in windows within an image, and tells seconds between frames."""
    tokenizer = _tokenizer(QWEN_TOKENS)
    config = Qwen2_5_VLConfig(
        text_config=_qwen_text(tokenizer, "qwen2_5_vl_text", {"mrope_section": [2, 3, 3]}),
        vision_config={
            "depth": 3, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2,
            "patch_size": PATCH, "out_hidden_size": WIDTH, "window_size": 4 * PATCH,
            "fullatt_block_indexes": [1], "tokens_per_second": 4,
        },
        tie_word_embeddings=False,
        **_qwen_ids(tokenizer),
    )  # fmt: skip
    processor = _qwen_processor(Qwen2_5_VLProcessor, Qwen2VLVideoProcessor, tokenizer, FRAMED)
    return _save(folder, Qwen2_5_VLForConditionalGeneration(config), processor, seed)


def save_qwen3_vl(folder: Path, seed: int = 0) -> Path:
    """Qwen3-VL: images also enter the first layers (DeepStack), frames have times in the text."""
    tokenizer = _tokenizer(QWEN_TOKENS)
    text = _qwen_text(
        tokenizer, "qwen3_vl_text", {"mrope_section": [4, 2, 2], "mrope_interleaved": True}
    )
    config = Qwen3VLConfig(
        text_config={**text, "head_dim": HEAD_DIM},
        vision_config={
            "depth": 3, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2,
            "patch_size": PATCH, "out_hidden_size": WIDTH, "num_position_embeddings": 36,
            "deepstack_visual_indexes": [0, 2],
        },
        tie_word_embeddings=False,
        **_qwen_ids(tokenizer),
    )  # fmt: skip
    processor = _qwen_processor(Qwen3VLProcessor, Qwen3VLVideoProcessor, tokenizer, FRAMED)
    return _save(folder, Qwen3VLForConditionalGeneration(config), processor, seed)


CHECKPOINTS: dict[str, Callable[..., Path]] = {
    "llava": save_llava,
    "qwen2_vl": save_qwen2_vl,
    "qwen2_5_vl": save_qwen2_5_vl,
    "qwen3_vl": save_qwen3_vl,
}
"""Builders by family; each takes a folder and a seed."""
