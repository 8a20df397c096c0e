"""A pen that draws shapes in unit coordinates, posed and anti-aliased, and layers to stack."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import cos, pi, radians, sin
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image, ImageDraw, ImageFilter

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

Colour = tuple[int, int, int]
Point = tuple[float, float]

SUPERSAMPLING = 4
CURVE_POINTS = 28

# Strokes of plate characters in a unit square, y down; one tuple per connected stroke.
GLYPHS: tuple[tuple[tuple[Point, ...], ...], ...] = (
    (((0, 0), (1, 0), (1, 1), (0, 1), (0, 0)),),  # 0
    (((0.1, 0.25), (0.5, 0), (0.5, 1)),),  # 1
    (((0, 0), (1, 0), (1, 0.5), (0, 0.5), (0, 1), (1, 1)),),  # 2
    (((0, 0), (1, 0), (1, 1), (0, 1)), ((0.3, 0.5), (1, 0.5))),  # 3
    (((0, 0), (0, 0.55), (1, 0.55)), ((0.75, 0), (0.75, 1))),  # 4
    (((1, 0), (0, 0), (0, 0.5), (1, 0.5), (1, 1), (0, 1)),),  # 5
    (((1, 0), (0, 0), (0, 1), (1, 1), (1, 0.5), (0, 0.5)),),  # 6
    (((0, 0), (1, 0), (0.4, 1)),),  # 7
    (((0, 0), (1, 0), (1, 1), (0, 1), (0, 0)), ((0, 0.5), (1, 0.5))),  # 8
    (((0, 1), (0.5, 0), (1, 1)), ((0.2, 0.65), (0.8, 0.65))),  # A
    (((1, 0), (0, 0), (0, 1), (1, 1)), ((0, 0.5), (0.8, 0.5))),  # E
    (((0, 0), (0, 1)), ((1, 0), (1, 1)), ((0, 0.5), (1, 0.5))),  # H
    (((0, 0), (0, 1)), ((1, 0), (0, 0.55), (1, 1))),  # K
    (((0, 0), (0, 1), (1, 1)),),  # L
    (((0, 1), (0, 0), (1, 1), (1, 0)),),  # N
    (((0, 1), (0, 0), (1, 0), (1, 0.5), (0, 0.5)),),  # P
    (((0, 0), (1, 0)), ((0.5, 0), (0.5, 1))),  # T
    (((0, 0), (1, 1)), ((1, 0), (0, 1))),  # X
)


@dataclass(frozen=True, slots=True)
class Pose:
    """How a shape stands: turned, slanted, and mirrored.

    Attributes:
        turn: Rotation in degrees, clockwise.
        slant: Horizontal shift per unit of height, as seen from the side.
        rise: Vertical shift per unit of width: the slope of a surface seen at an angle.
        mirrored: Whether left and right are swapped.
    """

    turn: float = 0.0
    slant: float = 0.0
    rise: float = 0.0
    mirrored: bool = False


@dataclass(frozen=True, slots=True)
class Layer:
    """A picture of one thing, to be stacked on others.

    Attributes:
        pixels: RGB and coverage, (height, width, 4) float32; RGB in [0, 255], coverage in [0, 1].
    """

    pixels: npt.NDArray[np.float32]


class Pen:
    """Draws into a rectangle of `width` × `height` pixels that unit coordinates span.

    Everything is drawn `SUPERSAMPLING` times as large and reduced at the end. Points may lie
    outside the unit square by `margin`.
    """

    def __init__(
        self, width: float, height: float, pose: Pose | None = None, margin: float = 0.1
    ) -> None:
        """Start with a transparent sheet."""
        pose = pose or Pose()
        self.width, self.height = width, height
        angle = radians(pose.turn)
        sign = -1.0 if pose.mirrored else 1.0
        # Columns: where one unit of x and one unit of y go, in supersampled pixels.
        self._x = _turned(sign * width, pose.rise * width, angle)
        self._y = _turned(pose.slant * height, height, angle)
        corners = [
            (u * self._x[0] + v * self._y[0], u * self._x[1] + v * self._y[1])
            for u in (-margin, 1 + margin)
            for v in (-margin, 1 + margin)
        ]
        self._left = min(x for x, _ in corners)
        self._top = min(y for _, y in corners)
        size = (
            int(max(x for x, _ in corners) - self._left) // SUPERSAMPLING + 1,
            int(max(y for _, y in corners) - self._top) // SUPERSAMPLING + 1,
        )
        # What is drawn covers a pixel or does not, so that colours are premultiplied already, as
        # in mode RGBa; Pillow cannot draw in it, but in RGBX, which has the same four channels.
        self._image = Image.new(
            "RGBX", (size[0] * SUPERSAMPLING, size[1] * SUPERSAMPLING), (0, 0, 0, 0)
        )
        self._draw = ImageDraw.Draw(self._image)

    def _place(self, points: Sequence[Point]) -> list[Point]:
        (a, b), (c, d), left, top = self._x, self._y, self._left, self._top
        return [(u * a + v * c - left, u * b + v * d - top) for u, v in points]

    def polygon(self, points: Sequence[Point], fill: Colour) -> None:
        """A filled polygon."""
        self._draw.polygon(self._place(points), fill=fill)

    def rectangle(self, x0: float, y0: float, x1: float, y1: float, fill: Colour) -> None:
        """A filled rectangle; the pose may make it a parallelogram."""
        self.polygon(((x0, y0), (x1, y0), (x1, y1), (x0, y1)), fill)

    def ellipse(self, x: float, y: float, rx: float, ry: float, fill: Colour) -> None:
        """A filled ellipse with centre (x, y)."""
        self.polygon(arc(x, y, rx, ry), fill)

    def disc(self, x: float, y: float, radius: float, fill: Colour) -> None:
        """A filled circle; `radius` in pixels."""
        self.ellipse(x, y, radius / self.width, radius / self.height, fill)

    def line(self, points: Sequence[Point], fill: Colour, width: float) -> None:
        """A stroke through points; `width` in pixels."""
        thickness = max(1, round(width * SUPERSAMPLING))
        self._draw.line(self._place(points), fill=fill, width=thickness, joint="curve")

    def limb(self, points: Sequence[Point], fill: Colour, width: float) -> None:
        """A stroke with round ends; `width` in pixels."""
        self.line(points, fill, width)
        for x, y in (points[0], points[-1]):
            self.disc(x, y, width / 2, fill)

    def ring(self, x: float, y: float, radius: float, fill: Colour, width: float) -> None:
        """A circle's outline; `radius` and `width` in pixels."""
        points = arc(x, y, radius / self.width, radius / self.height)
        self.line([*points, points[0], points[1]], fill, width)

    def text(
        self,
        glyphs: Sequence[int],
        box: tuple[float, float, float, float],
        fill: Colour,
        width: float,
        gap: float = 0.45,
    ) -> None:
        """Characters side by side in a box."""
        x0, y0, x1, y1 = box
        advance = (x1 - x0) / (len(glyphs) + (len(glyphs) - 1) * gap)
        for place, glyph in enumerate(glyphs):
            left = x0 + place * advance * (1 + gap)
            for stroke in GLYPHS[glyph]:
                points = [(left + u * advance, y0 + v * (y1 - y0)) for u, v in stroke]
                self.line(points, fill, width)

    def layer(self) -> Layer:
        """What was drawn so far, reduced to pixels of the scene."""
        small = self._image.reduce(SUPERSAMPLING)
        small = Image.frombytes("RGBa", small.size, small.tobytes()).convert("RGBA")
        pixels = np.asarray(small, dtype=np.float32)
        pixels[..., 3] /= 255
        return Layer(pixels)


def _turned(x: float, y: float, angle: float) -> Point:
    return (
        SUPERSAMPLING * (x * cos(angle) - y * sin(angle)),
        SUPERSAMPLING * (x * sin(angle) + y * cos(angle)),
    )


def arc(
    x: float, y: float, rx: float, ry: float, *, start: float = 0.0, end: float = 2 * pi
) -> list[Point]:
    """Points of an ellipse's outline between two angles (radians, clockwise from the right)."""
    return [(x + rx * u, y + ry * v) for u, v in _unit_arc(start, end)]


@cache
def _unit_arc(start: float, end: float) -> tuple[Point, ...]:
    whole = end - start >= 2 * pi
    count = CURVE_POINTS if whole else CURVE_POINTS // 2
    steps = count if whole else count - 1
    angles = (start + (end - start) * i / steps for i in range(count))
    return tuple((cos(a), sin(a)) for a in angles)


def blob(rng: np.random.Generator, x: float, y: float, rx: float, ry: float) -> list[Point]:
    """Points of an irregular rounded outline that fills about the ellipse."""
    angles = np.linspace(0, 2 * pi, CURVE_POINTS, endpoint=False)
    waves = np.arange(2, 5)[:, None] * angles + rng.uniform(0, 2 * pi, (3, 1))
    reach = 1 + (rng.uniform(0.02, 0.12, (3, 1)) * np.sin(waves)).sum(0)
    xs, ys = x + rx * reach * np.cos(angles), y + ry * reach * np.sin(angles)
    return list(zip(xs.tolist(), ys.tolist(), strict=True))


def varied(rng: np.random.Generator, colour: Sequence[int], spread: int = 25) -> Colour:
    """A colour near the given one: brightness moves most, hue a little."""
    lightness = rng.uniform(-spread, spread)
    r, g, b = (
        int(min(255, max(0, channel + lightness + rng.uniform(-spread / 3, spread / 3))))
        for channel in colour
    )
    return (r, g, b)


def scaled(colour: Colour, factor: float) -> Colour:
    """A darker (factor < 1) or lighter colour."""
    r, g, b = (int(min(255, max(0, channel * factor))) for channel in colour)
    return (r, g, b)


def lit(layer: Layer, direction: Point, strength: float) -> Layer:
    """The layer as seen under light that comes from `direction` (a unit vector, y down)."""
    height, width = layer.pixels.shape[:2]
    shade = 1 + strength * (direction[0] * _line(width) + direction[1] * _line(height)[:, None])
    pixels = layer.pixels.copy()
    for channel in range(3):  # loops over three channels would be the innermost ones
        pixels[..., channel] *= shade
    return Layer(pixels)


@cache
def _line(count: int) -> npt.NDArray[np.float32]:
    """Numbers from -1 to 1."""
    return np.linspace(-1, 1, count, dtype=np.float32)


def softened(coverage: npt.NDArray[np.float32], radius: float) -> npt.NDArray[np.float32]:
    """A coverage map in [0, 1] after Gaussian blur with `radius` pixels."""
    image = Image.fromarray((coverage * 255).astype(np.uint8))
    blurred = image.filter(ImageFilter.GaussianBlur(radius))
    return np.asarray(blurred, dtype=np.float32) / np.float32(255)
