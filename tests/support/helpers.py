"""Things that several tests build or compare."""

import torch
from PIL import Image, ImageDraw
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    CLIPImageProcessor,
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
)

from valora_data.schema import Answer, Box, Sample

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m['role'] }}: {% for c in m['content'] %}"
    "{% if c['type'] == 'image' %}<image>{% else %}{{ c['text'] }}{% endif %}{% endfor %}"
    "{% endfor %}{% if add_generation_prompt %} assistant:{% endif %}"
)


def save_random_llava(folder, seed, *, side=48, patch=12):
    """Save a LLaVA with two tiny layers on each side, a byte tokenizer and a processor."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        extra_special_tokens={"image_token": "<image>"},
    )
    processor = LlavaProcessor(
        image_processor=CLIPImageProcessor(
            size={"height": side, "width": side}, do_center_crop=False
        ),
        tokenizer=tokenizer,
        patch_size=patch,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=TEMPLATE,
    )
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(
            hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
            image_size=side, patch_size=patch,
        ),
        text_config=LlamaConfig(
            vocab_size=len(tokenizer), hidden_size=48, intermediate_size=96, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2,
        ),
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        image_seq_length=(side // patch) ** 2,
        vision_feature_layer=-1,
    )  # fmt: skip
    torch.manual_seed(seed)
    LlavaForConditionalGeneration(config).save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


def coloured_squares(count, seed, label, colour="red"):
    """Images of 48 px with one or two squares of a colour, which is what the boxes name."""
    generator = torch.Generator().manual_seed(seed)
    samples = []
    for index in range(count):
        noise = torch.randint(90, 170, (48, 48, 3), generator=generator, dtype=torch.uint8)
        image = Image.fromarray(noise.numpy())
        boxes = []
        for half in range(1 + index % 2):
            x, y, side = torch.randint(0, 12, (3,), generator=generator).tolist()
            x, y, side = 24 * half + x // 2, y * 2, 9 + side
            ImageDraw.Draw(image).rectangle([x, y, x + side - 1, y + side - 1], fill=colour)
            boxes.append(Box(x, y, x + side, y + side, label))
        samples.append(Sample(f"{label}/{seed}/{index:03d}", image, Answer(tuple(boxes))))
    return samples
