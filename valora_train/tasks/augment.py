"""Augmented views of training samples, made by torchvision's transforms.

A view depends on the seed, the sample and its number alone, not on the order of the calls or the
number of threads. The images are encoded once per view, as the originals are, so that augmentation
costs nothing in a training step.
"""

from __future__ import annotations

import hashlib
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from PIL.Image import Image

    from valora_data.schema import Answer, Box, Sample
    from valora_train.settings import AugmentSettings


GREY = 114  # fills what a rotation or a shift leaves free, as Ultralytics does
BLUR_KERNEL = 7  # pixels


class Augmenter:
    """Makes augmented views of samples.

    Colours, blur, noise and compression are changed for every task; places only where the answer
    moves with them. All images or frames of a sample get the same transform. Hues stay, because
    answers may name colours.

    Args:
        settings: How much may change.
        geometric: Whether crops, rotations and shifts leave the answer right, boxes being moved
            along (`DomainTask.geometric`).
        seed: Seed of all views.
    """

    def __init__(self, settings: AugmentSettings, geometric: bool, seed: int) -> None:
        self._settings = settings
        self._geometric = geometric
        self._seed = seed

    def __call__(self, sample: Sample, view: int) -> Sample:
        """An augmented view of a sample; its images keep their sizes.

        Args:
            sample: The sample.
            view: Number of the view.
        """
        with _repeatable(f"{self._seed}/{sample.id}/{view}"):
            images, boxes = self._transformed(sample)
        first, *rest = images
        answer = sample.answer
        if boxes is not None:
            answer = self._with_boxes(answer, boxes, first)
        return replace(sample, image=first, rest=tuple(rest), answer=answer)

    def _transformed(self, sample: Sample) -> tuple[list[Image], Any]:
        from torchvision.transforms.v2 import functional
        from torchvision.tv_tensors import BoundingBoxes

        width, height = sample.image.size
        images = [functional.to_image(image.convert("RGB")) for image in sample.images]
        boxes = None
        if self._geometric and sample.answer.boxes:
            edges = torch.tensor([box.xyxy for box in sample.answer.boxes], dtype=torch.float64)
            # Boxes keep the parts that leave the image, whose share decides whether they are kept.
            boxes = BoundingBoxes(
                edges, format="XYXY", canvas_size=(height, width), clamping_mode=None
            )
        transforms = self._geometry(width, height) if self._geometric else []
        for transform in (*transforms, *self._photometry()):
            images, boxes = transform(images, boxes)
        return [functional.to_pil_image(image) for image in images], boxes

    def _geometry(self, width: int, height: int) -> list[Any]:
        from torchvision.transforms import v2

        settings, bilinear = self._settings, v2.InterpolationMode.BILINEAR
        found: list[Any] = []
        if settings.rotate or settings.shift:
            shift = (settings.shift, settings.shift)
            found.append(v2.RandomAffine(settings.rotate, shift, interpolation=bilinear, fill=GREY))
        if settings.crop:
            shape = (width / height, width / height)  # undistorted
            found.append(v2.RandomResizedCrop((height, width), (1 - settings.crop, 1.0), shape))
        return found

    def _photometry(self) -> list[Any]:
        from torchvision.transforms import v2

        settings = self._settings
        found: list[Any] = []
        if settings.color:
            found.append(v2.ColorJitter(settings.color, settings.color, settings.color))
        if settings.blur:
            found.append(v2.GaussianBlur(BLUR_KERNEL, (0.05, max(0.05, settings.blur))))
        if settings.noise:
            found += [
                v2.ToDtype(torch.float32, scale=True),
                v2.GaussianNoise(sigma=settings.noise),
                v2.ToDtype(torch.uint8, scale=True),
            ]
        if settings.jpeg:
            found.append(v2.JPEG((round(100 - 90 * settings.jpeg), 100)))
        return found

    def _with_boxes(self, answer: Answer, moved: Any, image: Image) -> Answer:
        """The answer with its boxes where they are now, without those that are hardly visible."""
        limits = torch.tensor([image.width, image.height] * 2, dtype=torch.float64)
        inside = moved.as_subclass(torch.Tensor).double()
        clamped = torch.minimum(inside.clamp_min(0), limits)
        kept: list[Box] = []
        for box, whole, part in zip(answer.boxes, inside, clamped, strict=True):
            visible = _area(part) / max(_area(whole), 1e-9)
            if visible >= self._settings.least_visible and _area(part) > 0:
                x0, y0, x1, y1 = part.tolist()
                kept.append(replace(box, x0=x0, y0=y0, x1=x1, y1=y1))
        return replace(answer, boxes=tuple(kept))


def _area(edges: torch.Tensor) -> float:
    x0, y0, x1, y1 = edges.tolist()
    return float(max(0.0, x1 - x0) * max(0.0, y1 - y0))


@contextmanager
def _repeatable(name: str) -> Iterator[None]:
    """Draw random numbers that depend on a name alone; sums do not depend on threads."""
    threads = torch.get_num_threads()
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") >> 1
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(threads)
