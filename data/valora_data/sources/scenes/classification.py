"""Built-in classification and counting: things on photographs, weather, and real surfaces.

The handwritten digits are in `digits`.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from PIL import Image

from valora_data.schema import Answer, Task
from valora_data.sources.generic.scenes import COLORS
from valora_data.sources.scenes.boards import (
    WEATHERS,
    Board,
    Drawn,
    SceneDomain,
    add_weather,
    chosen,
    extent,
    resized,
)
from valora_data.sources.scenes.drawing import Layer, Pen, scaled, varied
from valora_data.sources.scenes.language import TABLE_SHAPES, put
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

LENGTH = (44.0, 80.0)
"""Range of the longer side of what is to be classified, in pixels."""
VEHICLE_LABELS = (*VEHICLES, "bicycle")
SURFACES = {"brick": 0, "gravel": 1, "grass": 2, "coins": 4, "tissue": 7, "stars": 8}
"""Surface to its photograph, by the number in `PHOTOGRAPHS`."""


def _vehicle_type(rng: np.random.Generator, split: Split) -> Drawn:
    label = chosen(rng, VEHICLE_LABELS)
    layer = bicycle(rng).thing if label == "bicycle" else VEHICLES[label](rng, None).layer()
    return _shown(rng, split, layer, label, other=chosen(rng, list(PLANTS)))


def _plant_type(rng: np.random.Generator, split: Split) -> Drawn:
    label = chosen(rng, list(PLANTS))
    return _shown(rng, split, PLANTS[label](rng).layer(), label)


def _sign_type(rng: np.random.Generator, split: Split) -> Drawn:
    kind = int(rng.integers(len(SIGNS)))
    layer = traffic_sign(rng, kind, rng.uniform(30, 60)).thing
    return _shown(rng, split, layer, SIGNS[kind], other=chosen(rng, list(PLANTS)))


def _shown(
    rng: np.random.Generator, split: Split, layer: Layer, label: str, other: str | None = None
) -> Drawn:
    """A thing on a photograph, sometimes with a plant beside it."""
    board = Board.photograph(rng, split, "grass")
    x0, y0, x1, y1 = extent(layer)
    board.add(rng, resized(layer, rng.uniform(*LENGTH) / max(x1 - x0, y1 - y0)))
    if other is not None and rng.random() < 0.4:
        board.add(rng, resized(PLANTS[other](rng).layer(), 0.7))
    return Drawn((board.image(rng),), Answer(label=label))


def _weather(rng: np.random.Generator, split: Split) -> Drawn:
    label = chosen(rng, WEATHERS)
    board = Board.photograph(rng, split)
    things = [VEHICLES[chosen(rng, list(VEHICLES))](rng, None).layer(), person(rng).thing]
    for layer in things[: int(rng.integers(3))]:
        board.add(rng, layer)
    add_weather(rng, board, label)
    return Drawn((board.image(rng),), Answer(label=label))


def _surface(rng: np.random.Generator, split: Split) -> Drawn:
    label = chosen(rng, list(SURFACES))
    pixels = photograph_crop(rng, split, photograph=SURFACES[label])
    return Drawn((Image.fromarray(pixels),), Answer(label=label))


CLASSIFICATION = {
    "vehicle_type": SceneDomain(
        Task.CLASSIFICATION, "which vehicle is this?", _vehicle_type, VEHICLE_LABELS
    ),
    "plant_type": SceneDomain(
        Task.CLASSIFICATION, "which plant is this?", _plant_type, tuple(PLANTS)
    ),
    "sign_type": SceneDomain(Task.CLASSIFICATION, "which sign is this?", _sign_type, SIGNS),
    "weather": SceneDomain(Task.CLASSIFICATION, "how is the weather?", _weather, WEATHERS),
    "surface": SceneDomain(
        Task.CLASSIFICATION, "which surface is this?", _surface, tuple(SURFACES)
    ),
}
"""Drawn domains by name."""


# ---- counting ------------------------------------------------------------------------------------

MOST = 5
COUNTS = tuple(str(count) for count in range(MOST + 1))
SMALL = (20.0, 30.0)
"""Range of a thing's longer side in pixels: small enough for `MOST` to find room."""

POTTED = ("conifer", "palm", "cactus", "grass")
"""Plants that keep their form when small."""


def _counted_coin(rng: np.random.Generator) -> Layer:
    """A round of gold, silver or copper with a raised rim and a number."""
    metal = varied(rng, ((214, 172, 60), (190, 192, 196), (184, 110, 62))[int(rng.integers(3))])
    size = rng.uniform(18, 28)
    pen = Pen(size, size)
    pen.ellipse(0.5, 0.5, 0.5, 0.5, scaled(metal, 0.6))
    pen.ellipse(0.5, 0.5, 0.44, 0.44, metal)
    pen.ring(0.5, 0.5, size * 0.36, scaled(metal, 1.25), 1.0)
    pen.text([int(rng.integers(1, 9))], (0.38, 0.3, 0.62, 0.7), scaled(metal, 0.5), size * 0.07)
    return pen.layer()


def _small(layer: Layer, rng: np.random.Generator) -> Layer:
    x0, y0, x1, y1 = extent(layer)
    return resized(layer, rng.uniform(*SMALL) / max(x1 - x0, y1 - y0))


def _counted_person(rng: np.random.Generator) -> Layer:
    return _small(person(rng).thing, rng)


def _counted_vehicle(rng: np.random.Generator) -> Layer:
    return _small(vehicle(rng).thing, rng)


def _counted_sign(rng: np.random.Generator) -> Layer:
    return traffic_sign(rng, size=rng.uniform(*SMALL)).thing


def _counted_plant(rng: np.random.Generator) -> Layer:
    return _small(PLANTS[chosen(rng, POTTED)](rng).layer(), rng)


def _counted(
    painter: Callable[[np.random.Generator], Layer],
    without: str | None,
    rng: np.random.Generator,
    split: Split,
) -> Drawn:
    """Some of what is counted, and up to two other things."""
    board = Board.photograph(rng, split, without)
    wanted = int(rng.integers(MOST + 1))
    found = sum(board.add(rng, painter(rng)) is not None for _ in range(wanted))
    for _ in range(int(rng.integers(3))):
        put(rng, board, chosen(rng, TABLE_SHAPES), chosen(rng, list(COLORS)), length=(14, 22))
    return Drawn((board.image(rng),), Answer(count=found))


def _domain(
    what: str, painter: Callable[[np.random.Generator], Layer], without: str | None = None
) -> SceneDomain:
    draw = partial(_counted, painter, without)
    return SceneDomain(Task.COUNTING, f"how many {what}?", draw, COUNTS)


COUNTING = {
    "people_count": _domain("people", _counted_person),
    "vehicle_count": _domain("vehicles", _counted_vehicle),
    "sign_count": _domain("signs", _counted_sign),
    "plant_count": _domain("plants", _counted_plant, "grass"),
    "coin_count": _domain("coins", _counted_coin, "coins"),
}
"""Domains by name; counts go from 0 to `MOST`."""
