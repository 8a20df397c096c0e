"""Checkpoints of the true architectures, tiny and with random weights, as the hub has them.

Each is a folder that `from_pretrained` loads: model, generation settings, tokenizer (that of the
shipped base model, with the special tokens that the family has) and processor. Weights are large
enough that every part of a prompt, and every adapter, changes which token comes next.
"""

from functools import partial
from pathlib import Path

import torch
import transformers as hf
from transformers.models.smolvlm import processing_smolvlm

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
# As in llava-v1.6-mistral-7b-hf: images first, and a blank before an answer.
MISTRAL_TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}"
    "{{ ' ' + m['content'][0]['text'] + eos_token + ' ' }}{% else %}{{ '[INST] ' }}"
    "{% for c in m['content'] | selectattr('type', 'equalto', 'image') %}<image>\n{% endfor %}"
    "{% for c in m['content'] | selectattr('type', 'equalto', 'text') %}{{ c['text'] }}"
    "{% endfor %}{{ ' [/INST]' }}{% endif %}{% endfor %}"
)
# As in gemma-3-4b-it: a system turn joins the first turn of a user, and turns alternate.
GEMMA_TEMPLATE = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}"
    "{% set prefix = messages[0]['content'][0]['text'] + '\n\n' %}{% set turns = messages[1:] %}"
    "{% else %}{% set prefix = '' %}{% set turns = messages %}{% endif %}"
    "{% for m in turns %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('turns must alternate') }}{% endif %}"
    "{{ '<start_of_turn>' + ('model' if m['role'] == 'assistant' else m['role']) + '\n' }}"
    "{{ prefix if loop.first else '' }}{% for c in m['content'] %}"
    "{% if c['type'] == 'image' %}<start_of_image>{% else %}{{ c['text'] | trim }}{% endif %}"
    "{% endfor %}{{ '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
WORDS_TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# As SmolVLM2 and Idefics3 have it.
SMOLVLM_TEMPLATE = processing_smolvlm.DEFAULT_CHAT_TEMPLATE
SMOLVLM_TOKENS = [
    "<|im_start|>", "<fake_token_around_image>", "<end_of_utterance>", "<global-img>",
    *(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)),
]  # fmt: skip
# SmolVLM's processor needs a package that writes the number of a video's frames as a word.
processing_smolvlm.num2words = processing_smolvlm.num2words or str
PATCH = 8
CROP = 4 * PATCH  # the side of a crop
WIDTH, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 64, 2, 4, 2, 16


def _tokenizer(extra, end="<|im_end|>", **named):
    tokenizer = hf.PreTrainedTokenizerFast.from_pretrained(
        base_folder("tiny"), **({"extra_special_tokens": named} if named else {})
    )
    if extra:
        tokenizer.add_special_tokens(
            {"extra_special_tokens": extra}, replace_extra_special_tokens=not named
        )
        tokenizer.eos_token = end
    return tokenizer


def randomize(model, seed):
    """Weights that keep the size of what goes through; biases and norms that do something."""
    generator = torch.Generator(model.device).manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if any(word in name for word in ("norm", "ln_q", "lambda")):
                centre = 0.0 if name.endswith("bias") else 1.0
                parameter.normal_(centre, 0.1, generator=generator)
            elif parameter.ndim == 1:
                parameter.normal_(0, 0.1, generator=generator)
            elif "embed" in name and "patch" not in name:
                parameter.normal_(0, 1.0, generator=generator)
            else:
                parameter.normal_(0, parameter[0].numel() ** -0.5, generator=generator)
        # So that the likeliest token is so by far more than fp32 can blur.
        if model.lm_head.weight is model.get_input_embeddings().weight:
            # Small beside what layers add, as otherwise each token would be followed by itself.
            model.lm_head.weight.mul_(0.8 * model.lm_head.weight.shape[1] ** -0.5)
            model.get_decoder().norm.weight.mul_(10.0)
        else:
            model.lm_head.weight.mul_(3.0)


def _save(folder, kind, processor, seed, **config):
    """Save a random model of a class, or of a family of images, with its processor."""
    if isinstance(kind, str):
        config = getattr(hf, f"{kind}Config")(**config)
        kind = getattr(hf, f"{kind}ForConditionalGeneration")
    else:
        config = kind.config_class(**config)
    model = kind(config)
    randomize(model, seed)
    tokenizer = getattr(processor, "tokenizer", processor)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


def _text(tokenizer, model_type, **more):
    return {
        "model_type": model_type, "vocab_size": len(tokenizer), "hidden_size": WIDTH,
        "intermediate_size": 96, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS, "max_position_embeddings": 1024,
        "tie_word_embeddings": False, "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, **more,
    }  # fmt: skip


def save_llava(folder, seed=0, *, side=32):
    """LLaVA-1.5 with grouped-query attention; an image is (side / 8)² tokens."""
    tokenizer = _tokenizer([])
    processor = hf.LlavaProcessor(
        image_processor=hf.CLIPImageProcessor(
            size={"height": side, "width": side}, do_center_crop=False
        ),
        tokenizer=tokenizer,
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=(Path(base_folder("tiny")) / "chat_template.jinja").read_text(),
    )
    return _save(
        folder, "Llava", processor, seed,
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


def _qwen_ids(tokenizer):
    ids = tokenizer.convert_tokens_to_ids
    return {
        "image_token_id": ids("<|image_pad|>"),
        "video_token_id": ids("<|video_pad|>"),
        "vision_start_token_id": ids("<|vision_start|>"),
        "vision_end_token_id": ids("<|vision_end|>"),
    }


def _save_qwen(folder, seed, kind, rope, vision, videos="Qwen2VL", **text):
    tokenizer = _tokenizer(QWEN_TOKENS)
    rope = {"rope_type": "default", "rope_theta": 10000.0, **rope}
    name = getattr(hf, f"{kind}Config").model_type
    text = _text(tokenizer, f"{name}_text", bos_token_id=None, rope_parameters=rope) | text
    limits = {"shortest_edge": (2 * PATCH) ** 2, "longest_edge": (6 * PATCH) ** 2}
    sizes = {"patch_size": PATCH, "merge_size": 2, "temporal_patch_size": 2}
    frames = {**limits, "longest_edge": 8 * (4 * PATCH) ** 2}
    processor = getattr(hf, f"{kind}Processor")(
        image_processor=hf.Qwen2VLImageProcessor(size=limits, **sizes),
        video_processor=getattr(hf, f"{videos}VideoProcessor")(size=frames, **sizes),
        tokenizer=tokenizer,
        chat_template=QWEN_TEMPLATE.replace("VIDEO", "<|vision_start|><|video_pad|><|vision_end|>"),
    )
    return _save(
        folder, kind, processor, seed, text_config=text,
        vision_config={"depth": 3, "patch_size": PATCH, **vision},
        tie_word_embeddings=text["tie_word_embeddings"], **_qwen_ids(tokenizer),
    )  # fmt: skip


QWEN_VISION = {  # as the real 3,420, the intermediate size is no multiple of 8
    "hidden_size": 32, "intermediate_size": 60, "num_heads": 2, "out_hidden_size": WIDTH,
}  # fmt: skip


def save_qwen2_vl(folder, seed=0):
    """Qwen2-VL: three positions a token, images of any size, videos."""
    vision = {"embed_dim": 32, "hidden_size": WIDTH, "num_heads": 2, "mlp_ratio": 2}
    return _save_qwen(folder, seed, "Qwen2VL", {"mrope_section": [2, 3, 3]}, vision)


def save_qwen2_5_vl(folder, seed=0):
    """Qwen2.5-VL: also attends in windows within an image, and tells seconds between frames."""
    vision = QWEN_VISION | {
        "window_size": 4 * PATCH, "fullatt_block_indexes": [1], "tokens_per_second": 4,
    }  # fmt: skip
    return _save_qwen(folder, seed, "Qwen2_5_VL", {"mrope_section": [2, 3, 3]}, vision)


def save_qwen3_vl(folder, seed=0):
    """Qwen3-VL: images also enter the first layers (DeepStack), frames have times in the text.

    As in the 2B and 4B, embeddings are tied.
    """
    rope = {"mrope_section": [4, 2, 2], "mrope_interleaved": True}
    vision = QWEN_VISION | {"num_position_embeddings": 36, "deepstack_visual_indexes": [0, 2]}
    more = {"head_dim": HEAD_DIM, "tie_word_embeddings": True}
    return _save_qwen(folder, seed, "Qwen3VL", rope, vision, "Qwen3VL", **more)


SIGLIP = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "image_size": CROP, "patch_size": PATCH,
}  # fmt: skip


def save_llava_next(folder, seed=0):
    """LLaVA-NeXT: a crop is 16 tokens, an image has up to four beside the whole."""
    tokenizer = _tokenizer([])
    sizes = [[CROP, 2 * CROP], [2 * CROP, CROP], [2 * CROP, 2 * CROP], [CROP, 3 * CROP]]
    processor = hf.LlavaNextProcessor(
        image_processor=hf.LlavaNextImageProcessor(
            size={"shortest_edge": CROP},
            crop_size={"height": CROP, "width": CROP},
            image_grid_pinpoints=sizes,
        ),
        tokenizer=tokenizer,
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=MISTRAL_TEMPLATE,
    )
    return _save(
        folder, "LlavaNext", processor, seed,
        vision_config={"model_type": "clip_vision_model", **SIGLIP, "num_hidden_layers": 3},
        text_config=_text(tokenizer, "mistral", sliding_window=None),
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        image_grid_pinpoints=sizes,
        tie_word_embeddings=False,
    )  # fmt: skip


GEMMA3 = {
    "head_dim": HEAD_DIM, "query_pre_attn_scalar": 24, "sliding_window": 960,
    "layer_types": ["sliding_attention", "full_attention"],
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    },
}  # fmt: skip


def save_gemma3(folder, seed=0):
    """Gemma 3: an image is 16 tokens that see each other; a layer attends in a window."""
    names = {
        "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>",
        "image_token": "<image_soft_token>",
    }  # fmt: skip
    tokenizer = _tokenizer(["<start_of_turn>", "<end_of_turn>"], "<end_of_turn>", **names)
    sides = {"height": 2 * CROP, "width": 2 * CROP}
    processor = hf.Gemma3Processor(
        hf.Gemma3ImageProcessor(size=sides),
        tokenizer,
        chat_template=GEMMA_TEMPLATE,
        image_seq_length=16,
    )
    vision = {**SIGLIP, "model_type": "siglip_vision_model", "image_size": 2 * CROP}
    return _save(
        folder, "Gemma3", processor, seed,
        vision_config={**vision, "vision_use_head": False},
        text_config=_text(tokenizer, "gemma3_text") | GEMMA3 | {"tie_word_embeddings": True},
        mm_tokens_per_image=16,
        boi_token_index=tokenizer.boi_token_id,
        eoi_token_index=tokenizer.eoi_token_id,
        image_token_index=tokenizer.image_token_id,
    )  # fmt: skip


def _save_idefics3(folder, kind, processor, seed):
    tokenizer = processor.tokenizer
    return _save(
        folder, kind, processor, seed, vision_config=SIGLIP, text_config=_text(tokenizer, "llama"),
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"), scale_factor=2,
        tie_word_embeddings=False,
    )  # fmt: skip


def save_idefics3(folder, seed=0):
    """Idefics3: a crop is 4 tokens, an image up to 3 x 3 crops and the whole."""
    processor = hf.Idefics3Processor(
        hf.Idefics3ImageProcessor(
            size={"longest_edge": 3 * CROP}, max_image_size={"longest_edge": CROP}
        ),
        _tokenizer(SMOLVLM_TOKENS, "<end_of_utterance>"),
        image_seq_len=4,
        chat_template=SMOLVLM_TEMPLATE.replace("<|im_start|>", "{{ bos_token }}"),
    )
    return _save_idefics3(folder, "Idefics3", processor, seed)


def save_smolvlm(folder, seed=0):
    """SmolVLM2: as Idefics3, with videos, whose frames are not split."""
    limit = {"longest_edge": CROP}
    tokenizer = _tokenizer(SMOLVLM_TOKENS, "<end_of_utterance>")
    tokenizer.bos_token = "<|im_start|>"
    processor = hf.SmolVLMProcessor(
        hf.SmolVLMImageProcessor(size={"longest_edge": 3 * CROP}, max_image_size=limit),
        tokenizer,
        hf.SmolVLMVideoProcessor(
            size=limit,
            max_image_size=limit,
            video_sampling={"max_frames": 64, "fps": 1, "video_size": limit},
        ),
        image_seq_len=4,
        chat_template=SMOLVLM_TEMPLATE,
    )
    return _save_idefics3(folder, "SmolVLM", processor, seed)


def save_internvl(folder, seed=0):
    """InternVL3: a crop is 4 tokens, an image up to six crops and the whole."""
    names = {
        "start_image_token": "<img>", "end_image_token": "</img>",
        "context_image_token": "<IMG_CONTEXT>", "video_token": "<video>",
    }  # fmt: skip
    tokenizer = _tokenizer(["<|im_start|>", "<|im_end|>"], **names)
    sides = {"height": CROP, "width": CROP}
    shown = {"<|image_pad|>": "<IMG_CONTEXT>\n", "VIDEO": "<video>\n"}
    template = QWEN_TEMPLATE.replace("<|vision_start|>", "").replace("<|vision_end|>", "")
    for old, new in shown.items():
        template = template.replace(old, new)
    processor = hf.InternVLProcessor(
        hf.GotOcr2ImageProcessor(size=sides, max_patches=6),
        tokenizer,
        hf.InternVLVideoProcessor(size=sides),
        image_seq_length=4,
        chat_template=template,
    )
    return _save(
        folder, "InternVL", processor, seed,
        vision_config={
            **SIGLIP, "image_size": [CROP, CROP], "patch_size": [PATCH, PATCH],
            "use_mean_pooling": True,
        },
        text_config=_text(tokenizer, "qwen2"),
        image_token_id=tokenizer.context_image_token_id,
        image_seq_length=4,
        tie_word_embeddings=False,
    )  # fmt: skip


def _save_words(kind, tied, folder, seed=0, **settings):
    """A causal language model and its tokenizer, whose template reads texts and not parts."""
    tokenizer = _tokenizer(QWEN_TOKENS)
    tokenizer.chat_template = WORDS_TEMPLATE
    text = _text(tokenizer, kind.config_class.model_type, tie_word_embeddings=tied)
    return _save(folder, kind, tokenizer, seed, **text | settings)


# As Llama 3.2's, positions beyond a quarter of the context are turned more slowly.
LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 4.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 256,
}  # fmt: skip
TEXT_CHECKPOINTS = {
    "gemma3_text": partial(_save_words, hf.Gemma3ForCausalLM, True, **GEMMA3),
    "llama": partial(_save_words, hf.LlamaForCausalLM, True, rope_parameters=LLAMA3_ROPE),
    "mistral": partial(_save_words, hf.MistralForCausalLM, False, sliding_window=None),
    "qwen2": partial(_save_words, hf.Qwen2ForCausalLM, True),
    "qwen3": partial(_save_words, hf.Qwen3ForCausalLM, False, head_dim=32),
}
"""Builders of models without images, the first and third with tied embeddings."""
CHECKPOINTS = {
    "gemma3": save_gemma3,
    "idefics3": save_idefics3,
    "internvl": save_internvl,
    "llava": save_llava,
    "llava_next": save_llava_next,
    "qwen2_vl": save_qwen2_vl,
    "qwen2_5_vl": save_qwen2_5_vl,
    "qwen3_vl": save_qwen3_vl,
    "smolvlm": save_smolvlm,
}
"""Builders by family; each takes a folder and a seed."""
FRAMES_AS_IMAGES = ("gemma3", "idefics3", "llava", "llava_next")
"""Families without videos."""
APART = ("internvl", "smolvlm")
"""Families whose prompts have images or videos, not both."""
