"""Which tiling for which shape: that of the nearest measured one, else by rules (VaLoRA §4.3.2)."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, fields
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from valora_kernels.arrangements import arrangements, default_tiling, fits, refit, rounds
from valora_kernels.tiling import Shape, Tiling

if TYPE_CHECKING:
    from valora_kernels.gpus import Gpu

VERSION = 2

FEATURE_WEIGHTS = np.array([0.5, 0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 2.0])
"""Distance for a factor of two in inputs, outputs, projections, rank, rows, adapters, rows per
adapter; and for `first`."""

STARTUP_ELEMENTS = 6e6  # 16-bit elements that could move while a kernel starts, in 3 µs

ROUNDS_FROM = 256
"""Rows from which on a further round of programs costs more than the start of a kernel."""


def _effort(shape: Shape) -> float:
    """Elements that a call moves, plus what could move while it starts: smooth in all sizes."""
    rows = shape.rows * (shape.in_features * shape.projections + 2 * shape.out_features)
    ranks = shape.adapters * shape.rank
    weights = ranks * (shape.in_features * shape.projections + shape.out_features)
    return STARTUP_ELEMENTS + rows + weights


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
    """The fastest tilings that were measured on one GPU."""

    def __init__(self, gpu: Gpu, entries: Iterable[tuple[Shape, Tiling]]) -> None:
        self.gpu = gpu
        self.entries = dict(entries)
        self._shapes = list(self.entries)
        places = np.array([_features(shape) for shape in self._shapes])
        self._places = places.reshape(-1, len(FEATURE_WEIGHTS))

    def joined(self, other: TilingTable) -> TilingTable:
        """The entries of both; those of the other one count where both have a shape."""
        return TilingTable(self.gpu, {**self.entries, **other.entries}.items())

    def look_up(self, shape: Shape) -> Tiling:
        """The tiling of this shape, of the nearest measured shape that fits, or of the rules."""
        found = self.entries.get(shape)
        if found is not None:
            return found
        best, lowest = default_tiling(shape), math.inf
        for nearness, near, tiling in self.neighbours(shape, 200):
            if nearness > lowest:
                break
            distance = nearness
            if not fits(tiling, shape, self.gpu):
                continue
            if shape.rows >= ROUNDS_FROM:
                # A tiling that just filled the processors there may take a round more here.
                steps = rounds(tiling, shape, self.gpu) / rounds(tiling, near, self.gpu)
                more = math.log2(steps * _effort(near) / _effort(shape))
                distance = nearness + 4 * max(0.0, more) ** 2
            if distance < lowest:
                best, lowest = tiling, distance
        return best

    def neighbours(self, shape: Shape, count: int) -> Iterator[tuple[float, Shape, Tiling]]:
        """Distance, shape and refitted tiling of the nearest measured shapes, in their order."""
        distances = np.square(self._places - _features(shape)).sum(axis=1)
        for place in np.argsort(distances, kind="stable")[:count]:
            near = self._shapes[int(place)]
            tiling = refit(self.entries[near], near.in_features, shape.in_features)
            yield float(distances[place]), near, tiling

    @classmethod
    def load(cls, path: Path, gpu: Gpu) -> TilingTable:
        """Read a table that `save` wrote; a `ValueError` says that it is none for this GPU."""
        try:
            data = json.loads(path.read_text())
            made_for = (data["version"], data["gpu"])
            if made_for != (VERSION, gpu.name):
                raise ValueError(f"expected {(VERSION, gpu.name)}, got {made_for}")  # noqa: TRY301
            tilings, columns = [Tiling(**one) for one in data["tilings"]], data["shapes"]["columns"]
            if unknown := {tiling.arrangement for tiling in tilings} - arrangements().keys():
                raise ValueError(f"expected {[*arrangements()]}, got {unknown}")  # noqa: TRY301
            entries = {
                Shape(**dict(zip(columns, row[:-1], strict=True))): tilings[row[-1]]
                for row in data["shapes"]["rows"]
            }
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
            raise ValueError(
                f"{path}: no tiling table of {gpu.name} ({error}): delete it, and measure it again "
                "with valora-tile"
            ) from error
        return cls(gpu, entries.items())

    def save(self, path: Path, **about: object) -> None:
        """Write the table as JSON, one shape per line; `about` says how it was measured."""
        tilings = sorted(set(self.entries.values()), key=str)
        number = {tiling: i for i, tiling in enumerate(tilings)}
        columns = json.dumps([field.name for field in fields(Shape)])
        rows = [[*asdict(shape).values(), number[t]] for shape, t in self.entries.items()]
        head = {"version": VERSION, "gpu": self.gpu.name, **about}
        text = "{\n " + ",\n ".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in head.items())
        text += ',\n "tilings": [\n  ' + ",\n  ".join(json.dumps(asdict(t)) for t in tilings)
        text += '\n ],\n "shapes": {"columns": ' + columns + ', "rows": [\n  '
        text += ",\n  ".join(json.dumps(row) for row in rows) + "\n ]}\n}\n"
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f"{path.name}.{os.getpid()}")
        try:
            temporary.write_text(text)
            temporary.replace(path)  # other processes never read half of it
        finally:
            temporary.unlink(missing_ok=True)


_tables: dict[Gpu, TilingTable] = {}
"""The tables in use: those of the records, and what `use_table` put in their place."""


def is_measured(gpu: Gpu) -> bool:
    """Whether the record of a GPU brings a table."""
    return gpu.table is not None and gpu.table.exists()


def table_of(gpu: Gpu) -> TilingTable:
    """The table of a GPU; if nothing was measured on it, that of one like it, or an empty one."""
    if gpu not in _tables:
        if gpu.table is not None and is_measured(gpu):
            _tables[gpu] = TilingTable.load(gpu.table, gpu)
        else:
            _tables[gpu] = _completed(TilingTable(gpu, []))
    return _tables[gpu]


def _completed(table: TilingTable) -> TilingTable:
    """A table that may have few shapes, with the others of a GPU like it."""
    like = table.gpu.like
    if like is None:
        return table
    return TilingTable(table.gpu, {**table_of(like).entries, **table.entries}.items())


def use_table(table: TilingTable) -> None:
    """Choose tilings of a table's GPU from it, then from a GPU like it; CUDA graphs keep theirs."""
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
def choose(gpu: Gpu, shape: Shape) -> Tiling:
    """The tiling for a shape on a GPU; cached, because every layer of a batch asks again."""
    return table_of(gpu).look_up(shape)
