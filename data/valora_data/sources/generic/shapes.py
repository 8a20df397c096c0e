# ruff: noqa: E501  the table of outlines reads better in long lines
"""Outlines of generic things: polygons and strokes in [-1, 1] × [-1, 1], y down."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

Points = npt.NDArray[np.float64]
Role = Literal["fill", "hole", "dark", "light"]


@dataclass(frozen=True, slots=True)
class Part:
    """One piece of a thing."""

    points: Points
    role: Role = "fill"
    width: float = 0.0


Parts = tuple[Part, ...]
Outline = Parts | Callable[[np.random.Generator], Parts]


def _poly(*xy: float, w: float = 0.0, role: Role = "fill") -> Part:
    return Part(np.array(xy, dtype=np.float64).reshape(-1, 2), role, w)


def _rect(x0: float, y0: float, x1: float, y1: float, role: Role = "fill") -> Part:
    return _poly(x0, y0, x1, y0, x1, y1, x0, y1, role=role)


def _arc(
    x: float, y: float, rx: float, ry: float, start: float = 0.0, end: float = 360.0
) -> Points:
    angle = np.radians(np.linspace(start, end, 28))
    return np.stack([x + rx * np.cos(angle), y + ry * np.sin(angle)], axis=1)


def _oval(x: float, y: float, rx: float, ry: float, role: Role = "fill") -> Part:
    return Part(_arc(x, y, rx, ry), role)


def _radial(radii: Points, start: float = -90.0) -> Points:
    angle = np.radians(start + np.arange(len(radii)) * 360.0 / len(radii))
    return np.stack([radii * np.cos(angle), radii * np.sin(angle)], axis=1)


def _star(rng: np.random.Generator) -> Parts:
    n = int(rng.integers(5, 8))
    inner = rng.uniform(0.36, 0.5)
    return (Part(_radial(np.where(np.arange(2 * n) % 2 == 0, 1.0, inner))),)


def _gear(rng: np.random.Generator) -> Parts:
    n = int(rng.integers(7, 11))
    teeth = np.tile([1.0, 1.0, 0.72, 0.72], n)
    return (Part(_radial(teeth)), _oval(0, 0, r := rng.uniform(0.2, 0.36), r, role="hole"))


def _heart(rng: np.random.Generator) -> Parts:
    t = np.linspace(0, 2 * np.pi, 48)
    x = 16 * np.sin(t) ** 3
    y = -(13 * np.cos(t) - 5 * np.cos(2 * t) - 2 * np.cos(3 * t) - np.cos(4 * t))
    return (Part(np.stack([x / 16, (y + 2) / 15], 1)),)


def _stroke(x: float, y: float, rx: float, ry: float, start: float, end: float, w: float) -> Part:
    return Part(_arc(x, y, rx, ry, start, end), width=w)


SHAPES: dict[str, Outline] = {
    "circle": (_oval(0, 0, 1, 1),),
    "oval": (_oval(0, 0, 1, 0.5),),
    "square": (_rect(-0.9, -0.9, 0.9, 0.9),),
    "bar": (_rect(-1, -0.22, 1, 0.22),),
    "triangle": (_poly(0, -0.95, 0.98, 0.8, -0.98, 0.8),),
    "diamond": (_poly(0, -1, 0.72, 0, 0, 1, -0.72, 0),),
    "pentagon": (Part(_radial(np.ones(5))),),
    "hexagon": (Part(_radial(np.ones(6))),),
    "trapezoid": (_poly(-0.5, -0.6, 0.5, -0.6, 1, 0.6, -1, 0.6),),
    "semicircle": (Part(_arc(0, 0.45, 1, 0.95, 180, 360)),),
    "star": _star,
    "heart": _heart,
    "cross": (_rect(-0.32, -0.98, 0.32, 0.98), _rect(-0.98, -0.32, 0.98, 0.32)),
    "arrow": (_poly(-1, -0.26, 0.15, -0.26, 0.15, -0.7, 1, 0, 0.15, 0.7, 0.15, 0.26, -1, 0.26),),
    "ring": lambda rng: (_oval(0, 0, 1, 1), _oval(0, 0, r := rng.uniform(0.5, 0.7), r, role="hole")),
    "gear": _gear,
    "drop": (_oval(0, 0.35, 0.6, 0.6), _poly(0, -1, 0.53, 0.1, -0.53, 0.1)),
    "bolt": (_poly(0.25, -1, -0.6, 0.15, -0.05, 0.15, -0.3, 1, 0.6, -0.25, 0.05, -0.25),),
    "mug": (_rect(-0.8, -0.75, 0.4, 0.8), _stroke(0.4, 0, 0.45, 0.42, -90, 90, 0.18)),
    "umbrella": (Part(_arc(0, 0, 1, 0.9, 180, 360)), _poly(0, 0, 0, 0.75, w=0.13), _stroke(-0.18, 0.75, 0.18, 0.2, 0, 180, 0.13)),
    "balloon": (_oval(0, -0.3, 0.58, 0.68), _poly(0, 0.3, 0.16, 0.52, -0.16, 0.52), _poly(0, 0.45, 0.12, 0.7, 0, 1, w=0.08)),
    "fish": (_oval(-0.2, 0, 0.75, 0.45), _poly(0.35, 0, 0.98, -0.48, 0.98, 0.48), _oval(-0.58, -0.1, 0.1, 0.1, role="dark")),
    "flag": (_poly(-0.75, -1, -0.75, 1, w=0.15), _poly(-0.75, -0.95, 0.95, -0.75, 0.8, 0.05, -0.75, 0.1)),
    "lamp": (_poly(-0.35, -0.95, 0.35, -0.95, 0.75, 0.05, -0.75, 0.05), _poly(0, 0, 0, 0.85, w=0.14), _rect(-0.45, 0.78, 0.45, 0.98)),
    "hammer": (_poly(0, -0.6, 0, 1, w=0.22), _rect(-0.6, -0.95, 0.6, -0.45)),
    "crown": (_poly(-0.9, 0.7, -0.98, -0.55, -0.45, 0, 0, -0.75, 0.45, 0, 0.98, -0.55, 0.9, 0.7),),
    "hourglass": (_poly(-0.65, -0.9, 0.65, -0.9, 0.08, 0, 0.65, 0.9, -0.65, 0.9, -0.08, 0),),
    "kite": (_poly(0, -1, 0.55, -0.3, 0, 0.5, -0.55, -0.3), _poly(0, 0.5, 0.2, 0.7, -0.1, 0.85, 0.1, 1, w=0.09)),
    "hat": (_rect(-0.98, 0.4, 0.98, 0.66), _poly(-0.52, -0.7, 0.52, -0.7, 0.58, 0.45, -0.58, 0.45)),
    "boot": (_poly(-0.55, -0.95, 0.1, -0.95, 0.15, 0.25, 0.85, 0.4, 0.9, 0.85, -0.6, 0.85),),
    "spoon": (_oval(-0.62, 0, 0.38, 0.28), _poly(-0.3, 0, 1, 0, w=0.14)),
    "candle": (_rect(-0.28, -0.3, 0.28, 0.98), _oval(0, -0.68, 0.15, 0.3), _poly(0, -0.4, 0, -0.28, w=0.08)),
}  # fmt: skip
"""Name to the parts, or to a function that draws one specimen's parts at random; others are drawn only
for pretraining (tests/bench/base_models/shapes.py)."""

FREE_TURN = frozenset([
    "circle", "oval", "bar", "star", "ring", "gear", "sun", "snowflake", "spiral", "key", "arrow", "fish",
    "spoon", "crescent", "scissors", "bone", "hammer", "dumbbell", "butterfly",
])  # fmt: skip
"""Things that are themselves at any angle; the others are turned by some degrees only."""
KEEP_ASPECT = frozenset(["circle", "oval", "square", "bar", "ring", "hexagon", "pentagon", "diamond"])  # fmt: skip
"""Things whose name depends on their proportions: they are hardly stretched."""
KEEP_SIDE = frozenset(["letter k", "letter e", "letter s"])
"""Things whose mirror image is another thing."""
