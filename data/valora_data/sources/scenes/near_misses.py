"""Hard negatives of the built-in scenes: things that resemble the six classes.

A near-miss shares colour, outline or parts with its class and lacks what makes it one: characters
on a plate, border and symbol of a sign, windows and wheels of a vehicle, leaves of a plant, a frame
between two wheels, head and limbs of a person.
"""

from __future__ import annotations

from math import cos, pi, sin
from typing import TYPE_CHECKING

from valora_data.sources.scenes.drawing import Pen, Pose, arc, scaled, varied
from valora_data.sources.scenes.props import (
    BLACK,
    BLUE,
    CLOTHES,
    GLASS,
    GREY,
    LEAVES,
    PAINTS,
    RED,
    TRIANGLE,
    TYRE,
    WHITE,
    WOOD,
    YELLOW,
    Drawing,
    bicycle_sheet,
    bumper,
    flipped,
    ground_pose,
    pick,
    plate_pose,
    pole,
    sheets,
    sign_sheets,
    spoked,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import numpy as np


def _plain_board(rng: np.random.Generator) -> Drawing:
    """A plate-sized board: blank, with lines, with a picture, or striped; no characters."""
    width = rng.uniform(22, 48)
    height = max(9.0, width / rng.uniform(1.6, 4.2))
    pen, behind = sheets(width, height, plate_pose(rng), margin=0.6)
    mounted = rng.random() < 0.4
    if mounted:
        bumper(rng, behind)
    ground = varied(rng, (WHITE, YELLOW, WHITE, BLUE, GREY)[int(rng.integers(5))], 20)
    ink = BLACK if sum(ground) > 380 else WHITE
    pen.rectangle(0, 0, 1, 1, ground)
    kind = int(rng.integers(4))
    if kind == 0 or rng.random() < 0.5:
        pen.line(((0, 0), (1, 0), (1, 1), (0, 1), (0, 0)), ink, 0.9)
    if kind == 1:
        for y in (0.3, 0.5, 0.7):
            pen.line(((0.1, y), (0.9, y)), ink, 0.8)
    elif kind == 2:
        pen.polygon(
            ((0.1, 0.9), (0.4, 0.3), (0.6, 0.7), (0.75, 0.5), (0.9, 0.9)), pick(rng, PAINTS)
        )
    elif kind == 3:
        stripe = (RED, BLACK)[int(rng.integers(2))]
        for x in (0.05, 0.3, 0.55, 0.8):
            pen.polygon(((x, 1), (x + 0.1, 0), (x + 0.2, 0), (x + 0.1, 1)), stripe)
    return Drawing(pen.layer(), behind.layer() if mounted else None)


def _sign_like(rng: np.random.Generator) -> Drawing:
    """A plain disc, ball, triangle, hoop, clock or poster: a sign's colours, no symbol."""
    pen, behind = sign_sheets(rng)
    colour = varied(rng, (RED, BLUE, YELLOW, (230, 230, 225), (220, 110, 40))[int(rng.integers(5))])
    kind = int(rng.integers(6))
    if kind == 0:
        pen.ellipse(0.5, 0.5, 0.5, 0.5, colour)
    elif kind == 1:  # a ball: shaded, with a glint
        for step in range(5):
            shift = 0.05 * step
            pen.ellipse(0.5 - shift, 0.5 - shift, 0.5 - 0.09 * step, 0.5 - 0.09 * step,
                        scaled(colour, 0.65 + 0.14 * step))  # fmt: skip
    elif kind == 2:
        points = TRIANGLE if rng.random() < 0.5 else flipped(TRIANGLE)
        pen.polygon(points, colour)
    elif kind == 3:
        pen.ring(0.5, 0.5, pen.height * 0.45, colour, max(1.6, pen.height * 0.1))
    elif kind == 4:  # a clock
        pen.ellipse(0.5, 0.5, 0.5, 0.5, varied(rng, (80, 66, 56)))
        pen.ellipse(0.5, 0.5, 0.42, 0.42, WHITE)
        for length in (0.22, 0.34):
            angle = rng.uniform(0, 2 * pi)
            pen.line(
                ((0.5, 0.5), (0.5 + length * cos(angle), 0.5 + length * sin(angle))), BLACK, 1.2
            )
    else:  # a poster: blocks of several colours
        pen.rectangle(0.08, 0, 0.92, 1, WHITE)
        pen.rectangle(0.14, 0.06, 0.86, 0.55, pick(rng, PAINTS))
        pen.ellipse(rng.uniform(0.35, 0.65), 0.35, 0.15, 0.15, pick(rng, PAINTS))
        for y in (0.66, 0.76, 0.86):
            pen.line(((0.18, y), (rng.uniform(0.5, 0.82), y)), GREY, 1.0)
    mounted = rng.random() < 0.5
    if mounted:
        pole(rng, behind)
    return Drawing(pen.layer(), behind.layer() if mounted else None)


def _box_like(rng: np.random.Generator) -> Drawing:
    """A container, kiosk, suitcase or crate: a vehicle's size and paint, no wheels."""
    width = rng.uniform(26, 54)
    height = width * rng.uniform(0.45, 0.75)
    pen = Pen(width, height, ground_pose(rng))
    paint = pick(rng, PAINTS)
    kind = int(rng.integers(4))
    if kind == 0:  # container with ribs
        pen.rectangle(0, 0, 1, 1, paint)
        for i in range(1, 9):
            pen.line(((i / 9, 0.06), (i / 9, 0.94)), scaled(paint, 0.7), 1.0)
    elif kind == 1:  # kiosk
        pen.rectangle(0.08, 0.3, 0.92, 1, paint)
        pen.polygon(((0, 0.32), (0.2, 0), (0.8, 0), (1, 0.32)), pick(rng, PAINTS))
        pen.rectangle(0.16, 0.45, 0.4, 0.7, GLASS)
        pen.rectangle(0.6, 0.45, 0.82, 1, scaled(paint, 0.5))
    elif kind == 2:  # suitcase
        pen.line(((0.36, 0.2), (0.36, 0.04), (0.64, 0.04), (0.64, 0.2)), BLACK, 1.6)
        pen.rectangle(0.02, 0.18, 0.98, 1, paint)
        for x in (0.2, 0.76):
            pen.rectangle(x, 0.18, x + 0.05, 1, scaled(paint, 0.55))
    else:  # crate
        pen.rectangle(0, 0, 1, 1, varied(rng, (160, 120, 74)))
        for y in (0.02, 0.36, 0.7):
            pen.rectangle(0.02, y, 0.98, y + 0.27, varied(rng, (186, 142, 92), 12))
        pen.line(((0.04, 0.96), (0.96, 0.04)), (130, 94, 56), 2.0)
    return Drawing(pen.layer())


def _plant_like(rng: np.random.Generator) -> Drawing:
    """A rock, banded green ball, tent or umbrella: a plant's colour or outline, no leaves."""
    width = rng.uniform(22, 44)
    pen = Pen(width, width * rng.uniform(0.65, 1.0))
    kind = int(rng.integers(4))
    green = pick(rng, LEAVES if rng.random() < 0.6 else PAINTS)
    if kind == 0:
        stone = varied(rng, (128, 122, 114), 35)
        left, right = (rng.uniform(0.2, 0.4), 0.1), (rng.uniform(0.5, 0.75), 0.02)
        top = [(0.0, 1.0), (0.06, 0.5), left, right, (0.94, 0.4), (1.0, 1.0)]
        pen.polygon(top, stone)
        pen.polygon((top[2], top[3], (0.6, 0.5), (0.3, 0.6)), scaled(stone, 1.25))
        pen.polygon((top[4], top[5], (0.55, 1.0), (0.6, 0.5)), scaled(stone, 0.7))
    elif kind == 1:
        for step in range(6):
            shift, radius = 0.035 * step, 0.5 - 0.07 * step
            shade = scaled(green, 0.7 + 0.12 * step)
            pen.ellipse(0.5 - shift, 0.5 - shift, radius, radius, shade)
        pen.polygon(((0.03, 0.58), (0.97, 0.38), (0.99, 0.56), (0.07, 0.76)), WHITE)
    elif kind == 2:
        pen.polygon(((0.5, 0.0), (1.0, 1.0), (0.0, 1.0)), green)
        pen.polygon(((0.5, 0.0), (0.62, 1.0), (0.38, 1.0)), scaled(green, 0.5))
    else:
        pen.line(((0.5, 0.4), (0.5, 0.94), (0.58, 0.98)), (70, 60, 55), 1.5)
        pen.polygon(arc(0.5, 0.5, 0.5, 0.48, start=pi), green)
        pen.polygon(arc(0.5, 0.5, 0.18, 0.48, start=pi), WHITE)
    return Drawing(pen.layer())


def _bicycle_like(rng: np.random.Generator) -> Drawing:
    """Two rings, a frame without wheels, a lone wheel, spectacles or a hand cart."""
    pen = bicycle_sheet(rng)
    radius = pen.width * rng.uniform(0.18, 0.23)
    tyre, paint = varied(rng, TYRE, 20), pick(rng, PAINTS)
    kind = int(rng.integers(5))
    if kind == 0:
        for x in (0.24, 0.76):
            spoked(pen, x, 0.95 - radius / pen.height, radius, tyre)
    elif kind == 1:  # a trestle
        for x in (0.3, 0.7):
            pen.line(((x - 0.2, 0.95), (x, 0.2), (x + 0.2, 0.95)), paint, 1.8)
        for y, reach in ((0.2, 0.25), (0.6, 0.3)):
            pen.line(((0.5 - reach, y), (0.5 + reach, y)), paint, 1.8)
    elif kind == 2:
        spoked(pen, 0.5, 0.5, pen.height * 0.45, tyre)
    elif kind == 3:  # spectacles
        for x in (0.24, 0.76):
            pen.ring(x, 0.5, radius, tyre, 1.7)
        pen.line(((0.24 + radius / pen.width, 0.5), (0.5, 0.42), (0.76 - radius / pen.width, 0.5)),
                 tyre, 1.6)  # fmt: skip
    else:  # a hand cart: a solid body on one wheel
        pen.polygon(((0.2, 0.3), (0.85, 0.3), (0.7, 0.7), (0.32, 0.7)), paint)
        pen.line(((0.0, 0.2), (0.3, 0.6)), WOOD, 1.6)
        spoked(pen, 0.62, 0.97 - radius * 0.7 / pen.height, radius * 0.7, tyre)
    return Drawing(pen.layer())


def _person_like(rng: np.random.Generator) -> Drawing:
    """A lamp post, bottle, bust on a plinth, skittle, traffic cone or hydrant."""
    height = rng.uniform(28, 54)
    pen = Pen(height * 0.42, height, Pose(turn=float(rng.normal(0, 3))))
    kind = int(rng.integers(6))
    colour = pick(rng, CLOTHES)
    if kind == 0:
        pen.line(((0.5, 0.1), (0.5, 1)), (70, 74, 78), 2.2)
        pen.disc(0.5, 0.08, height * 0.08, (250, 236, 180))
        pen.rectangle(0.35, 0.94, 0.65, 1, (60, 62, 66))
    elif kind == 1:
        glass = varied(rng, (50, 110, 70), 35)
        pen.polygon(((0.42, 0), (0.58, 0), (0.58, 0.25), (0.76, 0.4), (0.76, 1), (0.24, 1),
                     (0.24, 0.4), (0.42, 0.25)), glass)  # fmt: skip
        pen.rectangle(0.24, 0.55, 0.76, 0.82, varied(rng, WHITE))
    elif kind == 2:
        stone = varied(rng, (168, 166, 160), 25)
        pen.disc(0.5, 0.11, height * 0.085, stone)
        chest = ((0.12, 0.42), (0.2, 0.27), (0.42, 0.2), (0.58, 0.2), (0.8, 0.27), (0.88, 0.42))
        pen.polygon(chest, scaled(stone, 0.9))
        pen.rectangle(0.16, 0.42, 0.84, 1, scaled(stone, 0.75))
        pen.rectangle(0.08, 0.42, 0.92, 0.5, stone)
    elif kind == 3:
        body = varied(rng, (232, 226, 214), 15)
        pen.ellipse(0.5, 0.7, 0.32, 0.3, body)
        pen.polygon(((0.38, 0.2), (0.62, 0.2), (0.72, 0.6), (0.28, 0.6)), body)
        pen.ellipse(0.5, 0.12, 0.17, 0.12, body)
        pen.rectangle(0.36, 0.24, 0.64, 0.3, RED)
    elif kind == 4:
        pen.polygon(((0.44, 0.05), (0.56, 0.05), (0.84, 0.92), (0.16, 0.92)), (226, 96, 36))
        for y in (0.34, 0.62):
            spread = 0.06 + 0.25 * y
            pen.rectangle(0.5 - spread, y, 0.5 + spread, y + 0.12, WHITE)
        pen.rectangle(0.02, 0.9, 0.98, 1, (190, 80, 30))
    else:
        pen.ellipse(0.5, 0.22, 0.3, 0.2, colour)
        pen.rectangle(0.22, 0.22, 0.78, 1, colour)
        pen.rectangle(0.04, 0.45, 0.96, 0.58, scaled(colour, 0.8))
        pen.rectangle(0.1, 0.92, 0.9, 1, scaled(colour, 0.65))
    return Drawing(pen.layer())


NEAR_MISSES: Mapping[str, Callable[[np.random.Generator], Drawing]] = {
    "license_plate": _plain_board,
    "traffic_sign": _sign_like,
    "vehicle": _box_like,
    "vegetation": _plant_like,
    "bicycle": _bicycle_like,
    "person": _person_like,
}
"""Per domain: what resembles its class and is none."""
