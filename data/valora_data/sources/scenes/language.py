"""Built-in questions, captions and referring expressions about drawn pictures."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from valora_data.schema import Answer, Box, Split, Task
from valora_data.sources.generic.scenes import PATTERNS, Rng, Thing, color_of, plural
from valora_data.sources.generic.shapes import SHAPES
from valora_data.sources.scenes.boards import Board, Drawn, add_weather, resized, scene
from valora_data.sources.scenes.drawing import Edges, chosen
from valora_data.sources.scenes.objects import SIGNS, TARGETS, VEHICLES, traffic_sign
from valora_data.wording import joined

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
"""Colours that nobody takes for another one."""
TABLE_SHAPES = tuple(shape for shape in SHAPES if not shape.startswith("letter"))


def _several(rng: Rng, options: Collection[str], count: int) -> list[str]:
    """Different ones of some words."""
    return [str(word) for word in rng.choice(list(options), count, replace=False)]


def _in_places(rng: Rng, split: Split, count: int) -> tuple[Board, dict[str, Thing]]:
    """A board with things of different shapes, by the name of their place."""
    while True:
        board = Board.photograph(rng, split)
        places, shapes = _several(rng, PLACES, count), _several(rng, TABLE_SHAPES, count)
        found = {
            place: board.put(
                rng, shape, chosen(rng, CLEAR_COLORS), length=(18, 26), region=PLACES[place]
            )
            for place, shape in zip(places, shapes, strict=True)
        }
        things = {place: one for place, one in found.items() if one is not None}
        if len(things) == count:
            return board, things


def _article(name: str) -> str:
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


# ---- questions -----------------------------------------------------------------------------------

STREET = {
    "vehicle": "vehicle", "vegetation": "plant", "bicycle": "bicycle", "person": "person",
    "traffic_sign": "traffic sign",
}  # fmt: skip
"""Class that is drawn to what questions call it."""
SIGN_FACTS = {
    "prohibition": ("circle", "red"), "no entry": ("circle", "red"), "warning": ("triangle", "red"),
    "give way": ("triangle", "red"), "mandatory": ("circle", "blue"),
    "priority": ("diamond", "yellow"), "information": ("square", "blue"),
}  # fmt: skip
"""Kind of sign to its outline and colour."""


def _asked(board: Board, rng: Rng, question: str, answer: str, options: Sequence[str]) -> Drawn:
    """What ten people answer: at least seven agree, the rest says another one of the options."""
    others = [option for option in options if option != answer]
    strays = [chosen(rng, others) for _ in range(int(rng.integers(0, 4)))]
    said = (*[answer] * (ANNOTATORS - len(strays)), *strays)
    return Drawn((board.image(rng),), Answer(answers=said), question)


@scene(Task.VQA, "{}")
def _vehicle_color(rng: Rng, split: Split) -> Drawn:
    kind, color = chosen(rng, list(VEHICLES)), chosen(rng, CLEAR_COLORS)
    red, green, blue = (int(level) for level in color_of(color, rng) * 255)
    board = Board.photograph(rng, split)
    board.add(rng, VEHICLES[kind](rng, (red, green, blue)).layer())
    board.put(rng, chosen(rng, TABLE_SHAPES), chosen(rng, CLEAR_COLORS), length=(14, 20))
    return _asked(board, rng, f"what color is the {kind}?", color, CLEAR_COLORS)


@scene(Task.VQA, "{}", ("no", "yes"))
def _street_presence(rng: Rng, split: Split) -> Drawn:
    board = Board.photograph(rng, split, "grass")
    kinds = [str(kind) for kind in rng.permutation(list(STREET))]
    tried = kinds[: int(rng.integers(1, 3))]
    shown = [kind for kind in tried if board.add(rng, TARGETS[kind](rng).layer()) is not None]
    there = bool(shown) and rng.random() < 0.5
    asked = chosen(rng, shown if there else [kind for kind in kinds if kind not in shown])
    question = f"is there {_article(STREET[asked])}?"
    return _asked(board, rng, question, "yes" if there else "no", ("yes", "no"))


@scene(Task.VQA, "{}")
def _place_content(rng: Rng, split: Split) -> Drawn:
    board, things = _in_places(rng, split, 3)
    place, *_ = things
    where = "in the center" if place == "center" else f"at the {place}"
    shapes = [one.shape for one in things.values()]
    return _asked(board, rng, f"what is {where}?", shapes[0], shapes)


@scene(Task.VQA, "{}")
def _sign_facts(rng: Rng, split: Split) -> Drawn:
    kind = chosen(rng, list(SIGN_FACTS))
    board = Board.photograph(rng, split)
    board.add(rng, traffic_sign(rng, SIGNS.index(kind), rng.uniform(28, 56)).layer())
    if rng.random() < 0.5:
        board.add(rng, resized(TARGETS["vegetation"](rng).layer(), 0.7))
    which = int(rng.integers(2))
    options = sorted({facts[which] for facts in SIGN_FACTS.values()})
    question = f"what {('shape', 'color')[which]} is the sign?"
    return _asked(board, rng, question, SIGN_FACTS[kind][which], options)


# ---- captions ------------------------------------------------------------------------------------

NUMBERS = ("no", "one", "two", "three", "four", "five", "six")
WEATHER_WORDS = {
    "clear": ("by day", "on a sunny day"), "rain": ("in the rain", "on a day of rain"),
    "snow": ("in the snow", "on a day of snow"), "night": ("at night", "in the dark"),
}  # fmt: skip
SIZES = {"small": (16.0, 21.0), "big": (30.0, 40.0)}


def _middle(thing: Thing) -> float:
    """Captions name things from left to right."""
    return thing.box[0] + thing.box[2]


def _captioned(board: Board, rng: Rng, *captions: str) -> Drawn:
    return Drawn((board.image(rng),), Answer(captions=captions))


@scene(Task.CAPTION, "describe the places.")
def _place_caption(rng: Rng, split: Split) -> Drawn:
    board, things = _in_places(rng, split, int(rng.integers(1, 3)))
    named = [
        (_article(one.name), "in the center" if place == "center" else f"at the {place}")
        for place, one in sorted(things.items(), key=lambda item: _middle(item[1]))
    ]
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


@scene(Task.CAPTION, "describe the weather.")
def _weather_caption(rng: Rng, split: Split) -> Drawn:
    weather, count = chosen(rng, list(WEATHER_WORDS)), int(rng.integers(1, 3))
    found: list[Thing] = []
    while len(found) < count:
        board = Board.photograph(rng, split)
        shapes, colors = _several(rng, TABLE_SHAPES, count), _several(rng, CLEAR_COLORS, count)
        placed = [
            board.put(rng, shape, color, length=(24, 38))
            for shape, color in zip(shapes, colors, strict=True)
        ]
        found = [one for one in placed if one is not None]
    add_weather(rng, board, weather)
    first, second = WEATHER_WORDS[weather]
    names = joined([_article(one.shape) for one in sorted(found, key=_middle)])
    return _captioned(board, rng, f"{names} {first}", f"{names} {second}", f"{first} {names}")


@scene(Task.CAPTION, "describe the patterns.")
def _pattern_caption(rng: Rng, split: Split) -> Drawn:
    described: list[tuple[float, str, str, str]] = []
    while not described:
        board = Board.photograph(rng, split)
        for shape in _several(rng, TABLE_SHAPES, int(rng.integers(1, 3))):
            size, pattern = chosen(rng, list(SIZES)), chosen(rng, PATTERNS)
            if size == "small":
                pattern = "plain"  # a pattern of two pixels is none
            color = chosen(rng, CLEAR_COLORS)
            one = board.put(rng, shape, color, length=SIZES[size], pattern=pattern)
            if one is not None:
                described.append((_middle(one), size, pattern, shape))
    described.sort()
    plain = joined([f"a {size} {pattern} {shape}" for _, size, pattern, shape in described])
    bare = joined([f"a {pattern} {shape}" for _, _, pattern, shape in described])
    return _captioned(board, rng, plain, f"there is {plain}", bare)


# ---- referring expressions -----------------------------------------------------------------------

HALVES = {
    "left": (0.05, 0.1, 0.35, 0.9), "right": (0.65, 0.1, 0.95, 0.9),
    "top": (0.1, 0.05, 0.9, 0.35), "bottom": (0.1, 0.65, 0.9, 0.95),
}  # fmt: skip
OPPOSITE = {"left": "right", "right": "left", "top": "bottom", "bottom": "top"}


def _referred(board: Board, rng: Rng, phrase: str, box: Edges) -> Drawn:
    return Drawn((board.image(rng),), Answer((Box(*box, phrase),)), phrase)


@scene(Task.GROUNDING, "locate {}")
def _color_reference(rng: Rng, split: Split) -> Drawn:
    """Two or three things of one shape in different colours."""
    shape = chosen(rng, TABLE_SHAPES)
    while True:
        board = Board.photograph(rng, split)
        colors = _several(rng, CLEAR_COLORS, int(rng.integers(2, 4)))
        meant, other, *_ = [board.put(rng, shape, color) for color in colors]
        if meant and other:
            return _referred(board, rng, meant.name, meant.box)


@scene(Task.GROUNDING, "locate {}")
def _place_reference(rng: Rng, split: Split) -> Drawn:
    """Two equal things, one on each side."""
    side = chosen(rng, list(HALVES))
    while True:
        board = Board.photograph(rng, split)
        shape, color = chosen(rng, TABLE_SHAPES), chosen(rng, CLEAR_COLORS)
        meant = board.put(rng, shape, color, region=HALVES[side])
        other = board.put(rng, shape, color, region=HALVES[OPPOSITE[side]])
        if meant and other:
            return _referred(board, rng, f"{side} {shape}", meant.box)


@scene(Task.GROUNDING, "locate {}")
def _size_reference(rng: Rng, split: Split) -> Drawn:
    """Two things of one shape, one twice as long as the other."""
    while True:
        board, shape = Board.photograph(rng, split), chosen(rng, TABLE_SHAPES)
        big = board.put(rng, shape, chosen(rng, CLEAR_COLORS), length=(34, 46))
        small = board.put(rng, shape, chosen(rng, CLEAR_COLORS), length=(16, 20))
        if big and small:
            word, meant = ("big", big) if rng.random() < 0.5 else ("small", small)
            return _referred(board, rng, f"{word} {shape}", meant.box)


@scene(Task.GROUNDING, "locate {}")
def _pattern_reference(rng: Rng, split: Split) -> Drawn:
    """Two things of one shape, one with a pattern."""
    while True:
        board, shape = Board.photograph(rng, split), chosen(rng, TABLE_SHAPES)
        pattern = chosen(rng, ("striped", "dotted", "checked"))
        color = chosen(rng, CLEAR_COLORS)
        marked = board.put(rng, shape, color, length=(28, 40), pattern=pattern)
        plain = board.put(rng, shape, color, length=(28, 40))
        if marked and plain:
            meant = marked if rng.random() < 0.6 else plain
            return _referred(board, rng, f"{meant.pattern} {shape}", meant.box)
