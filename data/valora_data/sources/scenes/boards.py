"""Boards that the scenes of every task but detection are put on; weather over them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from hashlib import sha256
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageDraw

from valora_data.schema import Answer, Split, Task
from valora_data.sources.generic.scenes import (
    SIZE,
    Floats,
    Rng,
    Thing,
    draw_sprite,
    grainy,
    softened,
    windows,
)
from valora_data.sources.scenes.drawing import Edges, bounds, chosen
from valora_data.sources.scenes.photographs import PHOTOGRAPHS, photograph_crop

SOLID = 0.4  # coverage from which a pixel counts as part of a thing
PLACEMENTS = 30
GAP = 2  # pixels that stay free between things
FAINT = 30.0  # mean difference of colour, of 255, below which a rim sets a thing off
EVERYWHERE: Edges = (0.0, 0.0, 1.0, 1.0)


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
"""Domains by task and name, each registered by `scene` where it is drawn."""


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
    """The random numbers of one sample, whatever was drawn before it."""
    key = sha256(f"{seed}/{domain}/{split.value}/{index}".encode()).digest()
    return np.random.default_rng(int.from_bytes(key[:16], "little"))


@dataclass(slots=True)
class Board:
    """An image in the making, and the boxes of what was added to it."""

    pixels: Floats
    boxes: list[Edges] = field(default_factory=list)

    @classmethod
    def photograph(cls, rng: Rng, split: Split, without: str = "") -> Board:
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
            if all(
                max(box[0] - b[2], b[0] - box[2], box[1] - b[3], b[1] - box[3]) >= GAP
                for b in self.boxes
            ):
                self.paste(layer, left - x0, top - y0)
                self.boxes.append(box)
                return box
        return None

    def put(
        self, rng: Rng, shape: str, color: str, *, pattern: str = "plain",
        length: tuple[float, float] = (18.0, 32.0), region: Edges = EVERYWHERE,
    ) -> Thing | None:  # fmt: skip
        """Draw one of the base model's named things where there is room; None if there is none."""
        box = self.add(rng, thing(rng, shape, color, rng.uniform(*length), pattern), region)
        return None if box is None else Thing(shape, color, pattern, box)

    def paste(self, layer: Floats, left: int, top: int) -> None:
        """Put a thing with its sheet's corner at (left, top); it may reach over the edge."""
        view, part = windows(layer.shape, left, top, self.pixels.shape[0])
        patch, under = layer[part], self.pixels[view]
        colour, cover = patch[..., :3], patch[..., 3:]
        weight = float(cover.sum())
        if weight:
            ink = (colour * cover).sum((0, 1)) / weight
            gap = ink - (under * cover).sum((0, 1)) / weight
            if np.abs(gap).mean() < FAINT:
                rim = np.minimum(1.0, 2.0 * softened(patch[..., 3], 1.2))
                under = under + rim[..., None] * ((20.0 if ink.mean() > 115 else 235.0) - under)
        self.pixels[view] = under + cover * (colour - under)

    def with_middle(self, layer: Floats, x: float, y: float) -> Board:
        """A copy of the board with the middle of a layer at (x, y) in pixels."""
        board = Board(self.pixels.copy())
        board.paste(layer, round(x - layer.shape[1] / 2), round(y - layer.shape[0] / 2))
        return board

    def image(self, rng: Rng) -> Image.Image:
        """What a camera makes of it: light, tint, blur and grain."""
        tint = rng.uniform(0.88, 1.1) * (1 + rng.uniform(-0.03, 0.03, 3)).astype(np.float32)
        pixels = np.clip(self.pixels * tint, 0, 255).astype(np.uint8)
        return Image.fromarray(grainy(pixels, rng, 0.8, 7))


def extent(layer: Floats) -> tuple[int, int, int, int]:
    """Box around the solid pixels of a layer; of all of it if none is solid."""
    solid = layer[..., 3] > SOLID
    return bounds(solid if solid.any() else np.ones_like(solid))


def thing(rng: Rng, shape: str, color: str, length: float, pattern: str = "plain") -> Floats:
    """One of the base model's named things as a layer; `length` in pixels."""
    sprite = draw_sprite(shape, color, pattern, length, rng)
    return np.dstack([sprite.rgb * 255, sprite.alpha]).astype(np.float32)


def resized(layer: Floats, factor: float) -> Floats:
    """The layer at another size."""
    height, width = layer.shape[:2]
    size = (max(1, round(width * factor)), max(1, round(height * factor)))
    cover = layer[..., 3:]
    # Colours are weighted by coverage, so that what is transparent does not bleed in.
    weighted = np.dstack([layer[..., :3] * cover, cover])
    planes = [Image.fromarray(weighted[..., i]) for i in range(4)]
    scaled = np.dstack([np.asarray(p.resize(size, Image.Resampling.BILINEAR)) for p in planes])
    scaled[..., :3] /= np.maximum(scaled[..., 3:], 1e-3)
    result: Floats = np.clip(scaled, 0, 255).astype(np.float32)
    return result


def fitted(rng: Rng, layer: Floats, length: tuple[float, float] = (20.0, 30.0)) -> Floats:
    """The layer at a size of which the longer side lies in a range of pixels."""
    x0, y0, x1, y1 = extent(layer)
    return resized(layer, rng.uniform(*length) / max(x1 - x0, y1 - y0))


WEATHERS = ("clear", "rain", "snow", "fog", "night")


def add_weather(rng: Rng, board: Board, weather: str) -> None:
    """Change a board so that it shows one of `WEATHERS`."""
    pixels = board.pixels
    if weather == "rain":
        pixels *= rng.uniform(0.6, 0.8)
        pixels += np.array([0, 4, 14], np.float32)
        streaks = _streaks(rng, int(rng.integers(35, 60)), rng.uniform(0.1, 0.5))
        pixels += streaks * (np.array([205, 215, 230], np.float32) - pixels) * np.float32(0.7)
    elif weather == "snow":
        pixels += (np.float32(235) - pixels) * np.float32(rng.uniform(0.15, 0.35))
        pixels += _flakes(rng, int(rng.integers(50, 90))) * (np.float32(252) - pixels)
    elif weather == "fog":
        height = np.linspace(1, rng.uniform(0.6, 0.9), SIZE, dtype=np.float32)[:, None, None]
        grey = np.float32(rng.uniform(165, 215))
        pixels += (grey - pixels) * height * np.float32(rng.uniform(0.55, 0.72))
    elif weather == "night":
        pixels *= np.float32(rng.uniform(0.26, 0.38))
        pixels += np.array([0, 2, 16], np.float32)
        at = np.arange(SIZE, dtype=np.float32)
        for _ in range(int(rng.integers(1, 4))):  # lamps
            x, y = rng.uniform(8, SIZE - 8, 2)
            distance = (at[None, :] - x) ** 2 + (at[:, None] - y) ** 2
            glow = np.exp(-(distance / np.float32(rng.uniform(15, 60))))
            pixels += (glow[..., None] * np.array([255, 225, 150], np.float32)).astype(np.float32)


def _streaks(rng: Rng, count: int, slant: float) -> Floats:
    """Parallel strokes as coverage, (SIZE, SIZE, 1)."""
    sheet = Image.new("L", (SIZE, SIZE))
    pen = ImageDraw.Draw(sheet)
    lean = slant if rng.random() < 0.5 else -slant
    xs, ys = rng.uniform(0, SIZE, count), rng.uniform(-8, SIZE, count)
    for x, y, length in zip(xs, ys, rng.uniform(7, 15, count), strict=True):
        pen.line(((x, y), (x + lean * length, y + length)), fill=int(rng.integers(120, 255)))
    return np.asarray(sheet, dtype=np.float32)[..., None] / np.float32(255)


def _flakes(rng: Rng, count: int) -> Floats:
    """Soft dots as coverage, (SIZE, SIZE, 1)."""
    sheet = Image.new("L", (SIZE * 2, SIZE * 2))
    pen = ImageDraw.Draw(sheet)
    xs, ys = rng.uniform(0, SIZE * 2, count), rng.uniform(0, SIZE * 2, count)
    for x, y, r in zip(xs, ys, rng.uniform(1.2, 3.4, count), strict=True):
        pen.ellipse((x - r, y - r, x + r, y + r), fill=int(rng.integers(190, 255)))
    return np.asarray(sheet.reduce(2), dtype=np.float32)[..., None] / np.float32(255)
