"""Built-in classification, of pictures and of clips, and counting."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import cos, pi, sin

import numpy as np
from PIL import Image

from valora_data.schema import Answer, Split, Task
from valora_data.sources.generic.scenes import COLORS, SIZE, Floats, Rng
from valora_data.sources.generic.shapes import SHAPES
from valora_data.sources.scenes import objects
from valora_data.sources.scenes.boards import (
    WEATHERS,
    Board,
    Drawn,
    add_weather,
    fitted,
    resized,
    scene,
    thing,
)
from valora_data.sources.scenes.drawing import Colour, Pen, Point, chosen, pick, scaled
from valora_data.sources.scenes.language import TABLE_SHAPES
from valora_data.sources.scenes.objects import PLANTS, SIGNS, VEHICLES
from valora_data.sources.scenes.photographs import photograph_crop

VEHICLE_LABELS = (*VEHICLES, "bicycle")


@scene(Task.CLASSIFICATION, "which vehicle is this?", VEHICLE_LABELS)
def _vehicle_type(rng: Rng, split: Split) -> Drawn:
    label = chosen(rng, VEHICLE_LABELS)
    pen = {**VEHICLES, "bicycle": objects.bicycle}[label](rng)
    return _shown(rng, split, pen, label, other=chosen(rng, list(PLANTS)))


@scene(Task.CLASSIFICATION, "which plant is this?", PLANTS)
def _plant_type(rng: Rng, split: Split) -> Drawn:
    label = chosen(rng, list(PLANTS))
    return _shown(rng, split, PLANTS[label](rng), label)


@scene(Task.CLASSIFICATION, "which sign is this?", SIGNS)
def _sign_type(rng: Rng, split: Split) -> Drawn:
    kind = int(rng.integers(len(SIGNS)))
    pen = objects.traffic_sign(rng, kind, rng.uniform(30, 60))
    return _shown(rng, split, pen, SIGNS[kind], other=chosen(rng, list(PLANTS)))


def _shown(rng: Rng, split: Split, pen: Pen, label: str, other: str | None = None) -> Drawn:
    """A thing on a photograph, sometimes with a plant beside it."""
    board = Board.photograph(rng, split, "grass")
    board.add(rng, fitted(rng, pen.layer(), (44.0, 80.0)))
    if other is not None and rng.random() < 0.4:
        board.add(rng, resized(PLANTS[other](rng).layer(), 0.7))
    return Drawn((board.image(rng),), Answer(label=label))


@scene(Task.CLASSIFICATION, "how is the weather?", WEATHERS)
def _weather(rng: Rng, split: Split) -> Drawn:
    label = chosen(rng, WEATHERS)
    board = Board.photograph(rng, split)
    pens = [VEHICLES[chosen(rng, list(VEHICLES))](rng), objects.person(rng)]
    for pen in pens[: int(rng.integers(3))]:
        board.add(rng, pen.layer())
    add_weather(rng, board, label)
    return Drawn((board.image(rng),), Answer(label=label))


MOST = 5
COUNTS = tuple(str(count) for count in range(MOST + 1))
METALS = ((214, 172, 60), (190, 192, 196), (184, 110, 62))


def _potted_plant(rng: Rng) -> Floats:
    potted = ("conifer", "palm", "cactus", "grass")  # keep their form when small
    return fitted(rng, PLANTS[chosen(rng, potted)](rng).layer())


def _coin(rng: Rng) -> Floats:
    """A round of gold, silver or copper with a raised rim and a number."""
    metal = pick(rng, METALS, 25)
    size = rng.uniform(18, 28)
    pen = Pen(size, size)
    pen.oval(scaled(metal, 0.6), 0.5, 0.5, 0.5, 0.5)
    pen.oval(metal, 0.5, 0.5, 0.44, 0.44)
    pen.ring(scaled(metal, 1.25), 1.0, 0.5, 0.5, size * 0.36)
    pen.text(scaled(metal, 0.5), size * 0.07, str(rng.integers(1, 9)), 0.38, 0.3, 0.62, 0.7)
    return pen.layer()


def _count(painter: Callable[[Rng], Floats], without: str, rng: Rng, split: Split) -> Drawn:
    """Some of what is counted, and up to two other things."""
    board = Board.photograph(rng, split, without)
    wanted = int(rng.integers(MOST + 1))
    found = sum(board.add(rng, painter(rng)) is not None for _ in range(wanted))
    for _ in range(int(rng.integers(3))):
        board.put(rng, chosen(rng, TABLE_SHAPES), chosen(rng, list(COLORS)), length=(14, 22))
    return Drawn((board.image(rng),), Answer(count=found))


for _name, _what, _painter, _without in (
    ("people", "people", lambda rng: fitted(rng, objects.person(rng).layer()), ""),
    ("vehicle", "vehicles", lambda rng: fitted(rng, objects.vehicle(rng).layer()), ""),
    ("plant", "plants", _potted_plant, "grass"),
    ("coin", "coins", _coin, "coins"),
):
    _register = scene(Task.COUNTING, f"how many {_what}?", COUNTS, f"{_name}_count")
    _register(partial(_count, _painter, _without))


# ---- clips ---------------------------------------------------------------------------------------

FRAMES = 4
TIMES = np.linspace(0, 1, FRAMES)  # when the frames are taken, in shares of the clip

DRIVES = ("left", "right", "closer", "away", "still")
ACTIONS = ("walk", "jump", "wave", "crouch", "stand")
BALL_PATHS = ("roll", "bounce", "rise", "fall", "swing")
CAMERA_MOVES = ("pan left", "pan right", "zoom in", "zoom out", "still")


def _clip(rng: Rng, boards: Sequence[Board], label: str) -> Drawn:
    """Frames as one camera takes them: the same light, blur and strength of grain."""
    state = rng.bit_generator.state
    images = []
    for board in boards:
        rng.bit_generator.state = state
        images.append(board.image(rng))
    return Drawn(tuple(images), Answer(label=label))


@scene(Task.VIDEO, "which way does the vehicle move?", DRIVES)
def _vehicle_motion(rng: Rng, split: Split) -> Drawn:
    label = chosen(rng, DRIVES)
    board = Board.photograph(rng, split)
    layer = VEHICLES[chosen(rng, list(VEHICLES))](rng).layer()
    y, reach = rng.uniform(30, 66), rng.uniform(14, 24)
    x = rng.uniform(34, 62)
    sizes, xs = np.full(FRAMES, rng.uniform(0.7, 1.0)), np.full(FRAMES, x)
    if label in ("left", "right"):
        xs = x + (-1 if label == "left" else 1) * reach * (2 * TIMES - 1)
    elif label in ("closer", "away"):
        sizes = np.linspace(rng.uniform(0.35, 0.45), rng.uniform(0.95, 1.1), FRAMES)
        sizes = sizes[::-1] if label == "away" else sizes
    frames = [
        board.with_middle(resized(layer, size), at, y) for size, at in zip(sizes, xs, strict=True)
    ]
    return _clip(rng, frames, label)


def _figure(
    look: tuple[float, Colour, Colour, Colour, Colour],
    feet: Point = (-0.08, 0.08),
    hands: tuple[Point, Point] = ((-0.14, 0.56), (0.14, 0.56)),
    sink: float = 0.0,
) -> Floats:
    """Draw someone on a sheet whose size depends on the look alone; the soles are at its foot.

    `look` is a height in pixels and four colours; all else is shares of the height.
    """
    height, skin, hair, top, bottom = look
    pen = Pen(height, height, margin=0.12)
    limb, hips, shoulders = height * 0.085, 0.55 + sink, 0.24 + sink
    for side, foot, light in ((-1, feet[0], 0.8), (1, feet[1], 1.0)):
        knee = (0.5 + foot * 0.6 + side * sink * 0.7, (hips + 0.97) / 2 - sink * 0.15)
        leg = (0.5 + side * 0.05, hips, *knee, 0.5 + foot, 0.95)
        pen.limb(scaled(bottom, light), limb * 1.2, *leg)
        pen.limb(scaled(objects.BLACK, 1.3), limb * 0.8, 0.5 + foot, 0.97, 0.56 + foot, 0.97)
    for side, (x, y), light in ((-1, hands[0], 0.8), (1, hands[1], 1.1)):
        hand = (0.5 + x, y + sink)
        elbow = (0.5 + side * 0.13 + x * 0.25, (shoulders + hand[1]) / 2 + 0.03)
        pen.limb(scaled(top, light), limb, 0.5 + side * 0.09, shoulders + 0.02, *elbow, *hand)
        pen.disc(skin, *hand, limb * 0.6)
    neck = (0.45, shoulders - 0.05, 0.55, shoulders - 0.05)
    pen.fill(top, 0.39, shoulders, *neck, 0.61, shoulders, 0.59, hips + 0.03, 0.41, hips + 0.03)
    pen.disc(hair, 0.5, 0.085 + sink, limb * 1.08)
    pen.disc(skin, 0.51, 0.1 + sink, limb * 0.85)
    return pen.layer()


@scene(Task.VIDEO, "which action is this?", ACTIONS)
def _person_action(rng: Rng, split: Split) -> Drawn:
    label = chosen(rng, ACTIONS)
    board = Board.photograph(rng, split)
    top, bottom = pick(rng, objects.CLOTHES), pick(rng, objects.CLOTHES)
    height = rng.uniform(40, 54)
    look = (height, pick(rng, objects.SKIN, 12), pick(rng, objects.HAIR, 12), top, bottom)
    x, y = rng.uniform(36, 60), rng.uniform(46, 58)
    side = 1 if rng.random() < 0.5 else -1
    phase, frames = rng.uniform(0, 2 * pi), []
    for index, time in enumerate(TIMES):
        dx = dy = 0.0
        if label == "walk":
            stride = 0.2 * (1 if sin(phase + pi * index) > 0 else -1)
            hands = ((-0.14 - stride, 0.5), (0.14 - stride, 0.5))
            figure = _figure(look, (-stride, stride), hands)
            dx = side * 30 * (time - 0.5)
        elif label == "jump":
            lift = sin(pi * (0.15 + 0.7 * time)) ** 2
            foot, up = 0.1 + 0.06 * lift, 0.56 - 0.5 * lift
            figure = _figure(look, (-foot, foot), ((-0.24, up), (0.24, up)))
            dy = -16 * lift
        elif label == "wave":
            reach = 0.22 + 0.16 * (1 if index % 2 else -1)
            left, right = ((-0.14, 0.56), (reach, 0.02)) if side > 0 else (
                (-reach, 0.02), (0.14, 0.56))  # fmt: skip
            figure = _figure(look, hands=(left, right))
        elif label == "crouch":
            figure = _figure(look, (-0.13, 0.13), sink=0.27 * time)
        else:
            figure = _figure(look)
        frames.append(board.with_middle(figure, x + dx, y + dy))
    return _clip(rng, frames, label)


@scene(Task.VIDEO, "how does the ball move?", BALL_PATHS)
def _ball_path(rng: Rng, split: Split) -> Drawn:
    label = chosen(rng, BALL_PATHS)
    board = Board.photograph(rng, split)
    size, paint = rng.uniform(16, 26), pick(rng, objects.PAINTS)
    way = 1 if rng.random() < 0.5 else -1
    x, y = rng.uniform(36, 60), rng.uniform(36, 60)
    hook = rng.uniform(4, 10)
    frames = []
    for index, time in enumerate(TIMES):
        ball = Pen(size, size, turn=50.0 * index)
        ball.oval(paint, 0.5, 0.5, 0.5, 0.5)
        ball.box(objects.WHITE, 0.06, 0.4, 0.94, 0.6)
        px, py = x, y
        if label == "roll":
            px = 48 + way * 64 * (time - 0.5)
        elif label == "bounce":
            px = 48 + way * 56 * (time - 0.5)
            py = 76 - 44 * abs(cos(1.5 * pi * time))
        elif label in ("rise", "fall"):
            py = 48 + (-1 if label == "rise" else 1) * 60 * (time - 0.5)
        else:
            angle = way * 0.75 * cos(pi * 1.5 * time)
            px, py = x + 46 * sin(angle), hook + 46 * cos(angle)
        frames.append(board.with_middle(ball.layer(), px, py))
        if label == "swing":
            string = Pen(SIZE, SIZE, margin=0.0)
            end = ((px - 6 * sin(angle)) / SIZE, (py - 6 * cos(angle)) / SIZE)
            string.line((40, 38, 36), 1.2, x / SIZE, hook / SIZE, *end)
            frames[-1].paste(string.layer(), 0, 0)
    return _clip(rng, frames, label)


@scene(Task.VIDEO, "how does the camera move?", CAMERA_MOVES)
def _camera_motion(rng: Rng, split: Split) -> Drawn:
    """Windows into a larger picture with some things in it."""
    label = chosen(rng, CAMERA_MOVES)
    world = Board(photograph_crop(rng, split, 2 * SIZE).astype(np.float32))
    for _ in range(int(rng.integers(4, 7))):
        shape, color = chosen(rng, list(SHAPES)), chosen(rng, list(COLORS))
        layer = thing(rng, shape, color, rng.uniform(24, 44))
        x, y = rng.uniform(24, 2 * SIZE - 24, 2)
        world = world.with_middle(layer, x, y)
    y, spare = rng.uniform(0, 60), rng.uniform(0, 10)
    wide = Image.fromarray(np.clip(world.pixels, 0, 255).astype(np.uint8))
    frames = []
    for time in TIMES:
        side, left, top = 120.0, 36.0, y
        way = time if label in ("pan right", "zoom in") else 1 - time
        if label.startswith("pan"):
            left = spare + 56 * way
        elif label.startswith("zoom"):
            side = 180 - 100 * way
            left = top = (2 * SIZE - side) / 2
        window = (left, top, left + side, top + side)
        frame = wide.resize((SIZE, SIZE), Image.Resampling.BILINEAR, box=window)
        frames.append(Board(np.asarray(frame, dtype=np.float32)))
    return _clip(rng, frames, label)
