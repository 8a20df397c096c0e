"""Built-in classification: types of vehicles, plants and signs, weather, and real surfaces.

The handwritten digits are in `digits`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from PIL import Image

from valora_data.schema import Answer, Task
from valora_data.sources.scenes.boards import Board, extent, resized
from valora_data.sources.scenes.drawing import Layer
from valora_data.sources.scenes.objects import (
    PLANTS,
    SIGNS,
    VEHICLES,
    bicycle,
    person,
    traffic_sign,
)
from valora_data.sources.scenes.photographs import photograph_crop
from valora_data.sources.scenes.scene_domain import Drawn, SceneDomain, chosen
from valora_data.sources.scenes.weather import WEATHERS, add_weather

if TYPE_CHECKING:
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
