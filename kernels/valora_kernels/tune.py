"""Measures the tilings of a GPU beside other work on it, one piece at a time.

Candidates are the fastest tilings of similar shapes on a GPU with a table; `search` tries hundreds.
"""

from __future__ import annotations

import logging
import os
import pickle
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from enum import Enum
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from valora_kernels.arrangements import ALL, default_tiling, fits
from valora_kernels.lookup import TilingTable
from valora_kernels.search import Job, call_of, cases_of, first_cases, run_once, workload
from valora_kernels.timing import KernelWorkload, times_in_turn

if TYPE_CHECKING:
    from valora_kernels.gpus import Gpu
    from valora_kernels.tiling import Case, ProjectionGroup, Shape, Tiling

    Clock = Callable[..., Mapping[str, NDArray[np.float64]]]

log = logging.getLogger(__name__)

ROWS = (1, 4, 16, 64, 256, 1024, 4096)
ADAPTERS = (1, 4, 16, 64)  # sizes of the batches that are measured; look-up takes the nearest one

NEAR = 6
"""Similar shapes whose tilings are tried, for as many rows and for as many rows a processor."""

FINALISTS = 3  # tilings that are timed again, longer and in turns

MIN_COLUMNS = 32  # fewest input and output columns of a tile that is made smaller

COLD_BYTES, MAX_SETS = 96 << 20, 96
"""Bytes and number of inputs, between which calls alternate: twice the cache of most GPUs."""

STOP_SECONDS = 5.0  # most seconds for the compiling process to end when it is told to


class Compiler:
    """A process of the lowest priority that runs kernels once, so that Triton has them on disk."""

    def __init__(self, device: torch.device) -> None:
        # Called in another thread whenever a job is done, or the process has ended.
        self.on_news: Callable[[], None] = lambda: None
        self.failed: set[Job] = set()  # jobs that cannot be compiled
        # Whether the process has ended by itself, so that nothing more is compiled.
        self.lost = False
        self._device = device
        self._begun: set[Job] = set()
        self._done: set[Job] = set()  # the other thread adds to it
        self._waiting: deque[Job] = deque()
        self._process: subprocess.Popen[bytes] | None = None

    def compile(self, jobs: Collection[Job]) -> bool:
        """Whether all jobs are done, also those that failed; those that are not are begun."""
        new = [job for job in jobs if job not in self._begun and job not in self._done]
        if new and not self.lost:
            process = self._process = self._process or self._start()
            assert process.stdin is not None
            self._begun |= set(new)
            self._waiting += new
            try:
                for job in new:
                    pickle.dump(job, process.stdin)
                process.stdin.flush()
            except OSError:  # it has ended, which the other thread notices too
                self.lost = True
        return all(job in self._done for job in jobs)

    def close(self) -> None:
        """End the process; the next job starts another one."""
        process, self._process = self._process, None
        self._begun, self._waiting = set(), deque()
        if process is not None:
            process.terminate()
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _start(self) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(self._device)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        given = (process, self._waiting)
        threading.Thread(target=self._listen, args=given, daemon=True).start()
        return process

    def _listen(self, process: subprocess.Popen[bytes], waiting: deque[Job]) -> None:
        """Take the answers of a process, a line for each job in their order, until it ends."""
        assert process.stdout is not None
        for line in process.stdout:
            job = waiting.popleft()
            if line.strip():
                self.failed.add(job)
            self._done.add(job)
            self.on_news()
        if process is self._process:
            self.lost = True
            log.warning("the process that compiles kernels has ended: tilings are not measured")
            self.on_news()


class Piece(Enum):
    """What a piece of work was."""

    MEASURED = "measured"
    WAITS = "waits"  # nothing, as kernels are being compiled
    NONE_LEFT = "none left"


class Tuner:
    """Measures shapes one after another into `table`; `skipped` ones cannot be.

    Candidates are the tilings of `like`, another GPU's table; `clock` is as `timing.times_in_turn`.
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
        return [shape for group, case in wanted if self._new(shape := group.shape(*case))]

    def go_on(self, wanted: Iterable[tuple[ProjectionGroup, Case]]) -> Piece:
        """Time a candidate of the shape at hand, or of the first wanted one that is new."""
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
        shape = group.shape(*case)
        tilings = candidates(self.table.gpu, self._like, shape)
        jobs = {tiling: Job(group, ALL, tiling, case.first) for tiling in tilings}
        while not self.compiler.compile(jobs.values()):
            if self.compiler.lost:
                self.skipped.add(shape)
                return
            yield Piece.WAITS
        found: list[tuple[float, Tiling]] = []
        try:
            for tiling, job in jobs.items():
                if job not in self.compiler.failed:
                    found.append((self._times(group, case, [tiling])[tiling], tiling))
                    yield Piece.MEASURED
            found.sort(key=lambda pair: pair[0])
            few = [tiling for _, tiling in found[:FINALISTS]]
            times = self._times(group, case, few, repeats=9) if len(few) > 1 else {}
        except torch.OutOfMemoryError:
            log.info("no memory to measure tilings of %s", shape)
            few = []
        if few:
            best = min(few, key=lambda tiling: times.get(tiling, 0.0))
            self.table = self.table.joined(TilingTable(self.table.gpu, [(shape, best)]))
        else:
            self.skipped.add(shape)

    def _times(
        self, group: ProjectionGroup, case: Case, tilings: Sequence[Tiling], repeats: int = 3
    ) -> dict[Tiling, float]:
        if self._work is None:
            options = {"device": str(self._device), "cold": COLD_BYTES, "max_copies": MAX_SETS}
            self._work = workload(group, case, **options)
        work = self._work
        calls = {str(t): [call_of(ALL, t, work, one) for one in work.sets] for t in tilings}
        times = self._clock(calls, repeats=repeats, at_least=12)
        return {tiling: float(np.median(times[str(tiling)])) for tiling in tilings}


def candidates(gpu: Gpu, like: TilingTable, shape: Shape) -> list[Tiling]:
    """The fastest tilings of similar shapes on another GPU, and the rules' own, that fit here."""
    ratio = like.gpu.processors / gpu.processors
    scaled = replace(shape, rows=max(round(shape.rows * ratio), round(shape.adapters)))
    near = (*like.neighbours(shape, NEAR), *like.neighbours(scaled, NEAR))
    found = [*(tiling for _, _, tiling in near), default_tiling(shape)]
    fitting = [smaller for one in found if (smaller := _fitted(one, shape, gpu)) is not None]
    return list(dict.fromkeys(fitting))


def _fitted(tiling: Tiling, shape: Shape, gpu: Gpu) -> Tiling | None:
    """The tiling, with fewer loads in flight and then smaller tiles until it fits; or None."""
    while not fits(tiling, shape, gpu):
        if tiling.stages > 2:
            tiling = replace(tiling, stages=2, expand_stages=2)
        elif tiling.inputs > MIN_COLUMNS:
            tiling = replace(tiling, inputs=tiling.inputs // 2)
        elif tiling.outputs > MIN_COLUMNS:
            tiling = replace(tiling, outputs=tiling.outputs // 2)
        else:
            return None
    return tiling


def cases(max_rows: int, max_adapters: int, gpu: Gpu) -> list[Case]:
    """Batches to measure, of up to so many rows and adapters."""
    rows = [count for count in ROWS if count <= max_rows]
    found = [case for case in cases_of(rows, ADAPTERS) if case.adapters <= max_adapters]
    # Fewer adapters look these up, too: see `ProjectionGroup.shape`.
    return found + first_cases(rows, gpu)


def main() -> None:
    """Compile the jobs on stdin, and answer each on stdout with a line: empty, or its error."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what libraries print is no answer
    os.nice(19)
    device = torch.device(sys.argv[1])
    if device.type == "cuda":
        torch.cuda.set_device(device)
    while True:
        try:
            job = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        print(run_once(job, str(device)) or "", file=answers, flush=True)


if __name__ == "__main__":
    main()
