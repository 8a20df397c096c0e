"""Which arrangement of the operator for which shape: torch-free look-up (VaLoRA §4.3.2).

`search` measures the candidates on a GPU and writes the best of each shape into a JSON table.
Look-up has three modes, and says which one it took: `exact` (this shape was measured), `nearest`
(another shape was, the closest in the logarithms of all sizes) and `default` (nothing was measured
on this GPU, so rules decide).
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

TABLES = Path(__file__).parent / "tables"
VERSION = 1
SHARED_MEMORY = 216 << 10
"""Bytes that a program may use, with room for what the compiler adds; a Hopper GPU has 227 KB."""

EXPAND_RANKS = 128
"""Rank rows that an expanding program holds at once."""


class Kind(StrEnum):
    """How the operator is computed; see `atmm_kernels`."""

    PAIR = "pair"
    ROWS = "rows"


@dataclass(frozen=True, slots=True)
class Tiling:
    """One way to compute the operator.

    Attributes:
        kind: Arrangement of the two steps.
        rows: Rows a tile.
        outputs: Output columns a tile.
        inputs: Input columns that a shrinking program loads at a time.
        split: Input columns a shrinking program; `rows` takes all and ignores it.
        ranks: Rank rows a shrinking program at most; `rows` takes all and ignores it.
        gather: Whether the last shrinking program of a tile sums the parts up; if not, every
            expanding one does.
        loop: Output tiles an expanding program, one after the other (`pair` only).
        parts: Programs that share the outputs of a tile (`rows` only).
        warps: Warps a program; of the shrink if there are two kernels.
        expand_warps: Warps a program of the second kernel (`pair` only).
        stages: Loads in flight in a program's loop.
        expand_stages: Likewise in the second kernel (`pair` only).
    """

    kind: Kind
    rows: int = 16
    outputs: int = 64
    inputs: int = 128
    split: int = 256
    ranks: int = 64
    gather: bool = False
    loop: int = 1
    parts: int = 1
    warps: int = 4
    expand_warps: int = 4
    stages: int = 3
    expand_stages: int = 3


@dataclass(frozen=True, slots=True)
class Shape:
    """What a choice depends on.

    Attributes:
        in_features: Width of x.
        out_features: Width of all projections together.
        projections: Number of projections that share x.
        rank: Largest rank that the weights have room for, rounded up as the kernels do.
        rows: Rows of the batch that have an adapter.
        adapters: Adapters that the rows share; `Grouping.effective_adapters` if unevenly.
    """

    in_features: int
    out_features: int
    projections: int
    rank: int
    rows: int
    adapters: float


class Mode(StrEnum):
    """How a choice came about."""

    EXACT = "exact"
    NEAREST = "nearest"
    DEFAULT = "default"


@dataclass(frozen=True, slots=True)
class Choice:
    """A tiling and how it was found."""

    tiling: Tiling
    mode: Mode


def refit(tiling: Tiling, measured: int, in_features: int) -> Tiling:
    """Divide another input width into as many parts as the measured one was."""
    if tiling.kind is Kind.ROWS or measured == in_features:
        return tiling
    parts = -(-measured // tiling.split)
    share = -(-in_features // parts)
    return replace(tiling, split=-(-share // tiling.inputs) * tiling.inputs)


def shared_memory(tiling: Tiling, rank: int) -> int:
    """Bytes that a program of the hungriest kernel needs for 16-bit tiles, at most."""
    if tiling.kind is Kind.ROWS:
        first = (tiling.rows + rank) * tiling.inputs
        return 2 * tiling.stages * max(first, (tiling.rows + rank) * tiling.outputs)
    stages = tiling.stages if tiling.split > tiling.inputs else 1
    ahead = tiling.expand_stages if tiling.loop > 1 else 1
    first = stages * (tiling.rows + min(rank, tiling.ranks)) * tiling.inputs
    return 2 * max(first, ahead * (tiling.rows + min(rank, EXPAND_RANKS)) * tiling.outputs)


PROCESSORS = 132
"""Of an H200."""


def rounds(tiling: Tiling, shape: Shape) -> int:
    """How often the processors take programs until all have run: time goes up in such steps."""
    adapters = max(shape.adapters, 1)
    programs = adapters * math.ceil(shape.rows / adapters / tiling.rows) * shape.projections
    if tiling.kind is Kind.ROWS:
        programs *= tiling.parts
    else:
        parts = math.ceil(shape.in_features / tiling.split)
        programs *= parts * math.ceil(shape.rank / min(shape.rank, tiling.ranks))
    at_once = max(1, SHARED_MEMORY // shared_memory(tiling, shape.rank))
    return max(1, math.ceil(programs / (PROCESSORS * at_once)))


def effort(shape: Shape) -> float:
    """Elements that a call moves, and what could move while it starts: smooth in all sizes."""
    rows = shape.rows * (shape.in_features * shape.projections + 2 * shape.out_features)
    ranks = shape.adapters * shape.rank
    weights = ranks * (shape.in_features * shape.projections + shape.out_features)
    return STARTING + rows + weights


STARTING = 6e6
"""Elements of 16 bits that an H200 moves in 3 µs."""

LONG = 256
"""Rows from which on rounds of the processors cost more than starting a kernel."""

WEIGHTS = np.array([0.5, 0.5, 1.0, 1.0, 1.0, 1.0, 1.0])
"""Of a factor of two in: inputs, outputs, projections, rank, rows, adapters, rows per adapter."""


def _features(shape: Shape) -> np.ndarray:
    return WEIGHTS * np.log2(
        [
            shape.in_features,
            shape.out_features,
            shape.projections,
            max(shape.rank, 16),
            max(shape.rows, 1),
            max(shape.adapters, 1),
            max(shape.rows / max(shape.adapters, 1), 1),
        ]
    )


class Table:
    """The best tilings that were measured on one GPU.

    Args:
        gpu: Its name.
        entries: Shape and tiling of each measurement.
    """

    def __init__(self, gpu: str, entries: Iterable[tuple[Shape, Tiling]]) -> None:
        self.gpu = gpu
        self.entries = dict(entries)
        self._shapes = list(self.entries)
        self._places = np.array([_features(shape) for shape in self._shapes]).reshape(-1, 7)

    def look_up(self, shape: Shape) -> Choice:
        """The tiling of this shape, or of the nearest one, or what the rules say."""
        found = self.entries.get(shape)
        if found is not None:
            return Choice(found, Mode.EXACT)
        if not self._shapes:
            return Choice(default_tiling(shape), Mode.DEFAULT)
        best, least = default_tiling(shape), math.inf
        for nearness, near in self._near(shape, 200):
            if nearness > least:
                break
            distance = nearness
            tiling = refit(self.entries[near], near.in_features, shape.in_features)
            if shared_memory(tiling, shape.rank) > SHARED_MEMORY:
                continue
            if shape.rows >= LONG:  # what just filled the processors there may take a round more
                steps = rounds(tiling, shape) / rounds(tiling, near)
                more = math.log2(steps * effort(near) / effort(shape))
                distance = nearness + 4 * max(0.0, more) ** 2
            if distance < least:
                best, least = tiling, distance
        return Choice(best, Mode.DEFAULT if math.isinf(least) else Mode.NEAREST)

    def _near(self, shape: Shape, count: int) -> list[tuple[float, Shape]]:
        distances = np.square(self._places - _features(shape)).sum(axis=1)
        order = np.argsort(distances, kind="stable")[:count]
        return [(float(distances[place]), self._shapes[int(place)]) for place in order]

    def neighbours(self, shape: Shape, count: int) -> list[Shape]:
        """The measured shapes that are nearest to a shape, the nearest first."""
        return [near for _, near in self._near(shape, count)]

    @classmethod
    def load(cls, path: Path) -> Table:
        """Read a table that `save` wrote.

        Raises:
            ValueError: Another version of the format.
        """
        data: Mapping[str, Any] = json.loads(path.read_text())
        if data.get("version") != VERSION:
            raise ValueError(f"{path}: expected version {VERSION}, got {data.get('version')}")
        shapes, tilings = data["shapes"], data["tilings"]
        return cls(
            data["gpu"],
            (
                (
                    Shape(**dict(zip(shapes["columns"], row[:-1], strict=True))),
                    Tiling(**{**(t := tilings[row[-1]]), "kind": Kind(t["kind"])}),
                )
                for row in shapes["rows"]
            ),
        )

    def save(self, path: Path, **about: object) -> None:
        """Write the table as JSON, one shape a line: `about` says how it was measured."""
        tilings = sorted(set(self.entries.values()), key=str)
        number = {tiling: i for i, tiling in enumerate(tilings)}
        columns = list(Shape.__dataclass_fields__)
        rows = [[*asdict(shape).values(), number[t]] for shape, t in self.entries.items()]
        head = {"version": VERSION, "gpu": self.gpu, **about}
        text = "{\n " + ",\n ".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in head.items())
        text += ',\n "tilings": [\n  ' + ",\n  ".join(json.dumps(asdict(t)) for t in tilings)
        text += '\n ],\n "shapes": {"columns": ' + json.dumps(columns) + ', "rows": [\n  '
        text += ",\n  ".join(json.dumps(row) for row in rows) + "\n ]}\n}\n"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def table_path(gpu: str) -> Path:
    """Where the table of a GPU is shipped, e.g. `tables/nvidia_h200.json`."""
    return TABLES / (gpu.lower().replace(" ", "_") + ".json")


@cache
def table_of(gpu: str) -> Table:
    """The shipped table of a GPU; an empty one if none was measured."""
    path = table_path(gpu)
    return Table.load(path) if path.exists() else Table(gpu, [])


@lru_cache(maxsize=65536)
def choose(gpu: str, shape: Shape) -> Choice:
    """The tiling for a shape on a GPU; remembered, because every layer of a batch asks again."""
    return table_of(gpu).look_up(shape)


def default_tiling(shape: Shape) -> Tiling:
    """What usually does well: larger tiles for longer segments, more parts for fewer rows."""
    per = shape.rows / max(shape.adapters, 1)
    rows = 16 if per <= 64 else 32 if per <= 512 else 64
    inputs = 128
    parts = max(1, min(8, 256 * rows // max(shape.rows, 1)))
    split = -(-shape.in_features // parts // inputs) * inputs
    return Tiling(Kind.PAIR, rows, 128, inputs, split, 64, gather=parts > 1)
