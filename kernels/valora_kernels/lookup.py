"""Which tiling for which shape, from the table of a GPU (VaLoRA §4.3.2).

`search` measures the candidates on a GPU and writes the fastest of each shape into a JSON table.
Look-up takes the tiling of that shape or of the nearest measured one; where nothing was measured,
rules decide. `LookupMode` says which of the three it was.
"""

from __future__ import annotations

import json
import math
import os
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from valora_kernels.arrangements.registry import ARRANGEMENTS, arrangement
from valora_kernels.registry import UnknownNameError
from valora_kernels.tiling import Shape, Tiling

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

    from valora_kernels.gpus.base import Gpu

VERSION = 2
AGAIN = "delete it, and measure it again with valora-tile"
"""What to do with a table that cannot be used."""

FEATURE_WEIGHTS = np.array([0.5, 0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 2.0])
"""How far apart shapes are that differ by a factor of two in inputs, outputs, projections, rank,
rows, adapters or rows per adapter, or in whether LoRA comes first."""


class LookupMode(StrEnum):
    """How a tiling was found: this shape was measured, another one was, or a rule decided."""

    EXACT = "exact"
    NEAREST = "nearest"
    DEFAULT = "default"


@dataclass(frozen=True, slots=True)
class TilingChoice:
    """A tiling and how it was found."""

    tiling: Tiling
    mode: LookupMode


def effort(shape: Shape, gpu: Gpu) -> float:
    """Elements that a call moves, plus what could move while it starts: smooth in all sizes."""
    rows = shape.rows * (shape.in_features * shape.projections + 2 * shape.out_features)
    ranks = shape.adapters * shape.rank
    weights = ranks * (shape.in_features * shape.projections + shape.out_features)
    return gpu.startup_elements + rows + weights


def _features(shape: Shape) -> np.ndarray:
    return FEATURE_WEIGHTS * np.log2(
        [
            shape.in_features,
            shape.out_features,
            shape.projections,
            max(shape.rank, 16),
            max(shape.rows, 1),
            max(shape.adapters, 1),
            max(shape.rows / max(shape.adapters, 1), 1),
            2 if shape.first else 1,
        ]
    )


class TilingTable:
    """The fastest tilings that were measured on one GPU.

    Args:
        gpu: The GPU's record.
        entries: Shape and tiling of each measurement.
    """

    def __init__(self, gpu: Gpu, entries: Iterable[tuple[Shape, Tiling]]) -> None:
        self.gpu = gpu
        self.entries = dict(entries)
        self._shapes = list(self.entries)
        self._places = np.array([_features(shape) for shape in self._shapes]).reshape(
            -1, len(FEATURE_WEIGHTS)
        )

    def look_up(self, shape: Shape) -> TilingChoice:
        """The tiling of this shape, of the nearest measured shape that fits, or of the rules."""
        found = self.entries.get(shape)
        if found is not None:
            return TilingChoice(found, LookupMode.EXACT)
        best, least = None, math.inf
        for nearness, near in self._near(shape, 200):
            if nearness > least:
                break
            distance = nearness
            measured = self.entries[near]
            way = arrangement(measured.arrangement)
            tiling = way.refit(measured, near.in_features, shape.in_features)
            if not way.fits(tiling, shape, self.gpu):
                continue
            if shape.rows >= self.gpu.rounds_from:
                # A tiling that just filled the processors there may take a round more here.
                steps = way.rounds(tiling, shape, self.gpu) / way.rounds(tiling, near, self.gpu)
                more = math.log2(steps * effort(near, self.gpu) / effort(shape, self.gpu))
                distance = nearness + 4 * max(0.0, more) ** 2
            if distance < least:
                best, least = tiling, distance
        if best is None:
            return TilingChoice(default_tiling(self.gpu, shape), LookupMode.DEFAULT)
        return TilingChoice(best, LookupMode.NEAREST)

    def _near(self, shape: Shape, count: int) -> list[tuple[float, Shape]]:
        distances = np.square(self._places - _features(shape)).sum(axis=1)
        order = np.argsort(distances, kind="stable")[:count]
        return [(float(distances[place]), self._shapes[int(place)]) for place in order]

    def neighbours(self, shape: Shape, count: int) -> list[Shape]:
        """The measured shapes that are nearest to a shape, the nearest first."""
        return [near for _, near in self._near(shape, count)]

    @classmethod
    def load(cls, path: Path, gpu: Gpu) -> TilingTable:
        """Read a table that `save` wrote.

        Raises:
            ValueError: Another version of the format, a table of another GPU, or no table at all.
            UnknownNameError: An arrangement that is not registered, or that no table may choose.
        """
        text = path.read_text()
        try:
            data: Mapping[str, Any] = json.loads(text)
            version, name = data.get("version"), data.get("gpu")
            if version == VERSION and name == gpu.name:
                return cls(gpu, _entries(data, path))
        except UnknownNameError:
            raise
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            raise ValueError(f"{path}: no tiling table ({error}): {AGAIN}") from error
        if version != VERSION:
            raise ValueError(f"{path}: expected version {VERSION}, got {version}: {AGAIN}")
        raise ValueError(f"{path}: expected the table of {gpu.name}, got one of {name}: {AGAIN}")

    def save(self, path: Path, **about: object) -> None:
        """Write the table as JSON, one shape per line; `about` says how it was measured."""
        tilings = sorted(set(self.entries.values()), key=str)
        number = {tiling: i for i, tiling in enumerate(tilings)}
        columns = list(Shape.__dataclass_fields__)
        rows = [[*asdict(shape).values(), number[t]] for shape, t in self.entries.items()]
        head = {"version": VERSION, "gpu": self.gpu.name, **about}
        text = "{\n " + ",\n ".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in head.items())
        text += ',\n "tilings": [\n  ' + ",\n  ".join(json.dumps(asdict(t)) for t in tilings)
        text += '\n ],\n "shapes": {"columns": ' + json.dumps(columns) + ', "rows": [\n  '
        text += ",\n  ".join(json.dumps(row) for row in rows) + "\n ]}\n}\n"
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f"{path.name}.{os.getpid()}")
        try:
            temporary.write_text(text)
            temporary.replace(path)  # other processes never read half of it
        finally:
            temporary.unlink(missing_ok=True)


def _entries(data: Mapping[str, Any], path: Path) -> list[tuple[Shape, Tiling]]:
    """The entries of a table."""
    tilings, shapes = [Tiling(**tiling) for tiling in data["tilings"]], data["shapes"]
    for name in sorted({tiling.arrangement for tiling in tilings}):
        _check_arrangement(name, path)
    return [
        (Shape(**dict(zip(shapes["columns"], row[:-1], strict=True))), tilings[row[-1]])
        for row in shapes["rows"]
    ]


def _check_arrangement(name: str, path: Path) -> None:
    """Refuse a name that a table must not contain."""
    try:
        found = ARRANGEMENTS[name]
    except UnknownNameError as error:
        raise UnknownNameError(f"{path}: {error}") from error
    if not found.tabled:
        raise UnknownNameError(f"{path}: no table may choose the arrangement {name!r}")


_tables: dict[Gpu, TilingTable] = {}
"""The tables in use: those of the records, and what `use_table` put in their place."""


def is_measured(gpu: Gpu) -> bool:
    """Whether the record of a GPU brings a table."""
    return gpu.table is not None and gpu.table.exists()


def table_of(gpu: Gpu) -> TilingTable:
    """The table of a GPU; if nothing was measured on it, that of one like it, or an empty one."""
    if gpu not in _tables:
        found = gpu.table if is_measured(gpu) else None
        _tables[gpu] = TilingTable.load(found, gpu) if found else _completed(TilingTable(gpu, []))
    return _tables[gpu]


def _completed(table: TilingTable) -> TilingTable:
    """A table that may have few shapes, with the others of a GPU like it."""
    like = table.gpu.like
    if like is None:
        return table
    return TilingTable(table.gpu, {**table_of(like).entries, **table.entries}.items())


def use_table(table: TilingTable) -> None:
    """Choose the tilings of a table's GPU from that table from now on.

    Shapes that it does not have come from the table of a GPU like it, if there is one. CUDA graphs
    keep the tilings that they were captured with.
    """
    _tables[table.gpu] = _completed(table)
    choose.cache_clear()


@contextmanager
def using(table: TilingTable) -> Iterator[None]:
    """Choose the tilings of a table's GPU from that table within a block."""
    before = table_of(table.gpu)
    use_table(table)
    try:
        yield
    finally:
        use_table(before)


@lru_cache(maxsize=65536)
def choose(gpu: Gpu, shape: Shape) -> TilingChoice:
    """The tiling for a shape on a GPU; cached, because every layer of a batch asks again."""
    return table_of(gpu).look_up(shape)


def default_tiling(gpu: Gpu, shape: Shape) -> Tiling:
    """What the rules of the GPU's default arrangement say."""
    return arrangement(gpu.default).default_tiling(shape)
