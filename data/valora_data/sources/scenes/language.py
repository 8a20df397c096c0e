"""Built-in language domains: questions, captions and referring expressions about drawn pictures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from valora_data.schema import Answer, Box, Task
from valora_data.sources.generic.scenes import PATTERNS, color_of, plural
from valora_data.sources.generic.shapes import SHAPES
from valora_data.sources.scenes.boards import (
    Board,
    Drawn,
    Edges,
    SceneDomain,
    add_weather,
    chosen,
    resized,
    thing,
)
from valora_data.sources.scenes.digits import LABELS as DIGITS
from valora_data.sources.scenes.digits import digit_layer
from valora_data.sources.scenes.objects import SIGNS, TARGETS, VEHICLES, traffic_sign

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

    from valora_data.schema import Split

ANNOTATORS = 10
"""Answers per question, as in VQA v2."""
NUMBERS = ("no", "one", "two", "three", "four", "five", "six")
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


@dataclass(frozen=True, slots=True)
class Placed:
    """A thing on a board: its names and box in pixels."""

    shape: str
    color: str
    box: Edges

    @property
    def name(self) -> str:
        """Colour and shape."""
        return f"{self.color} {self.shape}"


def put(
    rng: np.random.Generator,
    board: Board,
    shape: str,
    color: str,
    *,
    length: tuple[float, float] = (18.0, 32.0),
    pattern: str = "plain",
    region: tuple[float, float, float, float] = (0.0, 0.0, 1.0, 1.0),
) -> Placed | None:
    """Draw a named thing and put it where there is room in a region; None if there is none."""
    box = board.add(rng, thing(rng, shape, color, rng.uniform(*length), pattern), region)
    return None if box is None else Placed(shape, color, box)


def things_on_photograph(
    rng: np.random.Generator, split: Split, count: int, length: tuple[float, float] = (18.0, 32.0)
) -> tuple[Board, list[Placed]]:
    """A board with `count` things of different shapes and colours."""
    while True:
        board = Board.photograph(rng, split)
        shapes = [str(s) for s in rng.choice(TABLE_SHAPES, count, replace=False)]
        colors = [str(c) for c in rng.choice(CLEAR_COLORS, count, replace=False)]
        placed = [
            put(rng, board, shape, color, length=length)
            for shape, color in zip(shapes, colors, strict=True)
        ]
        found = [one for one in placed if one is not None]
        if len(found) == count:
            return board, found


def annotators(rng: np.random.Generator, answer: str, others: Sequence[str]) -> tuple[str, ...]:
    """What ten people answer: at least seven agree, the rest says something of `others`."""
    strays = int(rng.integers(0, 4)) if others else 0
    return (*[answer] * (ANNOTATORS - strays), *(chosen(rng, others) for _ in range(strays)))


def article(name: str) -> str:
    """A name after `a` or `an`."""
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def joined(phrases: Sequence[str]) -> str:
    """Phrases as a list: commas, and `and` before the last."""
    return " and ".join([", ".join(phrases[:-1]), phrases[-1]] if phrases[1:] else phrases)


def from_left(placed: Sequence[Placed]) -> list[Placed]:
    """Things in the order in which captions name them."""
    return sorted(placed, key=lambda one: one.box[0] + one.box[2])


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


def _asked(
    board: Board, rng: np.random.Generator, question: str, answer: str, others: tuple[str, ...]
) -> Drawn:
    wrong = tuple(other for other in others if other != answer)
    said = Answer(answers=annotators(rng, answer, wrong))
    return Drawn((board.image(rng),), said, question)


def _vehicle_color(rng: np.random.Generator, split: Split) -> Drawn:
    kind, color = chosen(rng, list(VEHICLES)), chosen(rng, CLEAR_COLORS)
    red, green, blue = (int(level) for level in color_of(color, rng) * 255)
    board = Board.photograph(rng, split)
    board.add(rng, VEHICLES[kind](rng, (red, green, blue)).layer())
    put(rng, board, chosen(rng, TABLE_SHAPES), chosen(rng, CLEAR_COLORS), length=(14, 20))
    return _asked(board, rng, f"what color is the {kind}?", color, CLEAR_COLORS)


def _street_presence(rng: np.random.Generator, split: Split) -> Drawn:
    board = Board.photograph(rng, split, "grass")
    kinds = [str(kind) for kind in rng.permutation(list(STREET))]
    shown = [
        kind
        for kind in kinds[: int(rng.integers(1, 3))]
        if board.add(rng, TARGETS[kind](rng).thing) is not None
    ]
    there = bool(shown) and rng.random() < 0.5
    asked = chosen(rng, shown if there else [kind for kind in kinds if kind not in shown])
    question = f"is there {article(STREET[asked])}?"
    return _asked(board, rng, question, "yes" if there else "no", ("yes", "no"))


def _place_content(rng: np.random.Generator, split: Split) -> Drawn:
    while True:
        board = Board.photograph(rng, split)
        places = [str(place) for place in rng.choice(list(PLACES), 3, replace=False)]
        shapes = [str(shape) for shape in rng.choice(TABLE_SHAPES, 3, replace=False)]
        found = [
            put(rng, board, shape, chosen(rng, CLEAR_COLORS), length=(18, 26), region=PLACES[place])
            for place, shape in zip(places, shapes, strict=True)
        ]
        if None not in found:
            break
    where = places[0] if places[0] == "center" else f"the {places[0]}"
    question = f"what is at {where}?"
    return _asked(board, rng, question.replace("at center", "in the center"), shapes[0],
                  tuple(shapes))  # fmt: skip


def _digit_facts(rng: np.random.Generator, split: Split) -> Drawn:
    board = Board.slate(rng)
    layer, digit = digit_layer(rng, split, rng.uniform(56, 88), (235, 235, 228))
    board.add(rng, layer)
    if rng.random() < 0.5:
        return _asked(board, rng, "which digit is this?", digit, DIGITS)
    limit = int(rng.integers(2, 8))
    answer = "yes" if int(digit) > limit else "no"
    return _asked(board, rng, f"is this digit more than {limit}?", answer, ("yes", "no"))


def _sign_facts(rng: np.random.Generator, split: Split) -> Drawn:
    kind = chosen(rng, list(SIGN_FACTS))
    board = Board.photograph(rng, split)
    board.add(rng, traffic_sign(rng, SIGNS.index(kind), rng.uniform(28, 56)).thing)
    if rng.random() < 0.5:
        board.add(rng, resized(TARGETS["vegetation"](rng).thing, 0.7))
    which = int(rng.integers(2))
    answer = SIGN_FACTS[kind][which]
    others = tuple(sorted({facts[which] for facts in SIGN_FACTS.values()}))
    question = ("what shape is the sign?", "what color is the sign?")[which]
    return _asked(board, rng, question, answer, others)


VQA = {
    "vehicle_color": SceneDomain(Task.VQA, "{}", _vehicle_color),
    "street_presence": SceneDomain(Task.VQA, "{}", _street_presence, ("no", "yes")),
    "place_content": SceneDomain(Task.VQA, "{}", _place_content),
    "digit_facts": SceneDomain(Task.VQA, "{}", _digit_facts),
    "sign_facts": SceneDomain(Task.VQA, "{}", _sign_facts),
}
"""Domains by name; every sample has its own question and ten annotators."""


# ---- captions ------------------------------------------------------------------------------------

WEATHER_WORDS = {
    "clear": ("by day", "on a sunny day"), "rain": ("in the rain", "on a day of rain"),
    "snow": ("in the snow", "on a day of snow"), "night": ("at night", "in the dark"),
}  # fmt: skip
SIZES = {"small": (16.0, 21.0), "big": (30.0, 40.0)}


def _captioned(board: Board, rng: np.random.Generator, captions: tuple[str, ...]) -> Drawn:
    return Drawn((board.image(rng),), Answer(captions=captions))


def _place_caption(rng: np.random.Generator, split: Split) -> Drawn:
    count = int(rng.integers(1, 3))
    while True:
        board = Board.photograph(rng, split)
        places = [str(place) for place in rng.choice(list(PLACES), count, replace=False)]
        shapes = [str(shape) for shape in rng.choice(TABLE_SHAPES, count, replace=False)]
        placed = [
            put(rng, board, shape, chosen(rng, CLEAR_COLORS), length=(18, 26), region=PLACES[place])
            for shape, place in zip(shapes, places, strict=True)
        ]
        named = [
            (article(one.name), "in the center" if place == "center" else f"at the {place}", one)
            for one, place in zip(placed, places, strict=True)
            if one is not None
        ]
        if len(named) == count:
            break
    named.sort(key=lambda entry: entry[2].box[0] + entry[2].box[2])
    plain = joined([f"{name} {where}" for name, where, _ in named])
    turned = joined([f"{where} {name}" for name, where, _ in named])
    return _captioned(board, rng, (plain, f"there is {plain}", turned))


def _count_caption(rng: np.random.Generator, split: Split) -> Drawn:
    board = Board.photograph(rng, split)
    shapes = [str(s) for s in rng.choice(TABLE_SHAPES, int(rng.integers(1, 3)), replace=False)]
    phrases, bare = [], []
    for shape in shapes:
        color, wanted = chosen(rng, CLEAR_COLORS), int(rng.integers(1, 4))
        placed = [put(rng, board, shape, color, length=(17, 24)) for _ in range(wanted)]
        count = sum(one is not None for one in placed)
        if count:
            name = shape if count == 1 else plural(shape)
            phrases.append(f"{NUMBERS[count]} {color} {name}")
            bare.append(f"{NUMBERS[count]} {name}")
    plain = joined(phrases)
    return _captioned(board, rng, (plain, f"there are {plain}", joined(bare)))


def _weather_caption(rng: np.random.Generator, split: Split) -> Drawn:
    weather = chosen(rng, list(WEATHER_WORDS))
    board, placed = things_on_photograph(rng, split, int(rng.integers(1, 3)), (24, 38))
    add_weather(rng, board, weather)
    first, second = WEATHER_WORDS[weather]
    names = joined([article(one.shape) for one in from_left(placed)])
    return _captioned(board, rng, (f"{names} {first}", f"{names} {second}", f"{first} {names}"))


def _pattern_caption(rng: np.random.Generator, split: Split) -> Drawn:
    while True:
        board = Board.photograph(rng, split)
        described = []
        for shape in rng.choice(TABLE_SHAPES, int(rng.integers(1, 3)), replace=False):
            size, pattern = chosen(rng, list(SIZES)), chosen(rng, PATTERNS)
            if size == "small":
                pattern = "plain"  # a pattern of two pixels is none
            one = put(rng, board, str(shape), chosen(rng, CLEAR_COLORS), length=SIZES[size],
                      pattern=pattern)  # fmt: skip
            if one is not None:
                described.append((one.box[0] + one.box[2], size, pattern, one.shape))
        if described:
            break
    described.sort()
    plain = joined([f"a {size} {pattern} {shape}" for _, size, pattern, shape in described])
    bare = joined([f"a {pattern} {shape}" for _, _, pattern, shape in described])
    return _captioned(board, rng, (plain, f"there is {plain}", bare))


def _digit_caption(rng: np.random.Generator, split: Split) -> Drawn:
    board, found = Board.slate(rng), []
    count = int(rng.integers(1, 3))
    for place in range(count):
        layer, digit = digit_layer(rng, split, rng.uniform(42, 48), (245, 245, 240))
        middle = (place + 0.5) / count
        if board.add(rng, layer, (middle - 0.1, 0.3, middle + 0.1, 0.7)) is not None:
            found.append(digit)
    return _captioned(
        board, rng, (joined(found), f"the numbers {joined(found)}", f"{' '.join(found)} in a row")
    )


CAPTION = {
    "place_caption": SceneDomain(Task.CAPTION, "describe the places.", _place_caption),
    "count_caption": SceneDomain(Task.CAPTION, "describe the numbers.", _count_caption),
    "weather_caption": SceneDomain(Task.CAPTION, "describe the weather.", _weather_caption),
    "pattern_caption": SceneDomain(Task.CAPTION, "describe the patterns.", _pattern_caption),
    "digit_caption": SceneDomain(Task.CAPTION, "read the digits.", _digit_caption),
}
"""Domains by name; every sample has three references."""


# ---- referring expressions -----------------------------------------------------------------------

HALVES = {
    "left": (0.05, 0.1, 0.35, 0.9), "right": (0.65, 0.1, 0.95, 0.9),
    "top": (0.1, 0.05, 0.9, 0.35), "bottom": (0.1, 0.65, 0.9, 0.95),
}  # fmt: skip
OPPOSITE = {"left": "right", "right": "left", "top": "bottom", "bottom": "top"}
MARKED = ("striped", "dotted", "checked")


def _referred(board: Board, rng: np.random.Generator, phrase: str, box: Edges) -> Drawn:
    return Drawn((board.image(rng),), Answer((Box(*box, phrase),)), phrase)


def _color_reference(rng: np.random.Generator, split: Split) -> Drawn:
    """Two or three things of one shape in different colours."""
    shape = chosen(rng, TABLE_SHAPES)
    while True:
        board = Board.photograph(rng, split)
        colors = [str(c) for c in rng.choice(CLEAR_COLORS, int(rng.integers(2, 4)), replace=False)]
        placed = [put(rng, board, shape, color) for color in colors]
        if placed[0] is not None and placed[1] is not None:
            return _referred(board, rng, placed[0].name, placed[0].box)


def _place_reference(rng: np.random.Generator, split: Split) -> Drawn:
    """Two equal things, one on each side."""
    side = chosen(rng, list(HALVES))
    while True:
        board = Board.photograph(rng, split)
        shape, color = chosen(rng, TABLE_SHAPES), chosen(rng, CLEAR_COLORS)
        meant = put(rng, board, shape, color, region=HALVES[side])
        other = put(rng, board, shape, color, region=HALVES[OPPOSITE[side]])
        if meant is not None and other is not None:
            return _referred(board, rng, f"{side} {shape}", meant.box)


def _size_reference(rng: np.random.Generator, split: Split) -> Drawn:
    """Two things of one shape, one twice as long as the other."""
    while True:
        board = Board.photograph(rng, split)
        shape = chosen(rng, TABLE_SHAPES)
        big = put(rng, board, shape, chosen(rng, CLEAR_COLORS), length=(34, 46))
        small = put(rng, board, shape, chosen(rng, CLEAR_COLORS), length=(16, 20))
        if big is not None and small is not None:
            word, meant = ("big", big) if rng.random() < 0.5 else ("small", small)
            return _referred(board, rng, f"{word} {shape}", meant.box)


def _pattern_reference(rng: np.random.Generator, split: Split) -> Drawn:
    """Two things of one shape, one with a pattern."""
    while True:
        board = Board.photograph(rng, split)
        shape, pattern = chosen(rng, TABLE_SHAPES), chosen(rng, MARKED)
        color = chosen(rng, CLEAR_COLORS)
        marked = put(rng, board, shape, color, length=(28, 40), pattern=pattern)
        plain = put(rng, board, shape, color, length=(28, 40))
        if marked is not None and plain is not None:
            phrase, meant = ((f"{pattern} {shape}", marked) if rng.random() < 0.6 else
                             (f"plain {shape}", plain))  # fmt: skip
            return _referred(board, rng, phrase, meant.box)


def _digit_reference(rng: np.random.Generator, split: Split) -> Drawn:
    """Two handwritten digits, not the same."""
    while True:
        board = Board.slate(rng)
        found: dict[str, Edges] = {}
        for _ in range(2):
            layer, digit = digit_layer(rng, split, rng.uniform(42, 50), (245, 245, 240))
            box = None if digit in found else board.add(rng, layer)
            if box is not None:
                found[digit] = box
        if len(found) > 1:
            digit = next(iter(found))
            return _referred(board, rng, f"number {digit}", found[digit])


GROUNDING = {
    "color_reference": SceneDomain(Task.GROUNDING, "locate {}", _color_reference),
    "place_reference": SceneDomain(Task.GROUNDING, "locate {}", _place_reference),
    "size_reference": SceneDomain(Task.GROUNDING, "locate {}", _size_reference),
    "pattern_reference": SceneDomain(Task.GROUNDING, "locate {}", _pattern_reference),
    "digit_reference": SceneDomain(Task.GROUNDING, "locate {}", _digit_reference),
}
"""Domains by name; every sample has its own phrase and one box."""
