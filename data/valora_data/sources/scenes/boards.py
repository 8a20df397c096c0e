"""Boards: photographs that the built-in scenes, except those of detection, draw on."""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import sha256
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw, ImageFilter

from valora_data.sources.generic.scenes import draw_sprite
from valora_data.sources.scenes.drawing import Layer, softened
from valora_data.sources.scenes.photographs import PHOTOGRAPHS, photograph_crop

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from valora_data.schema import Answer, Split, Task

SIZE = 96
SOLID = 0.4
"""Coverage from which a pixel counts as part of a thing."""
PLACEMENTS = 30
GAP = 2
"""Pixels that stay free between things."""
FAINT = 30.0
"""Mean difference of colour, of 255, below which a thing gets a rim to set it off."""

Edges = tuple[float, float, float, float]
Region = tuple[float, float, float, float]
EVERYWHERE: Region = (0.0, 0.0, 1.0, 1.0)
LEFT: Region = (0.0, 0.0, 0.5, 1.0)
RIGHT: Region = (0.5, 0.0, 1.0, 1.0)


def scene_rng(domain: str, split: Split, index: int, seed: int) -> np.random.Generator:
    """The random numbers of one sample, whatever was drawn before it."""
    key = sha256(f"{seed}/{domain}/{split.value}/{index}".encode()).digest()
    return np.random.default_rng(int.from_bytes(key[:16], "little"))


@dataclass(slots=True)
class Board:
    """An image in the making, `SIZE` pixels square."""

    pixels: npt.NDArray[np.float32]
    boxes: list[Edges] = field(default_factory=list)

    @classmethod
    def photograph(
        cls, rng: np.random.Generator, split: Split, without: str | None = None
    ) -> Board:
        """A board with a crop of a photograph that only this split shows."""
        suitable = [
            number
            for number, photograph in enumerate(PHOTOGRAPHS)
            if without is None or without not in photograph.file
        ]
        number = suitable[int(rng.integers(len(suitable)))]
        return cls(photograph_crop(rng, split, SIZE, number).astype(np.float32))

    @classmethod
    def slate(cls, rng: np.random.Generator) -> Board:
        """A board of one dark colour, to write on."""
        return cls(np.zeros((SIZE, SIZE, 3), np.float32) + np.float32(rng.uniform(0, 60, 3)))

    def copy(self) -> Board:
        """A copy of the board, on which other things can be drawn."""
        return Board(self.pixels.copy(), list(self.boxes))

    def add(
        self, rng: np.random.Generator, layer: Layer, region: Region = EVERYWHERE
    ) -> Edges | None:
        """Put a thing at a random place where it covers no other."""
        x0, y0, x1, y1 = extent(layer)
        width, height = x1 - x0, y1 - y0
        low = np.array([region[0] * SIZE - width / 2, region[1] * SIZE - height / 2])
        high = np.array([region[2] * SIZE - width / 2, region[3] * SIZE - height / 2])
        low, high = np.maximum(low, 0), np.minimum(high, [SIZE - width, SIZE - height])
        if (low > high).any():
            return None
        for corner in rng.uniform(low, high, (PLACEMENTS, 2)):
            left, top = (int(v) for v in np.round(corner))
            box = (float(left), float(top), float(left + width), float(top + height))
            if all(_apart(box, other) for other in self.boxes):
                self.paste(layer, left - x0, top - y0)
                self.boxes.append(box)
                return box
        return None

    def paste(self, layer: Layer, left: int, top: int) -> None:
        """Put a thing with its sheet's corner at (left, top); it may reach over the edge."""
        height, width = layer.pixels.shape[:2]
        rows, columns = self.pixels.shape[:2]
        x0, y0, x1, y1 = (
            max(0, left),
            max(0, top),
            min(columns, left + width),
            min(rows, top + height),
        )
        if x0 >= x1 or y0 >= y1:
            return
        patch = layer.pixels[y0 - top : y1 - top, x0 - left : x1 - left]
        under = self.pixels[y0:y1, x0:x1]
        colour, cover = patch[..., :3], patch[..., 3:]
        weight = float(cover.sum())
        if weight:
            ink = (colour * cover).sum((0, 1)) / weight
            gap = ink - (under * cover).sum((0, 1)) / weight
            if np.abs(gap).mean() < FAINT:
                rim = np.minimum(1.0, 2.0 * softened(np.ascontiguousarray(patch[..., 3]), 1.2))
                under = under + rim[..., None] * ((20.0 if ink.mean() > 115 else 235.0) - under)
        self.pixels[y0:y1, x0:x1] = under + cover * (colour - under)

    def image(self, rng: np.random.Generator) -> Image.Image:
        """What a camera makes of it: light, tint, blur and grain."""
        tint = rng.uniform(0.88, 1.1) * (1 + rng.uniform(-0.03, 0.03, 3)).astype(np.float32)
        photo = Image.fromarray(np.clip(self.pixels * tint, 0, 255).astype(np.uint8))
        if rng.random() < 0.5:
            photo = photo.filter(ImageFilter.GaussianBlur(float(rng.uniform(0.2, 0.8))))
        grain = rng.standard_normal((*photo.size[::-1], 3), dtype=np.float32) * rng.uniform(0, 7)
        noisy = np.asarray(photo, dtype=np.float32) + grain
        return Image.fromarray(np.clip(noisy, 0, 255).astype(np.uint8))


def extent(layer: Layer) -> tuple[int, int, int, int]:
    """Box around the solid pixels of a layer; of all of it if none is solid."""
    solid = layer.pixels[..., 3] > SOLID
    columns, rows = np.flatnonzero(solid.any(0)), np.flatnonzero(solid.any(1))
    if not len(columns):
        height, width = solid.shape
        return (0, 0, width, height)
    return (int(columns[0]), int(rows[0]), int(columns[-1]) + 1, int(rows[-1]) + 1)


def thing(
    rng: np.random.Generator, shape: str, color: str, length: float, pattern: str = "plain"
) -> Layer:
    """One of the base model's named things as a layer; `length` in pixels."""
    sprite = draw_sprite(shape, color, pattern, length, rng)
    return Layer(np.dstack([sprite.rgb * 255, sprite.alpha]).astype(np.float32))


def resized(layer: Layer, factor: float) -> Layer:
    """The layer at another size."""
    height, width = layer.pixels.shape[:2]
    size = (max(1, round(width * factor)), max(1, round(height * factor)))
    cover = layer.pixels[..., 3:]
    # Colours are weighted by coverage, so that what is transparent does not bleed in.
    weighted = np.dstack([layer.pixels[..., :3] * cover, cover])
    planes = [
        np.asarray(Image.fromarray(weighted[..., i]).resize(size, Image.Resampling.BILINEAR))
        for i in range(4)
    ]
    scaled = np.dstack(planes)
    scaled[..., :3] /= np.maximum(scaled[..., 3:], 1e-3)
    return Layer(np.clip(scaled, 0, 255).astype(np.float32))


def _apart(a: Edges, b: Edges) -> bool:
    return a[2] + GAP <= b[0] or b[2] + GAP <= a[0] or a[3] + GAP <= b[1] or b[3] + GAP <= a[1]


@dataclass(frozen=True, slots=True)
class Drawn:
    """One sample before it has a name."""

    images: tuple[Image.Image, ...]
    answer: Answer
    prompt: str | None = None


@dataclass(frozen=True, slots=True)
class SceneDomain:
    """A built-in domain."""

    task: Task
    prompt: str
    draw: Callable[[np.random.Generator, Split], Drawn] | None = None
    labels: tuple[str, ...] = ()


def chosen(rng: np.random.Generator, options: Sequence[str]) -> str:
    """One of some words."""
    return options[int(rng.integers(len(options)))]


# ---- weather -----------------------------------------------------------------------------------

Floats = npt.NDArray[np.float32]
WEATHERS = ("clear", "rain", "snow", "fog", "night")


def add_weather(rng: np.random.Generator, board: Board, weather: str) -> None:
    """Change a board so that it shows one of `WEATHERS`."""
    pixels = board.pixels
    if weather == "rain":
        pixels *= rng.uniform(0.6, 0.8)
        pixels += _rgb(0, 4, 14)
        streaks = _strokes(rng, int(rng.integers(35, 60)), (7, 15), rng.uniform(0.1, 0.5))
        pixels += streaks * (_rgb(205, 215, 230) - pixels) * np.float32(0.7)
    elif weather == "snow":
        pixels += (np.float32(235) - pixels) * np.float32(rng.uniform(0.15, 0.35))
        flakes = _flakes(rng, int(rng.integers(50, 90)))
        pixels += flakes * (np.float32(252) - pixels)
    elif weather == "fog":
        height = np.linspace(1, rng.uniform(0.6, 0.9), SIZE, dtype=np.float32)[:, None, None]
        grey = np.float32(rng.uniform(165, 215))
        pixels += (grey - pixels) * height * np.float32(rng.uniform(0.55, 0.72))
    elif weather == "night":
        pixels *= np.float32(rng.uniform(0.26, 0.38))
        pixels += _rgb(0, 2, 16)
        for _ in range(int(rng.integers(1, 4))):
            _lamp(rng, pixels)
    board.pixels = pixels


def _strokes(
    rng: np.random.Generator, count: int, lengths: tuple[int, int], slant: float
) -> Floats:
    """Parallel strokes as coverage, (SIZE, SIZE, 1)."""
    sheet = Image.new("L", (SIZE, SIZE))
    pen = ImageDraw.Draw(sheet)
    lean = slant if rng.random() < 0.5 else -slant
    for x, y, length in zip(
        rng.uniform(0, SIZE, count), rng.uniform(-8, SIZE, count), rng.uniform(*lengths, count),
        strict=True,
    ):  # fmt: skip
        pen.line(((x, y), (x + lean * length, y + length)), fill=int(rng.integers(120, 255)))
    return np.asarray(sheet, dtype=np.float32)[..., None] / np.float32(255)


def _flakes(rng: np.random.Generator, count: int) -> Floats:
    """Soft dots as coverage, (SIZE, SIZE, 1)."""
    sheet = Image.new("L", (SIZE * 2, SIZE * 2))
    pen = ImageDraw.Draw(sheet)
    for x, y, r in zip(
        rng.uniform(0, SIZE * 2, count), rng.uniform(0, SIZE * 2, count),
        rng.uniform(1.2, 3.4, count), strict=True,
    ):  # fmt: skip
        pen.ellipse((x - r, y - r, x + r, y + r), fill=int(rng.integers(190, 255)))
    return np.asarray(sheet.reduce(2), dtype=np.float32)[..., None] / np.float32(255)


def _lamp(rng: np.random.Generator, pixels: Floats) -> None:
    x, y = rng.uniform(8, SIZE - 8, 2)
    at = np.arange(SIZE, dtype=np.float32)
    distance = ((at[None, :] - x) ** 2 + (at[:, None] - y) ** 2) / np.float32(rng.uniform(15, 60))
    glow = np.exp(-distance)[..., None] * _rgb(255, 225, 150)
    pixels += glow.astype(np.float32)


def _rgb(*levels: float) -> Floats:
    return np.array(levels, dtype=np.float32)
