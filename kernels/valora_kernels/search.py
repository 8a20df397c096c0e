"""Measure the tiling table of a GPU: VaLoRA §4.3.2 and Algorithm 2, with pruned candidates.

Sizes grow geometrically, candidates fit into shared memory and occupy the processors, shrink and
expand are timed apart, and sizes in between try the fastest tilings of their neighbours only.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, partial
from itertools import product, starmap
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from valora_kernels.arrangements import ALL, EXPAND, SHRINK, arrangements, fits
from valora_kernels.atmm import launch
from valora_kernels.gpus import Gpu, gpu_of
from valora_kernels.launching import ALIGNMENT, expand, shrink
from valora_kernels.lookup import TilingTable
from valora_kernels.tiling import ROWS_TOGETHER, Case, ProjectionGroup, Tiling, Times
from valora_kernels.timing import Inputs, KernelWorkload, replay_times, spread
from valora_kernels.weights import MAX_PROJECTIONS

if TYPE_CHECKING:
    Widths = tuple[int, tuple[int, ...]]

ROWS = (1, 4, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
FEWER = tuple(
    starmap(Case, ((1, 1), (16, 16), (64, 16), (256, 64), (256, 256), (512, 4), (4096, 16)))
)
"""Cases for which the further projections of a model are measured."""
ADAPTERS = (1, 4, 16, 64, 256)
ROWS_BETWEEN = (48, 96, 192, 384, 768, 1536, 3072, 6144)
ADAPTERS_BETWEEN = (2, 8, 32)
"""Sizes between those of the full search; only their neighbours' fastest tilings are tried."""
RANKS = (16, 32, 64, 128)
MAX_RANK = 256  # largest rank that adapters are served with

_SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
PRESETS = {
    name: dict(zip(_SIZES, sizes, strict=True))
    for name, sizes in {
        "7b": (4096, 11008, 32, 32), "8b-gqa": (4096, 14336, 32, 8),
        "qwen-7b": (3584, 18944, 28, 4), "13b": (5120, 13824, 40, 40),
    }.items()
}  # fmt: skip


def groups_of_model(config: dict[str, Any]) -> list[Widths]:
    """Widths of the inputs and outputs of projections; a `ValueError` names a missing size."""
    config = {**config, **(config.get("text_config") or {})}

    def size(name: str, default: int | None = None) -> int:
        found = default if config.get(name) is None else config[name]
        if type(found) is not int or found < 1:
            raise ValueError(f"{name} is {found!r}, where a model's config.json has a size")
        return found

    hidden, heads = size("hidden_size"), size("num_attention_heads")
    width = size("head_dim", hidden // heads)
    query, key = heads * width, size("num_key_value_heads", heads) * width
    inner = size("intermediate_size")
    found = [
        (hidden, (query,)),
        (query, (hidden,)),
        (hidden, (key,)),
        (hidden, (query, key, key)),
        (hidden, (inner,)),
        (hidden, (inner, inner)),
        (inner, (hidden,)),
    ]
    return list(dict.fromkeys(found))


def call_of(step: str, tiling: Tiling, work: KernelWorkload, one: Inputs) -> Callable[[], object]:
    """The operator or a step of `shrink_expand`, with the base product where LoRA comes first."""
    given = (one.x, one.weights, work.batch)
    call: Callable[[], object]
    if step == SHRINK:
        call = partial(shrink, tiling, *given)
    elif step == EXPAND:
        call = partial(expand, tiling, one.ys, *shrink(tiling, *given), *given[1:])
    else:
        call = partial(launch, tiling, one.ys, *given, add=one.base is None)
    if one.base is None or one.y is None:
        return call
    y, base = one.y, one.base

    def with_base() -> None:
        call()
        y.addmm_(one.x, base.T)

    return with_base


class Job(NamedTuple):
    """What is compiled: one step of a tiling for the widths and the rank of a group."""

    group: ProjectionGroup
    step: str
    tiling: Tiling
    first: bool = False


def workload(group: ProjectionGroup, case: Case, **options: Any) -> KernelWorkload:
    """Inputs for rows that share adapters evenly."""
    return KernelWorkload(
        spread(case.rows, case.adapters), [group.rank] * case.adapters, group.in_features,
        group.out_features, first=case.first, **options,
    )  # fmt: skip


@lru_cache(maxsize=2)  # a base weight of a large model has 0.2 GB
def _small_workload(group: ProjectionGroup, device: str, first: bool) -> KernelWorkload:
    return workload(group, Case(128, 1, first), device=device, cold=1, max_copies=1)


def run_once(job: Job, device: str = "cuda") -> str | None:
    """Run a job once, so that its kernels are in Triton's cache; return the error if that fails."""
    work = _small_workload(job.group, device, job.first)
    try:
        call_of(job.step, job.tiling, work, work.sets[0])()
        if work.batch.device.type == "cuda":
            torch.cuda.synchronize()
    except Exception as error:  # noqa: BLE001  # a tiling that Triton refuses is no candidate
        return " ".join(str(error).split())[:200] or repr(error)
    return None


class Search:
    """Finds the fastest tilings of `total` shapes that `table` lacks, and keeps each in `file`."""

    def __init__(self, table: TilingTable, file: Path, compilers: int, total: int = 0) -> None:
        self.table, self.file, self.total = table, file, total
        self.done, self.started = 0, time.time()
        self.compiled: dict[Job, str | None] = {}
        self.pool = multiprocessing.get_context("spawn").Pool(compilers) if compilers > 1 else None

    def compile(self, jobs: Iterable[Job]) -> None:
        """Compile the jobs that have not been compiled yet, on all cores."""
        new = sorted(set(jobs) - self.compiled.keys(), key=str)
        errors = self.pool.imap(run_once, new, 2) if self.pool else map(run_once, new)
        for job, error in zip(new, errors, strict=True):
            self.compiled[job] = error
            if error is not None:
                print(f"{job}: {error}", file=sys.stderr)

    def full(self, group: ProjectionGroup, cases: Iterable[Case]) -> None:
        """Let every arrangement search its candidates for every case."""
        for case in self._new(group, cases):
            timed = partial(self._times, group, case, workload(group, case, max_copies=192))
            sizes = (group, case.rows, case.adapters, self.table.gpu)
            ways = arrangements().values()
            best = sorted(
                (pair for way in ways for pair in way.search(timed, *sizes)), key=itemgetter(0)
            )
            self._finish(group, case, timed, [tiling for _, tiling in best[:4]])

    def derived(self, group: ProjectionGroup, cases: Iterable[Case]) -> None:
        """Try only the tilings that were the fastest for similar shapes."""
        table, plans = self.table, {}
        for case in self._new(group, cases):
            shape = group.shape(*case)
            near = dict.fromkeys(tiling for _, _, tiling in table.neighbours(shape, 8))
            plans[case] = [one for one in near if fits(one, shape, table.gpu)][:4]
        self.compile(Job(group, ALL, t, case.first) for case in plans for t in plans[case])
        for case, tilings in plans.items():
            timed = partial(self._times, group, case, workload(group, case, max_copies=192))
            self._finish(group, case, timed, tilings)

    def _new(self, group: ProjectionGroup, cases: Iterable[Case]) -> list[Case]:
        return [case for case in cases if group.shape(*case) not in self.table.entries]

    def _times(
        self,
        group: ProjectionGroup,
        case: Case,
        work: KernelWorkload,
        step: str,
        tilings: Sequence[Tiling],
        repeats: int,
    ) -> Times:
        """Compile and time one step of each tiling; those that did not compile are left out."""
        jobs = {tiling: Job(group, step, tiling, case.first) for tiling in tilings}
        self.compile(jobs.values())
        found = []
        for tiling, job in jobs.items():
            if self.compiled[job] is None:
                calls = [call_of(step, tiling, work, one) for one in work.sets]
                us = replay_times(calls, repeats=repeats, at_least=12)
                found.append((float(np.median(us)), tiling))
        return sorted(found, key=itemgetter(0))

    def _finish(
        self, group: ProjectionGroup, case: Case, timed: Callable[..., Times], few: list[Tiling]
    ) -> None:
        shape = group.shape(*case)
        for _, tiling in timed(ALL, few, 7)[:1]:
            self.table = self.table.joined(TilingTable(self.table.gpu, [(shape, tiling)]))
            self.table.save(self.file)
        self.done += 1
        seconds = time.time() - self.started
        print(f"\r{self.done}/{self.total} {seconds:.0f} s {shape}", end="", file=sys.stderr)


def cases_of(rows: Iterable[int], adapters: Iterable[int]) -> list[Case]:
    """All pairs of (rows, adapters) with at least one row for every adapter."""
    return [Case(m, n) for m, n in product(rows, adapters) if n <= m]


def first_cases(rows: Iterable[int], gpu: Gpu) -> list[Case]:
    """The cases in which LoRA comes first, one for each number of rows from the GPU's first on."""
    return [
        Case(m, max(1, m // ROWS_TOGETHER), first=True) for m in rows if m >= gpu.lora_first_rows
    ]


def _model(name: str) -> list[Widths]:
    try:
        config = PRESETS[name] if name in PRESETS else json.loads(Path(name).read_text())
        return [_checked(*widths) for widths in groups_of_model(config)]
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise argparse.ArgumentTypeError(
            f"{name}: {error}: name a model's config.json, one of {', '.join(PRESETS)}, or use "
            "--shape"
        ) from error


def _shape(text: str) -> list[Widths]:
    try:
        before, _, after = text.partition(":")
        return [_checked(int(before), tuple(map(int, after.split(","))))]
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"{text}: {error}: write in:out[,out…], such as 4096:4096"
        ) from error


def _checked(width: int, outputs: tuple[int, ...]) -> Widths:
    if any(size < ALIGNMENT or size % ALIGNMENT for size in (width, *outputs)):
        raise ValueError(f"expected widths that {ALIGNMENT} divides, got {width} and {outputs}")
    if len(outputs) > MAX_PROJECTIONS:
        raise ValueError(f"expected at most {MAX_PROJECTIONS} outputs, got {len(outputs)}")
    return width, outputs


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("valora-tile", description=(__doc__ or "").split("\n\n")[0])
    add, models = parser.add_argument, f"config.json of a model, or one of {', '.join(PRESETS)}"
    add("--model", action="extend", type=_model, dest="widths", metavar="MODEL",
        help=f"{models}; may be repeated")  # fmt: skip
    add("--shape", action="extend", type=_shape, dest="widths", metavar="SHAPE",
        help="in:out[,out…] of projections that share x")  # fmt: skip
    add("--ranks", type=int, nargs="+", default=list(RANKS), help="largest ranks",
        choices=[1 << n for n in range(4, MAX_RANK.bit_length())])  # fmt: skip
    add("--output", type=Path, help="table to write; by default the package's own for this GPU")
    add("--again", action="store_true", help="measure the shapes that the table has already, too")
    add("--compilers", type=int, default=max(1, multiprocessing.cpu_count() - 1),
        help="processes that compile kernels")  # fmt: skip
    return parser


def main() -> None:
    """Run the command `valora-tile`."""
    parser = _parser()
    args = parser.parse_args()
    if not args.widths:
        parser.error("name a --model or a --shape")
    if not torch.cuda.is_available():
        sys.exit("valora-tile measures on the CUDA GPU that the table is for, and found none")
    gpu = gpu_of(torch.device("cuda"))
    widths: list[Widths] = list(dict.fromkeys(args.widths))
    output = args.output or gpu.table
    if output is None:
        parser.error(f"the record of {gpu.name} names no table: say with --output where to write")
    known = begun = TilingTable(gpu, [])
    try:
        partial_file = output.with_suffix(".partial.json")
        if output.exists():
            known = TilingTable.load(output, gpu)
        if partial_file.exists():  # of a search that was interrupted
            begun = TilingTable.load(partial_file, gpu)
        begun.save(partial_file)  # it can be written now, not only after the first minutes
    except (OSError, ValueError) as error:
        parser.error(f"{error}: or name another file with --output")
    firsts = first_cases(ROWS, gpu)
    every, some = cases_of(ROWS, ADAPTERS) + firsts, list(FEWER) + firsts
    between = cases_of(ROWS_BETWEEN, ADAPTERS + ADAPTERS_BETWEEN) + cases_of(ROWS, ADAPTERS_BETWEEN)
    start = begun if args.again else known.joined(begun)
    total = sum(
        ProjectionGroup(*width, rank).shape(*case) not in start.entries
        for rank, width in product(args.ranks, widths)
        for case in (every + between if width == widths[0] else some)
    )
    search = Search(start, partial_file, args.compilers, total)
    for rank in args.ranks:
        first = ProjectionGroup(*widths[0], rank)
        search.full(first, every)
        search.derived(first, between)
        for others in widths[1:]:
            search.derived(ProjectionGroup(*others, rank), some)
        torch.cuda.empty_cache()
    table, seconds = known.joined(search.table), round(time.time() - search.started)
    table.save(output, torch=torch.__version__, seconds=seconds)
    partial_file.unlink()
    print(f"\n{output}: {total} shapes in {seconds} s, {len(table.entries)} in all")


if __name__ == "__main__":
    main()
