"""Measure the tiling table of a GPU: VaLoRA §4.3.2 and Algorithm 2, with pruned candidates.

`valora-tile --model …/config.json` measures the shapes that a model's projections can ask for, and
writes the table of the GPU. The paper's search takes 30 minutes per model; this one takes less than
ten, because

- sizes grow geometrically, and look-up takes the nearest one (the paper measures every 32 rows);
- tile sizes are powers of two that fit into shared memory, and candidates that would leave most
  processors idle or start far too many programs are dropped;
- shrink and expand are timed apart, and only the best of each together: a sum instead of a product;
- sizes in between, and a model's further projections, try only the tilings that are the fastest for
  their neighbours;
- kernels are compiled beforehand, on all cores.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
from dataclasses import asdict
from functools import lru_cache, partial
from itertools import product, starmap
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from valora_kernels.arrangements.base import ALL
from valora_kernels.arrangements.registry import ARRANGEMENTS, arrangement
from valora_kernels.gpus.detect import gpu_of
from valora_kernels.launching import ALIGNMENT
from valora_kernels.lookup import TilingTable
from valora_kernels.tiling import ROWS_TOGETHER, Case, ProjectionGroup, Shape, Tiling
from valora_kernels.timing import KernelWorkload, replay_times, spread
from valora_kernels.weights import MAX_PROJECTIONS

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator, Sequence

    from valora_kernels.arrangements.base import Times, Trial
    from valora_kernels.gpus.base import Gpu
    from valora_kernels.timing import Inputs

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
MOST_RANK = 256
"""Largest rank that adapters are served with."""

PRESETS = {
    "7b": {"hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32},
    "8b-gqa": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "qwen-7b": {
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
    },
    "13b": {"hidden_size": 5120, "intermediate_size": 13824, "num_attention_heads": 40},
}


def groups_of_model(config: dict[str, Any]) -> list[tuple[int, tuple[int, ...]]]:
    """Input and output widths of a transformer's projections, alone and as they share inputs.

    Args:
        config: A model's `config.json`; that of a multimodal model has a `text_config`.

    Raises:
        InputError: A size is missing, or no number.
    """
    text = config.get("text_config")
    config = {**config, **text} if isinstance(text, dict) else config
    hidden, heads = _size(config, "hidden_size"), _size(config, "num_attention_heads")
    size = _size(config, "head_dim", hidden // heads)
    query, key = heads * size, _size(config, "num_key_value_heads", heads) * size
    inner = _size(config, "intermediate_size")
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


def _size(config: dict[str, Any], name: str, default: int | None = None) -> int:
    """A size that a configuration names, or the default where it names none."""
    size = config.get(name)
    if size is None:
        size = default
    if type(size) is not int or size < 1:
        found = f"{name} is {size!r}" if name in config else f"it has no {name}"
        raise InputError(f"{found}, where a model's config.json has a size: use --shape instead")
    return size


def call_of(step: str, tiling: Tiling, work: KernelWorkload, one: Inputs) -> Callable[[], object]:
    """The call that is timed: one step of the tiling's arrangement, or all of it.

    Where LoRA comes first, the base product that follows is timed, too.
    """
    way = arrangement(tiling.arrangement)
    given = (tiling, one.ys, one.x, one.weights, work.batch)
    if one.base is None:
        return way.call(step, *given)
    call = partial(way.launch, *given, add=False) if step == ALL else way.call(step, *given)

    def with_base() -> None:
        call()
        one.add_base()

    return with_base


class InputError(ValueError):
    """What `valora-tile` was given is of no use; the message says why, and the remedy."""


class Job(NamedTuple):
    """What is compiled: one step of a tiling for the widths and the rank of a group."""

    group: ProjectionGroup
    step: str
    tiling: Tiling
    first: bool = False


@lru_cache(maxsize=2)  # a base weight of a large model has 0.2 GB
def _small_workload(group: ProjectionGroup, device: str, first: bool) -> KernelWorkload:
    return KernelWorkload(
        spread(128, 1),
        [group.rank],
        group.in_features,
        group.out_features,
        device=device,
        cold=1,
        most=1,
        first=first,
    )


def run_once(job: Job, device: str = "cuda") -> str | None:
    """Run a job once, so that its kernels are in Triton's cache; return the error if that fails."""
    work = _small_workload(job.group, device, job.first)
    try:
        call_of(job.step, job.tiling, work, work.sets[0])()
        if work.batch.device.type == "cuda":
            torch.cuda.synchronize()
    except Exception as error:  # noqa: BLE001  # a tiling that Triton refuses is no candidate
        return str(error)[:200]
    return None


def _compile(job: Job) -> Job | None:
    """Compile a job's kernels; return the job if that fails."""
    error = run_once(job)
    if error is None:
        return None
    print(f"{job}: {error}", file=sys.stderr)
    return job


class Progress:
    """A progress bar on stderr.

    Args:
        total: Number of shapes to measure.
    """

    def __init__(self, total: int) -> None:
        self.total, self.done, self.started = total, 0, time.time()

    def step(self, what: str) -> None:
        """Count one more shape, and show what it was."""
        self.done += 1
        filled = 30 * self.done // max(self.total, 1)
        spent = time.time() - self.started
        end = "\n" if self.done == self.total else ""
        bar = "█" * filled + "·" * (30 - filled)
        print(
            f"\r{bar} {self.done}/{self.total} {spent:4.0f} s {what:48s}", end=end, file=sys.stderr
        )


class Search:
    """Finds the fastest tilings of shapes, and writes each shape to a journal when it is done.

    Args:
        gpu: Record of the GPU that it runs on.
        journal: File of finished shapes; an existing one is continued.
        compilers: Number of processes that compile kernels.
        known: Tilings of shapes that are not searched again.

    Attributes:
        found: Microseconds and tilings of the finalists of each shape, the fastest first.
    """

    def __init__(
        self, gpu: Gpu, journal: Path, compilers: int, known: dict[Shape, Tiling] | None = None
    ) -> None:
        self.gpu = gpu
        self.journal = journal
        self.found = {shape: [(0.0, tiling)] for shape, tiling in (known or {}).items()}
        self.failed: set[Job] = set()
        self.compiled: set[Job] = set()
        self._continue()
        self.pool = multiprocessing.get_context("spawn").Pool(compilers) if compilers > 1 else None

    def _continue(self) -> None:
        """Read the journal; a last line that is cut off is dropped, and its shape measured again.

        Raises:
            InputError: It is no journal of this version.
        """
        if not self.journal.exists():
            return
        text = self.journal.read_text()
        whole = text[: text.rfind("\n") + 1]
        try:
            for line in whole.splitlines():
                shape, finalists = _entry(line, self.gpu)
                self.found[shape] = finalists
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            raise InputError(
                f"{self.journal} cannot be continued ({error}): delete it to begin anew"
            ) from error
        if whole != text:
            self.journal.write_text(whole)

    def compile(self, jobs: Iterable[Job]) -> None:
        """Compile the jobs that have not been compiled yet, on all cores."""
        new = sorted(set(jobs) - self.compiled, key=str)
        run = (
            self.pool.imap_unordered(_compile, new, chunksize=2)
            if self.pool
            else map(_compile, new)
        )
        self.failed |= {job for job in run if job is not None}
        self.compiled |= set(new)

    def times(
        self,
        group: ProjectionGroup,
        work: KernelWorkload,
        step: str,
        tilings: Sequence[Tiling],
        repeats: int = 3,
        *,
        first: bool,
    ) -> Times:
        """Time one step of each tiling; tilings that did not compile are left out."""
        found = []
        for tiling in tilings:
            if Job(group, step, tiling, first) in self.failed:
                continue
            calls = [call_of(step, tiling, work, one) for one in work.sets]
            us = replay_times(calls, repeats=repeats, at_least=12)
            found.append((float(np.median(us)), tiling))
        return sorted(found, key=lambda pair: pair[0])

    def keep(self, shape: Shape, finalists: Times) -> None:
        """Store a shape's finalists, and write them to the journal."""
        self.found[shape] = finalists
        entry = {
            "gpu": self.gpu.name,
            "shape": asdict(shape),
            "finalists": [(round(us, 3), asdict(tiling)) for us, tiling in finalists],
        }
        with self.journal.open("a") as file:
            file.write(json.dumps(entry) + "\n")

    def full(self, group: ProjectionGroup, cases: list[Case], bar: Progress) -> None:
        """Let every arrangement search its candidates for every (rows, adapters)."""
        cases = [case for case in cases if group.shape(*case) not in self.found]
        works = {case: workload(group, *case) for case in cases}
        names = list(ARRANGEMENTS)
        searches = {
            (case, name): arrangement(name).search(group, case.rows, case.adapters, self.gpu)
            for case in cases
            for name in names
        }
        results: dict[Case, dict[str, Times]] = {case: {} for case in cases}
        for (case, name), times in self.advance(group, works, searches):
            results[case][name] = times
            if len(results[case]) == len(names):
                finalists = [pair for name in names for pair in results[case][name]]
                self.finish(group, case, works[case], finalists, bar)

    def advance(
        self,
        group: ProjectionGroup,
        works: dict[Case, KernelWorkload],
        searches: dict[tuple[Case, str], Generator[Trial, Times, Times]],
    ) -> Iterator[tuple[tuple[Case, str], Times]]:
        """Advance all searches trial by trial, and yield the result of each when it ends.

        The kernels of a round of trials are compiled together, on all cores, before any is timed.
        """
        trials = {key: next(search) for key, search in searches.items()}
        while trials:
            self.compile(
                Job(group, trial.step, tiling, case.first)
                for (case, _), trial in trials.items()
                # Only with `add`, which LoRA that comes first does not.
                if case.first or not trial.compiled
                for tiling in trial.tilings
            )
            following = {}
            for key, trial in trials.items():
                given = (trial.step, trial.tilings, trial.repeats)
                times = self.times(group, works[key[0]], *given, first=key[0].first)
                try:
                    following[key] = searches[key].send(times)
                except StopIteration as end:
                    yield key, end.value
            trials = following

    def finish(
        self,
        group: ProjectionGroup,
        case: Case,
        work: KernelWorkload,
        finalists: Times,
        bar: Progress,
    ) -> None:
        """Time the best four again, longer, and store them in their new order."""
        few = [tiling for _, tiling in sorted(finalists, key=lambda pair: pair[0])[:4]]
        again = self.times(group, work, ALL, few, repeats=7, first=case.first)
        self.keep(group.shape(*case), again)
        size = f"{case.rows}×{case.adapters}{' first' if case.first else ''}"
        bar.step(f"{group.in_features}→{sum(group.out_features)} r{group.rank} {size}")

    def derived(
        self, group: ProjectionGroup, like: ProjectionGroup, cases: list[Case], bar: Progress
    ) -> None:
        """Try only the tilings that were the fastest in another group."""
        cases = [case for case in cases if group.shape(*case) not in self.found]
        table = TilingTable(
            self.gpu, ((shape, best[0][1]) for shape, best in self.found.items() if best)
        )
        plans = {}
        for case in cases:
            near = table.neighbours(like.shape(*case), 8)
            tilings = dict.fromkeys(self.found[shape][0][1] for shape in near)
            plans[case] = self.refitted(tilings, like.in_features, group, case)
        self.compile(Job(group, ALL, t, case.first) for case in cases for t in plans[case])
        for case in cases:
            work = workload(group, *case)
            self.finish(group, case, work, [(0.0, t) for t in plans[case]], bar)

    def refitted(
        self, tilings: Iterable[Tiling], measured: int, group: ProjectionGroup, case: Case
    ) -> list[Tiling]:
        """Tilings measured with another input width, adapted to a group, if they still fit."""
        found = []
        for tiling in tilings:
            way = arrangement(tiling.arrangement)
            other = way.refit(tiling, measured, group.in_features)
            if way.fits(other, group.shape(*case), self.gpu):
                found.append(other)
        return found


def _entry(line: str, gpu: Gpu) -> tuple[Shape, Times]:
    """The shape and the finalists of a line of the journal."""
    entry = json.loads(line)
    if entry.get("gpu", gpu.name) != gpu.name:
        raise ValueError(f"it is of {entry['gpu']}, not of {gpu.name}")
    return Shape(**entry["shape"]), [(us, Tiling(**t)) for us, t in entry["finalists"]]


def workload(
    group: ProjectionGroup, rows: int, adapters: int, first: bool = False
) -> KernelWorkload:
    """Inputs for `rows` rows that share `adapters` adapters evenly."""
    return KernelWorkload(
        spread(rows, adapters), [group.rank] * adapters, group.in_features, group.out_features,
        most=192, first=first,
    )  # fmt: skip


def cases_of(rows: Iterable[int], adapters: Iterable[int]) -> list[Case]:
    """All pairs of (rows, adapters) with at least one row for every adapter."""
    return [Case(m, n) for m, n in product(rows, adapters) if n <= m]


def first_cases(rows: Iterable[int], gpu: Gpu) -> list[Case]:
    """The cases in which LoRA comes first, one for each number of rows from the GPU's first on."""
    return [
        Case(m, max(1, m // ROWS_TOGETHER), first=True) for m in rows if m >= gpu.lora_first_rows
    ]


def _parser() -> argparse.ArgumentParser:
    """The command line of `valora-tile`."""
    parser = argparse.ArgumentParser(prog="valora-tile", description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "--model",
        action="append",
        default=[],
        help=f"config.json of a model, or one of {', '.join(PRESETS)}; may be repeated",
    )
    parser.add_argument(
        "--shape", action="append", default=[], help="in:out[,out…] of projections that share x"
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=list(RANKS), help="largest ranks")
    parser.add_argument(
        "--output", type=Path, help="table to write; by default the package's own for this GPU"
    )
    parser.add_argument(
        "--again", action="store_true", help="measure the shapes that the table has already, too"
    )
    parser.add_argument(
        "--compilers",
        type=int,
        default=max(1, multiprocessing.cpu_count() - 1),
        help="processes that compile kernels",
    )
    return parser


def _widths(models: Iterable[str], shapes: Iterable[str]) -> list[tuple[int, tuple[int, ...]]]:
    """Input and output widths that the command line names, each once.

    Raises:
        InputError: It names none, or some that no kernel computes.
    """
    named: list[tuple[str, int, tuple[int, ...]]] = []
    for name in models:
        try:
            named += [(f"--model {name}", *group) for group in groups_of_model(_config(name))]
        except InputError as error:
            raise InputError(f"--model {name}: {error}") from error
    for text in shapes:
        before, _, after = text.partition(":")
        try:
            named.append((f"--shape {text}", int(before), tuple(map(int, after.split(",")))))
        except ValueError as error:
            raise InputError(f"--shape {text}: write in:out[,out…], such as 4096:4096") from error
    for what, width, outputs in named:
        for size in (width, *outputs):
            if size < ALIGNMENT or size % ALIGNMENT:
                raise InputError(f"{what}: expected widths that {ALIGNMENT} divides, got {size}")
        if len(outputs) > MAX_PROJECTIONS:
            raise InputError(
                f"{what}: expected at most {MAX_PROJECTIONS} outputs, got {len(outputs)}"
            )
    if not named:
        raise InputError("name a --model or a --shape")
    return list(dict.fromkeys((width, outputs) for _, width, outputs in named))


def _config(name: str) -> dict[str, Any]:
    """A preset, or what a model's `config.json` says."""
    if name in PRESETS:
        return dict(PRESETS[name])
    try:
        config = json.loads(Path(name).read_text())
    except OSError as error:
        raise InputError(
            f"{error.strerror}: name a config.json, or one of {', '.join(PRESETS)}"
        ) from error
    except ValueError as error:
        raise InputError("this is no JSON: name a model's config.json") from error
    if not isinstance(config, dict):
        raise InputError("this is no JSON object: name a model's config.json")
    return config


def _check_numbers(ranks: Iterable[int], compilers: int) -> None:
    """Check what the command line counts."""
    for rank in ranks:
        if not 16 <= rank <= MOST_RANK or rank & (rank - 1):
            raise InputError(
                f"--ranks: expected powers of two from 16 to {MOST_RANK}, to which kernels round "
                f"ranks up, got {rank}"
            )
    if compilers < 1:
        raise InputError(f"--compilers: expected at least 1, got {compilers}")


def _output(given: Path | None, gpu: Gpu) -> Path:
    """The table to write.

    Raises:
        InputError: There is none, or it is a folder.
    """
    output = given or gpu.table
    if output is None:
        raise InputError(
            f"the record of {gpu.name} names no table: say with --output where to write"
        )
    if output.is_dir():
        raise InputError(f"{output} is a folder: name a file with --output")
    return output


def _open(output: Path, gpu: Gpu) -> tuple[dict[Shape, Tiling], dict[Shape, float | None], Path]:
    """The tilings that a table has already, their microseconds, and the journal beside it.

    Raises:
        InputError: The table cannot be read, or cannot be written.
    """
    journal = output.with_suffix(".partial.jsonl")
    known: dict[Shape, Tiling] = {}
    measured: dict[Shape, float | None] = {}
    try:
        if output.exists():
            known = TilingTable.load(output, gpu).entries
            times = json.loads(output.read_text()).get("microseconds") or [None] * len(known)
            measured = dict(zip(known, times, strict=True))
        output.parent.mkdir(parents=True, exist_ok=True)
        journal.open("a").close()  # now, not after the first minutes
    except OSError as error:
        raise InputError(
            f"{error.filename or output}: {error.strerror}: name a file that can be written with "
            "--output"
        ) from error
    except ValueError as error:
        raise InputError(f"{error}, or name another file with --output") from error
    return known, measured, journal


def _run(search: Search, widths: list[tuple[int, tuple[int, ...]]], ranks: list[int]) -> Progress:
    """Measure the first widths with all candidates, and the others with what did best there."""
    firsts = first_cases(ROWS, search.gpu)
    every, some = cases_of(ROWS, ADAPTERS) + firsts, list(FEWER) + firsts
    between = cases_of(ROWS_BETWEEN, ADAPTERS + ADAPTERS_BETWEEN) + cases_of(ROWS, ADAPTERS_BETWEEN)
    plan = [
        (ProjectionGroup(*width, rank), every + between if width == widths[0] else some)
        for rank, width in product(ranks, widths)
    ]
    shapes = [group.shape(*case) for group, cases in plan for case in cases]
    bar = Progress(sum(shape not in search.found for shape in shapes))
    for rank in ranks:
        first = ProjectionGroup(*widths[0], rank)
        search.full(first, every, bar)
        search.derived(first, first, between, bar)
        for others in widths[1:]:
            search.derived(ProjectionGroup(*others, rank), first, some, bar)
        torch.cuda.empty_cache()
    return bar


def main() -> None:
    """Run the command `valora-tile`."""
    parser = _parser()
    args = parser.parse_args()
    try:
        widths = _widths(args.model, args.shape)
        _check_numbers(args.ranks, args.compilers)
        if not torch.cuda.is_available():
            sys.exit("valora-tile measures on the CUDA GPU that the table is for, and found none")
        gpu = gpu_of(torch.device("cuda"))
        output = _output(args.output, gpu)
        known, measured, journal = _open(output, gpu)
        search = Search(gpu, journal, args.compilers, None if args.again else known)
    except InputError as error:
        parser.error(str(error))
    started = time.time()
    bar = _run(search, widths, args.ranks)
    best = {shape: finalists[0][1] for shape, finalists in search.found.items() if finalists}
    entries = {**known, **best}
    measured |= {s: round(f[0][0], 2) for s, f in search.found.items() if f and f[0][0]}
    times = [measured.get(shape) for shape in entries]
    TilingTable(gpu, entries.items()).save(
        output, torch=torch.__version__, seconds=round(time.time() - started), microseconds=times
    )
    print(f"\n{output}: {bar.total} shapes in {time.time() - started:.0f} s, {len(entries)} in all")
    journal.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
