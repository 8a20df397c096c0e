"""Built-in videos: short clips of vehicles, people, balls and cameras that move."""

from __future__ import annotations

from dataclasses import dataclass
from math import cos, pi, sin
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

from valora_data.schema import Answer, Task
from valora_data.sources.generic.scenes import COLORS
from valora_data.sources.generic.shapes import SHAPES
from valora_data.sources.scenes.boards import (
    SIZE,
    Board,
    Drawn,
    SceneDomain,
    chosen,
    resized,
    thing,
)
from valora_data.sources.scenes.drawing import Colour, Layer, Pen, Pose, scaled
from valora_data.sources.scenes.objects import (
    BLACK,
    CLOTHES,
    HAIR,
    PAINTS,
    SKIN,
    VEHICLES,
    WHITE,
    pick,
)
from valora_data.sources.scenes.photographs import photograph_crop

if TYPE_CHECKING:
    from collections.abc import Sequence

    from valora_data.schema import Split

FRAMES = 4
TIMES = np.linspace(0, 1, FRAMES)
"""When the frames are taken, in shares of the clip."""

DRIVES = ("left", "right", "closer", "away", "still")
ACTIONS = ("walk", "jump", "wave", "crouch", "stand")
BALL_PATHS = ("roll", "bounce", "rise", "fall", "swing")
CAMERA_MOVES = ("pan left", "pan right", "zoom in", "zoom out", "still")
CHANGES = ("appear", "vanish", "grow", "shrink", "recolor")


HIPS, SHOULDERS = 0.55, 0.24


@dataclass(frozen=True, slots=True)
class Look:
    """What stays the same from frame to frame."""

    height: float
    skin: Colour
    hair: Colour
    top: Colour
    bottom: Colour

    @classmethod
    def any(cls, rng: np.random.Generator) -> Look:
        """Someone."""
        clothes = pick(rng, CLOTHES), pick(rng, CLOTHES)
        return cls(rng.uniform(40, 54), pick(rng, SKIN, 12), pick(rng, HAIR, 12), *clothes)


@dataclass(frozen=True, slots=True)
class Posture:
    """How someone stands; all in shares of the height.

    Attributes:
        feet: Distance of each foot from the middle, left and right.
        hands: Place of each hand (x from the middle, y from the crown), left and right.
        sink: How far the body is lowered by bent knees.
    """

    feet: tuple[float, float] = (-0.08, 0.08)
    hands: tuple[tuple[float, float], tuple[float, float]] = ((-0.14, 0.56), (0.14, 0.56))
    sink: float = 0.0


def figure(look: Look, posture: Posture) -> Layer:
    """Draw someone; the sheet's size depends on the look alone, the soles are at its foot."""
    pen = Pen(look.height, look.height, margin=0.12)
    limb, drop = look.height * 0.085, posture.sink
    hips, shoulders = HIPS + drop, SHOULDERS + drop
    for side, foot, shade in ((-1, posture.feet[0], 0.8), (1, posture.feet[1], 1.0)):
        bend = 0.5 + foot * 0.6 + side * drop * 0.7
        knee = (bend, (hips + 0.97) / 2 - drop * 0.15)
        leg = ((0.5 + side * 0.05, hips), knee, (0.5 + foot, 0.95))
        pen.limb(leg, scaled(look.bottom, shade), limb * 1.2)
        pen.limb(((0.5 + foot, 0.97), (0.56 + foot, 0.97)), scaled(BLACK, 1.3), limb * 0.8)
    for side, (x, y), shade in ((-1, posture.hands[0], 0.8), (1, posture.hands[1], 1.1)):
        hand = (0.5 + x, y + drop)
        elbow = (0.5 + side * 0.13 + x * 0.25, (shoulders + hand[1]) / 2 + 0.03)
        pen.limb(
            ((0.5 + side * 0.09, shoulders + 0.02), elbow, hand), scaled(look.top, shade), limb
        )
        pen.disc(*hand, limb * 0.6, look.skin)
    chest = (
        (0.39, shoulders), (0.45, shoulders - 0.05), (0.55, shoulders - 0.05), (0.61, shoulders),
        (0.59, hips + 0.03), (0.41, hips + 0.03),
    )  # fmt: skip
    pen.polygon(chest, look.top)
    head = look.height * 0.085
    pen.disc(0.5, 0.085 + drop, head * 1.08, look.hair)
    pen.disc(0.51, 0.1 + drop, head * 0.85, look.skin)
    return pen.layer()


def _clip(rng: np.random.Generator, boards: Sequence[Board], label: str) -> Drawn:
    """Frames as one camera takes them: the same light, blur and strength of grain."""
    state = rng.bit_generator.state
    images = []
    for board in boards:
        rng.bit_generator.state = state
        images.append(board.image(rng))
    return Drawn(tuple(images), Answer(label=label))


def _at(board: Board, layer: Layer, x: float, y: float) -> Board:
    """The board with the middle of a layer at (x, y) in pixels."""
    height, width = layer.pixels.shape[:2]
    with_it = board.copy()
    with_it.paste(layer, round(x - width / 2), round(y - height / 2))
    return with_it


def _drive(rng: np.random.Generator, split: Split) -> Drawn:
    label = chosen(rng, DRIVES)
    board = Board.photograph(rng, split)
    layer = VEHICLES[chosen(rng, list(VEHICLES))](rng, None).layer()
    y, reach = rng.uniform(30, 66), rng.uniform(14, 24)
    x = rng.uniform(34, 62)
    sizes, xs = np.full(FRAMES, rng.uniform(0.7, 1.0)), np.full(FRAMES, x)
    if label in ("left", "right"):
        way = -1 if label == "left" else 1
        xs = x + way * reach * (2 * TIMES - 1)
    elif label in ("closer", "away"):
        sizes = np.linspace(rng.uniform(0.35, 0.45), rng.uniform(0.95, 1.1), FRAMES)
        sizes = sizes[::-1] if label == "away" else sizes
    frames = [_at(board, resized(layer, size), at, y) for size, at in zip(sizes, xs, strict=True)]
    return _clip(rng, frames, label)


def _act(rng: np.random.Generator, split: Split) -> Drawn:
    label = chosen(rng, ACTIONS)
    board, look = Board.photograph(rng, split), Look.any(rng)
    x, y = rng.uniform(36, 60), rng.uniform(46, 58)
    side = 1 if rng.random() < 0.5 else -1
    phase, frames = rng.uniform(0, 2 * pi), []
    for index, time in enumerate(TIMES):
        swing = sin(phase + pi * index)
        dx = dy = 0.0
        posture = Posture()
        if label == "walk":
            stride = 0.2 * (1 if swing > 0 else -1)
            hands = ((-0.14 - stride, 0.5), (0.14 - stride, 0.5))
            posture = Posture((-stride, stride), hands)
            dx = side * 30 * (time - 0.5)
        elif label == "jump":
            lift = sin(pi * (0.15 + 0.7 * time)) ** 2
            up = 0.56 - 0.5 * lift
            posture = Posture((-0.1 - 0.06 * lift, 0.1 + 0.06 * lift),
                              ((-0.24, up), (0.24, up)))  # fmt: skip
            dy = -16 * lift
        elif label == "wave":
            hand = (0.22 + 0.16 * (1 if index % 2 else -1), 0.02)
            rest = (0.14, 0.56)
            hands = ((-rest[0], rest[1]), hand) if side > 0 else ((-hand[0], hand[1]), rest)
            posture = Posture(hands=hands)
        elif label == "crouch":
            posture = Posture((-0.13, 0.13), sink=0.27 * time)
        frames.append(_at(board, figure(look, posture), x + dx, y + dy))
    return _clip(rng, frames, label)


def _ball(rng: np.random.Generator) -> list[Layer]:
    """A ball with a stripe, turned a little further in every frame."""
    size, paint = rng.uniform(16, 26), pick(rng, PAINTS)
    layers = []
    for index in range(FRAMES):
        pen = Pen(size, size, Pose(turn=50.0 * index))
        pen.ellipse(0.5, 0.5, 0.5, 0.5, paint)
        pen.rectangle(0.06, 0.4, 0.94, 0.6, WHITE)
        layers.append(pen.layer())
    return layers


def _ball_path(rng: np.random.Generator, split: Split) -> Drawn:
    label = chosen(rng, BALL_PATHS)
    board, layers = Board.photograph(rng, split), _ball(rng)
    way = 1 if rng.random() < 0.5 else -1
    x, y = rng.uniform(36, 60), rng.uniform(36, 60)
    frames = []
    hook = (x, rng.uniform(4, 10))
    for layer, time in zip(layers, TIMES, strict=True):
        px, py = x, y
        if label == "roll":
            px = 48 + way * 64 * (time - 0.5)
        elif label == "bounce":
            px = 48 + way * 56 * (time - 0.5)
            py = 76 - 44 * abs(cos(1.5 * pi * time))
        elif label in ("rise", "fall"):
            sign = -1 if label == "rise" else 1
            py = 48 + sign * 60 * (time - 0.5)
        else:
            angle = way * 0.75 * cos(pi * 1.5 * time)
            px, py = hook[0] + 46 * sin(angle), hook[1] + 46 * cos(angle)
        frame = _at(board, layer, px, py)
        if label == "swing":
            pen = Pen(SIZE, SIZE, margin=0.0)
            end = (px - 6 * sin(angle), py - 6 * cos(angle))
            pen.line([(hook[0] / SIZE, hook[1] / SIZE), (end[0] / SIZE, end[1] / SIZE)],
                     (40, 38, 36), 1.2)  # fmt: skip
            frame.paste(pen.layer(), 0, 0)
        frames.append(frame)
    return _clip(rng, frames, label)


def _camera(rng: np.random.Generator, split: Split) -> Drawn:
    """Windows into a larger picture with some things in it."""
    label = chosen(rng, CAMERA_MOVES)
    world = Board(photograph_crop(rng, split, 2 * SIZE).astype(np.float32))
    for _ in range(int(rng.integers(4, 7))):
        layer = thing(
            rng, chosen(rng, list(SHAPES)), chosen(rng, list(COLORS)), rng.uniform(24, 44)
        )
        x, y = rng.uniform(24, 2 * SIZE - 24, 2)
        world = _at(world, layer, x, y)
    y, spare = rng.uniform(0, 60), rng.uniform(0, 10)
    wide = Image.fromarray(np.clip(world.pixels, 0, 255).astype(np.uint8))
    frames = []
    for time in TIMES:
        side, left, top = 120.0, 36.0, y
        if label.startswith("pan"):
            way = time if label == "pan right" else 1 - time
            left = spare + 56 * way
        elif label.startswith("zoom"):
            way = time if label == "zoom in" else 1 - time
            side = 180 - 100 * way
            left, top = (2 * SIZE - side) / 2, (2 * SIZE - side) / 2
        window = (left, top, left + side, top + side)
        frame = wide.resize((SIZE, SIZE), Image.Resampling.BILINEAR, box=window)
        frames.append(Board(np.asarray(frame, dtype=np.float32)))
    return _clip(rng, frames, label)


def _change(rng: np.random.Generator, split: Split) -> Drawn:
    label = chosen(rng, CHANGES)
    board = Board.photograph(rng, split)
    shape = chosen(rng, list(SHAPES))
    first, second = (str(c) for c in rng.choice(list(COLORS), 2, replace=False))
    length, state = rng.uniform(28, 42), rng.bit_generator.state
    layer = thing(rng, shape, first, length)
    x, y = rng.uniform(30, 66, 2)
    other = thing(rng, chosen(rng, [s for s in SHAPES if s != shape]), second, 16)
    board.add(rng, other, (0, 0, 1, 0.2) if y > 48 else (0, 0.8, 1, 1))
    after = rng.bit_generator.state
    rng.bit_generator.state = state  # the same specimen in the other colour
    recoloured = thing(rng, shape, second, length)
    rng.bit_generator.state = after
    turn = int(rng.integers(1, FRAMES))
    frames = []
    for index, time in enumerate(TIMES):
        late = index >= turn
        shown: Layer | None = layer
        if label in ("appear", "vanish"):
            shown = layer if late == (label == "appear") else None
        elif label in ("grow", "shrink"):
            shown = resized(layer, 0.4 + 0.8 * (time if label == "grow" else 1 - time))
        elif late:
            shown = recoloured
        frames.append(board.copy() if shown is None else _at(board, shown, x, y))
    return _clip(rng, frames, label)


VIDEO = {
    "vehicle_motion": SceneDomain(Task.VIDEO, "which way does the vehicle move?", _drive, DRIVES),
    "person_action": SceneDomain(Task.VIDEO, "which action is this?", _act, ACTIONS),
    "ball_path": SceneDomain(Task.VIDEO, "how does the ball move?", _ball_path, BALL_PATHS),
    "camera_motion": SceneDomain(Task.VIDEO, "how does the camera move?", _camera, CAMERA_MOVES),
    "change": SceneDomain(Task.VIDEO, "what does the thing do?", _change, CHANGES),
}
"""Domains by name; every clip has `FRAMES` frames."""
