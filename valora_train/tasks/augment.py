"""Augmented views by torchvision: functions of seed, sample and number alone."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torchvision.ops import box_area, clip_boxes_to_image
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional
from torchvision.tv_tensors import BoundingBoxes

from valora_data.schema import Answer, Sample
from valora_train.settings import AugmentSettings

GREY = 114  # fills what a rotation or a shift leaves free, as Ultralytics does
BLUR_KERNEL = 7  # pixels


class Augmenter:
    """Makes views of samples; places change only in `DomainTask.geometric` tasks, hues never."""

    def __init__(
        self, settings: AugmentSettings, geometric: bool, seed: int, device: str = "cpu"
    ) -> None:
        self._settings, self._geometric, self._seed = settings, geometric, seed
        # Where the images are meanwhile; torch's noise and JPEG differ by device, or need the CPU.
        self._device = "cpu" if settings.noise or settings.jpeg else device

    def __call__(self, sample: Sample, view: int) -> Sample:
        """An augmented view of a sample, by its number; the images keep their sizes."""
        width, height = sample.image.size
        images = [
            functional.to_image(image.convert("RGB")).to(self._device) for image in sample.images
        ]
        boxes = None
        if self._geometric and sample.answer.boxes:
            edges = torch.tensor([box.xyxy for box in sample.answer.boxes], dtype=torch.float64)
            # Boxes keep the parts that leave the image, whose share decides whether they are kept.
            boxes = BoundingBoxes(
                edges, format="XYXY", canvas_size=(height, width), clamping_mode=None
            )
        with _repeatable(f"{self._seed}/{sample.id}/{view}"):
            for transform in self._transforms(width, height):
                images, boxes = transform(images, boxes)
        first, *rest = [functional.to_pil_image(image) for image in images]
        answer = sample.answer
        if boxes is not None:
            answer = self._with_boxes(answer, boxes.as_subclass(torch.Tensor), width, height)
        return replace(sample, image=first, rest=tuple(rest), answer=answer)

    def _transforms(self, width: int, height: int) -> Iterator[Any]:
        asked = self._settings
        if self._geometric and (asked.rotate or asked.shift):
            bilinear, shift = v2.InterpolationMode.BILINEAR, (asked.shift, asked.shift)
            yield v2.RandomAffine(asked.rotate, shift, interpolation=bilinear, fill=GREY)
        if self._geometric and asked.zoom_out:
            yield v2.RandomZoomOut(GREY, (1.0, 1.0 + asked.zoom_out))
        if self._geometric and (asked.crop or asked.zoom_out or asked.stretch):
            shape = [width / height * math.exp(sign * asked.stretch) for sign in (-1, 1)]
            yield v2.RandomResizedCrop((height, width), (1 - asked.crop, 1.0), shape)
        if asked.color:
            yield v2.ColorJitter(asked.color, asked.color, asked.color)
        if asked.blur:
            yield v2.GaussianBlur(BLUR_KERNEL, (0.05, max(0.05, asked.blur)))
        if asked.noise:
            yield v2.ToDtype(torch.float32, scale=True)
            yield v2.GaussianNoise(sigma=asked.noise)
            yield v2.ToDtype(torch.uint8, scale=True)
        if asked.jpeg:
            yield v2.JPEG((round(100 - 90 * asked.jpeg), 100))

    def _with_boxes(self, answer: Answer, moved: torch.Tensor, width: int, height: int) -> Answer:
        """The answer with its boxes where they are now, without those that are hardly visible."""
        clipped = clip_boxes_to_image(moved.double(), (height, width))
        visible = box_area(clipped) / box_area(moved.double()).clamp_min(1e-9)
        kept = (visible >= self._settings.least_visible) & (box_area(clipped) > 0)
        boxes = [
            replace(box, x0=x0, y0=y0, x1=x1, y1=y1)
            for box, (x0, y0, x1, y1), keep in zip(
                answer.boxes, clipped.tolist(), kept.tolist(), strict=True
            )
            if keep
        ]
        return replace(answer, boxes=tuple(boxes))


@contextmanager
def _repeatable(name: str) -> Iterator[None]:
    """Draw random numbers that depend on a name alone; sums do not depend on threads."""
    threads = torch.get_num_threads()
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") >> 1
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # `torch.manual_seed` asks every kind of device
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(threads)
