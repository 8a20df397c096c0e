"""Colours, stances and mounts that the built-in classes and their near-misses share."""

from __future__ import annotations

from dataclasses import dataclass
from math import cos, pi, sin
from typing import TYPE_CHECKING

from valora_data.sources.scenes.drawing import Colour, Layer, Pen, Pose, arc, scaled, varied

if TYPE_CHECKING:
    import numpy as np

WHITE: Colour = (236, 236, 230)
BLACK: Colour = (24, 24, 28)
GREY: Colour = (125, 125, 128)
RED: Colour = (196, 30, 36)
BLUE: Colour = (30, 70, 170)
YELLOW: Colour = (240, 190, 30)
GREEN: Colour = (60, 115, 45)
GLASS: Colour = (70, 90, 110)
TYRE: Colour = (28, 28, 30)

PAINTS: tuple[Colour, ...] = (
    (190, 30, 35), (30, 70, 160), (225, 225, 222), (40, 42, 48), (150, 155, 160),
    (225, 175, 40), (40, 110, 80), (220, 110, 40), (110, 50, 100), (90, 160, 190),
)  # fmt: skip
CLOTHES: tuple[Colour, ...] = (
    (170, 40, 50), (40, 70, 140), (60, 60, 66), (220, 215, 205), (60, 120, 80),
    (220, 170, 60), (120, 70, 120), (110, 80, 55), (230, 120, 140),
)  # fmt: skip
SKIN: tuple[Colour, ...] = ((240, 200, 170), (214, 160, 120), (160, 105, 70), (100, 65, 45))
HAIR: tuple[Colour, ...] = ((30, 24, 20), (90, 60, 35), (190, 150, 80), (150, 150, 150))
LEAVES: tuple[Colour, ...] = (
    (62, 118, 42), (40, 92, 40), (104, 136, 50), (76, 104, 62), (52, 128, 66), (176, 110, 36),
)  # fmt: skip
WOOD: Colour = (98, 70, 46)
TRIANGLE = ((0.5, 0.04), (1.0, 0.94), (0.0, 0.94))


@dataclass(frozen=True, slots=True)
class Drawing:
    """A thing and, on sheets of the same size, what it is mounted on.

    Attributes:
        thing: What a box goes around.
        behind: A pole or bumper: never part of the box, or None.
    """

    thing: Layer
    behind: Layer | None = None


def pick(rng: np.random.Generator, options: tuple[Colour, ...], spread: int = 18) -> Colour:
    """One of some colours, varied."""
    return varied(rng, options[int(rng.integers(len(options)))], spread)


def sheets(
    width: float, height: float, pose: Pose | None = None, margin: float = 0.1
) -> tuple[Pen, Pen]:
    """Two pens of the same stance: for a thing and for what is behind it."""
    return Pen(width, height, pose, margin), Pen(width, height, pose, margin)


def plate_pose(rng: np.random.Generator) -> Pose:
    """A flat thing seen at an angle, as plates are."""
    return Pose(
        turn=float(rng.normal(0, 4)),
        slant=float(rng.normal(0, 0.08)),
        rise=float(rng.normal(0, 0.05)),
    )


def bumper(rng: np.random.Generator, pen: Pen) -> None:
    """The body of a car around a plate, with lights."""
    paint = pick(rng, PAINTS)
    pen.rectangle(-0.3, -0.5, 1.3, 1.45, paint)
    pen.rectangle(-0.3, 1.1, 1.3, 1.45, scaled(paint, 0.6))
    for side in (-0.3, 1.1):
        pen.rectangle(side, -0.35, side + 0.2, 0.25, varied(rng, (200, 60, 50), 30))


def sign_sheets(
    rng: np.random.Generator, size: float | None = None, margin: float = 1.2
) -> tuple[Pen, Pen]:
    """Pens for a sign, of a size in pixels if that is given, and the pole behind it."""
    size = rng.uniform(16, 38) if size is None else size
    pose = Pose(turn=float(rng.normal(0, 5)), rise=float(rng.normal(0, 0.05)))
    return sheets(size * rng.uniform(0.72, 1.0), size, pose, margin)


def pole(rng: np.random.Generator, pen: Pen) -> None:
    """A pole from the middle of a sign down."""
    pen.line(((0.5, 0.5), (0.5, rng.uniform(1.6, 2.2))), varied(rng, (140, 140, 145), 30), 2.0)


def ground_pose(rng: np.random.Generator) -> Pose:
    """A thing that stands on uneven ground, facing left or right."""
    return Pose(turn=float(rng.normal(0, 3)), mirrored=bool(rng.random() < 0.5))


def bicycle_sheet(rng: np.random.Generator) -> Pen:
    """A pen for a bicycle seen from the side or obliquely."""
    width = rng.uniform(32, 60)
    # Seen obliquely a bicycle gets shorter, not lower.
    return Pen(width, width * rng.uniform(0.56, 0.78), ground_pose(rng))


def spoked(pen: Pen, x: float, y: float, radius: float, tyre: Colour) -> None:
    """A spoked wheel; `radius` in pixels."""
    rx, ry = radius * 0.92 / pen.width, radius / pen.height
    for i in range(4):
        angle = pi * i / 4
        dx, dy = rx * cos(angle), ry * sin(angle)
        pen.line(((x - dx, y - dy), (x + dx, y + dy)), (160, 162, 166), 0.45)
    outline = arc(x, y, rx, ry)
    pen.line([*outline, *outline[:2]], tyre, 1.7)


def flipped(points: tuple[tuple[float, float], ...]) -> list[tuple[float, float]]:
    """Points upside down."""
    return [(x, 1 - y) for x, y in points]
