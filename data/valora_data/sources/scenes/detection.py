"""Six built-in detection domains, drawn on photographs: one class each, look-alikes in between.

The domains are those of VaLoRA's Figure 10. Every image is a function of (seed, domain, split,
index) alone, so that any image can be made again without the ones before it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from io import BytesIO
from itertools import combinations
from math import cos, sin
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image, ImageFilter

from valora_data.errors import DataError
from valora_data.images import decode_image
from valora_data.schema import Answer, Box, Sample, Split
from valora_data.sources.scenes.boards import scene_rng
from valora_data.sources.scenes.drawing import lit, softened
from valora_data.sources.scenes.objects import NEAR_MISSES, TARGETS
from valora_data.sources.scenes.photographs import photograph_crop

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import numpy.typing as npt

    from valora_data.sources.scenes.objects import Drawing

SIZE = 96
GRID = 8
"""Cells per side in which at most one target may have its centre: a detector's visual tokens."""

DOMAINS = tuple(TARGETS)


# What makes the scenes hard; the requirements of the six domains are set for these values.
TARGET_COUNTS = (
    0.12,
    0.36,
    0.30,
    0.16,
    0.06,
)  # probabilities of 0, 1, 2, … tried targets
DISTRACTORS = (1, 4)  # range of how many other things are tried
NEAR_MISS = 0.7  # share of them that resemble the class; others belong to the other five domains
OVERLAP = 0.3  # probability that a thing may cover another one
MIN_VISIBLE = 0.65  # least share of a target that stays visible where things may cover it
MAX_IOU = 0.3  # largest overlap of the boxes of two targets
BLUR, NOISE = 0.9, 10.0  # largest radius in pixels, and standard deviation of noise, of 255
JPEG = (45, 95)  # range of JPEG quality
LIGHTING, SHADOW = 0.28, 0.45  # largest strength of shading, and darkness of cast shadows
EXPOSURE = 0.22  # largest relative change of brightness and contrast
MIN_SIDE = 8
MASK_COVERAGE = 0.35
"""Coverage from which a pixel counts as part of a thing; thin tubes rarely cover half a pixel."""
PLACEMENTS = 12
MIN_CONTRAST = 38.0
"""Least difference, of 255, in lightness and (weaker) hue between a thing and what it covers."""


@dataclass(slots=True)
class Scene:
    """A drawn image with the truth about it."""

    image: Image.Image
    label: str
    masks: list[npt.NDArray[np.bool_]] = field(default_factory=list)

    def boxes(self) -> tuple[Box, ...]:
        """Tight boxes around the visible pixels."""
        return tuple(Box(*_bounds(mask), self.label) for mask in self.masks)


def detection_sample(domain: str, split: Split, index: int, seed: int = 0) -> Sample:
    """One image of a domain with its boxes; the same for the same arguments."""
    scene = draw_scene(domain, split, index, seed)
    return Sample(f"{domain}/{split}/{index:05d}", scene.image, Answer(scene.boxes()))


def detection_samples(domain: str, split: Split, count: int, seed: int = 0) -> Iterator[Sample]:
    """The first `count` samples of a split; see `detection_sample`."""
    return (detection_sample(domain, split, index, seed) for index in range(count))


def draw_scene(domain: str, split: Split, index: int, seed: int = 0) -> Scene:
    """Draw the image of `detection_sample` and keep the masks of its targets."""
    if domain not in TARGETS:
        raise DataError(f"unknown domain {domain!r}: expected one of {', '.join(DOMAINS)}")
    rng = scene_rng(domain, split, index, seed)
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
        painter = TARGETS[domain] if is_target else _distractor(rng, domain)
        canvas.add(rng, painter(rng), is_target)
    return Scene(_photographed(rng, canvas.pixels), domain, canvas.masks)


def _distractor(rng: np.random.Generator, domain: str) -> Callable[[np.random.Generator], Drawing]:
    if rng.random() < NEAR_MISS:
        return NEAR_MISSES[domain]
    others = [name for name in DOMAINS if name != domain]
    return TARGETS[others[int(rng.integers(len(others)))]]


@dataclass(slots=True)
class _Canvas:
    """An image in the making."""

    pixels: npt.NDArray[np.float32]
    light: tuple[float, float]
    lighting: float
    shadow: float
    masks: list[npt.NDArray[np.bool_]] = field(default_factory=list)
    areas: list[int] = field(default_factory=list)
    taken: npt.NDArray[np.bool_] = field(default_factory=lambda: np.zeros((SIZE, SIZE), np.bool_))

    def add(self, rng: np.random.Generator, drawing: Drawing, is_target: bool) -> None:
        """Put a thing where it fits; leave it out where none of some random places does."""
        thing = lit(drawing.thing, self.light, self.lighting).pixels
        solid = thing[..., 3] > MASK_COVERAGE
        rows, columns = np.flatnonzero(solid.any(1)), np.flatnonzero(solid.any(0))
        if not len(rows):
            return
        size = np.array([columns[-1] - columns[0] + 1, rows[-1] - rows[0] + 1])
        origin = np.array([columns[0], rows[0]])
        may_overlap = rng.random() < OVERLAP
        # Mostly whole; where overlap is allowed it may also reach over the edge of the image.
        spill = 0.2 * size if may_overlap else np.zeros(2)
        for _ in range(PLACEMENTS):
            corner = rng.uniform(1 - spill, np.maximum(SIZE - 1 - size + spill, 2 - spill))
            left, top = (int(v) for v in np.round(corner) - origin)
            mask = _placed(solid, left, top)
            if self._fits(mask, int(solid.sum()), is_target, may_overlap):
                self._stack(
                    rng, drawing, thing=thing, left=left, top=top, mask=mask, is_target=is_target
                )
                return

    def _fits(
        self, mask: npt.NDArray[np.bool_], area: int, is_target: bool, may_overlap: bool
    ) -> bool:
        x0, y0, x1, y1 = _bounds(mask)
        # Whole things keep clear of each other's surroundings, the filled bounding boxes.
        if not may_overlap and self.taken[y0:y1, x0:x1].any():
            return False
        free = ~mask
        visible = [old & free for old in self.masks]
        areas = list(self.areas)
        if is_target:
            visible.append(mask)
            areas.append(area)
        if any(
            np.count_nonzero(new) < MIN_VISIBLE * whole
            for new, whole in zip(visible, areas, strict=True)
        ):
            return False
        boxes = [_bounds(new) for new in visible]
        cells = {
            (int((x0 + x1) / 2 * GRID / SIZE), int((y0 + y1) / 2 * GRID / SIZE))
            for x0, y0, x1, y1 in boxes
        }
        return (
            len(cells) == len(boxes)
            and all(min(x1 - x0, y1 - y0) >= MIN_SIDE for x0, y0, x1, y1 in boxes)
            and all(_iou(one, other) <= MAX_IOU for one, other in combinations(boxes, 2))
        )

    def _stack(
        self,
        rng: np.random.Generator,
        drawing: Drawing,
        *,
        thing: npt.NDArray[np.float32],
        left: int,
        top: int,
        mask: npt.NDArray[np.bool_],
        is_target: bool,
    ) -> None:
        if drawing.behind is not None:
            behind = lit(drawing.behind, self.light, self.lighting).pixels
            free = behind.copy()
            # What holds a thing never covers what was there before.
            view, part = _windows(behind.shape, left, top)
            free[part][..., 3] *= ~self.taken[view]
            self._blend(free, left, top)
            self.taken |= _placed(free[..., 3] > MASK_COVERAGE, left, top)
        thing = self._set_off(thing, left, top)
        reach = rng.uniform(1.5, 4.0)
        self._darken(thing[..., 3], left - reach * self.light[0], top - reach * self.light[1])
        self._blend(thing, left, top)
        self.masks = [old & ~mask for old in self.masks]
        self.taken |= mask
        if is_target:
            self.masks.append(mask)
            self.areas.append(int((thing[..., 3] > MASK_COVERAGE).sum()))

    def _set_off(
        self, thing: npt.NDArray[np.float32], left: int, top: int
    ) -> npt.NDArray[np.float32]:
        """The thing, lightened or darkened where the eye would lose it in its background."""
        view, part = _windows(thing.shape, left, top)
        seen, behind = thing[part], self.pixels[view]
        weight = seen[..., 3] / max(1.0, float(seen[..., 3].sum()))
        gaps = seen[..., :3] - behind
        for channel in range(3):
            gaps[..., channel] *= weight
        gap = gaps.sum((0, 1))
        lightness = float(gap.mean())
        # A difference of hue alone is far weaker for the eye than one of lightness.
        missing = MIN_CONTRAST - abs(lightness) - 0.3 * float(np.abs(gap - lightness).max())
        if missing <= 0:
            return thing
        thing = thing.copy()
        thing[..., :3] += missing if lightness > 0 else -missing
        return thing

    def _darken(self, coverage: npt.NDArray[np.float32], left: float, top: float) -> None:
        padded = np.pad(coverage, 4)
        shade = 1 - self.shadow * softened(padded, 1.5)
        view, part = _windows(shade.shape, round(left) - 4, round(top) - 4)
        for channel in range(3):
            self.pixels[view][..., channel] *= shade[part]

    def _blend(self, pixels: npt.NDArray[np.float32], left: int, top: int) -> None:
        view, part = _windows(pixels.shape, left, top)
        patch, below = pixels[part], self.pixels[view]
        for channel in range(3):
            below[..., channel] += patch[..., 3] * (patch[..., channel] - below[..., channel])


Window = tuple[slice, slice]


def _windows(shape: tuple[int, ...], left: int, top: int) -> tuple[Window, Window]:
    """The part of the image that a sheet at (left, top) covers, and that part of the sheet."""
    height, width = shape[:2]
    x0, y0 = max(0, left), max(0, top)
    x1, y1 = max(x0, min(SIZE, left + width)), max(y0, min(SIZE, top + height))
    return (
        (slice(y0, y1), slice(x0, x1)),
        (slice(y0 - top, y1 - top), slice(x0 - left, x1 - left)),
    )


def _placed(solid: npt.NDArray[np.bool_], left: int, top: int) -> npt.NDArray[np.bool_]:
    mask = np.zeros((SIZE, SIZE), np.bool_)
    view, part = _windows(solid.shape, left, top)
    mask[view] = solid[part]
    return mask


def _bounds(mask: npt.NDArray[np.bool_]) -> tuple[int, int, int, int]:
    columns, rows = np.flatnonzero(mask.any(0)), np.flatnonzero(mask.any(1))
    if not len(columns):
        return (0, 0, 0, 0)
    return (int(columns[0]), int(rows[0]), int(columns[-1]) + 1, int(rows[-1]) + 1)


def _iou(a: tuple[int, int, int, int], b: tuple[int, int, int, int]) -> float:
    width = max(0, min(a[2], b[2]) - max(a[0], b[0]))
    height = max(0, min(a[3], b[3]) - max(a[1], b[1]))
    union = (a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - width * height
    return width * height / union


def _photographed(rng: np.random.Generator, pixels: npt.NDArray[np.float32]) -> Image.Image:
    """What a camera makes of the scene: exposure, tint, blur, noise and compression."""
    gain = 1 + rng.uniform(-EXPOSURE, EXPOSURE)
    contrast = 1 + rng.uniform(-EXPOSURE, EXPOSURE / 2)
    tint = 1 + rng.uniform(-0.06, 0.06, size=3).astype(np.float32)
    pixels = (128 + (pixels - 128) * contrast) * gain * tint
    image = Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))
    image = image.filter(ImageFilter.GaussianBlur(rng.uniform(0, BLUR)))
    sigma = rng.uniform(0, NOISE)
    noisy = np.asarray(image, dtype=np.float32)
    noisy = noisy + sigma * rng.standard_normal(noisy.shape, dtype=np.float32)
    image = Image.fromarray(np.clip(noisy, 0, 255).astype(np.uint8))
    file = BytesIO()
    # Without chroma subsampling, which would halve the colour resolution of so small an image.
    image.save(file, "JPEG", quality=int(rng.integers(JPEG[0], JPEG[1] + 1)), subsampling=0)
    return decode_image(file.getvalue())  # remembers its file, so that it is not encoded again
