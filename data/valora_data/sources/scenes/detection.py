"""VaLoRA's Figure 10: six detection domains, one class each, look-alikes in between."""

from dataclasses import dataclass, field
from functools import partial
from io import BytesIO
from itertools import combinations
from math import cos, sin

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageFilter

from valora_data.images import decode_image
from valora_data.schema import Answer, Box, Split, Task
from valora_data.sources.generic.scenes import SIZE, Floats, Rng, softened, windows
from valora_data.sources.scenes.boards import Drawn, scene
from valora_data.sources.scenes.drawing import Pen, bounds, chosen, lit, shade
from valora_data.sources.scenes.objects import NEAR_MISSES, TARGETS
from valora_data.sources.scenes.photographs import photograph_crop

Mask = npt.NDArray[np.bool_]  # pixels of the image, (SIZE, SIZE)

GRID = 8  # cells per side, the visual tokens of a detector, with the centre of one target at most

# What makes the scenes hard; the requirements of the six domains are set for these values.
TARGET_COUNTS = (0.12, 0.36, 0.30, 0.16, 0.06)  # probabilities of 0, 1, 2, … tried targets
DISTRACTORS = (1, 4)  # range of how many other things are tried
NEAR_MISS = 0.7  # share of them that resemble the class; others belong to the other five domains
OVERLAP = 0.3  # probability that a thing may cover another one
MIN_VISIBLE = 0.65  # least share of a target that stays visible where things may cover it
MAX_IOU = 0.3  # largest overlap of the boxes of two targets
BLUR, NOISE = 0.9, 10.0  # largest radius in pixels, and standard deviation of noise, of 255
JPEG = (45, 95)  # range of JPEG quality
LIGHTING, SHADOW = 0.28, 0.45  # largest strength of shading, and darkness of cast shadows
EXPOSURE = 0.22  # largest relative change of brightness and contrast
MIN_SIDE = 8  # of a target's box, in pixels
MASK_COVERAGE = 0.35  # from which a pixel belongs to a thing; thin tubes rarely cover half a pixel
PLACEMENTS = 12
MIN_CONTRAST = 38.0  # of 255, in lightness and (weaker) hue, between a thing and what it covers


def draw_scene(domain: str, rng: Rng, split: Split) -> tuple[Image.Image, list[Mask]]:
    """An image of a domain, and the visible pixels of each target."""
    angle = rng.uniform(0, 2 * np.pi)
    canvas = _Canvas(
        pixels=photograph_crop(rng, split, SIZE).astype(np.float32),
        light=(cos(angle), -abs(sin(angle))),
        lighting=rng.uniform(0, LIGHTING),
        shadow=rng.uniform(0.1, SHADOW),
    )
    wanted = [True] * int(rng.choice(len(TARGET_COUNTS), p=TARGET_COUNTS))
    wanted += [False] * int(rng.integers(DISTRACTORS[0], DISTRACTORS[1] + 1))
    rng.shuffle(wanted)
    for is_target in wanted:
        painter = TARGETS[domain]
        if not is_target and rng.random() < NEAR_MISS:
            painter = NEAR_MISSES[domain]
        elif not is_target:
            painter = TARGETS[chosen(rng, [name for name in TARGETS if name != domain])]
        canvas.add(rng, painter(rng), is_target)
    return _photographed(rng, canvas.pixels), canvas.masks


def _sample(domain: str, rng: Rng, split: Split) -> Drawn:
    image, masks = draw_scene(domain, rng, split)
    return Drawn((image,), Answer(tuple(Box(*bounds(mask), domain) for mask in masks)))


for _name in TARGETS:
    _prompt = f"detect {_name.replace('_', ' ')}"
    scene(Task.DETECTION, _prompt, (_name,), _name)(partial(_sample, _name))


@dataclass(slots=True)
class _Canvas:
    """An image in the making: its targets' visible pixels and whole areas, and what is covered."""

    pixels: Floats
    light: tuple[float, float]
    lighting: float
    shadow: float
    masks: list[Mask] = field(default_factory=list)
    areas: list[int] = field(default_factory=list)
    taken: Mask = field(default_factory=lambda: np.zeros((SIZE, SIZE), np.bool_))

    def add(self, rng: Rng, pen: Pen, is_target: bool) -> None:
        thing = lit(pen.layer(), self.light, self.lighting)
        solid = thing[..., 3] > MASK_COVERAGE
        if not solid.any():
            return
        x0, y0, x1, y1 = bounds(solid)
        size, origin = np.array([x1 - x0, y1 - y0]), np.array([x0, y0])
        may_overlap = rng.random() < OVERLAP
        # Mostly whole; where overlap is allowed it may also reach over the edge of the image.
        spill = 0.2 * size if may_overlap else np.zeros(2)
        for _ in range(PLACEMENTS):
            corner = rng.uniform(1 - spill, np.maximum(SIZE - 1 - size + spill, 2 - spill))
            left, top = (int(v) for v in np.round(corner) - origin)
            mask = _placed(solid, left, top)
            x0, y0, x1, y1 = bounds(mask)
            # Whole things keep clear of each other's surroundings, the filled bounding boxes.
            if not may_overlap and self.taken[y0:y1, x0:x1].any():
                continue
            masks, areas = [old & ~mask for old in self.masks], self.areas
            if is_target:
                masks, areas = [*masks, mask], [*areas, int(solid.sum())]
            if _tell_apart(masks, areas):
                self.masks, self.areas = masks, areas
                self._stack(rng, pen, thing, left, top)
                self.taken |= mask
                return

    def _stack(self, rng: Rng, pen: Pen, thing: Floats, left: int, top: int) -> None:
        if pen.behind is not None:
            behind = lit(pen.behind.layer(), self.light, self.lighting)
            # What holds a thing never covers what was there before.
            view, part = windows(behind.shape, left, top)
            behind[part][..., 3] *= ~self.taken[view]
            self._blend(behind, left, top)
            self.taken |= _placed(behind[..., 3] > MASK_COVERAGE, left, top)
        thing = self._set_off(thing, left, top)
        reach = rng.uniform(1.5, 4.0)
        dark = 1 - self.shadow * softened(np.pad(thing[..., 3], 4), 1.5)
        x, y = round(left - reach * self.light[0]) - 4, round(top - reach * self.light[1]) - 4
        view, part = windows(dark.shape, x, y)
        shade(self.pixels[view], dark[part])
        self._blend(thing, left, top)

    def _set_off(self, thing: Floats, left: int, top: int) -> Floats:
        """The thing, lightened or darkened where the eye would lose it in its background."""
        view, part = windows(thing.shape, left, top)
        seen = thing[part]
        gaps = seen[..., :3] - self.pixels[view]
        shade(gaps, seen[..., 3] / max(1.0, float(seen[..., 3].sum())))
        gap = gaps.sum((0, 1))
        lightness = float(gap.mean())
        # A difference of hue alone is far weaker for the eye than one of lightness.
        missing = MIN_CONTRAST - abs(lightness) - 0.3 * float(np.abs(gap - lightness).max())
        if missing > 0:
            thing = thing.copy()
            thing[..., :3] += missing if lightness > 0 else -missing
        return thing

    def _blend(self, pixels: Floats, left: int, top: int) -> None:
        view, part = windows(pixels.shape, left, top)
        patch, below = pixels[part], self.pixels[view]
        for channel in range(3):
            below[..., channel] += patch[..., 3] * (patch[..., channel] - below[..., channel])


def _tell_apart(masks: list[Mask], areas: list[int]) -> bool:
    shown = zip(masks, areas, strict=True)
    if any(np.count_nonzero(mask) < MIN_VISIBLE * area for mask, area in shown):
        return False
    boxes, cell = [Box(*bounds(mask), "") for mask in masks], 2 * SIZE // GRID
    return (
        len({((box.x0 + box.x1) // cell, (box.y0 + box.y1) // cell) for box in boxes}) == len(boxes)
        and all(min(box.x1 - box.x0, box.y1 - box.y0) >= MIN_SIDE for box in boxes)
        and all(one.iou(other) <= MAX_IOU for one, other in combinations(boxes, 2))
    )


def _placed(solid: Mask, left: int, top: int) -> Mask:
    mask = np.zeros((SIZE, SIZE), np.bool_)
    view, part = windows(solid.shape, left, top)
    mask[view] = solid[part]
    return mask


def _photographed(rng: Rng, pixels: Floats) -> Image.Image:
    gain = 1 + rng.uniform(-EXPOSURE, EXPOSURE)
    contrast = 1 + rng.uniform(-EXPOSURE, EXPOSURE / 2)
    tint = 1 + rng.uniform(-0.06, 0.06, size=3).astype(np.float32)
    pixels = (128 + (pixels - 128) * contrast) * gain * tint
    image = Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))
    image = image.filter(ImageFilter.GaussianBlur(rng.uniform(0, BLUR)))
    sigma, noisy, file = rng.uniform(0, NOISE), np.asarray(image, dtype=np.float32), BytesIO()
    noisy = noisy + sigma * rng.standard_normal(noisy.shape, dtype=np.float32)
    image = Image.fromarray(np.clip(noisy, 0, 255).astype(np.uint8))
    # Without chroma subsampling, which would halve the colour resolution of so small an image.
    image.save(file, "JPEG", quality=int(rng.integers(JPEG[0], JPEG[1] + 1)), subsampling=0)
    return decode_image(file.getvalue())  # remembers its file, so that it is not encoded again
