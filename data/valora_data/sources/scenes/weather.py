"""Weather that is drawn over a picture: rain, snow, fog or night."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw

from valora_data.sources.scenes.boards import SIZE, Board

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
