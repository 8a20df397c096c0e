# ruff: noqa: E501  the table of outlines reads better in long lines
"""Outlines of all generic things that the base model is pretrained on; they look like no domain."""

import numpy as np

from valora_data.sources.generic.shapes import (
    SHAPES as DRAWN,
)
from valora_data.sources.generic.shapes import (
    Part,
    Parts,
    Role,
    _arc,
    _oval,
    _poly,
    _radial,
    _rect,
    _stroke,
)


def _sun(rng: np.random.Generator) -> Parts:
    n = int(rng.integers(8, 13))
    rays = [Part(_radial(np.ones(n))[[i]] * [[0.72], [1.0]], width=0.13) for i in range(n)]
    return (_oval(0, 0, 0.52, 0.52), *rays)


def _snowflake(rng: np.random.Generator) -> Parts:
    twig = rng.uniform(0.25, 0.4)
    parts = []
    for angle in np.radians(np.arange(6) * 60.0):
        turn = np.array([[np.cos(angle), np.sin(angle)], [-np.sin(angle), np.cos(angle)]])
        parts.append(Part(np.array([[0.0, 0.0], [1.0, 0.0]]) @ turn, width=0.13))
        fork = np.array([[0.6 + twig * 0.7, -twig], [0.5, 0.0], [0.6 + twig * 0.7, twig]])
        parts.append(Part(fork @ turn, width=0.11))
    return tuple(parts)


def _spiral(rng: np.random.Generator) -> Parts:
    t = np.linspace(0.0, 1.0, 60)
    angle = t * 2 * np.pi * rng.uniform(2.0, 2.7)
    radius = 0.08 + 0.84 * t
    return (Part(np.stack([radius * np.cos(angle), radius * np.sin(angle)], 1), width=0.16),)


def _zigzag(rng: np.random.Generator) -> Parts:
    n = int(rng.integers(5, 8))
    y = np.where(np.arange(n) % 2 == 0, -0.35, 0.35)
    return (Part(np.stack([np.linspace(-0.95, 0.95, n), y], 1), width=0.2),)


def _wave(rng: np.random.Generator) -> Parts:
    x = np.linspace(-0.95, 0.95, 40)
    y = 0.32 * np.sin(x * rng.uniform(5.5, 8.0) + rng.uniform(0, 6))
    return (Part(np.stack([x, y], 1), width=0.22),)


def _cloud(rng: np.random.Generator) -> Parts:
    puffs = [
        _oval(x, rng.uniform(-0.25, 0.05), rng.uniform(0.3, 0.42), rng.uniform(0.3, 0.45))
        for x in (-0.45, 0.0, 0.45)
    ]
    return (_poly(-0.85, 0.4, -0.85, 0.1, 0.85, 0.1, 0.85, 0.4), *puffs, _oval(-0.7, 0.18, 0.3, 0.25),
            _oval(0.7, 0.18, 0.3, 0.25))  # fmt: skip


def _dice(rng: np.random.Generator) -> Parts:
    four = ((-0.4, -0.4), (0.4, -0.4), (-0.4, 0.4), (0.4, 0.4))
    three = ((-0.45, -0.45), (0, 0), (0.45, 0.45))
    spots = [((0, 0),), four[::3], three, four][int(rng.integers(4))]
    role: Role = "light" if rng.random() < 0.5 else "dark"
    return (_rect(-0.85, -0.85, 0.85, 0.85), *(_oval(x, y, 0.19, 0.19, role) for x, y in spots))


def _clock(rng: np.random.Generator) -> Parts:
    a, b = rng.uniform(0, 2 * np.pi, 2)
    long = _poly(0, 0, 0.62 * np.cos(a), 0.62 * np.sin(a), w=0.13, role="dark")
    short = _poly(0, 0, 0.42 * np.cos(b), 0.42 * np.sin(b), w=0.15, role="dark")
    return (_oval(0, 0, 1, 1), _oval(0, 0, 0.76, 0.76, "light"), long, short)


def _ladder(rng: np.random.Generator) -> Parts:
    rungs = np.linspace(-0.7, 0.7, int(rng.integers(4, 6)))
    sides = [_poly(x, -1, x, 1, w=0.15) for x in (-0.38, 0.38)]
    return (*sides, *(_poly(-0.38, float(y), 0.38, float(y), w=0.14) for y in rungs))


def _comb(rng: np.random.Generator) -> Parts:
    teeth = np.linspace(-0.85, 0.85, int(rng.integers(6, 9))).tolist()
    return (_rect(-0.95, -0.5, 0.95, -0.12), *(_poly(x, -0.2, x, 0.5, w=0.12) for x in teeth))


def _lattice(rng: np.random.Generator) -> Parts:
    at = np.linspace(-0.85, 0.85, int(rng.integers(3, 5))).tolist()
    bars = [bar for p in at for bar in ((p, -0.92, p, 0.92), (-0.92, p, 0.92, p))]
    return tuple(_poly(*bar, w=0.14) for bar in bars)


MORE = {
    "crescent": lambda rng: (_oval(0, 0, 1, 1), _oval(rng.uniform(0.4, 0.55), -0.1, 0.85, 0.85, role="hole")),
    "sun": _sun,
    "snowflake": _snowflake,
    "spiral": _spiral,
    "zigzag": _zigzag,
    "wave": _wave,
    "cloud": _cloud,
    "dice": _dice,
    "clock": _clock,
    "ladder": _ladder,
    "comb": _comb,
    "lattice": _lattice,
    "key": (
        _oval(-0.6, 0, 0.4, 0.4), _oval(-0.6, 0, 0.19, 0.19, role="hole"),
        _poly(-0.25, 0, 1, 0, w=0.2), _poly(0.85, 0, 0.85, 0.4, w=0.17), _poly(0.5, 0, 0.5, 0.33, w=0.17),
    ),
    "house": (
        _rect(-0.7, -0.1, 0.7, 0.9), _poly(0, -0.95, 1, -0.05, -1, -0.05), _rect(-0.18, 0.3, 0.2, 0.9, role="dark"),
        _rect(-0.5, 0.1, -0.28, 0.36, role="light"),
    ),
    "bell": (
        _poly(-0.25, -0.75, 0.25, -0.75, 0.5, -0.35, 0.55, 0.35, 0.9, 0.62, -0.9, 0.62, -0.55, 0.35, -0.5, -0.35),
        _oval(0, 0.75, 0.2, 0.2), _oval(0, -0.8, 0.15, 0.15),
    ),
    "bottle": (
        _poly(-0.16, -0.95, 0.16, -0.95, 0.16, -0.45, 0.4, -0.2, 0.4, 0.98, -0.4, 0.98, -0.4, -0.2, -0.16, -0.45),
        _rect(-0.4, 0.15, 0.4, 0.6, role="light"),
    ),
    "anchor": (
        _poly(0, -0.6, 0, 0.9, w=0.15), _stroke(0, 0.15, 0.75, 0.72, 10, 170, 0.16), _poly(-0.4, -0.4, 0.4, -0.4, w=0.14),
        _oval(0, -0.78, 0.2, 0.2), _oval(0, -0.78, 0.09, 0.09, role="hole"),
    ),
    "envelope": (_rect(-1, -0.65, 1, 0.65), _poly(-0.95, -0.6, 0, 0.15, 0.95, -0.6, w=0.12, role="dark")),
    "butterfly": (
        _oval(-0.5, -0.35, 0.48, 0.45), _oval(0.5, -0.35, 0.48, 0.45), _oval(-0.4, 0.42, 0.36, 0.36), _oval(0.4, 0.42, 0.36, 0.36),
        _poly(0, -0.6, 0, 0.7, w=0.16, role="dark"),
    ),
    "chair": (_poly(-0.5, -0.98, -0.5, 0.98, w=0.18), _rect(-0.58, -0.05, 0.58, 0.2), _poly(0.5, 0.1, 0.5, 0.98, w=0.18)),
    "table": (_rect(-1, -0.6, 1, -0.32), _poly(-0.75, -0.4, -0.75, 0.75, w=0.17), _poly(0.75, -0.4, 0.75, 0.75, w=0.17)),
    "bone": (
        _poly(-0.65, 0, 0.65, 0, w=0.3), _oval(-0.75, -0.22, 0.25, 0.25), _oval(-0.75, 0.22, 0.25, 0.25),
        _oval(0.75, -0.22, 0.25, 0.25), _oval(0.75, 0.22, 0.25, 0.25),
    ),
    "fork": (_poly(0, -0.2, 0, 1, w=0.16), _poly(-0.3, -0.95, -0.3, -0.2, 0.3, -0.2, 0.3, -0.95, w=0.13), _poly(0, -0.95, 0, -0.2, w=0.13)),
    "scissors": (
        _poly(-0.45, -0.95, 0.3, 0.4, w=0.15), _poly(0.45, -0.95, -0.3, 0.4, w=0.15),
        _stroke(-0.42, 0.65, 0.24, 0.28, 0, 360, 0.14), _stroke(0.42, 0.65, 0.24, 0.28, 0, 360, 0.14),
    ),
    "guitar": (_oval(0, 0.6, 0.5, 0.4), _oval(0, 0.12, 0.36, 0.3), _poly(0, 0, 0, -0.98, w=0.15), _oval(0, 0.4, 0.15, 0.15, role="dark")),
    "magnet": (_stroke(0, 0.1, 0.62, 0.7, 180, 360, 0.4), _poly(-0.62, 0.1, -0.62, 0.85, w=0.4), _poly(0.62, 0.1, 0.62, 0.85, w=0.4)),
    "ghost": (
        _poly(-0.7, 0.95, -0.7, -0.25, 0.7, -0.25, 0.7, 0.95, 0.35, 0.65, 0, 0.95, -0.35, 0.65), Part(_arc(0, -0.25, 0.7, 0.7, 180, 360)),
        _oval(-0.28, -0.25, 0.14, 0.2, role="dark"), _oval(0.28, -0.25, 0.14, 0.2, role="dark"),
    ),
    "dumbbell": (_poly(-0.6, 0, 0.6, 0, w=0.2), _rect(-0.98, -0.5, -0.52, 0.5), _rect(0.52, -0.5, 0.98, 0.5)),
    "shield": (_poly(-0.8, -0.85, 0.8, -0.85, 0.78, 0.1, 0.45, 0.65, 0, 0.98, -0.45, 0.65, -0.78, 0.1),),
    "castle": (
        _poly(-0.85, 0.9, -0.85, -0.8, -0.45, -0.8, -0.45, -0.45, -0.2, -0.45, -0.2, -0.8, 0.2, -0.8, 0.2, -0.45, 0.45, -0.45, 0.45, -0.8,
              0.85, -0.8, 0.85, 0.9),
        _rect(-0.2, 0.35, 0.2, 0.9, role="dark"),
    ),
    "lollipop": (_oval(0, -0.45, 0.55, 0.55), _poly(0, 0, 0, 1, w=0.12), _oval(0, -0.45, 0.22, 0.22, role="light")),
    "bow": (_poly(-0.98, -0.6, 0, -0.1, 0.98, -0.6, 0.98, 0.6, 0, 0.1, -0.98, 0.6), _oval(0, 0, 0.22, 0.26)),
    "teapot": (
        _oval(0, 0.15, 0.6, 0.55), _poly(0.45, 0.2, 0.98, -0.4, 0.98, -0.1, 0.5, 0.5), _stroke(-0.55, 0.1, 0.38, 0.32, 80, 280, 0.14),
        _oval(0, -0.5, 0.15, 0.15),
    ),
    "trophy": (
        _poly(-0.52, -0.9, 0.52, -0.9, 0.4, -0.1, 0.12, 0.25, -0.12, 0.25, -0.4, -0.1), _poly(0, 0.2, 0, 0.75, w=0.18),
        _rect(-0.45, 0.68, 0.45, 0.95), _stroke(-0.55, -0.5, 0.32, 0.26, 90, 270, 0.12), _stroke(0.55, -0.5, 0.32, 0.26, -90, 90, 0.12),
    ),
    "tent": (_poly(0, -0.8, 1, 0.8, -1, 0.8), _poly(0, -0.2, 0.35, 0.8, -0.35, 0.8, role="dark")),
    "glasses": (_stroke(-0.55, 0, 0.36, 0.34, 0, 360, 0.15), _stroke(0.55, 0, 0.36, 0.34, 0, 360, 0.15), _poly(-0.2, 0, 0.2, 0, w=0.14)),
    "book": (_rect(-0.75, -0.95, 0.75, 0.95), _poly(-0.5, -0.95, -0.5, 0.95, w=0.1, role="dark"), _rect(-0.2, -0.6, 0.5, -0.3, role="light")),
    "letter a": (_poly(-0.65, 0.95, 0, -0.9, 0.65, 0.95, w=0.24), _poly(-0.35, 0.3, 0.35, 0.3, w=0.2)),
    "letter e": (_poly(0.55, -0.85, -0.5, -0.85, -0.5, 0.85, 0.55, 0.85, w=0.24), _poly(-0.5, 0, 0.4, 0, w=0.22)),
    "letter h": (_poly(-0.55, -0.95, -0.55, 0.95, w=0.24), _poly(0.55, -0.95, 0.55, 0.95, w=0.24), _poly(-0.5, 0, 0.5, 0, w=0.22)),
    "letter k": (_poly(-0.5, -0.95, -0.5, 0.95, w=0.24), _poly(0.55, -0.9, -0.4, 0.05, 0.6, 0.9, w=0.24)),
    "letter t": (_poly(-0.75, -0.82, 0.75, -0.82, w=0.25), _poly(0, -0.8, 0, 0.95, w=0.25)),
    "letter s": (_poly(
        0.55, -0.65, 0.2, -0.88, -0.3, -0.85, -0.52, -0.5, -0.3, -0.15, 0.3, 0.1, 0.52, 0.45, 0.3, 0.82, -0.2, 0.88, -0.55, 0.65, w=0.24
    ),),
}  # fmt: skip
NAMES = (
    "circle", "oval", "square", "bar", "triangle", "diamond", "pentagon", "hexagon",
    "trapezoid", "semicircle", "star", "heart", "cross", "arrow", "crescent", "ring", "gear",
    "sun", "snowflake", "spiral", "zigzag", "wave", "cloud", "dice", "clock", "ladder", "comb",
    "lattice", "drop", "bolt", "mug", "key", "umbrella", "balloon", "fish", "house", "flag",
    "bell", "bottle", "lamp", "hammer", "anchor", "crown", "hourglass", "envelope", "kite",
    "butterfly", "chair", "table", "hat", "boot", "bone", "spoon", "fork", "scissors",
    "candle", "guitar", "magnet", "ghost", "dumbbell", "shield", "castle", "lollipop", "bow",
    "teapot", "trophy", "tent", "glasses", "book", "letter a", "letter e", "letter h",
    "letter k", "letter t", "letter s",
)  # fmt: skip
"""In the order in which the base model numbers them."""
SHAPES = {name: (DRAWN | MORE)[name] for name in NAMES}
