"""The LMM as it is trained on, and what transformers makes of the same examples."""

import numpy as np
import torch
from PIL import Image

from tests.support.engine_reference import auto_class, load_processor
from tests.support.lmm_checkpoints import FRAMES_AS_IMAGES, TEXT_CHECKPOINTS
from valora_train.model.lmm import Lmm
from valora_train.model.prompts import Example
from valora_train.settings import LoraSettings, ModelSettings

PROMPTS = ["detect cat", "detect anything at all", "x"]


def load(folder, **lora):
    return Lmm(ModelSettings(id=str(folder)), LoraSettings(rank=4, alpha=12, **lora))


def visual(lmm, prompts, images):
    """Last hidden states of the visual tokens."""
    examples = [Example(prompt, (image,)) for prompt, image in zip(prompts, images, strict=True)]
    with torch.no_grad():
        return lmm.states(lmm.encode(examples, whole=False)).head_inputs().visual


def reference(model, processor, prompt, image):
    """Last hidden states of the visual tokens by transformers' whole forward pass."""
    turn = [{"type": "text", "text": prompt}, {"type": "image"}]
    text = processor.apply_chat_template(
        [{"role": "user", "content": turn}], add_generation_prompt=True
    )
    inputs = processor(text=text, images=image, return_tensors="pt")
    with torch.no_grad():
        out = model(**inputs, output_hidden_states=True)
    return out.hidden_states[-1][0, inputs["input_ids"][0] == model.config.image_token_id]


def disturb(lmm, name):
    generator = torch.Generator().manual_seed(len(name))
    for parameter in lmm.adapters.parameters(name).values():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)


def picture(width, height, seed):
    pixels = torch.randint(
        0, 255, (height, width, 3), generator=torch.Generator().manual_seed(seed)
    )
    return Image.fromarray(pixels.to(torch.uint8).numpy())


def questions(family):
    """One image, several of different sizes, a video; or words where no images are taken."""
    if family in TEXT_CHECKPOINTS:
        asked = ("Say it.", "Which one is the larger of both?", "What happens?")
        return [Example(question, ()) for question in asked]
    frames = tuple(picture(40, 32, 20 + n) for n in range(4))
    return [
        Example("Say it.", (picture(40, 30, 1),)),
        Example("Which one is the larger of both?", (picture(20, 48, 2), picture(64, 24, 3))),
        Example("What happens?", frames, video=family not in FRAMES_AS_IMAGES),
    ]


def whole(folder, example):
    """Model, and inputs of an example by transformers' processor, as a user makes them."""
    model = auto_class(str(folder)).from_pretrained(folder)
    processor = load_processor(str(folder))
    if not (example.images or example.video):
        turn = [{"role": "user", "content": example.question}]
        text = processor.apply_chat_template(turn, add_generation_prompt=True, tokenize=False)
        return model, processor(text=[text], return_tensors="pt", add_special_tokens=False)
    kind = "video" if example.video else "image"
    shown = [{"type": kind}] * (1 if example.video else len(example.images))
    turn = [{"role": "user", "content": [{"type": "text", "text": example.question}, *shown]}]
    text = processor.apply_chat_template(turn, add_generation_prompt=True)
    media = {"images": list(example.images)}
    if example.video:
        frames = np.stack([np.asarray(frame) for frame in example.images])
        media = {"videos": [frames], "videos_kwargs": {"do_sample_frames": False}}
    return model, processor(text=[text], return_tensors="pt", add_special_tokens=False, **media)
