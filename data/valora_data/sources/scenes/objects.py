"""Painters of the six built-in classes, and of what resembles them; sizes are pixels of 96 × 96.

A near-miss shares colour, outline or parts with its class and lacks what makes it one: characters
on a plate, border and symbol of a sign, windows and wheels of a vehicle, leaves of a plant, a frame
between two wheels, head and limbs of a person.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import cos, pi, sin

import numpy as np

from valora_data.sources.scenes.drawing import (
    GLYPHS,
    Colour,
    Layer,
    Pen,
    Point,
    Pose,
    arc,
    blob,
    scaled,
    varied,
)

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
    """A thing and, on sheets of the same size, what it is mounted on."""

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


# ---- license plates ----------------------------------------------------------------------------


def license_plate(rng: np.random.Generator) -> Drawing:
    """A plate with 4 to 8 characters in one or two lines, often on a bumper."""
    ground, ink = (
        (WHITE, BLACK), (WHITE, BLACK), (YELLOW, BLACK), (WHITE, BLUE), (WHITE, (150, 30, 30)),
        (BLACK, WHITE), (BLUE, WHITE), ((190, 220, 190), (20, 70, 40)),
    )[int(rng.integers(8))]  # fmt: skip
    ground = varied(rng, ground, 15)
    double = rng.random() < 0.25
    width = rng.uniform(20, 34) if double else rng.uniform(26, 52)
    height = width / rng.uniform(1.5, 2.0) if double else max(10.0, width / rng.uniform(2.6, 4.4))
    pen, behind = sheets(width, height, plate_pose(rng), margin=0.6)
    mounted = rng.random() < 0.5
    if mounted:
        bumper(rng, behind)
    corner = 0.12 * height / width
    outline = ((corner, 0), (1 - corner, 0), (1, 0.12), (1, 0.88), (1 - corner, 1), (corner, 1),
               (0, 0.88), (0, 0.12))  # fmt: skip
    pen.polygon(outline, ground)
    pen.line([*outline, outline[0]], scaled(ink, 0.9), 0.9)
    left = 0.08
    if not double and rng.random() < 0.4:
        pen.rectangle(0.0, 0.04, 0.11, 0.96, BLUE)
        left = 0.15
    stroke = max(1.0, height * (0.07 if double else 0.11))
    if double:
        for y0, y1 in ((0.12, 0.45), (0.56, 0.9)):
            count = int(rng.integers(3, 5))
            pen.text(list(rng.integers(len(GLYPHS), size=count)), (0.12, y0, 0.88, y1), ink, stroke)
    else:
        count = int(rng.integers(5, 8))
        pen.text(list(rng.integers(len(GLYPHS), size=count)), (left, 0.2, 0.93, 0.8), ink, stroke)
    return Drawing(pen.layer(), behind.layer() if mounted else None)


# ---- traffic signs -----------------------------------------------------------------------------


def _symbol(rng: np.random.Generator, pen: Pen, ink: Colour, radius: float) -> None:
    """A pictogram around the middle; `radius` as a share of the sign."""
    size = pen.height * radius
    stroke = max(1.2, size * 0.28)
    kind = int(rng.integers(5))
    if kind == 0:
        digits = [int(rng.integers(1, 9)), 0]
        pen.text(digits, (0.5 - radius, 0.5 - radius * 0.7, 0.5 + radius, 0.5 + radius * 0.7), ink,
                 max(1.1, size * 0.2))  # fmt: skip
    elif kind == 1:  # arrow
        side = 1 if rng.random() < 0.5 else -1
        tip = 0.5 + side * radius
        pen.line(((0.5 - side * radius, 0.5), (tip, 0.5)), ink, stroke)
        pen.polygon(((tip + side * 0.06, 0.5), (tip - side * radius * 0.8, 0.5 - radius),
                     (tip - side * radius * 0.8, 0.5 + radius)), ink)  # fmt: skip
    elif kind == 2:  # exclamation mark
        pen.line(((0.5, 0.5 - radius), (0.5, 0.5 + radius * 0.35)), ink, stroke)
        pen.disc(0.5, 0.5 + radius * 0.85, stroke * 0.6, ink)
    elif kind == 3:  # a bend
        pen.line(((0.5 - radius * 0.4, 0.5 + radius), (0.5 - radius * 0.4, 0.5),
                  (0.5 + radius * 0.4, 0.5 - radius * 0.1), (0.5 + radius * 0.4, 0.5 - radius)),
                 ink, stroke)  # fmt: skip
    else:  # a walker
        pen.disc(0.5, 0.5 - radius * 0.8, size * 0.26, ink)
        pen.line(((0.5, 0.5 - radius * 0.5), (0.5, 0.5 + radius * 0.2)), ink, stroke)
        for side in (-1, 1):
            pen.line(((0.5, 0.5 + radius * 0.1), (0.5 + side * radius * 0.5, 0.5 + radius)), ink,
                     stroke * 0.8)  # fmt: skip


def _regular(corners: int, start: float, radius: float) -> list[tuple[float, float]]:
    angles = (start + 2 * pi * i / corners for i in range(corners))
    return [(0.5 + radius * cos(a), 0.5 + radius * sin(a)) for a in angles]


INNER_TRIANGLE = ((0.5, 0.25), (0.82, 0.84), (0.18, 0.84))


SIGNS = (
    "prohibition", "no entry", "stop", "warning", "give way", "mandatory", "priority",
    "information",
)  # fmt: skip
"""Kinds of road signs, by number."""


def traffic_sign(
    rng: np.random.Generator, kind: int | None = None, size: float | None = None
) -> Drawing:
    """A road sign: coloured border and symbol, of eight kinds, often on a pole."""
    pen, behind = sign_sheets(rng) if size is None else sign_sheets(rng, size, 0.1)
    red, blue, yellow = varied(rng, RED), varied(rng, BLUE), varied(rng, YELLOW)
    kind = int(rng.integers(8)) if kind is None else kind
    if kind == 0:  # prohibition or speed limit
        pen.ellipse(0.5, 0.5, 0.5, 0.5, red)
        pen.ellipse(0.5, 0.5, 0.36, 0.36, WHITE)
        _symbol(rng, pen, BLACK, 0.2)
    elif kind == 1:  # no entry
        pen.ellipse(0.5, 0.5, 0.5, 0.5, WHITE)
        pen.ellipse(0.5, 0.5, 0.46, 0.46, red)
        pen.rectangle(0.2, 0.41, 0.8, 0.59, WHITE)
    elif kind == 2:  # stop
        pen.polygon(_regular(8, pi / 8, 0.53), WHITE)
        pen.polygon(_regular(8, pi / 8, 0.48), red)
        pen.text((5, 16, 0, 15), (0.17, 0.36, 0.83, 0.64), WHITE, max(1.0, pen.height * 0.06))
    elif kind == 3:  # warning
        pen.polygon(TRIANGLE, red)
        pen.polygon(INNER_TRIANGLE, (WHITE, yellow)[int(rng.integers(2))])
        pen.line(((0.5, 0.42), (0.5, 0.65)), BLACK, max(1.3, pen.height * 0.1))
        pen.disc(0.5, 0.76, max(0.8, pen.height * 0.05), BLACK)
    elif kind == 4:  # give way
        pen.polygon(flipped(TRIANGLE), red)
        pen.polygon(flipped(INNER_TRIANGLE), WHITE)
    elif kind == 5:  # mandatory
        pen.ellipse(0.5, 0.5, 0.5, 0.5, WHITE)
        pen.ellipse(0.5, 0.5, 0.46, 0.46, blue)
        _symbol(rng, pen, WHITE, 0.22)
    elif kind == 6:  # priority road or American warning
        pen.polygon(_regular(4, 0, 0.55), (BLACK, WHITE)[int(rng.integers(2))])
        pen.polygon(_regular(4, 0, 0.48), yellow)
        _symbol(rng, pen, BLACK, 0.18)
    else:  # information
        pen.rectangle(0.04, 0.04, 0.96, 0.96, WHITE)
        pen.rectangle(0.09, 0.09, 0.91, 0.91, blue)
        _symbol(rng, pen, WHITE, 0.25)
    mounted = size is None and rng.random() < 0.6
    if mounted:
        pole(rng, behind)
    return Drawing(pen.layer(), behind.layer() if mounted else None)


# ---- vehicles ----------------------------------------------------------------------------------


def _wheel(pen: Pen, x: float, y: float, radius: float) -> None:
    pen.disc(x, y, radius, TYRE)
    pen.disc(x, y, radius * 0.5, (170, 172, 176))


def _car_side(rng: np.random.Generator, colour: Colour | None = None) -> Pen:
    width = rng.uniform(30, 58)
    height = width * rng.uniform(0.36, 0.46)
    pen = Pen(width, height, ground_pose(rng))
    paint = colour or pick(rng, PAINTS)
    front, back = rng.uniform(0.2, 0.32), rng.uniform(0.02, 0.2)
    roof = (front + rng.uniform(0.1, 0.16), 1 - back - rng.uniform(0.04, 0.14))
    pen.polygon(((front - 0.06, 0.45), (roof[0], 0.03), (roof[1], 0.03), (1 - back, 0.45)), paint)
    pen.polygon(((0.02, 0.52), (front - 0.05, 0.4), (1 - back, 0.38), (0.98, 0.46), (1.0, 0.8),
                 (0.0, 0.82)), paint)  # fmt: skip
    glass = varied(rng, GLASS, 30)
    middle = (roof[0] + roof[1]) / 2
    pen.polygon(((front + 0.02, 0.4), (roof[0] + 0.02, 0.11), (middle - 0.02, 0.11),
                 (middle - 0.02, 0.4)), glass)  # fmt: skip
    pen.polygon(((middle + 0.02, 0.4), (middle + 0.02, 0.11), (roof[1] - 0.02, 0.11),
                 (0.95 - back, 0.4)), glass)  # fmt: skip
    pen.rectangle(0.0, 0.74, 1.0, 0.83, scaled(paint, 0.55))
    pen.disc(0.04, 0.58, 1.0, (250, 240, 190))
    pen.disc(0.96, 0.56, 1.0, (200, 40, 40))
    for x in (0.2, 0.8):
        _wheel(pen, x, 0.82, height * 0.19)
    return pen


def _van_or_bus(
    rng: np.random.Generator, colour: Colour | None = None, bus: bool | None = None
) -> Pen:
    bus = rng.random() < 0.5 if bus is None else bus
    width = rng.uniform(38, 60) if bus else rng.uniform(30, 50)
    height = width * (rng.uniform(0.38, 0.48) if bus else rng.uniform(0.46, 0.58))
    pen = Pen(width, height, ground_pose(rng))
    paint, glass = colour or pick(rng, PAINTS), varied(rng, GLASS, 30)
    if bus:
        pen.rectangle(0.0, 0.04, 1.0, 0.86, paint)
        for x in (0.04, 0.23, 0.42, 0.61, 0.8):
            pen.rectangle(x, 0.16, x + 0.15, 0.46, glass)
        pen.rectangle(0.0, 0.58, 1.0, 0.66, scaled(colour, 0.7) if colour else pick(rng, PAINTS))
    else:
        pen.polygon(
            ((0.0, 0.55), (0.16, 0.08), (0.24, 0.02), (1, 0.02), (1, 0.86), (0, 0.86)), paint
        )
        pen.polygon(((0.07, 0.48), (0.19, 0.13), (0.36, 0.13), (0.36, 0.48)), glass)
        if rng.random() < 0.6:
            pen.rectangle(0.44, 0.13, 0.9, 0.46, glass)
    pen.rectangle(0.0, 0.78, 1.0, 0.86, scaled(paint, 0.55))
    for x in (0.2, 0.8):
        _wheel(pen, x, 0.85, height * 0.15)
    return pen


def _truck(rng: np.random.Generator, colour: Colour | None = None) -> Pen:
    width = rng.uniform(36, 60)
    height = width * rng.uniform(0.42, 0.52)
    pen = Pen(width, height, ground_pose(rng))
    cab, cargo = colour or pick(rng, PAINTS), colour or pick(rng, PAINTS)
    pen.rectangle(0.3, 0.0, 1.0, 0.74, cargo)
    pen.rectangle(0.3, 0.66, 1.0, 0.74, scaled(cargo, 0.7))
    pen.polygon(((0.0, 0.5), (0.07, 0.2), (0.27, 0.18), (0.27, 0.8), (0.0, 0.8)), cab)
    pen.polygon(((0.04, 0.48), (0.09, 0.27), (0.21, 0.27), (0.21, 0.48)), varied(rng, GLASS, 30))
    pen.rectangle(0.0, 0.74, 1.0, 0.84, (50, 50, 54))
    for x in (0.15, 0.68, 0.86):
        _wheel(pen, x, 0.85, height * 0.14)
    return pen


def _car_front(rng: np.random.Generator, colour: Colour | None = None) -> Pen:
    width = rng.uniform(24, 42)
    height = width * rng.uniform(0.75, 0.95)
    pen = Pen(width, height, Pose(turn=float(rng.normal(0, 3))))
    paint, rear = colour or pick(rng, PAINTS), rng.random() < 0.5
    for x in (0.08, 0.74):
        pen.rectangle(x, 0.75, x + 0.18, 1.0, TYRE)
    pen.polygon(((0.1, 0.42), (0.24, 0.03), (0.76, 0.03), (0.9, 0.42)), paint)
    pen.polygon(((0.18, 0.4), (0.28, 0.1), (0.72, 0.1), (0.82, 0.4)), varied(rng, GLASS, 30))
    pen.polygon(((0.04, 0.48), (0.12, 0.4), (0.88, 0.4), (0.96, 0.48), (0.98, 0.86), (0.02, 0.86)),
                paint)  # fmt: skip
    lamp: Colour = (205, 40, 36) if rear else (250, 244, 205)
    for x in (0.16, 0.84):
        pen.ellipse(x, 0.56, 0.09, 0.07, lamp)
    pen.rectangle(0.3, 0.52, 0.7, 0.62, scaled(paint, 0.5) if rear else (45, 45, 48))
    pen.rectangle(0.02, 0.76, 0.98, 0.87, scaled(paint, 0.6))
    return pen


def vehicle(rng: np.random.Generator) -> Drawing:
    """A car from the side, front or rear, a van, a bus or a truck."""
    painters = (_car_side, _car_side, _car_front, _van_or_bus, _truck)
    return Drawing(painters[int(rng.integers(len(painters)))](rng).layer())


def _car(rng: np.random.Generator, colour: Colour | None = None) -> Pen:
    return (_car_side if rng.random() < 0.7 else _car_front)(rng, colour)


def _van(rng: np.random.Generator, colour: Colour | None = None) -> Pen:
    return _van_or_bus(rng, colour, bus=False)


def _bus(rng: np.random.Generator, colour: Colour | None = None) -> Pen:
    return _van_or_bus(rng, colour, bus=True)


VEHICLES: Mapping[str, Callable[[np.random.Generator, Colour | None], Pen]] = {
    "car": _car, "van": _van, "bus": _bus, "truck": _truck,
}  # fmt: skip
"""Painters of each type of vehicle, in a given colour if there is one."""


# ---- vegetation --------------------------------------------------------------------------------


def _foliage(rng: np.random.Generator, pen: Pen, leaf: Colour, *, at: Point, radii: Point) -> None:
    """A crown: clumps of leaves, darker below, lighter above."""
    (x, y), (rx, ry) = at, radii
    pen.polygon(blob(rng, x, y, rx * 0.85, ry * 0.85), scaled(leaf, 0.62))
    for _ in range(int(rng.integers(14, 24))):
        angle, distance = rng.uniform(0, 2 * pi), rng.uniform(0.2, 0.8)
        u, v = distance * cos(angle), distance * sin(angle)
        clump = rng.uniform(0.18, 0.34)
        shade = rng.uniform(0.75, 1.05) - 0.28 * v
        pen.polygon(blob(rng, x + u * rx, y + v * ry, clump * rx, clump * ry), scaled(leaf, shade))


def _tree(rng: np.random.Generator) -> Pen:
    height = rng.uniform(28, 56)
    pen = Pen(height * rng.uniform(0.6, 0.9), height, Pose(turn=float(rng.normal(0, 3))))
    wood = varied(rng, WOOD)
    pen.polygon(((0.44, 1), (0.47, 0.5), (0.53, 0.5), (0.56, 1)), wood)
    for side in (-1, 1):
        pen.line(((0.5, 0.75), (0.5 + side * 0.18, 0.5)), wood, 1.4)
    _foliage(rng, pen, pick(rng, LEAVES), at=(0.5, 0.36), radii=(0.48, 0.36))
    return pen


def _conifer(rng: np.random.Generator) -> Pen:
    height = rng.uniform(28, 56)
    pen = Pen(height * rng.uniform(0.42, 0.6), height, Pose(turn=float(rng.normal(0, 3))))
    pen.rectangle(0.45, 0.8, 0.55, 1, varied(rng, WOOD))
    leaf = pick(rng, LEAVES[:4])
    tiers = int(rng.integers(4, 6))
    for tier in reversed(range(tiers)):
        top, bottom = 0.84 * tier / tiers - 0.06, 0.84 * (tier + 1) / tiers + 0.04
        half = 0.16 + 0.34 * (tier + 1) / tiers
        fringe = [
            (0.5 - half + 2 * half * i / 8, bottom - (0.05 if i % 2 else 0.0)) for i in range(9)
        ]
        pen.polygon([(0.5, max(0.0, top)), *reversed(fringe)], varied(rng, leaf, 16))
        pen.polygon(((0.5, max(0.0, top)), (0.5 - half * 0.4, bottom - 0.05), (0.5, bottom - 0.05)),
                    scaled(leaf, 1.25))  # fmt: skip
    return pen


def _bush(rng: np.random.Generator) -> Pen:
    width = rng.uniform(24, 48)
    pen = Pen(width, width * rng.uniform(0.55, 0.85))
    leaf = pick(rng, LEAVES)
    for x in (0.28, 0.72, 0.5):
        radii = (0.29, rng.uniform(0.36, 0.48))
        _foliage(rng, pen, leaf, at=(x, rng.uniform(0.5, 0.6)), radii=radii)
    return pen


def _palm(rng: np.random.Generator) -> Pen:
    height = rng.uniform(32, 56)
    pen = Pen(height * rng.uniform(0.65, 0.85), height, ground_pose(rng))
    lean = rng.uniform(-0.12, 0.12)
    pen.line(((0.5 - lean, 1), (0.5 - lean * 0.3, 0.65), (0.5, 0.3)), varied(rng, WOOD), 2.4)
    leaf = pick(rng, LEAVES[:4])
    for angle in (-2.9, -2.3, -1.7, -1.2, -0.7, -0.1, 0.35, 2.8):
        reach = rng.uniform(0.38, 0.5)
        x, y = 0.5 + reach * cos(angle), 0.3 + reach * 0.6 * sin(angle)
        pen.polygon(((0.5, 0.26), ((x + 0.5) / 2, (y + 0.3) / 2 - 0.1), (x, y + 0.08),
                     ((x + 0.5) / 2, (y + 0.3) / 2 + 0.03)), varied(rng, leaf, 22))  # fmt: skip
    return pen


def _cactus(rng: np.random.Generator) -> Pen:
    height = rng.uniform(26, 48)
    pen = Pen(height * rng.uniform(0.5, 0.7), height, ground_pose(rng))
    leaf = pick(rng, LEAVES[:3])
    thick = height * rng.uniform(0.17, 0.23)
    for x, y, top in ((0.12, 0.62, 0.28), (0.88, 0.5, 0.16)):
        pen.limb(((0.5, y), (x, y)), leaf, thick * 0.75)
        pen.limb(((x, y), (x, top)), leaf, thick * 0.75)
    pen.limb(((0.5, 0.96), (0.5, 0.1)), leaf, thick)
    for x in (0.46, 0.54):
        pen.line(((x, 0.1), (x, 0.95)), scaled(leaf, 0.7), 0.7)
    return pen


def _tuft(rng: np.random.Generator) -> Pen:
    height = rng.uniform(24, 42)
    pen = Pen(height * rng.uniform(0.75, 1.05), height)
    leaf = pick(rng, LEAVES[:4])
    for _ in range(int(rng.integers(18, 26))):
        lean = rng.uniform(-0.46, 0.46)
        tip = rng.uniform(0.02, 0.4) + abs(lean) * 0.3
        root = 0.5 + lean * 0.4
        blade = ((root - 0.06, 0.98), (0.5 + lean, tip), (root + 0.06, 0.98))
        pen.polygon(blade, varied(rng, leaf, 30))
    return pen


PLANTS: Mapping[str, Callable[[np.random.Generator], Pen]] = {
    "tree": _tree, "conifer": _conifer, "bush": _bush, "palm": _palm, "cactus": _cactus,
    "grass": _tuft,
}  # fmt: skip
"""Painters of each type of plant."""


def vegetation(rng: np.random.Generator) -> Drawing:
    """A tree, conifer, bush, palm, cactus or tuft of grass."""
    painters = (_tree, _tree, _conifer, _bush, _bush, _palm, _cactus, _tuft)
    return Drawing(painters[int(rng.integers(len(painters)))](rng).layer())


# ---- bicycles ----------------------------------------------------------------------------------


def bicycle(rng: np.random.Generator) -> Drawing:
    """A bicycle: two spoked wheels, a frame, handlebars and a saddle."""
    pen = bicycle_sheet(rng)
    radius = pen.width * rng.uniform(0.19, 0.225)
    hub = 0.97 - radius / pen.height
    tyre = varied(rng, TYRE, 20)
    rear, front = (0.22, hub), (0.78, hub)
    paint = pick(rng, PAINTS)
    tube = max(1.3, pen.width * 0.035)
    seat, head, crank = (0.36, 0.27), (0.68, rng.uniform(0.2, 0.28)), (0.47, hub + 0.02)
    for x, y in (rear, front):
        spoked(pen, x, y, radius, tyre)
    low = rng.random() < 0.3  # a step-through frame
    top = (0.4, 0.52) if low else (0.37, 0.32)
    for stroke in ((rear, crank, seat), (rear, top), (top, head), (crank, head), (head, front)):
        pen.line(stroke, paint, tube)
    pen.line(((0.29, 0.2), (0.43, 0.19)), BLACK, tube * 1.3)
    pen.line((seat, (0.36, 0.2)), (120, 120, 124), tube * 0.8)
    bars = (
        ((0.62, 0.1), (0.67, 0.08), head)
        if rng.random() < 0.5
        else ((0.76, 0.16), (0.7, 0.07), head)
    )
    pen.line(bars, (60, 60, 64), tube * 0.9)
    pen.disc(*crank, 1.5, (50, 50, 54))
    if rng.random() < 0.25:
        pen.rectangle(0.72, 0.14, 0.9, 0.36, varied(rng, (150, 112, 70)))
    return Drawing(pen.layer())


# ---- people ------------------------------------------------------------------------------------


def person(rng: np.random.Generator) -> Drawing:
    """Someone who stands, walks or waves, in trousers or a skirt, sometimes with hat or bag."""
    height = rng.uniform(30, 60)
    width = height * 0.42
    pen = Pen(width, height, ground_pose(rng), margin=0.3)
    skin, hair = pick(rng, SKIN, 12), pick(rng, HAIR, 12)
    top, bottom = pick(rng, CLOTHES), pick(rng, CLOTHES)
    build = rng.uniform(0.9, 1.2)
    limb = height * 0.075 * build
    stride = rng.uniform(0.05, 0.42)
    hips, shoulders = 0.53, 0.22
    # Far limbs first, a little darker.
    for side, shade in ((-1, 0.8), (1, 1.0)):
        foot = 0.5 + side * stride
        knee = 0.5 + side * stride * rng.uniform(0.5, 0.8)
        pen.limb(((0.5 + side * 0.1, hips), (knee, 0.74), (foot, 0.94)), scaled(bottom, shade),
                 limb * 1.25)  # fmt: skip
        pen.limb(((foot, 0.965), (foot + 0.12, 0.97)), scaled(BLACK, 1.3), limb * 0.8)
    raised = rng.random() < 0.2
    for side, shade in ((-1, 0.75), (1, 1.08)):
        swing = side * rng.uniform(0.15, 0.4)
        elbow = (0.5 + side * 0.24 + swing * 0.3, 0.37)
        hand = (0.5 + side * 0.26 + swing * 0.7, rng.uniform(0.47, 0.53))
        if raised and side > 0:
            elbow, hand = (0.84, 0.2), (0.9, rng.uniform(0.0, 0.08))
        pen.limb(((0.5 + side * 0.2, shoulders + 0.02), elbow, hand), scaled(top, shade), limb)
        pen.disc(*hand, limb * 0.55, skin)
    half = 0.24 * build
    pen.polygon(((0.5 - half, shoulders), (0.5 - half * 0.5, 0.17), (0.5 + half * 0.5, 0.17),
                 (0.5 + half, shoulders), (0.5 + half * 0.85, hips + 0.03),
                 (0.5 - half * 0.85, hips + 0.03)), top)  # fmt: skip
    if rng.random() < 0.25:
        pen.polygon(((0.5 - half * 0.8, 0.48), (0.5 + half * 0.8, 0.48), (0.5 + half * 1.5, 0.74),
                     (0.5 - half * 1.5, 0.74)), bottom)  # fmt: skip
    pen.limb(((0.5, 0.12), (0.5, 0.18)), scaled(skin, 0.85), limb * 0.7)
    head = height * 0.072
    pen.disc(0.5, 0.075, head * 1.08, hair)
    pen.ellipse(0.53, 0.09, head * 0.85 / width, head * 0.9 / height, skin)
    if rng.random() < 0.25:
        cap = pick(rng, CLOTHES)
        pen.polygon(arc(0.5, 0.07, head * 1.15 / width, head * 1.1 / height, start=pi), cap)
        pen.line(((0.4, 0.07), (0.78, 0.075)), cap, 1.2)
    if rng.random() < 0.25:
        pen.rectangle(0.08, 0.24, 0.3, 0.44, pick(rng, CLOTHES))
    return Drawing(pen.layer())


TARGETS: Mapping[str, Callable[[np.random.Generator], Drawing]] = {
    "license_plate": license_plate,
    "traffic_sign": traffic_sign,
    "vehicle": vehicle,
    "vegetation": vegetation,
    "bicycle": bicycle,
    "person": person,
}
"""The six domains of the paper's Figure 10, in its order."""


# ---- near-misses -------------------------------------------------------------------------------


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
