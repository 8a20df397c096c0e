"""Measures the tilings of a GPU piece by piece, between other work on it.

`search` tries hundreds of candidates of a shape and needs a GPU and all cores for itself. Here the
candidates are the fastest tilings of similar shapes on a GPU with a table: about ten, which every
piece times one of.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from enum import Enum
from typing import TYPE_CHECKING

import numpy as np
import torch

from valora_kernels.arrangements.base import ALL
from valora_kernels.arrangements.registry import arrangement
from valora_kernels.lookup import TilingTable, default_tiling
from valora_kernels.search import Job, call_of, cases_of, first_cases
from valora_kernels.timing import KernelWorkload, spread, times_in_turn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from valora_kernels.compiler import Compiler
    from valora_kernels.gpus.base import Gpu
    from valora_kernels.tiling import Case, ProjectionGroup, Shape, Tiling

    Clock = Callable[..., Mapping[str, NDArray[np.float64]]]

log = logging.getLogger(__name__)

ROWS = (1, 4, 16, 64, 256, 1024, 4096)
ADAPTERS = (1, 4, 16, 64)
"""Sizes of the batches that are measured; look-up takes the nearest one."""

NEAR = 6
"""Similar shapes whose tilings are tried, for as many rows and for as many rows a processor."""

FINALISTS = 3
"""Tilings that are timed again, longer and in turns."""

LEAST = 32
"""Fewest input and output columns of a tile that is made smaller."""

COLD_BYTES, MOST_SETS = 96 << 20, 96
"""Bytes and number of the inputs, between which calls alternate: less than in `search`, as memory
is short beside a server's, and still twice the cache of most GPUs."""


class Piece(Enum):
    """What a piece of work was."""

    MEASURED = "measured"
    WAITS = "waits"
    """Nothing, as kernels are being compiled."""
    NONE_LEFT = "none left"


class Tuner:
    """Measures shapes one after another.

    Args:
        table: What was measured before.
        like: Table of another GPU, whose tilings are the candidates.
        compiler: Compiles the candidates.
        device: The GPU.
        clock: Times lists of calls by name, see `timing.times_in_turn`.

    Attributes:
        compiler: Compiles the candidates.
        table: What was measured until now.
        skipped: Shapes that cannot be measured.
    """

    def __init__(
        self,
        table: TilingTable,
        like: TilingTable,
        compiler: Compiler,
        device: torch.device,
        clock: Clock = times_in_turn,
    ) -> None:
        self.compiler = compiler
        self.table = table
        self.skipped: set[Shape] = set()
        self._like, self._device, self._clock = like, device, clock
        self._pieces: Iterator[Piece] | None = None
        self._work: KernelWorkload | None = None
        self._open = False

    def left(self, wanted: Iterable[tuple[ProjectionGroup, Case]]) -> list[Shape]:
        """Return the shapes that are wanted and not measured yet."""
        shapes = (group.shape(*case) for group, case in wanted)
        return [shape for shape in shapes if self._new(shape)]

    def go_on(self, wanted: Iterable[tuple[ProjectionGroup, Case]]) -> Piece:
        """Do one piece: time a candidate of the shape at hand, or of the next one.

        Args:
            wanted: Groups and cases to measure, the first ones first.
        """
        if self._pieces is None:
            found = next(((g, c) for g, c in wanted if self._new(g.shape(*c))), None)
            if found is None:
                return Piece.NONE_LEFT
            self._open = True
            self._pieces = self._measure(*found)
        piece = next(self._pieces, None)
        if piece is None:
            self._pieces = None
            self.pause()
            return Piece.MEASURED
        return piece

    def pause(self) -> None:
        """Free the memory of the inputs; `go_on` makes them again."""
        self._work = None

    def close(self) -> None:
        """Free all that measuring needs; `go_on` takes it again."""
        if not self._open:
            return
        self._open = False
        self.pause()
        self.compiler.close()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # CUDA graphs have pools of their own

    def _new(self, shape: Shape) -> bool:
        return shape not in self.table.entries and shape not in self.skipped

    def _measure(self, group: ProjectionGroup, case: Case) -> Iterator[Piece]:
        """Measure a shape, and enter its fastest tiling into the table."""
        shape = group.shape(*case)
        tilings = candidates(self.table.gpu, self._like, shape)
        jobs = [Job(group, ALL, tiling, case.first) for tiling in tilings]
        while not self.compiler.compile(jobs):
            if self.compiler.lost:
                self.skipped.add(shape)
                return
            yield Piece.WAITS
        found: list[tuple[float, Tiling]] = []
        try:
            for job, tiling in zip(jobs, tilings, strict=True):
                if job in self.compiler.failed:
                    continue
                found.append((self._times(group, case, [tiling])[tiling], tiling))
                yield Piece.MEASURED
            found.sort(key=lambda pair: pair[0])
            few = [tiling for _, tiling in found[:FINALISTS]]
            times = self._times(group, case, few, repeats=9) if len(few) > 1 else {}
        except torch.OutOfMemoryError:
            log.info("no memory to measure tilings of %s", shape)
            self.skipped.add(shape)
            return
        if not few:
            self.skipped.add(shape)
            return
        best = min(few, key=lambda tiling: times.get(tiling, 0.0))
        self.table = TilingTable(self.table.gpu, {**self.table.entries, shape: best}.items())

    def _times(
        self, group: ProjectionGroup, case: Case, tilings: Sequence[Tiling], repeats: int = 3
    ) -> dict[Tiling, float]:
        """Median microseconds of each tiling."""
        work = self._work = self._work or self._workload(group, case)
        calls = {str(t): [call_of(ALL, t, work, one) for one in work.sets] for t in tilings}
        times = self._clock(calls, repeats=repeats, at_least=12)
        return {tiling: float(np.median(times[str(tiling)])) for tiling in tilings}

    def _workload(self, group: ProjectionGroup, case: Case) -> KernelWorkload:
        return KernelWorkload(
            spread(case.rows, case.adapters),
            [group.rank] * case.adapters,
            group.in_features,
            group.out_features,
            device=str(self._device),
            cold=COLD_BYTES,
            most=MOST_SETS,
            first=case.first,
        )


def candidates(gpu: Gpu, like: TilingTable, shape: Shape) -> list[Tiling]:
    """Tilings to try for a shape, without repetitions.

    They are the fastest ones of similar shapes on another GPU, with as many rows and with as many
    rows for each processor, and the one that the rules choose; smaller where the GPU has less
    shared memory.

    Args:
        gpu: The GPU.
        like: Table of the other GPU.
        shape: The shape.
    """
    ratio = like.gpu.processors / gpu.processors
    scaled = replace(shape, rows=max(round(shape.rows * ratio), round(shape.adapters)))
    found = []
    for near in (*like.neighbours(shape, NEAR), *like.neighbours(scaled, NEAR)):
        tiling = like.entries[near]
        way = arrangement(tiling.arrangement)
        found.append(way.refit(tiling, near.in_features, shape.in_features))
    found.append(default_tiling(gpu, shape))
    fitting = [smaller for one in found if (smaller := _fitted(one, shape, gpu)) is not None]
    return list(dict.fromkeys(fitting))


def _fitted(tiling: Tiling, shape: Shape, gpu: Gpu) -> Tiling | None:
    """The tiling, with fewer loads in flight and then smaller tiles until it fits; or None."""
    way = arrangement(tiling.arrangement)
    while not way.fits(tiling, shape, gpu):
        if tiling.stages > 2:
            tiling = replace(tiling, stages=2, expand_stages=2)
        elif tiling.inputs > LEAST:
            tiling = replace(tiling, inputs=tiling.inputs // 2)
        elif tiling.outputs > LEAST:
            tiling = replace(tiling, outputs=tiling.outputs // 2)
        else:
            return None
    return tiling


def cases(most_rows: int, most_adapters: int, gpu: Gpu) -> list[Case]:
    """Batches to measure.

    Args:
        most_rows: Most rows of a batch.
        most_adapters: Most adapters of a batch.
        gpu: The GPU.
    """
    rows = [count for count in ROWS if count <= most_rows]
    found = [case for case in cases_of(rows, ADAPTERS) if case.adapters <= most_adapters]
    # Fewer adapters look these up, too: see `apparent_adapters`.
    return found + first_cases(rows, gpu)
