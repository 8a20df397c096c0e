"""Built-in classification and counting: things on photographs, weather, and real surfaces."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from PIL import Image

from valora_data.schema import Answer
from valora_data.sources.generic.scenes import COLORS, Floats
from valora_data.sources.scenes.boards import (
    WEATHERS,
    Board,
    Drawn,
    SceneDomain,
    add_weather,
    fitted,
    resized,
)
from valora_data.sources.scenes.drawing import Pen, chosen, pick, scaled
from valora_data.sources.scenes.language import TABLE_SHAPES
from valora_data.sources.scenes.objects import (
    PLANTS,
    SIGNS,
    VEHICLES,
    bicycle,
    person,
    traffic_sign,
    vehicle,
)
from valora_data.sources.scenes.photographs import photograph_crop

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np

    from valora_data.schema import Split

VEHICLE_LABELS = (*VEHICLES, "bicycle")
SURFACES = {"brick": 0, "gravel": 1, "grass": 2, "coins": 4, "tissue": 7, "stars": 8}
"""Surface to its photograph, by the number in `PHOTOGRAPHS`."""


def _vehicle_type(rng: np.random.Generator, split: Split) -> Drawn:
    label = chosen(rng, VEHICLE_LABELS)
    pen = {**VEHICLES, "bicycle": bicycle}[label](rng)
    return _shown(rng, split, pen, label, other=chosen(rng, list(PLANTS)))


def _plant_type(rng: np.random.Generator, split: Split) -> Drawn:
    label = chosen(rng, list(PLANTS))
    return _shown(rng, split, PLANTS[label](rng), label)


def _sign_type(rng: np.random.Generator, split: Split) -> Drawn:
    kind = int(rng.integers(len(SIGNS)))
    pen = traffic_sign(rng, kind, rng.uniform(30, 60))
    return _shown(rng, split, pen, SIGNS[kind], other=chosen(rng, list(PLANTS)))


def _shown(
    rng: np.random.Generator, split: Split, pen: Pen, label: str, other: str | None = None
) -> Drawn:
    """A thing on a photograph, sometimes with a plant beside it."""
    board = Board.photograph(rng, split, "grass")
    board.add(rng, fitted(rng, pen.layer(), (44.0, 80.0)))
    if other is not None and rng.random() < 0.4:
        board.add(rng, resized(PLANTS[other](rng).layer(), 0.7))
    return Drawn((board.image(rng),), Answer(label=label))


def _weather(rng: np.random.Generator, split: Split) -> Drawn:
    label = chosen(rng, WEATHERS)
    board = Board.photograph(rng, split)
    pens = [VEHICLES[chosen(rng, list(VEHICLES))](rng), person(rng)]
    for pen in pens[: int(rng.integers(3))]:
        board.add(rng, pen.layer())
    add_weather(rng, board, label)
    return Drawn((board.image(rng),), Answer(label=label))


def _surface(rng: np.random.Generator, split: Split) -> Drawn:
    label = chosen(rng, list(SURFACES))
    pixels = photograph_crop(rng, split, photograph=SURFACES[label])
    return Drawn((Image.fromarray(pixels),), Answer(label=label))


CLASSIFICATION = {
    "vehicle_type": SceneDomain("which vehicle is this?", _vehicle_type, VEHICLE_LABELS),
    "plant_type": SceneDomain("which plant is this?", _plant_type, tuple(PLANTS)),
    "sign_type": SceneDomain("which sign is this?", _sign_type, SIGNS),
    "weather": SceneDomain("how is the weather?", _weather, WEATHERS),
    "surface": SceneDomain("which surface is this?", _surface, tuple(SURFACES)),
}
"""Domains by name."""

MOST = 5
COUNTS = tuple(str(count) for count in range(MOST + 1))
POTTED = ("conifer", "palm", "cactus", "grass")
"""Plants that keep their form when small."""
METALS = ((214, 172, 60), (190, 192, 196), (184, 110, 62))


def _coin(rng: np.random.Generator) -> Floats:
    """A round of gold, silver or copper with a raised rim and a number."""
    metal = pick(rng, METALS, 25)
    size = rng.uniform(18, 28)
    pen = Pen(size, size)
    pen.oval(scaled(metal, 0.6), 0.5, 0.5, 0.5, 0.5)
    pen.oval(metal, 0.5, 0.5, 0.44, 0.44)
    pen.ring(scaled(metal, 1.25), 1.0, 0.5, 0.5, size * 0.36)
    pen.text(scaled(metal, 0.5), size * 0.07, str(rng.integers(1, 9)), 0.38, 0.3, 0.62, 0.7)
    return pen.layer()


def _count(
    painter: Callable[[np.random.Generator], Floats],
    without: str,
    rng: np.random.Generator,
    split: Split,
) -> Drawn:
    """Some of what is counted, and up to two other things."""
    board = Board.photograph(rng, split, without)
    wanted = int(rng.integers(MOST + 1))
    found = sum(board.add(rng, painter(rng)) is not None for _ in range(wanted))
    for _ in range(int(rng.integers(3))):
        board.put(rng, chosen(rng, TABLE_SHAPES), chosen(rng, list(COLORS)), length=(14, 22))
    return Drawn((board.image(rng),), Answer(count=found))


COUNTING = {
    f"{name}_count": SceneDomain(f"how many {what}?", partial(_count, painter, without), COUNTS)
    for name, what, painter, without in (
        ("people", "people", lambda rng: fitted(rng, person(rng).layer()), ""),
        ("vehicle", "vehicles", lambda rng: fitted(rng, vehicle(rng).layer()), ""),
        ("sign", "signs", lambda rng: traffic_sign(rng, size=rng.uniform(20, 30)).layer(), ""),
        ("plant", "plants", lambda rng: fitted(rng, PLANTS[chosen(rng, POTTED)](rng).layer()),
         "grass"),
        ("coin", "coins", _coin, "coins"),
    )
}  # fmt: skip
"""Domains by name; counts go from 0 to `MOST`."""
