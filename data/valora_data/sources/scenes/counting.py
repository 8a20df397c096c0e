"""Built-in counting: how many people, vehicles, signs, coins or plants a picture shows."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from valora_data.schema import Answer, Task
from valora_data.sources.generic.scenes import COLORS
from valora_data.sources.scenes.boards import Board, extent, resized
from valora_data.sources.scenes.drawing import Layer, Pen, scaled, varied
from valora_data.sources.scenes.objects import PLANTS, person, traffic_sign, vehicle
from valora_data.sources.scenes.scene_domain import Drawn, SceneDomain, chosen
from valora_data.sources.scenes.words import TABLE_SHAPES, put

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np

    from valora_data.schema import Split

MOST = 5
LABELS = tuple(str(count) for count in range(MOST + 1))
LENGTH = (20.0, 30.0)
"""Range of a thing's longer side in pixels: small enough for `MOST` to find room."""

POTTED = ("conifer", "palm", "cactus", "grass")
"""Plants that keep their form when small."""


def _coin(rng: np.random.Generator) -> Layer:
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
    return resized(layer, rng.uniform(*LENGTH) / max(x1 - x0, y1 - y0))


def _person(rng: np.random.Generator) -> Layer:
    return _small(person(rng).thing, rng)


def _vehicle(rng: np.random.Generator) -> Layer:
    return _small(vehicle(rng).thing, rng)


def _sign(rng: np.random.Generator) -> Layer:
    return traffic_sign(rng, size=rng.uniform(*LENGTH)).thing


def _plant(rng: np.random.Generator) -> Layer:
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
    return SceneDomain(Task.COUNTING, f"how many {what}?", draw, LABELS)


COUNTING = {
    "people_count": _domain("people", _person),
    "vehicle_count": _domain("vehicles", _vehicle),
    "sign_count": _domain("signs", _sign),
    "plant_count": _domain("plants", _plant, "grass"),
    "coin_count": _domain("coins", _coin, "coins"),
}
"""Domains by name; counts go from 0 to `MOST`."""
