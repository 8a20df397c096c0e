"""Boards that the scenes of every task but detection are put on."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple, Self

import numpy as np
from PIL import Image

from valora_data.schema import Answer, Split, Task
from valora_data.sources.generic import scenes as sprites
from valora_data.sources.generic.scenes import SIZE, Floats, Rng
from valora_data.sources.scenes.drawing import Edges, bounds, chosen
from valora_data.sources.scenes.photographs import PHOTOGRAPHS, photograph_crop

SOLID = 0.4  # coverage from which a pixel counts as part of a thing
PLACEMENTS = 30
GAP = 2  # pixels that stay free between things
FAINT = 30.0  # mean difference of colour, of 255, below which a rim sets a thing off
EVERYWHERE: Edges = (0.0, 0.0, 1.0, 1.0)


class Thing(NamedTuple):
    """One of the base model's named things on a board."""

    shape: str
    color: str
    box: Edges


class Drawn(NamedTuple):
    """One sample before it has a name."""

    images: tuple[Image.Image, ...]
    answer: Answer
    prompt: str | None = None


Draw = Callable[[Rng, "Split"], Drawn]


class SceneDomain(NamedTuple):
    """A built-in domain; the digits, which are not drawn, have no `draw`."""

    prompt: str
    labels: tuple[str, ...] = ()
    draw: Draw | None = None


SCENES: dict[Task, dict[str, SceneDomain]] = {}


def scene(
    task: Task, prompt: str, labels: Iterable[str] = (), name: str = ""
) -> Callable[[Draw], Draw]:
    """Register what draws the samples of a domain; its name is that of the function."""

    def register(draw: Draw) -> Draw:
        found = name or draw.__name__.removeprefix("_")
        SCENES.setdefault(task, {})[found] = SceneDomain(prompt, tuple(labels), draw)
        return draw

    return register


def scene_rng(domain: str, split: Split, index: int, seed: int) -> Rng:
    return sprites.seeded(f"{seed}/{domain}/{split.value}/{index}")


@dataclass(slots=True)
class Board:
    """An image in the making, and the boxes of what was added to it."""

    pixels: Floats
    boxes: list[Edges] = field(default_factory=list)

    @classmethod
    def photograph(cls, rng: Rng, split: Split, without: str = "") -> Self:
        """A board with a crop that only this split shows, of a photograph of no file `without`."""
        suitable = [n for n, file in enumerate(PHOTOGRAPHS) if not without or without not in file]
        return cls(photograph_crop(rng, split, SIZE, chosen(rng, suitable)).astype(np.float32))

    def add(self, rng: Rng, layer: Floats, region: Edges = EVERYWHERE) -> Edges | None:
        """Put a thing where it covers no other, its middle in a region (shares of the image)."""
        x0, y0, x1, y1 = extent(layer)
        size = np.array([x1 - x0, y1 - y0])
        low = np.maximum(np.array(region[:2]) * SIZE - size / 2, 0)
        high = np.minimum(np.array(region[2:]) * SIZE - size / 2, SIZE - size)
        if (low > high).any():
            return None
        for corner in rng.uniform(low, high, (PLACEMENTS, 2)):
            left, top = (int(v) for v in np.round(corner))
            box = (float(left), float(top), float(left + x1 - x0), float(top + y1 - y0))
            x, y, right, bottom = box
            gaps = ((x - b[2], b[0] - right, y - b[3], b[1] - bottom) for b in self.boxes)
            if all(max(gap) >= GAP for gap in gaps):
                self.paste(layer, left - x0, top - y0)
                self.boxes.append(box)
                return box
        return None

    def put(
        self, rng: Rng, shape: str, color: str, *,
        length: tuple[float, float] = (18.0, 32.0), region: Edges = EVERYWHERE,
    ) -> Thing | None:  # fmt: skip
        """Draw one of the base model's named things where there is room; None if there is none."""
        box = self.add(rng, thing(rng, shape, color, rng.uniform(*length)), region)
        return None if box is None else Thing(shape, color, box)

    def paste(self, layer: Floats, left: int, top: int) -> None:
        """Put a thing with its sheet's corner at (left, top); it may reach over the edge."""
        view, part = sprites.windows(layer.shape, left, top, self.pixels.shape[0])
        patch, under = layer[part], self.pixels[view]
        colour, cover = patch[..., :3], patch[..., 3:]
        weight = float(cover.sum())
        if weight:
            ink = (colour * cover).sum((0, 1)) / weight
            gap = ink - (under * cover).sum((0, 1)) / weight
            if np.abs(gap).mean() < FAINT:
                rim = np.minimum(1.0, 2.0 * sprites.softened(patch[..., 3], 1.2))
                under = under + rim[..., None] * ((20.0 if ink.mean() > 115 else 235.0) - under)
        self.pixels[view] = under + cover * (colour - under)

    def with_middle(self, layer: Floats, x: float, y: float) -> "Board":
        """A copy of the board with the middle of a layer at (x, y) in pixels."""
        board = Board(self.pixels.copy())
        board.paste(layer, round(x - layer.shape[1] / 2), round(y - layer.shape[0] / 2))
        return board

    def image(self, rng: Rng) -> Image.Image:
        """What a camera makes of it: light, tint, blur and grain."""
        tint = rng.uniform(0.88, 1.1) * (1 + rng.uniform(-0.03, 0.03, 3)).astype(np.float32)
        pixels = np.clip(self.pixels * tint, 0, 255).astype(np.uint8)
        return Image.fromarray(sprites.grainy(pixels, rng, 0.8, 7))


def extent(layer: Floats) -> tuple[int, int, int, int]:
    solid = layer[..., 3] > SOLID
    return bounds(solid if solid.any() else np.ones_like(solid))


def thing(rng: Rng, shape: str, color: str, length: float) -> Floats:
    cover, rgb = sprites.draw_sprite(shape, color, length, rng)
    return np.dstack([rgb * 255, cover]).astype(np.float32)


def resized(layer: Floats, factor: float) -> Floats:
    width, height = (max(1, round(side * factor)) for side in layer.shape[1::-1])
    cover = layer[..., 3:]
    # Colours are weighted by coverage, so that what is transparent does not bleed in.
    planes = map(Image.fromarray, np.moveaxis(np.dstack([layer[..., :3] * cover, cover]), 2, 0))
    sized = [plane.resize((width, height), Image.Resampling.BILINEAR) for plane in planes]
    scaled: Floats = np.dstack([np.asarray(plane) for plane in sized])
    scaled[..., :3] /= np.maximum(scaled[..., 3:], 1e-3)
    return np.asarray(np.clip(scaled, 0, 255), dtype=np.float32)


def fitted(rng: Rng, layer: Floats, length: tuple[float, float] = (20.0, 30.0)) -> Floats:
    """The layer at a size of which the longer side lies in a range of pixels."""
    x0, y0, x1, y1 = extent(layer)
    return resized(layer, rng.uniform(*length) / max(x1 - x0, y1 - y0))
