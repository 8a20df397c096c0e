"""Built-in domains of every task but detection."""

from collections.abc import Callable, Collection, Sequence
from functools import partial
from math import cos, pi, sin

import numpy as np

from valora_data.schema import Answer, Box, Split, Task
from valora_data.sources.generic.scenes import COLORS, SIZE, Floats, Rng, color_of, plural
from valora_data.sources.generic.shapes import SHAPES
from valora_data.sources.scenes import objects
from valora_data.sources.scenes.boards import Board, Drawn, Thing, fitted, resized, scene
from valora_data.sources.scenes.drawing import Edges, Pen, chosen, pick, scaled
from valora_data.wording import joined

VEHICLE_LABELS = (*objects.VEHICLES, "bicycle")


@scene(Task.CLASSIFICATION, "which vehicle is this?", VEHICLE_LABELS)
def _vehicle_type(rng: Rng, split: Split) -> Drawn:
    label = chosen(rng, VEHICLE_LABELS)
    pen = {**objects.VEHICLES, "bicycle": objects.bicycle}[label](rng)
    return _shown(rng, split, pen, label, other=chosen(rng, list(objects.PLANTS)))


@scene(Task.CLASSIFICATION, "which plant is this?", objects.PLANTS)
def _plant_type(rng: Rng, split: Split) -> Drawn:
    label = chosen(rng, list(objects.PLANTS))
    return _shown(rng, split, objects.PLANTS[label](rng), label)


@scene(Task.CLASSIFICATION, "which sign is this?", objects.SIGNS)
def _sign_type(rng: Rng, split: Split) -> Drawn:
    kind = int(rng.integers(len(objects.SIGNS)))
    pen = objects.traffic_sign(rng, kind, rng.uniform(30, 60))
    return _shown(rng, split, pen, objects.SIGNS[kind], other=chosen(rng, list(objects.PLANTS)))


def _shown(rng: Rng, split: Split, pen: Pen, label: str, other: str | None = None) -> Drawn:
    """A thing on a photograph, sometimes with a plant beside it."""
    board = Board.photograph(rng, split, "grass")
    board.add(rng, fitted(rng, pen.layer(), (44.0, 80.0)))
    if other is not None and rng.random() < 0.4:
        board.add(rng, resized(objects.PLANTS[other](rng).layer(), 0.7))
    return Drawn((board.image(rng),), Answer(label=label))


MAX_COUNT = 5
COUNTS = tuple(str(count) for count in range(MAX_COUNT + 1))
# What keeps its form when it is small.
POTTED = [objects.PLANTS[name] for name in ("conifer", "palm", "cactus", "grass")]
METALS = ((214, 172, 60), (190, 192, 196), (184, 110, 62))


def _coin(rng: Rng) -> Floats:
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
    wanted = int(rng.integers(MAX_COUNT + 1))
    found = sum(board.add(rng, painter(rng)) is not None for _ in range(wanted))
    for _ in range(int(rng.integers(3))):
        board.put(rng, chosen(rng, TABLE_SHAPES), chosen(rng, list(COLORS)), length=(14, 22))
    return Drawn((board.image(rng),), Answer(count=found))


for _name, _what, _painter, _without in (
    ("people", "people", lambda rng: fitted(rng, objects.person(rng).layer()), ""),
    ("vehicle", "vehicles", lambda rng: fitted(rng, objects.vehicle(rng).layer()), ""),
    ("plant", "plants", lambda rng: fitted(rng, chosen(rng, POTTED)(rng).layer()), "grass"),
    ("coin", "coins", _coin, "coins"),
):
    _register = scene(Task.COUNTING, f"how many {_what}?", COUNTS, f"{_name}_count")
    _register(partial(_count, _painter, _without))


FRAMES = 4
TIMES = np.linspace(0, 1, FRAMES)  # when the frames are taken, in shares of the clip

DRIVES = ("left", "right", "closer", "away", "still")
BALL_PATHS = ("roll", "bounce", "rise", "fall", "swing")


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
    layer = objects.VEHICLES[chosen(rng, list(objects.VEHICLES))](rng).layer()
    y, reach = rng.uniform(30, 66), rng.uniform(14, 24)
    x = rng.uniform(34, 62)
    sizes, xs = np.full(FRAMES, rng.uniform(0.7, 1.0)), np.full(FRAMES, x)
    if label in ("left", "right"):
        xs = x + (-1 if label == "left" else 1) * reach * (2 * TIMES - 1)
    elif label in ("closer", "away"):
        sizes = np.linspace(rng.uniform(0.35, 0.45), rng.uniform(0.95, 1.1), FRAMES)
        sizes = sizes[::-1] if label == "away" else sizes
    moves = zip(sizes, xs, strict=True)
    return _clip(rng, [board.with_middle(resized(layer, size), at, y) for size, at in moves], label)


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


ANNOTATORS = 10  # answers per question, as in VQA v2
PLACES = {
    "top left": (0.02, 0.02, 0.28, 0.28), "top": (0.4, 0.02, 0.6, 0.28),
    "top right": (0.72, 0.02, 0.98, 0.28), "left": (0.02, 0.4, 0.28, 0.6),
    "center": (0.4, 0.4, 0.6, 0.6), "right": (0.72, 0.4, 0.98, 0.6),
    "bottom left": (0.02, 0.72, 0.28, 0.98), "bottom": (0.4, 0.72, 0.6, 0.98),
    "bottom right": (0.72, 0.72, 0.98, 0.98),
}  # fmt: skip
"""Name of a place to where the middle of a thing lies, in shares of the image."""
CLEAR_COLORS = ("red", "yellow", "green", "blue", "purple", "pink", "white", "black")
TABLE_SHAPES = tuple(SHAPES)


def _several(rng: Rng, options: Collection[str], count: int) -> list[str]:
    return [str(word) for word in rng.choice(list(options), count, replace=False)]


def _in_places(rng: Rng, split: Split, count: int) -> tuple[Board, dict[str, Thing]]:
    """A board with things of different shapes, by the name of their place."""
    while True:
        board = Board.photograph(rng, split)
        places, shapes = _several(rng, PLACES, count), _several(rng, TABLE_SHAPES, count)
        things = dict[str, Thing]()
        for place, shape in zip(places, shapes, strict=True):
            color, region = chosen(rng, CLEAR_COLORS), PLACES[place]
            if found := board.put(rng, shape, color, length=(18, 26), region=region):
                things[place] = found
        if len(things) == count:
            return board, things


def _article(name: str) -> str:
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


STREET = {
    "vehicle": "vehicle", "vegetation": "plant", "bicycle": "bicycle", "person": "person",
    "traffic_sign": "traffic sign",
}  # fmt: skip


def _asked(board: Board, rng: Rng, question: str, answer: str, options: Sequence[str]) -> Drawn:
    """What ten people answer: at least seven agree, the rest says another one of the options."""
    others = [option for option in options if option != answer]
    strays = [chosen(rng, others) for _ in range(int(rng.integers(0, 4)))]
    said = (*[answer] * (ANNOTATORS - len(strays)), *strays)
    return Drawn((board.image(rng),), Answer(answers=said), question)


@scene(Task.VQA, "{}")
def _vehicle_color(rng: Rng, split: Split) -> Drawn:
    kind, color = chosen(rng, list(objects.VEHICLES)), chosen(rng, CLEAR_COLORS)
    red, green, blue = (int(level) for level in color_of(color, rng) * 255)
    board = Board.photograph(rng, split)
    board.add(rng, objects.VEHICLES[kind](rng, (red, green, blue)).layer())
    board.put(rng, chosen(rng, TABLE_SHAPES), chosen(rng, CLEAR_COLORS), length=(14, 20))
    return _asked(board, rng, f"what color is the {kind}?", color, CLEAR_COLORS)


@scene(Task.VQA, "{}", ("no", "yes"))
def _street_presence(rng: Rng, split: Split) -> Drawn:
    board = Board.photograph(rng, split, "grass")
    kinds = [str(kind) for kind in rng.permutation(list(STREET))]
    tried = kinds[: int(rng.integers(1, 3))]
    shown = [
        kind for kind in tried if board.add(rng, objects.TARGETS[kind](rng).layer()) is not None
    ]
    there = bool(shown) and rng.random() < 0.5
    asked = chosen(rng, shown if there else [kind for kind in kinds if kind not in shown])
    question = f"is there {_article(STREET[asked])}?"
    return _asked(board, rng, question, "yes" if there else "no", ("yes", "no"))


NUMBERS = ("no", "one", "two", "three")


def _captioned(board: Board, rng: Rng, *captions: str) -> Drawn:
    return Drawn((board.image(rng),), Answer(captions=captions))


@scene(Task.CAPTION, "describe the places.")
def _place_caption(rng: Rng, split: Split) -> Drawn:
    board, things = _in_places(rng, split, int(rng.integers(1, 3)))
    named = [
        (_article(f"{one.color} {one.shape}"), f"{'in' if place == 'center' else 'at'} the {place}")
        for place, one in sorted(things.items(), key=lambda item: item[1].box[0] + item[1].box[2])
    ]  # from left to right
    plain = joined([f"{name} {where}" for name, where in named])
    turned = joined([f"{where} {name}" for name, where in named])
    return _captioned(board, rng, plain, f"there is {plain}", turned)


@scene(Task.CAPTION, "describe the numbers.")
def _count_caption(rng: Rng, split: Split) -> Drawn:
    board = Board.photograph(rng, split)
    phrases, bare = [], []
    for shape in _several(rng, TABLE_SHAPES, int(rng.integers(1, 3))):
        color, wanted = chosen(rng, CLEAR_COLORS), int(rng.integers(1, 4))
        placed = [board.put(rng, shape, color, length=(17, 24)) for _ in range(wanted)]
        count = sum(one is not None for one in placed)
        if count:
            name = shape if count == 1 else plural(shape)
            phrases.append(f"{NUMBERS[count]} {color} {name}")
            bare.append(f"{NUMBERS[count]} {name}")
    plain = joined(phrases)
    return _captioned(board, rng, plain, f"there are {plain}", joined(bare))


HALVES = {
    "left": (0.05, 0.1, 0.35, 0.9), "right": (0.65, 0.1, 0.95, 0.9),
    "top": (0.1, 0.05, 0.9, 0.35), "bottom": (0.1, 0.65, 0.9, 0.95),
}  # fmt: skip
OPPOSITE = {"left": "right", "right": "left", "top": "bottom", "bottom": "top"}


def _referred(board: Board, rng: Rng, phrase: str, box: Edges) -> Drawn:
    return Drawn((board.image(rng),), Answer((Box(*box, phrase),)), phrase)


@scene(Task.GROUNDING, "locate {}")
def _color_reference(rng: Rng, split: Split) -> Drawn:
    shape = chosen(rng, TABLE_SHAPES)
    while True:
        board = Board.photograph(rng, split)
        colors = _several(rng, CLEAR_COLORS, int(rng.integers(2, 4)))
        meant, other, *_ = [board.put(rng, shape, color) for color in colors]
        if meant and other:
            return _referred(board, rng, f"{meant.color} {meant.shape}", meant.box)


@scene(Task.GROUNDING, "locate {}")
def _place_reference(rng: Rng, split: Split) -> Drawn:
    side = chosen(rng, list(HALVES))
    while True:
        board = Board.photograph(rng, split)
        shape, color = chosen(rng, TABLE_SHAPES), chosen(rng, CLEAR_COLORS)
        meant = board.put(rng, shape, color, region=HALVES[side])
        other = board.put(rng, shape, color, region=HALVES[OPPOSITE[side]])
        if meant and other:
            return _referred(board, rng, f"{side} {shape}", meant.box)
