"""Painters of the classes and near-misses; the order of random numbers is part of the data."""

from collections.abc import Callable, Mapping
from math import cos, pi, sin
from typing import Literal

from valora_data.sources.generic.scenes import Rng
from valora_data.sources.scenes.drawing import (
    GLYPHS,
    Colour,
    Pen,
    Point,
    arc,
    blob,
    chosen,
    pick,
    scaled,
    varied,
)

Painter = Callable[[Rng], Pen]

WHITE, BLACK, GREY = (236, 236, 230), (24, 24, 28), (125, 125, 128)
RED, BLUE, YELLOW = (196, 30, 36), (30, 70, 170), (240, 190, 30)
GLASS, TYRE, WOOD = (70, 90, 110), (28, 28, 30), (98, 70, 46)
PAINTS = (
    (190, 30, 35), (30, 70, 160), (225, 225, 222), (40, 42, 48), (150, 155, 160),
    (225, 175, 40), (40, 110, 80), (220, 110, 40), (110, 50, 100), (90, 160, 190),
)  # fmt: skip
CLOTHES = (
    (170, 40, 50), (40, 70, 140), (60, 60, 66), (220, 215, 205), (60, 120, 80),
    (220, 170, 60), (120, 70, 120), (110, 80, 55), (230, 120, 140),
)  # fmt: skip
SKIN = ((240, 200, 170), (214, 160, 120), (160, 105, 70), (100, 65, 45))
HAIR = ((30, 24, 20), (90, 60, 35), (190, 150, 80), (150, 150, 150))
LEAVES = (
    (62, 118, 42), (40, 92, 40), (104, 136, 50), (76, 104, 62), (52, 128, 66), (176, 110, 36),
)  # fmt: skip


def _sheet(
    side: Literal["width", "height"], length: Point, ratio: Point | float,
    pose: Literal["upright", "tilted", "facing"], margin: float = 0.1,
) -> Callable[[Callable[..., None]], Callable[..., Pen]]:  # fmt: skip
    """Give a painter a pen: a side in pixels, the other as its share; `facing` is also mirrored."""

    def with_pen(draw: Callable[..., None]) -> Callable[..., Pen]:
        def paint(rng: Rng, *colour: Colour) -> Pen:
            first = rng.uniform(*length)
            second = first * (ratio if isinstance(ratio, float) else rng.uniform(*ratio))
            turn = 0.0 if pose == "upright" else rng.normal(0, 3)
            mirrored = pose == "facing" and rng.random() < 0.5
            size = (first, second) if side == "width" else (second, first)
            pen = Pen(*size, turn=turn, mirrored=mirrored, margin=margin)
            draw(rng, pen, *colour)
            return pen

        return paint

    return with_pen


PLATES = (
    (WHITE, BLACK), (WHITE, BLACK), (YELLOW, BLACK), (WHITE, BLUE), (WHITE, (150, 30, 30)),
    (BLACK, WHITE), (BLUE, WHITE), ((190, 220, 190), (20, 70, 40)),
)  # fmt: skip


def _board(rng: Rng, width: float, height: float, mounted: float) -> Pen:
    """A pen for a flat thing seen at an angle, sometimes on the bumper of a car with lights."""
    turn, slant, rise = rng.normal(0, 4), rng.normal(0, 0.08), rng.normal(0, 0.05)
    pen = Pen(width, height, turn=turn, slant=slant, rise=rise, margin=0.6)
    if rng.random() < mounted:
        bumper, paint = pen.backing(), pick(rng, PAINTS)
        bumper.box(paint, -0.3, -0.5, 1.3, 1.45)
        bumper.box(scaled(paint, 0.6), -0.3, 1.1, 1.3, 1.45)
        for side in (-0.3, 1.1):
            bumper.box(varied(rng, (200, 60, 50), 30), side, -0.35, side + 0.2, 0.25)
    return pen


def _license_plate(rng: Rng) -> Pen:
    ground, ink = chosen(rng, PLATES)
    ground = varied(rng, ground, 15)
    double = rng.random() < 0.25
    width = rng.uniform(20, 34) if double else rng.uniform(26, 52)
    height = width / rng.uniform(1.5, 2.0) if double else max(10.0, width / rng.uniform(2.6, 4.4))
    pen = _board(rng, width, height, 0.5)
    x = 0.12 * height / width
    edge = (x, 0, 1 - x, 0, 1, 0.12, 1, 0.88, 1 - x, 1, x, 1, 0, 0.88, 0, 0.12)
    pen.fill(ground, *edge)
    pen.line(scaled(ink, 0.9), 0.9, *edge, *edge[:2])
    rows, stroke, lengths = [(0.08, 0.2, 0.93, 0.8)], 0.11, (5, 8)
    if double:
        rows, stroke, lengths = [(0.12, 0.12, 0.88, 0.45), (0.12, 0.56, 0.88, 0.9)], 0.07, (3, 5)
    elif rng.random() < 0.4:
        pen.box(BLUE, 0.0, 0.04, 0.11, 0.96)
        rows = [(0.15, 0.2, 0.93, 0.8)]
    for row in rows:
        indices = rng.integers(len(GLYPHS), size=int(rng.integers(*lengths)))
        text = "".join(list(GLYPHS)[index] for index in indices)
        pen.text(ink, max(1.0, height * stroke), text, *row)
    return pen


def _plain_board(rng: Rng) -> Pen:
    """A plate-sized board: blank, with lines, with a picture, or striped; no characters."""
    width = rng.uniform(22, 48)
    pen = _board(rng, width, max(9.0, width / rng.uniform(1.6, 4.2)), 0.4)
    ground = varied(rng, chosen(rng, (WHITE, YELLOW, WHITE, BLUE, GREY)), 20)
    ink = BLACK if sum(ground) > 380 else WHITE
    pen.box(ground, 0, 0, 1, 1)
    kind = int(rng.integers(4))
    if kind == 0 or rng.random() < 0.5:
        pen.line(ink, 0.9, 0, 0, 1, 0, 1, 1, 0, 1, 0, 0)
    if kind == 1:
        for y in (0.3, 0.5, 0.7):
            pen.line(ink, 0.8, 0.1, y, 0.9, y)
    elif kind == 2:
        pen.fill(pick(rng, PAINTS), 0.1, 0.9, 0.4, 0.3, 0.6, 0.7, 0.75, 0.5, 0.9, 0.9)
    elif kind == 3:
        stripe = chosen(rng, (RED, BLACK))
        for x in (0.05, 0.3, 0.55, 0.8):
            pen.fill(stripe, x, 1, x + 0.1, 0, x + 0.2, 0, x + 0.1, 1)
    return pen


SIGNS = (
    "prohibition", "no entry", "stop", "warning", "give way", "mandatory", "priority", "information"
)  # fmt: skip
TRIANGLE = (0.5, 0.04, 1.0, 0.94, 0.0, 0.94)
INNER_TRIANGLE = (0.5, 0.25, 0.82, 0.84, 0.18, 0.84)
FLIPPED, INNER_FLIPPED = (
    [1 - c if i % 2 else c for i, c in enumerate(at)] for at in (TRIANGLE, INNER_TRIANGLE)
)


def _regular(corners: int, start: float, radius: float) -> list[float]:
    angles = (start + 2 * pi * i / corners for i in range(corners))
    return [c for a in angles for c in (0.5 + radius * cos(a), 0.5 + radius * sin(a))]


def _sign_sheet(rng: Rng, size: float | None = None) -> Pen:
    margin = 1.2 if size is None else 0.1
    size = rng.uniform(16, 38) if size is None else size
    turn, rise = rng.normal(0, 5), rng.normal(0, 0.05)
    return Pen(size * rng.uniform(0.72, 1.0), size, turn=turn, rise=rise, margin=margin)


def _on_pole(rng: Rng, pen: Pen, probability: float) -> Pen:
    if rng.random() < probability:
        foot = rng.uniform(1.6, 2.2)
        pen.backing().line(varied(rng, (140, 140, 145), 30), 2.0, 0.5, 0.5, 0.5, foot)
    return pen


def _symbol(rng: Rng, pen: Pen, ink: Colour, r: float) -> None:
    """A pictogram around the middle; `r` is its radius as a share of the sign."""
    size = pen.height * r
    stroke = max(1.2, size * 0.28)
    kind = int(rng.integers(5))
    if kind == 0:  # a number
        text = f"{rng.integers(1, 9)}0"
        pen.text(ink, max(1.1, size * 0.2), text, 0.5 - r, 0.5 - r * 0.7, 0.5 + r, 0.5 + r * 0.7)
    elif kind == 1:  # an arrow
        side = 1 if rng.random() < 0.5 else -1
        tip = 0.5 + side * r
        pen.line(ink, stroke, 0.5 - side * r, 0.5, tip, 0.5)
        back = tip - side * r * 0.8
        pen.fill(ink, tip + side * 0.06, 0.5, back, 0.5 - r, back, 0.5 + r)
    elif kind == 2:  # an exclamation mark
        pen.line(ink, stroke, 0.5, 0.5 - r, 0.5, 0.5 + r * 0.35)
        pen.disc(ink, 0.5, 0.5 + r * 0.85, stroke * 0.6)
    elif kind == 3:  # a bend
        left, right = 0.5 - r * 0.4, 0.5 + r * 0.4
        pen.line(ink, stroke, left, 0.5 + r, left, 0.5, right, 0.5 - r * 0.1, right, 0.5 - r)
    else:  # a walker
        pen.disc(ink, 0.5, 0.5 - r * 0.8, size * 0.26)
        pen.line(ink, stroke, 0.5, 0.5 - r * 0.5, 0.5, 0.5 + r * 0.2)
        for side in (-1, 1):
            pen.line(ink, stroke * 0.8, 0.5, 0.5 + r * 0.1, 0.5 + side * r * 0.5, 0.5 + r)


def traffic_sign(rng: Rng, kind: int | None = None, size: float | None = None) -> Pen:
    """A road sign: coloured border and symbol, often on a pole; of a height in pixels if given."""
    pen = _sign_sheet(rng, size)
    red, blue, yellow = varied(rng, RED), varied(rng, BLUE), varied(rng, YELLOW)
    sign = SIGNS[int(rng.integers(8)) if kind is None else kind]
    if sign == "prohibition":
        pen.oval(red, 0.5, 0.5, 0.5, 0.5)
        pen.oval(WHITE, 0.5, 0.5, 0.36, 0.36)
        _symbol(rng, pen, BLACK, 0.2)
    elif sign == "no entry":
        pen.oval(WHITE, 0.5, 0.5, 0.5, 0.5)
        pen.oval(red, 0.5, 0.5, 0.46, 0.46)
        pen.box(WHITE, 0.2, 0.41, 0.8, 0.59)
    elif sign == "stop":
        pen.fill(WHITE, *_regular(8, pi / 8, 0.53))
        pen.fill(red, *_regular(8, pi / 8, 0.48))
        pen.text(WHITE, max(1.0, pen.height * 0.06), "5T0P", 0.17, 0.36, 0.83, 0.64)
    elif sign == "warning":
        pen.fill(red, *TRIANGLE)
        pen.fill(chosen(rng, (WHITE, yellow)), *INNER_TRIANGLE)
        pen.line(BLACK, max(1.3, pen.height * 0.1), 0.5, 0.42, 0.5, 0.65)
        pen.disc(BLACK, 0.5, 0.76, max(0.8, pen.height * 0.05))
    elif sign == "give way":
        pen.fill(red, *FLIPPED)
        pen.fill(WHITE, *INNER_FLIPPED)
    elif sign == "mandatory":
        pen.oval(WHITE, 0.5, 0.5, 0.5, 0.5)
        pen.oval(blue, 0.5, 0.5, 0.46, 0.46)
        _symbol(rng, pen, WHITE, 0.22)
    elif sign == "priority":  # or an American warning
        pen.fill(chosen(rng, (BLACK, WHITE)), *_regular(4, 0, 0.55))
        pen.fill(yellow, *_regular(4, 0, 0.48))
        _symbol(rng, pen, BLACK, 0.18)
    else:
        pen.box(WHITE, 0.04, 0.04, 0.96, 0.96)
        pen.box(blue, 0.09, 0.09, 0.91, 0.91)
        _symbol(rng, pen, WHITE, 0.25)
    return pen if size else _on_pole(rng, pen, 0.6)


def _sign_like(rng: Rng) -> Pen:
    """A plain disc, ball, triangle, hoop, clock or poster: a sign's colours, no symbol."""
    pen = _sign_sheet(rng)
    colour = varied(rng, chosen(rng, (RED, BLUE, YELLOW, (230, 230, 225), (220, 110, 40))))
    kind = int(rng.integers(6))
    if kind == 0:
        pen.oval(colour, 0.5, 0.5, 0.5, 0.5)
    elif kind == 1:  # a ball: shaded, with a glint
        for step in range(5):
            middle, r = 0.5 - 0.05 * step, 0.5 - 0.09 * step
            pen.oval(scaled(colour, 0.65 + 0.14 * step), middle, middle, r, r)
    elif kind == 2:
        pen.fill(colour, *(TRIANGLE if rng.random() < 0.5 else FLIPPED))
    elif kind == 3:
        pen.ring(colour, max(1.6, pen.height * 0.1), 0.5, 0.5, pen.height * 0.45)
    elif kind == 4:  # a clock
        pen.oval(varied(rng, (80, 66, 56)), 0.5, 0.5, 0.5, 0.5)
        pen.oval(WHITE, 0.5, 0.5, 0.42, 0.42)
        for length in (0.22, 0.34):
            angle = rng.uniform(0, 2 * pi)
            pen.line(BLACK, 1.2, 0.5, 0.5, 0.5 + length * cos(angle), 0.5 + length * sin(angle))
    else:  # a poster: blocks of several colours
        pen.box(WHITE, 0.08, 0, 0.92, 1)
        pen.box(pick(rng, PAINTS), 0.14, 0.06, 0.86, 0.55)
        x = rng.uniform(0.35, 0.65)
        pen.oval(pick(rng, PAINTS), x, 0.35, 0.15, 0.15)
        for y in (0.66, 0.76, 0.86):
            pen.line(GREY, 1.0, 0.18, y, rng.uniform(0.5, 0.82), y)
    return _on_pole(rng, pen, 0.5)


def _wheels(pen: Pen, y: float, share: float, *xs: float) -> None:
    for x in xs:
        pen.disc(TYRE, x, y, pen.height * share)
        pen.disc((170, 172, 176), x, y, pen.height * share * 0.5)


@_sheet("width", (30, 58), (0.36, 0.46), "facing")
def _car_side(rng: Rng, pen: Pen, colour: Colour | None = None) -> None:
    paint = colour or pick(rng, PAINTS)
    front, back = rng.uniform(0.2, 0.32), rng.uniform(0.02, 0.2)
    left, right = front + rng.uniform(0.1, 0.16), 1 - back - rng.uniform(0.04, 0.14)
    pen.fill(paint, front - 0.06, 0.45, left, 0.03, right, 0.03, 1 - back, 0.45)
    hood = (0.02, 0.52, front - 0.05, 0.4, 1 - back, 0.38, 0.98, 0.46)
    pen.fill(paint, *hood, 1.0, 0.8, 0.0, 0.82)
    glass = varied(rng, GLASS, 30)
    middle = (left + right) / 2
    a, b = middle - 0.02, middle + 0.02
    pen.fill(glass, front + 0.02, 0.4, left + 0.02, 0.11, a, 0.11, a, 0.4)
    pen.fill(glass, b, 0.4, b, 0.11, right - 0.02, 0.11, 0.95 - back, 0.4)
    pen.box(scaled(paint, 0.55), 0.0, 0.74, 1.0, 0.83)
    pen.disc((250, 240, 190), 0.04, 0.58, 1.0)
    pen.disc((200, 40, 40), 0.96, 0.56, 1.0)
    _wheels(pen, 0.82, 0.19, 0.2, 0.8)


@_sheet("width", (24, 42), (0.75, 0.95), "tilted")
def _car_front(rng: Rng, pen: Pen, colour: Colour | None = None) -> None:
    paint, rear = colour or pick(rng, PAINTS), rng.random() < 0.5
    for x in (0.08, 0.74):
        pen.box(TYRE, x, 0.75, x + 0.18, 1.0)
    pen.fill(paint, 0.1, 0.42, 0.24, 0.03, 0.76, 0.03, 0.9, 0.42)
    pen.fill(varied(rng, GLASS, 30), 0.18, 0.4, 0.28, 0.1, 0.72, 0.1, 0.82, 0.4)
    pen.fill(paint, 0.04, 0.48, 0.12, 0.4, 0.88, 0.4, 0.96, 0.48, 0.98, 0.86, 0.02, 0.86)
    for x in (0.16, 0.84):
        pen.oval((205, 40, 36) if rear else (250, 244, 205), x, 0.56, 0.09, 0.07)
    pen.box(scaled(paint, 0.5) if rear else (45, 45, 48), 0.3, 0.52, 0.7, 0.62)
    pen.box(scaled(paint, 0.6), 0.02, 0.76, 0.98, 0.87)


@_sheet("width", (30, 50), (0.46, 0.58), "facing")
def _van(rng: Rng, pen: Pen, colour: Colour | None = None) -> None:
    paint, glass = colour or pick(rng, PAINTS), varied(rng, GLASS, 30)
    pen.fill(paint, 0.0, 0.55, 0.16, 0.08, 0.24, 0.02, 1, 0.02, 1, 0.86, 0, 0.86)
    pen.fill(glass, 0.07, 0.48, 0.19, 0.13, 0.36, 0.13, 0.36, 0.48)
    if rng.random() < 0.6:
        pen.box(glass, 0.44, 0.13, 0.9, 0.46)
    pen.box(scaled(paint, 0.55), 0.0, 0.78, 1.0, 0.86)
    _wheels(pen, 0.85, 0.15, 0.2, 0.8)


@_sheet("width", (38, 60), (0.38, 0.48), "facing")
def _bus(rng: Rng, pen: Pen, colour: Colour | None = None) -> None:
    paint, glass = colour or pick(rng, PAINTS), varied(rng, GLASS, 30)
    pen.box(paint, 0.0, 0.04, 1.0, 0.86)
    for x in (0.04, 0.23, 0.42, 0.61, 0.8):
        pen.box(glass, x, 0.16, x + 0.15, 0.46)
    pen.box(scaled(colour, 0.7) if colour else pick(rng, PAINTS), 0.0, 0.58, 1.0, 0.66)
    pen.box(scaled(paint, 0.55), 0.0, 0.78, 1.0, 0.86)
    _wheels(pen, 0.85, 0.15, 0.2, 0.8)


@_sheet("width", (36, 60), (0.42, 0.52), "facing")
def _truck(rng: Rng, pen: Pen, colour: Colour | None = None) -> None:
    cab, cargo = colour or pick(rng, PAINTS), colour or pick(rng, PAINTS)
    pen.box(cargo, 0.3, 0.0, 1.0, 0.74)
    pen.box(scaled(cargo, 0.7), 0.3, 0.66, 1.0, 0.74)
    pen.fill(cab, 0.0, 0.5, 0.07, 0.2, 0.27, 0.18, 0.27, 0.8, 0.0, 0.8)
    pen.fill(varied(rng, GLASS, 30), 0.04, 0.48, 0.09, 0.27, 0.21, 0.27, 0.21, 0.48)
    pen.box((50, 50, 54), 0.0, 0.74, 1.0, 0.84)
    _wheels(pen, 0.85, 0.14, 0.15, 0.68, 0.86)


VEHICLES: Mapping[str, Callable[..., Pen]] = {
    "car": lambda rng, *colour: (_car_side if rng.random() < 0.7 else _car_front)(rng, *colour),
    "van": _van, "bus": _bus, "truck": _truck,
}  # fmt: skip


def vehicle(rng: Rng) -> Pen:
    """A car from the side, front or rear, a van, a bus or a truck."""
    kind = chosen(rng, (_car_side, _car_side, _car_front, None, _truck))
    return (kind or (_bus if rng.random() < 0.5 else _van))(rng)


@_sheet("width", (26, 54), (0.45, 0.75), "facing")
def _box_like(rng: Rng, pen: Pen) -> None:
    """A container, kiosk, suitcase or crate: a vehicle's size and paint, no wheels."""
    paint = pick(rng, PAINTS)
    kind = int(rng.integers(4))
    if kind == 0:  # a container with ribs
        pen.box(paint, 0, 0, 1, 1)
        for i in range(1, 9):
            pen.line(scaled(paint, 0.7), 1.0, i / 9, 0.06, i / 9, 0.94)
    elif kind == 1:  # a kiosk
        pen.box(paint, 0.08, 0.3, 0.92, 1)
        pen.fill(pick(rng, PAINTS), 0, 0.32, 0.2, 0, 0.8, 0, 1, 0.32)
        pen.box(GLASS, 0.16, 0.45, 0.4, 0.7)
        pen.box(scaled(paint, 0.5), 0.6, 0.45, 0.82, 1)
    elif kind == 2:  # a suitcase
        pen.line(BLACK, 1.6, 0.36, 0.2, 0.36, 0.04, 0.64, 0.04, 0.64, 0.2)
        pen.box(paint, 0.02, 0.18, 0.98, 1)
        for x in (0.2, 0.76):
            pen.box(scaled(paint, 0.55), x, 0.18, x + 0.05, 1)
    else:  # a crate
        pen.box(varied(rng, (160, 120, 74)), 0, 0, 1, 1)
        for y in (0.02, 0.36, 0.7):
            pen.box(varied(rng, (186, 142, 92), 12), 0.02, y, 0.98, y + 0.27)
        pen.line((130, 94, 56), 2.0, 0.04, 0.96, 0.96, 0.04)


def _foliage(rng: Rng, pen: Pen, leaf: Colour, x: float, y: float, rx: float, ry: float) -> None:
    """A crown: clumps of leaves, darker below, lighter above."""
    pen.fill(scaled(leaf, 0.62), *blob(rng, x, y, rx * 0.85, ry * 0.85))
    for _ in range(int(rng.integers(14, 24))):
        angle, distance = rng.uniform(0, 2 * pi), rng.uniform(0.2, 0.8)
        u, v = distance * cos(angle), distance * sin(angle)
        clump = rng.uniform(0.18, 0.34)
        leaves = scaled(leaf, rng.uniform(0.75, 1.05) - 0.28 * v)
        pen.fill(leaves, *blob(rng, x + u * rx, y + v * ry, clump * rx, clump * ry))


@_sheet("height", (28, 56), (0.6, 0.9), "tilted")
def _tree(rng: Rng, pen: Pen) -> None:
    wood = varied(rng, WOOD)
    pen.fill(wood, 0.44, 1, 0.47, 0.5, 0.53, 0.5, 0.56, 1)
    for side in (-1, 1):
        pen.line(wood, 1.4, 0.5, 0.75, 0.5 + side * 0.18, 0.5)
    _foliage(rng, pen, pick(rng, LEAVES), 0.5, 0.36, 0.48, 0.36)


@_sheet("height", (28, 56), (0.42, 0.6), "tilted")
def _conifer(rng: Rng, pen: Pen) -> None:
    pen.box(varied(rng, WOOD), 0.45, 0.8, 0.55, 1)
    leaf = pick(rng, LEAVES[:4])
    tiers = int(rng.integers(4, 6))
    for tier in reversed(range(tiers)):
        top, bottom = max(0.0, 0.84 * tier / tiers - 0.06), 0.84 * (tier + 1) / tiers + 0.04
        half, low = 0.16 + 0.34 * (tier + 1) / tiers, bottom - 0.05
        fringe = [(0.5 - half + 2 * half * i / 8, low if i % 2 else bottom) for i in range(9)]
        pen.fill(varied(rng, leaf, 16), 0.5, top, *(c for at in reversed(fringe) for c in at))
        pen.fill(scaled(leaf, 1.25), 0.5, top, 0.5 - half * 0.4, low, 0.5, low)


@_sheet("width", (24, 48), (0.55, 0.85), "upright")
def _bush(rng: Rng, pen: Pen) -> None:
    leaf = pick(rng, LEAVES)
    for x in (0.28, 0.72, 0.5):
        high = rng.uniform(0.36, 0.48)
        _foliage(rng, pen, leaf, x, rng.uniform(0.5, 0.6), 0.29, high)


@_sheet("height", (32, 56), (0.65, 0.85), "facing")
def _palm(rng: Rng, pen: Pen) -> None:
    lean = rng.uniform(-0.12, 0.12)
    pen.line(varied(rng, WOOD), 2.4, 0.5 - lean, 1, 0.5 - lean * 0.3, 0.65, 0.5, 0.3)
    leaf = pick(rng, LEAVES[:4])
    for angle in (-2.9, -2.3, -1.7, -1.2, -0.7, -0.1, 0.35, 2.8):
        reach = rng.uniform(0.38, 0.5)
        x, y = 0.5 + reach * cos(angle), 0.3 + reach * 0.6 * sin(angle)
        u, v = (x + 0.5) / 2, (y + 0.3) / 2
        pen.fill(varied(rng, leaf, 22), 0.5, 0.26, u, v - 0.1, x, y + 0.08, u, v + 0.03)


@_sheet("height", (26, 48), (0.5, 0.7), "facing")
def _cactus(rng: Rng, pen: Pen) -> None:
    leaf = pick(rng, LEAVES[:3])
    thick = pen.height * rng.uniform(0.17, 0.23)
    for x, y, top in ((0.12, 0.62, 0.28), (0.88, 0.5, 0.16)):
        pen.limb(leaf, thick * 0.75, 0.5, y, x, y)
        pen.limb(leaf, thick * 0.75, x, y, x, top)
    pen.limb(leaf, thick, 0.5, 0.96, 0.5, 0.1)
    for x in (0.46, 0.54):
        pen.line(scaled(leaf, 0.7), 0.7, x, 0.1, x, 0.95)


@_sheet("height", (24, 42), (0.75, 1.05), "upright")
def _tuft(rng: Rng, pen: Pen) -> None:
    leaf = pick(rng, LEAVES[:4])
    for _ in range(int(rng.integers(18, 26))):
        lean = rng.uniform(-0.46, 0.46)
        tip = rng.uniform(0.02, 0.4) + abs(lean) * 0.3
        root = 0.5 + lean * 0.4
        pen.fill(varied(rng, leaf, 30), root - 0.06, 0.98, 0.5 + lean, tip, root + 0.06, 0.98)


PLANTS: Mapping[str, Painter] = {
    "tree": _tree, "conifer": _conifer, "bush": _bush, "palm": _palm, "cactus": _cactus,
    "grass": _tuft,
}  # fmt: skip


def vegetation(rng: Rng) -> Pen:
    """A tree, conifer, bush, palm, cactus or tuft of grass."""
    return chosen(rng, (_tree, _tree, _conifer, _bush, _bush, _palm, _cactus, _tuft))(rng)


@_sheet("width", (22, 44), (0.65, 1.0), "upright")
def _plant_like(rng: Rng, pen: Pen) -> None:
    """A rock, banded green ball, tent or umbrella: a plant's colour or outline, no leaves."""
    kind = int(rng.integers(4))
    green = pick(rng, LEAVES if rng.random() < 0.6 else PAINTS)
    if kind == 0:
        stone = varied(rng, (128, 122, 114), 35)
        a, b = rng.uniform(0.2, 0.4), rng.uniform(0.5, 0.75)
        pen.fill(stone, 0.0, 1.0, 0.06, 0.5, a, 0.1, b, 0.02, 0.94, 0.4, 1.0, 1.0)
        pen.fill(scaled(stone, 1.25), a, 0.1, b, 0.02, 0.6, 0.5, 0.3, 0.6)
        pen.fill(scaled(stone, 0.7), 0.94, 0.4, 1.0, 1.0, 0.55, 1.0, 0.6, 0.5)
    elif kind == 1:
        for step in range(6):
            middle, r = 0.5 - 0.035 * step, 0.5 - 0.07 * step
            pen.oval(scaled(green, 0.7 + 0.12 * step), middle, middle, r, r)
        pen.fill(WHITE, 0.03, 0.58, 0.97, 0.38, 0.99, 0.56, 0.07, 0.76)
    elif kind == 2:
        pen.fill(green, 0.5, 0.0, 1.0, 1.0, 0.0, 1.0)
        pen.fill(scaled(green, 0.5), 0.5, 0.0, 0.62, 1.0, 0.38, 1.0)
    else:
        pen.line((70, 60, 55), 1.5, 0.5, 0.4, 0.5, 0.94, 0.58, 0.98)
        pen.fill(green, *arc(0.5, 0.5, 0.5, 0.48, start=pi))
        pen.fill(WHITE, *arc(0.5, 0.5, 0.18, 0.48, start=pi))


# Seen obliquely a bicycle gets shorter, not lower.
_bicycle_sheet = _sheet("width", (32, 60), (0.56, 0.78), "facing")


def _spoked(pen: Pen, x: float, y: float, radius: float, tyre: Colour) -> None:
    rx, ry = radius * 0.92 / pen.width, radius / pen.height
    for i in range(4):
        dx, dy = rx * cos(pi * i / 4), ry * sin(pi * i / 4)
        pen.line((160, 162, 166), 0.45, x - dx, y - dy, x + dx, y + dy)
    pen.ring(tyre, 1.7, x, y, radius, narrow=0.92)


@_bicycle_sheet
def bicycle(rng: Rng, pen: Pen) -> None:
    """A bicycle: two spoked wheels, a frame, handlebars and a saddle."""
    radius = pen.width * rng.uniform(0.19, 0.225)
    hub = 0.97 - radius / pen.height
    tyre = varied(rng, TYRE, 20)
    rear, front = (0.22, hub), (0.78, hub)
    paint = pick(rng, PAINTS)
    tube = max(1.3, pen.width * 0.035)
    seat, head, crank = (0.36, 0.27), (0.68, rng.uniform(0.2, 0.28)), (0.47, hub + 0.02)
    for wheel in (rear, front):
        _spoked(pen, *wheel, radius, tyre)
    low = rng.random() < 0.3  # a step-through frame
    top = (0.4, 0.52) if low else (0.37, 0.32)
    pen.line(paint, tube, *rear, *crank, *seat)
    for start, end in ((rear, top), (top, head), (crank, head), (head, front)):
        pen.line(paint, tube, *start, *end)
    pen.line(BLACK, tube * 1.3, 0.29, 0.2, 0.43, 0.19)
    pen.line((120, 120, 124), tube * 0.8, *seat, 0.36, 0.2)
    bars = (0.62, 0.1, 0.67, 0.08) if rng.random() < 0.5 else (0.76, 0.16, 0.7, 0.07)
    pen.line((60, 60, 64), tube * 0.9, *bars, *head)
    pen.disc((50, 50, 54), *crank, 1.5)
    if rng.random() < 0.25:
        pen.box(varied(rng, (150, 112, 70)), 0.72, 0.14, 0.9, 0.36)


@_bicycle_sheet
def _bicycle_like(rng: Rng, pen: Pen) -> None:
    """Two rings, a frame without wheels, a lone wheel, spectacles or a hand cart."""
    radius = pen.width * rng.uniform(0.18, 0.23)
    tyre, paint = varied(rng, TYRE, 20), pick(rng, PAINTS)
    kind = int(rng.integers(5))
    if kind == 0:
        for x in (0.24, 0.76):
            _spoked(pen, x, 0.95 - radius / pen.height, radius, tyre)
    elif kind == 1:  # a trestle
        for x in (0.3, 0.7):
            pen.line(paint, 1.8, x - 0.2, 0.95, x, 0.2, x + 0.2, 0.95)
        for y, reach in ((0.2, 0.25), (0.6, 0.3)):
            pen.line(paint, 1.8, 0.5 - reach, y, 0.5 + reach, y)
    elif kind == 2:
        _spoked(pen, 0.5, 0.5, pen.height * 0.45, tyre)
    elif kind == 3:  # spectacles
        for x in (0.24, 0.76):
            pen.ring(tyre, 1.7, x, 0.5, radius)
        reach = radius / pen.width
        pen.line(tyre, 1.6, 0.24 + reach, 0.5, 0.5, 0.42, 0.76 - reach, 0.5)
    else:  # a hand cart: a solid body on one wheel
        pen.fill(paint, 0.2, 0.3, 0.85, 0.3, 0.7, 0.7, 0.32, 0.7)
        pen.line(WOOD, 1.6, 0.0, 0.2, 0.3, 0.6)
        _spoked(pen, 0.62, 0.97 - radius * 0.7 / pen.height, radius * 0.7, tyre)


@_sheet("height", (30, 60), 0.42, "facing", margin=0.3)
def person(rng: Rng, pen: Pen) -> None:
    """Someone who stands, walks or waves, in trousers or a skirt, sometimes with hat or bag."""
    skin, hair = pick(rng, SKIN, 12), pick(rng, HAIR, 12)
    top, bottom = pick(rng, CLOTHES), pick(rng, CLOTHES)
    build = rng.uniform(0.9, 1.2)
    limb = pen.height * 0.075 * build
    stride = rng.uniform(0.05, 0.42)
    # Far limbs first, a little darker.
    for side, light in ((-1, 0.8), (1, 1.0)):
        foot = 0.5 + side * stride
        leg = (0.5 + side * 0.1, 0.53, 0.5 + side * stride * rng.uniform(0.5, 0.8), 0.74)
        pen.limb(scaled(bottom, light), limb * 1.25, *leg, foot, 0.94)
        pen.limb(scaled(BLACK, 1.3), limb * 0.8, foot, 0.965, foot + 0.12, 0.97)
    raised = rng.random() < 0.2
    for side, light in ((-1, 0.75), (1, 1.08)):
        swing = side * rng.uniform(0.15, 0.4)
        elbow = (0.5 + side * 0.24 + swing * 0.3, 0.37)
        hand = (0.5 + side * 0.26 + swing * 0.7, rng.uniform(0.47, 0.53))
        if raised and side > 0:
            elbow, hand = (0.84, 0.2), (0.9, rng.uniform(0.0, 0.08))
        pen.limb(scaled(top, light), limb, 0.5 + side * 0.2, 0.22 + 0.02, *elbow, *hand)
        pen.disc(skin, *hand, limb * 0.55)
    half = 0.24 * build
    a, b, c, d, e = (half * share for share in (1, 0.5, 0.85, 0.8, 1.5))
    shoulders = (0.5 - a, 0.22, 0.5 - b, 0.17, 0.5 + b, 0.17, 0.5 + a, 0.22)
    pen.fill(top, *shoulders, 0.5 + c, 0.53 + 0.03, 0.5 - c, 0.53 + 0.03)
    if rng.random() < 0.25:  # a skirt
        pen.fill(bottom, 0.5 - d, 0.48, 0.5 + d, 0.48, 0.5 + e, 0.74, 0.5 - e, 0.74)
    pen.limb(scaled(skin, 0.85), limb * 0.7, 0.5, 0.12, 0.5, 0.18)
    head = pen.height * 0.072
    pen.disc(hair, 0.5, 0.075, head * 1.08)
    pen.oval(skin, 0.53, 0.09, head * 0.85 / pen.width, head * 0.9 / pen.height)
    if rng.random() < 0.25:
        cap = pick(rng, CLOTHES)
        rx, ry = head * 1.15 / pen.width, head * 1.1 / pen.height
        pen.fill(cap, *arc(0.5, 0.07, rx, ry, start=pi))
        pen.line(cap, 1.2, 0.4, 0.07, 0.78, 0.075)
    if rng.random() < 0.25:
        pen.box(pick(rng, CLOTHES), 0.08, 0.24, 0.3, 0.44)


@_sheet("height", (28, 54), 0.42, "tilted")
def _person_like(rng: Rng, pen: Pen) -> None:
    """A lamp post, bottle, bust on a plinth, skittle, traffic cone or hydrant."""
    kind = int(rng.integers(6))
    colour = pick(rng, CLOTHES)
    if kind == 0:
        pen.line((70, 74, 78), 2.2, 0.5, 0.1, 0.5, 1)
        pen.disc((250, 236, 180), 0.5, 0.08, pen.height * 0.08)
        pen.box((60, 62, 66), 0.35, 0.94, 0.65, 1)
    elif kind == 1:
        right = (0.58, 0, 0.58, 0.25, 0.76, 0.4, 0.76, 1)
        left = (0.24, 1, 0.24, 0.4, 0.42, 0.25)
        pen.fill(varied(rng, (50, 110, 70), 35), 0.42, 0, *right, *left)
        pen.box(varied(rng, WHITE), 0.24, 0.55, 0.76, 0.82)
    elif kind == 2:
        stone = varied(rng, (168, 166, 160), 25)
        pen.disc(stone, 0.5, 0.11, pen.height * 0.085)
        chest = (0.12, 0.42, 0.2, 0.27, 0.42, 0.2, 0.58, 0.2, 0.8, 0.27, 0.88, 0.42)
        pen.fill(scaled(stone, 0.9), *chest)
        pen.box(scaled(stone, 0.75), 0.16, 0.42, 0.84, 1)
        pen.box(stone, 0.08, 0.42, 0.92, 0.5)
    elif kind == 3:
        body = varied(rng, (232, 226, 214), 15)
        pen.oval(body, 0.5, 0.7, 0.32, 0.3)
        pen.fill(body, 0.38, 0.2, 0.62, 0.2, 0.72, 0.6, 0.28, 0.6)
        pen.oval(body, 0.5, 0.12, 0.17, 0.12)
        pen.box(RED, 0.36, 0.24, 0.64, 0.3)
    elif kind == 4:
        pen.fill((226, 96, 36), 0.44, 0.05, 0.56, 0.05, 0.84, 0.92, 0.16, 0.92)
        for y in (0.34, 0.62):
            spread = 0.06 + 0.25 * y
            pen.box(WHITE, 0.5 - spread, y, 0.5 + spread, y + 0.12)
        pen.box((190, 80, 30), 0.02, 0.9, 0.98, 1)
    else:
        pen.oval(colour, 0.5, 0.22, 0.3, 0.2)
        pen.box(colour, 0.22, 0.22, 0.78, 1)
        pen.box(scaled(colour, 0.8), 0.04, 0.45, 0.96, 0.58)
        pen.box(scaled(colour, 0.65), 0.1, 0.92, 0.9, 1)


TARGETS: Mapping[str, Painter] = {
    "license_plate": _license_plate, "traffic_sign": traffic_sign, "vehicle": vehicle,
    "vegetation": vegetation, "bicycle": bicycle, "person": person,
}  # fmt: skip
"""The six domains of the paper's Figure 10, in its order."""
NEAR_MISSES: Mapping[str, Painter] = {
    "license_plate": _plain_board, "traffic_sign": _sign_like, "vehicle": _box_like,
    "vegetation": _plant_like, "bicycle": _bicycle_like, "person": _person_like,
}  # fmt: skip
"""Per domain: what resembles its class and is none."""
