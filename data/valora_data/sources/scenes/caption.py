"""Built-in captions: places, numbers, weather, patterns, and rows of handwritten digits.

The first of a sample's references is the plainest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from valora_data.schema import Answer, Task
from valora_data.sources.generic.questions import plural
from valora_data.sources.generic.scenes import PATTERNS
from valora_data.sources.scenes.boards import Board
from valora_data.sources.scenes.digits import digit_layer
from valora_data.sources.scenes.scene_domain import Drawn, SceneDomain, chosen
from valora_data.sources.scenes.weather import add_weather
from valora_data.sources.scenes.words import (
    CLEAR_COLORS,
    NUMBERS,
    PLACES,
    TABLE_SHAPES,
    article,
    from_left,
    joined,
    put,
    things_on_photograph,
)

if TYPE_CHECKING:
    import numpy as np

    from valora_data.schema import Split

WEATHER_WORDS = {
    "clear": ("by day", "on a sunny day"), "rain": ("in the rain", "on a day of rain"),
    "snow": ("in the snow", "on a day of snow"), "night": ("at night", "in the dark"),
}  # fmt: skip
SIZES = {"small": (16.0, 21.0), "big": (30.0, 40.0)}


def _captioned(board: Board, rng: np.random.Generator, captions: tuple[str, ...]) -> Drawn:
    return Drawn((board.image(rng),), Answer(captions=captions))


def _places(rng: np.random.Generator, split: Split) -> Drawn:
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


def _counts(rng: np.random.Generator, split: Split) -> Drawn:
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


def _weather(rng: np.random.Generator, split: Split) -> Drawn:
    weather = chosen(rng, list(WEATHER_WORDS))
    board, placed = things_on_photograph(rng, split, int(rng.integers(1, 3)), (24, 38))
    add_weather(rng, board, weather)
    first, second = WEATHER_WORDS[weather]
    names = joined([article(one.shape) for one in from_left(placed)])
    return _captioned(board, rng, (f"{names} {first}", f"{names} {second}", f"{first} {names}"))


def _patterns(rng: np.random.Generator, split: Split) -> Drawn:
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


def _digits(rng: np.random.Generator, split: Split) -> Drawn:
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
    "place_caption": SceneDomain(Task.CAPTION, "describe the places.", _places),
    "count_caption": SceneDomain(Task.CAPTION, "describe the numbers.", _counts),
    "weather_caption": SceneDomain(Task.CAPTION, "describe the weather.", _weather),
    "pattern_caption": SceneDomain(Task.CAPTION, "describe the patterns.", _patterns),
    "digit_caption": SceneDomain(Task.CAPTION, "read the digits.", _digits),
}
"""Domains by name; every sample has three references."""
