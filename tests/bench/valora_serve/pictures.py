"""Prompts with drawn pictures, as a model's own image processor cuts them."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from functools import cache

import numpy as np
import torch
from PIL import Image, ImageDraw

from valora_data.models.base import IMAGE
from valora_data.models.qwen_vl import GRIDS
from valora_serve.model.prompt import Prompt, Visual
from valora_serve.types import Request, SamplingParams

SIZE = (640, 480)
"""Width and height of a picture, in pixels."""


def picture(seed: int, size: tuple[int, int] = SIZE) -> Image.Image:
    """A drawn picture."""
    rng = np.random.default_rng(seed)
    image = Image.new("RGB", size, tuple(map(int, rng.integers(0, 256, 3))))
    draw = ImageDraw.Draw(image)
    for _ in range(24):
        left, top = (rng.integers(0, max(1, side - 80)) for side in size)
        width, height = rng.integers(8, 240, 2)
        shape = draw.rectangle if rng.random() < 0.5 else draw.ellipse
        box = (int(left), int(top), int(left + width), int(top + height))
        shape(box, fill=tuple(map(int, rng.integers(0, 256, 3))))
    return image


@cache
def _processor(qwen: bool):
    from transformers import CLIPImageProcessor, Qwen2VLImageProcessor

    if qwen:
        return Qwen2VLImageProcessor()
    return CLIPImageProcessor(
        size={"shortest_edge": 336}, crop_size={"height": 336, "width": 336}
    )  # LLaVA-1.5's


class Pictures:
    """Pictures that are processed once; requests about them differ in key and words.

    Args:
        bench: The bench whose model reads them.
        count: Number of distinct pictures.
        size: Their width and height, in pixels.
    """

    @classmethod
    def of(cls, bench, size=SIZE):
        """The pictures of a bench, which its sections share."""
        held = getattr(bench, "pictures", None)
        if held is None or held.size != size:
            held = bench.pictures = cls(bench, 24, size)
        return held

    def __init__(self, bench, count, size=SIZE):
        self.bench, self.size = bench, size
        qwen = bench.base.startswith("qwen")
        self.inputs, self.parts = [], []
        for seed in range(count):
            inputs = _processor(qwen)(picture(seed, size), return_tensors="pt")
            inputs = {name: torch.as_tensor(np.asarray(value)) for name, value in inputs.items()}
            tokens = bench.lmm.fixed_grid and int(np.prod(bench.lmm.fixed_grid))
            if tokens is None:
                merge = bench.lmm.config.vision_config.spatial_merge_size
                tokens = int(inputs[GRIDS[IMAGE]].prod()) // merge**2
            self.inputs.append(inputs)
            self.parts += bench.lmm.architecture.split(IMAGE, inputs, tokens, bench.lmm.config)

    def prepared(self, number, name, which, *, words=32, output=1, scene=None):
        """A request about some of the pictures, ready for the engine.

        Args:
            number: Number of the request, which its words follow from.
            name: Model that it asks.
            which: Numbers of the pictures.
            words: Random tokens of text.
            output: Tokens of the answer.
            scene: What caches know the pictures by, together with their numbers; None if every
                request has pictures of its own.
        """
        engine, lmm = self.bench.engine, self.bench.lmm
        sampling = SamplingParams(max_tokens=output, ignore_eos=True)
        request = Request(str(number), name, token_ids=[1], sampling=sampling)
        ids, visuals, grids = [1], [], []
        for place, one in enumerate(which):
            part = self.parts[one % len(self.parts)]
            at = np.arange(len(ids), len(ids) + part.tokens)
            key = f"own {number}/{place}" if scene is None else f"{scene}/{one}"
            key = hashlib.sha256(key.encode()).digest()
            visuals.append(Visual(IMAGE, key, part.tensors, at, self.size, part.grid))
            ids += [lmm.image_token] * part.tokens + [3]  # which sets it apart from the next one
            grids.append(self.inputs[one % len(self.inputs)].get(GRIDS[IMAGE]))
        ids += np.random.default_rng(number).integers(3, 31000, words).tolist()
        prompt = Prompt(ids, tuple(visuals))
        if lmm.three_positions:
            inputs = {"input_ids": torch.tensor([ids]), GRIDS[IMAGE]: torch.cat(grids)}
            positions, delta = lmm.architecture.positions(lmm.model, inputs, lmm.config)
            prompt = replace(prompt, positions=positions.numpy(), delta=delta)
        return replace(engine.prepare(request), prompt=prompt)
