"""Built-in referring expressions, which name things by colour, place, size, pattern or digit."""

from __future__ import annotations

from typing import TYPE_CHECKING

from valora_data.schema import Answer, Box, Task
from valora_data.sources.scenes.boards import Board, Edges
from valora_data.sources.scenes.digits import digit_layer
from valora_data.sources.scenes.scene_domain import Drawn, SceneDomain, chosen
from valora_data.sources.scenes.words import CLEAR_COLORS, TABLE_SHAPES, put

if TYPE_CHECKING:
    import numpy as np

    from valora_data.schema import Split

HALVES = {
    "left": (0.05, 0.1, 0.35, 0.9), "right": (0.65, 0.1, 0.95, 0.9),
    "top": (0.1, 0.05, 0.9, 0.35), "bottom": (0.1, 0.65, 0.9, 0.95),
}  # fmt: skip
OPPOSITE = {"left": "right", "right": "left", "top": "bottom", "bottom": "top"}
MARKED = ("striped", "dotted", "checked")


def _referred(board: Board, rng: np.random.Generator, phrase: str, box: Edges) -> Drawn:
    return Drawn((board.image(rng),), Answer((Box(*box, phrase),)), phrase)


def _colors(rng: np.random.Generator, split: Split) -> Drawn:
    """Two or three things of one shape in different colours."""
    shape = chosen(rng, TABLE_SHAPES)
    while True:
        board = Board.photograph(rng, split)
        colors = [str(c) for c in rng.choice(CLEAR_COLORS, int(rng.integers(2, 4)), replace=False)]
        placed = [put(rng, board, shape, color) for color in colors]
        if placed[0] is not None and placed[1] is not None:
            return _referred(board, rng, placed[0].name, placed[0].box)


def _places(rng: np.random.Generator, split: Split) -> Drawn:
    """Two equal things, one on each side."""
    side = chosen(rng, list(HALVES))
    while True:
        board = Board.photograph(rng, split)
        shape, color = chosen(rng, TABLE_SHAPES), chosen(rng, CLEAR_COLORS)
        meant = put(rng, board, shape, color, region=HALVES[side])
        other = put(rng, board, shape, color, region=HALVES[OPPOSITE[side]])
        if meant is not None and other is not None:
            return _referred(board, rng, f"{side} {shape}", meant.box)


def _sizes(rng: np.random.Generator, split: Split) -> Drawn:
    """Two things of one shape, one twice as long as the other."""
    while True:
        board = Board.photograph(rng, split)
        shape = chosen(rng, TABLE_SHAPES)
        big = put(rng, board, shape, chosen(rng, CLEAR_COLORS), length=(34, 46))
        small = put(rng, board, shape, chosen(rng, CLEAR_COLORS), length=(16, 20))
        if big is not None and small is not None:
            word, meant = ("big", big) if rng.random() < 0.5 else ("small", small)
            return _referred(board, rng, f"{word} {shape}", meant.box)


def _patterns(rng: np.random.Generator, split: Split) -> Drawn:
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


def _digits(rng: np.random.Generator, split: Split) -> Drawn:
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
    "color_reference": SceneDomain(Task.GROUNDING, "locate {}", _colors),
    "place_reference": SceneDomain(Task.GROUNDING, "locate {}", _places),
    "size_reference": SceneDomain(Task.GROUNDING, "locate {}", _sizes),
    "pattern_reference": SceneDomain(Task.GROUNDING, "locate {}", _patterns),
    "digit_reference": SceneDomain(Task.GROUNDING, "locate {}", _digits),
}
"""Domains by name; every sample has its own phrase and one box."""
