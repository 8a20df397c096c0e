"""A pen that draws shapes in unit coordinates, posed and anti-aliased, and its sheets."""

from collections.abc import Sequence
from copy import copy
from functools import cache
from math import cos, pi, radians, sin
from typing import TypeVar

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw

from valora_data.sources.generic.scenes import Floats, Rng

T = TypeVar("T")
Colour = tuple[int, int, int]
Point = tuple[float, float]
Edges = tuple[float, float, float, float]

SUPERSAMPLING = 4
CURVE_POINTS = 28

GLYPHS = {
    "0": ((0, 0, 1, 0, 1, 1, 0, 1, 0, 0),), "1": ((0.1, 0.25, 0.5, 0, 0.5, 1),),
    "2": ((0, 0, 1, 0, 1, 0.5, 0, 0.5, 0, 1, 1, 1),),
    "3": ((0, 0, 1, 0, 1, 1, 0, 1), (0.3, 0.5, 1, 0.5)),
    "4": ((0, 0, 0, 0.55, 1, 0.55), (0.75, 0, 0.75, 1)),
    "5": ((1, 0, 0, 0, 0, 0.5, 1, 0.5, 1, 1, 0, 1),),
    "6": ((1, 0, 0, 0, 0, 1, 1, 1, 1, 0.5, 0, 0.5),), "7": ((0, 0, 1, 0, 0.4, 1),),
    "8": ((0, 0, 1, 0, 1, 1, 0, 1, 0, 0), (0, 0.5, 1, 0.5)),
    "A": ((0, 1, 0.5, 0, 1, 1), (0.2, 0.65, 0.8, 0.65)),
    "E": ((1, 0, 0, 0, 0, 1, 1, 1), (0, 0.5, 0.8, 0.5)),
    "H": ((0, 0, 0, 1), (1, 0, 1, 1), (0, 0.5, 1, 0.5)),
    "K": ((0, 0, 0, 1), (1, 0, 0, 0.55, 1, 1)), "L": ((0, 0, 0, 1, 1, 1),),
    "N": ((0, 1, 0, 0, 1, 1, 1, 0),), "P": ((0, 1, 0, 0, 1, 0, 1, 0.5, 0, 0.5),),
    "T": ((0, 0, 1, 0), (0.5, 0, 0.5, 1)), "X": ((0, 0, 1, 1), (1, 0, 0, 1)),
}  # fmt: skip


class Pen:
    """Draws on a sheet of `width` × `height` pixels that unit coordinates x, y, x, y, … span."""

    behind: "Pen | None" = None  # The pen of what the thing is mounted on

    def __init__(
        self, width: float, height: float, *, turn: float = 0.0, slant: float = 0.0,
        rise: float = 0.0, mirrored: bool = False, margin: float = 0.1,
    ) -> None:  # fmt: skip
        """Start with a transparent sheet, turned by degrees clockwise, slanted, then mirrored."""
        self.width, self.height = width, height
        angle = radians(turn)

        def turned(x: float, y: float) -> Point:
            return (
                SUPERSAMPLING * (x * cos(angle) - y * sin(angle)),
                SUPERSAMPLING * (x * sin(angle) + y * cos(angle)),
            )

        # Where one unit of x and one unit of y go, in supersampled pixels.
        self._x = turned((-1.0 if mirrored else 1.0) * width, rise * width)
        self._y = turned(slant * height, height)
        self._left = self._top = 0.0
        ends = (-margin, 1 + margin)
        xs, ys = zip(*self._place([c for u in ends for v in ends for c in (u, v)]), strict=True)
        self._left, self._top = min(xs), min(ys)
        columns, rows = (int(max(at) - min(at)) // SUPERSAMPLING + 1 for at in (xs, ys))
        self._size = (columns * SUPERSAMPLING, rows * SUPERSAMPLING)
        self._start()

    def _start(self) -> None:
        # What is drawn covers a pixel or does not, so that colours are premultiplied already, as
        # in mode RGBa; Pillow cannot draw in it, but in RGBX, which has the same four channels.
        self._image = Image.new("RGBX", self._size, (0, 0, 0, 0))
        self._draw = ImageDraw.Draw(self._image)

    def backing(self) -> "Pen":
        """A pen of the same stance for what the thing is mounted on."""
        self.behind = copy(self)
        self.behind._start()
        return self.behind

    def _place(self, at: Sequence[float]) -> list[Point]:
        (a, b), (c, d), left, top = self._x, self._y, self._left, self._top
        return [
            (u * a + v * c - left, u * b + v * d - top)
            for u, v in zip(at[::2], at[1::2], strict=True)
        ]

    def fill(self, colour: Colour, *at: float) -> None:
        self._draw.polygon(self._place(at), fill=colour)

    def box(self, colour: Colour, x0: float, y0: float, x1: float, y1: float) -> None:
        self.fill(colour, x0, y0, x1, y0, x1, y1, x0, y1)

    def oval(self, colour: Colour, x: float, y: float, rx: float, ry: float) -> None:
        self.fill(colour, *arc(x, y, rx, ry))

    def disc(self, colour: Colour, x: float, y: float, radius: float) -> None:
        self.oval(colour, x, y, radius / self.width, radius / self.height)

    def line(self, colour: Colour, width: float, *at: float) -> None:
        thickness = max(1, round(width * SUPERSAMPLING))
        self._draw.line(self._place(at), fill=colour, width=thickness, joint="curve")

    def limb(self, colour: Colour, width: float, *at: float) -> None:
        self.line(colour, width, *at)
        for x, y in (at[:2], at[-2:]):
            self.disc(colour, x, y, width / 2)

    def ring(
        self, colour: Colour, width: float, x: float, y: float, radius: float, narrow: float = 1.0
    ) -> None:
        """The outline of a circle, `narrow` times as wide as high."""
        at = arc(x, y, radius * narrow / self.width, radius / self.height)
        self.line(colour, width, *at, *at[:4])

    def text(self, colour: Colour, width: float, text: str, *box: float) -> None:
        """Characters of `GLYPHS` side by side in a box."""
        x0, y0, x1, y1 = box
        gap = 0.45
        advance = (x1 - x0) / (len(text) + (len(text) - 1) * gap)
        for index, character in enumerate(text):
            left = x0 + index * advance * (1 + gap)
            for stroke in GLYPHS[character]:
                points = zip(stroke[::2], stroke[1::2], strict=True)
                at = [c for u, v in points for c in (left + u * advance, y0 + v * (y1 - y0))]
                self.line(colour, width, *at)

    def layer(self) -> Floats:
        """What was drawn so far: RGB in [0, 255] and coverage in [0, 1], (height, width, 4)."""
        small = self._image.reduce(SUPERSAMPLING)
        small = Image.frombytes("RGBa", small.size, small.tobytes()).convert("RGBA")
        pixels = np.asarray(small, dtype=np.float32)
        pixels[..., 3] /= 255
        return pixels


def arc(
    x: float, y: float, rx: float, ry: float, *, start: float = 0.0, end: float = 2 * pi
) -> list[float]:
    """An ellipse's outline between two angles (radians, clockwise from the right)."""
    return [c for u, v in _unit_arc(start, end) for c in (x + rx * u, y + ry * v)]


@cache
def _unit_arc(start: float, end: float) -> tuple[Point, ...]:
    whole = end - start >= 2 * pi
    count = CURVE_POINTS if whole else CURVE_POINTS // 2
    steps = count if whole else count - 1
    angles = (start + (end - start) * i / steps for i in range(count))
    return tuple((cos(a), sin(a)) for a in angles)


def blob(rng: Rng, x: float, y: float, rx: float, ry: float) -> list[float]:
    """An irregular rounded outline that fills about the ellipse."""
    angles = np.linspace(0, 2 * pi, CURVE_POINTS, endpoint=False)
    waves = np.arange(2, 5)[:, None] * angles + rng.uniform(0, 2 * pi, (3, 1))
    reach = 1 + (rng.uniform(0.02, 0.12, (3, 1)) * np.sin(waves)).sum(0)
    at = np.stack([x + rx * reach * np.cos(angles), y + ry * reach * np.sin(angles)], axis=1)
    points: list[float] = at.ravel().tolist()
    return points


def chosen(rng: Rng, options: Sequence[T]) -> T:
    return options[int(rng.integers(len(options)))]


def varied(rng: Rng, colour: Colour, spread: int = 25) -> Colour:
    """A colour near the given one: brightness moves most, hue a little."""
    lightness = rng.uniform(-spread, spread)
    r, g, b = (
        int(min(255, max(0, channel + lightness + rng.uniform(-spread / 3, spread / 3))))
        for channel in colour
    )
    return (r, g, b)


def pick(rng: Rng, options: Sequence[Colour], spread: int = 18) -> Colour:
    return varied(rng, chosen(rng, options), spread)


def scaled(colour: Colour, factor: float) -> Colour:
    r, g, b = (int(min(255, max(0, channel * factor))) for channel in colour)
    return (r, g, b)


def lit(layer: Floats, direction: Point, strength: float) -> Floats:
    """The layer as seen under light that comes from `direction` (a unit vector, y down)."""
    y, x = (np.linspace(-1, 1, count, dtype=np.float32) for count in layer.shape[:2])
    layer = layer.copy()
    shade(layer, 1 + strength * (direction[0] * x + direction[1] * y[:, None]))
    return layer


def shade(pixels: Floats, factor: npt.NDArray[np.floating]) -> None:
    for channel in range(3):  # a loop over three channels would be the innermost one
        pixels[..., channel] *= factor


def bounds(mask: npt.NDArray[np.bool_]) -> tuple[int, int, int, int]:
    columns, rows = np.flatnonzero(mask.any(0)), np.flatnonzero(mask.any(1))
    if not len(columns):
        return (0, 0, 0, 0)
    return (int(columns[0]), int(rows[0]), int(columns[-1]) + 1, int(rows[-1]) + 1)
