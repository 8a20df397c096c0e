"""Wording of the built-in language domains: places, numbers, articles, annotators, layouts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from valora_data.sources.generic.shapes import SHAPES
from valora_data.sources.scenes.boards import Board, Edges, thing
from valora_data.sources.scenes.scene_domain import chosen

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
