"""Fill the tiling table of a GPU: VaLoRA §4.3.2 and Algorithm 2, pruned by expert knowledge.

`valora-tile --model …/config.json` measures the shapes that a model's projections can ask for, and
writes `tables/<gpu>.json`. The paper's search takes 30 minutes for a model; this one takes less
than ten, because

- sizes grow geometrically, and look-up takes the nearest (the paper: every 32 rows);
- tiles are powers of two of at least 16 that fit the shared memory, and candidates that would leave
  most processors idle or start far too many programs are dropped;
- shrink and expand are timed apart, and only the best of each together: a sum instead of a product;
- sizes between those, and the further projections of a model, try only what did best around;
- kernels are compiled beforehand on all cores.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from valora_kernels.atmm import expand, launch, shrink
from valora_kernels.profile import Workload, replay_times, spread
from valora_kernels.tiling import (
    SHARED_MEMORY,
    Kind,
    Shape,
    Table,
    Tiling,
    refit,
    shared_memory,
    table_path,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from valora_kernels.profile import Inputs

ROWS = (1, 4, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
FEWER = ((1, 1), (16, 16), (64, 16), (256, 64), (256, 256), (512, 4), (4096, 16))
"""(rows, adapters) that the further projections of a model are measured for."""
ADAPTERS = (1, 4, 16, 64, 256)
ROWS_BETWEEN = (48, 96, 192, 384, 768, 1536, 3072, 6144)
ADAPTERS_BETWEEN = (2, 8, 32)
"""Between those that all candidates are tried on; here only what did best around is."""
RANKS = (16, 32, 64, 128)
PROGRAMS = (40, 2300)
"""Fewest programs that keep 132 processors busy enough, and most that are worth starting."""

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


@dataclass(frozen=True, slots=True)
class Group:
    """Projections that share an input, with weights of one largest rank."""

    in_features: int
    out_features: tuple[int, ...]
    rank: int

    def shape(self, rows: int, adapters: int) -> Shape:
        """The look-up key of a batch."""
        return Shape(
            self.in_features,
            sum(self.out_features),
            len(self.out_features),
            self.rank,
            rows,
            float(adapters),
        )


def groups_of_model(config: dict[str, Any]) -> list[tuple[int, tuple[int, ...]]]:
    """Input and output widths of a transformer's projections, alone and as they share inputs."""
    config = {**config, **config.get("text_config", {})}
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    size = config.get("head_dim") or hidden // heads
    query, key = heads * size, config.get("num_key_value_heads", heads) * size
    inner = config["intermediate_size"]
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


def row_tiles(rows: int, adapters: int) -> list[int]:
    """Tiles that waste little on short segments and repeat little on long ones."""
    per = rows / adapters
    found = [16] if per <= 256 else []
    found += [tile for tile, least in ((32, 24), (64, 48), (128, 500)) if per >= least]
    return found


def _tile_count(rows: int, adapters: int, tile: int) -> int:
    return adapters * -(-(rows // adapters) // tile)


def shrinks(group: Group, rows: int, adapters: int) -> list[Tiling]:
    """Candidates of the first step; the second step's fields are still open."""
    found = []
    ranks = max(16, group.rank)
    for tile in row_tiles(rows, adapters):
        blocks = sorted({16, min(ranks, 64)}) if tile <= 32 else sorted({min(ranks, 64), ranks})
        steps = (128, 256) if tile == 16 else (64, 128)
        for block, splits, step in product(blocks, (1, 2, 4, 8, 16), steps):
            split = -(-group.in_features // splits // step) * step
            count = len(group.out_features) * ranks // block * splits
            programs = _tile_count(rows, adapters, tile) * count
            if programs > PROGRAMS[1] or (programs < PROGRAMS[0] and splits < 4):
                continue
            if block > 128 or block * step > 32768 or (splits == 16 and tile >= 64):
                continue
            for stages in (2,) if split == step else (3, 5) if tile >= 32 else (4,):
                if stages * (tile + block) * step * 2 > SHARED_MEMORY:
                    continue
                for gather in (False, True) if splits > 1 else (False,):
                    if not gather and splits * tile > 256:
                        continue  # every expanding program would sum too much
                    warps = 8 if tile == 128 or (tile == 64 and step == 128) else 4
                    found.append(
                        Tiling(
                            Kind.PAIR,
                            rows=tile,
                            inputs=step,
                            split=split,
                            ranks=block,
                            gather=gather,
                            warps=warps,
                            stages=stages,
                        )
                    )
    return list(dict.fromkeys(found))


def expands(first: Tiling, group: Group, rows: int, adapters: int) -> list[Tiling]:
    """Candidates of the second step for a given first one."""
    found = []
    tiles = _tile_count(rows, adapters, first.rows)
    for outputs, loop, warps in product((64, 128, 256), (1, 2, 4, 8), (4, 8)):
        programs = tiles * sum(-(-n // (outputs * loop)) for n in group.out_features)
        if not 24 <= programs <= 4800 and (outputs, loop) != (64, 1):
            continue
        if (warps == 8) != (first.rows * outputs > 8192):
            continue
        if first.rows * outputs > 128 * 256:
            continue
        for stages in (3,) if loop < 4 else (2, 4):
            memory = stages * (first.rows + max(16, group.rank)) * outputs * 2
            if loop > 1 and memory > SHARED_MEMORY:
                continue
            found.append(
                replace(first, outputs=outputs, loop=loop, expand_warps=warps, expand_stages=stages)
            )
    return found


def single_kernels(group: Group, rows: int, adapters: int) -> list[Tiling]:
    """Candidates that do both steps in one kernel: they need many rows to fill the GPU."""
    if rows < 512 or group.rank > 128:
        return []
    found = []
    for tile, outputs, step, parts, stages in product(
        (16, 32, 64, 128), (64, 128), (64, 128), (1, 2, 4), (3, 4)
    ):
        programs = _tile_count(rows, adapters, tile) * parts * len(group.out_features)
        if tile not in row_tiles(rows, adapters) or not 96 <= programs <= 1100:
            continue
        memory = stages * max(tile + group.rank, 1) * max(step, outputs) * 2
        if memory > SHARED_MEMORY or (step, outputs) == (64, 128):
            continue
        warps = 8 if tile == 128 else 4
        found.append(
            Tiling(Kind.ROWS, tile, outputs, step, 0, 64, parts=parts, warps=warps, stages=stages)
        )
    return found


def call_of(step: str, tiling: Tiling, work: Workload, one: Inputs) -> Callable[[], object]:
    """What is timed: one of the two steps, or all."""
    if step == "shrink":
        return partial(shrink, tiling, one.x, one.weights, work.batch)
    if step == "expand":
        splits = -(-one.weights.in_features // tiling.split)
        parts = 1 if tiling.gather else splits
        h, _ = shrink(tiling, one.x, one.weights, work.batch)
        return partial(expand, tiling, one.ys, h, parts, one.weights, work.batch)
    return partial(launch, tiling, one.ys, one.x, one.weights, work.batch)


Job = tuple[Group, str, Tiling]


@cache
def _small_workload(group: Group) -> Workload:
    return Workload(
        spread(128, 1), [group.rank], group.in_features, group.out_features, cold=1, most=1
    )


def _compile(job: Job) -> Job | None:
    """Run once, so that the kernel lies in Triton's cache; the job itself if that fails."""
    group, step, tiling = job
    work = _small_workload(group)
    try:
        call_of(step, tiling, work, work.sets[0])()
        torch.cuda.synchronize()
    except Exception as error:  # noqa: BLE001  # whatever Triton refuses is no candidate
        print(f"{job}: {str(error)[:200]}", file=sys.stderr)
        return job
    return None


class Progress:
    """A bar on stderr."""

    def __init__(self, total: int) -> None:
        self.total, self.done, self.started = total, 0, time.time()

    def step(self, what: str) -> None:
        """One more is done."""
        self.done += 1
        filled = 30 * self.done // max(self.total, 1)
        spent = time.time() - self.started
        end = "\n" if self.done == self.total else ""
        bar = "█" * filled + "·" * (30 - filled)
        print(
            f"\r{bar} {self.done}/{self.total} {spent:4.0f} s {what:48s}", end=end, file=sys.stderr
        )


class Search:
    """Finds the best tiling of every shape; what is found is kept on disk as it goes.

    Args:
        journal: File of finished shapes; a search that finds one continues it.
        compilers: Processes that compile.
        known: Shapes that need no search any more.
    """

    def __init__(
        self, journal: Path, compilers: int, known: dict[Shape, Tiling] | None = None
    ) -> None:
        self.journal = journal
        self.found = {shape: [(0.0, tiling)] for shape, tiling in (known or {}).items()}
        self.failed: set[Job] = set()
        self.compiled: set[Job] = set()
        if journal.exists():
            for line in journal.read_text().splitlines():
                entry = json.loads(line)
                self.found[Shape(**entry["shape"])] = [
                    (us, Tiling(**{**t, "kind": Kind(t["kind"])})) for us, t in entry["finalists"]
                ]
        self.pool = multiprocessing.get_context("spawn").Pool(compilers) if compilers > 1 else None

    def compile(self, jobs: Iterable[Job]) -> None:
        """Compile what is not yet, on all cores."""
        new = sorted(set(jobs) - self.compiled, key=str)
        run = (
            self.pool.imap_unordered(_compile, new, chunksize=2)
            if self.pool
            else map(_compile, new)
        )
        self.failed |= {job for job in run if job is not None}
        self.compiled |= set(new)

    def times(
        self, group: Group, work: Workload, step: str, tilings: Sequence[Tiling], repeats: int = 3
    ) -> list[tuple[float, Tiling]]:
        """Median microseconds of each candidate, the fastest first."""
        found = []
        for tiling in tilings:
            if (group, step, tiling) in self.failed:
                continue
            calls = [call_of(step, tiling, work, one) for one in work.sets]
            us = replay_times(calls, repeats=repeats, at_least=12)
            found.append((float(np.median(us)), tiling))
        return sorted(found, key=lambda pair: pair[0])

    def keep(self, shape: Shape, finalists: list[tuple[float, Tiling]]) -> None:
        """Remember a shape's result, and write it to the journal."""
        self.found[shape] = finalists
        entry = {
            "shape": asdict(shape),
            "finalists": [(round(us, 3), asdict(tiling)) for us, tiling in finalists],
        }
        with self.journal.open("a") as file:
            file.write(json.dumps(entry) + "\n")

    def full(self, group: Group, cases: list[tuple[int, int]], bar: Progress) -> None:
        """Try all candidates on every (rows, adapters)."""
        cases = [case for case in cases if group.shape(*case) not in self.found]
        works = {case: workload(group, *case) for case in cases}
        firsts = {case: shrinks(group, *case) for case in cases}
        singles = {case: single_kernels(group, *case) for case in cases}
        self.compile((group, "shrink", t) for case in cases for t in firsts[case])
        self.compile((group, "all", t) for case in cases for t in singles[case])
        seconds: dict[tuple[int, int], list[tuple[float, list[Tiling]]]] = {}
        for case in cases:
            times = self.times(group, works[case], "shrink", firsts[case])
            best: dict[tuple[object, ...], tuple[float, Tiling]] = {}
            for us, tiling in times:  # the second step sees only these properties of the first
                parts = 1 if tiling.gather else -(-group.in_features // tiling.split)
                best.setdefault((tiling.rows, parts), (us, tiling))
            leading = sorted(best.values(), key=lambda pair: pair[0])[:5]
            seconds[case] = [(us, expands(t, group, *case)) for us, t in leading]
        self.compile((group, "expand", t) for case in cases for _, ts in seconds[case] for t in ts)
        for case in cases:
            sums: list[tuple[float, Tiling]] = []
            for us, tilings in seconds[case]:
                times = self.times(group, works[case], "expand", tilings)
                sums += [(us + more, tiling) for more, tiling in times[:3]]
            together = [t for _, t in sorted(sums, key=lambda pair: pair[0])[:12]]
            finalists = self.times(group, works[case], "all", together, repeats=5)
            finalists += self.times(group, works[case], "all", singles[case])[:2]
            self.finish(group, case, works[case], finalists, bar)

    def finish(
        self,
        group: Group,
        case: tuple[int, int],
        work: Workload,
        finalists: list[tuple[float, Tiling]],
        bar: Progress,
    ) -> None:
        """Time the best few again, longer, and keep them in that order."""
        few = [tiling for _, tiling in sorted(finalists, key=lambda pair: pair[0])[:4]]
        again = self.times(group, work, "all", few, repeats=7)
        self.keep(group.shape(*case), again)
        rows, adapters = case
        bar.step(f"{group.in_features}→{sum(group.out_features)} r{group.rank} {rows}×{adapters}")

    def derived(
        self, group: Group, like: Group, cases: list[tuple[int, int]], bar: Progress
    ) -> None:
        """Try what did best in another group."""
        cases = [case for case in cases if group.shape(*case) not in self.found]
        table = Table("", ((shape, best[0][1]) for shape, best in self.found.items() if best))
        plans = {}
        for case in cases:
            near = table.neighbours(like.shape(*case), 8)
            tilings = dict.fromkeys(self.found[shape][0][1] for shape in near)
            plans[case] = [refit(t, like.in_features, group.in_features) for t in tilings]
            plans[case] = [t for t in plans[case] if shared_memory(t, group.rank) <= SHARED_MEMORY]
        self.compile((group, "all", t) for case in cases for t in plans[case])
        for case in cases:
            work = workload(group, *case)
            self.finish(group, case, work, [(0.0, t) for t in plans[case]], bar)


def workload(group: Group, rows: int, adapters: int) -> Workload:
    """Cold inputs of a shape."""
    return Workload(
        spread(rows, adapters), [group.rank] * adapters, group.in_features, group.out_features,
        most=192,
    )  # fmt: skip


def cases_of(rows: Iterable[int], adapters: Iterable[int]) -> list[tuple[int, int]]:
    """All (rows, adapters) with a row for every adapter."""
    return [(m, n) for m, n in product(rows, adapters) if n <= m]


def main() -> None:
    """The command `valora-tile`."""
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
    parser.add_argument("--ranks", type=int, nargs="+", default=list(RANKS))
    parser.add_argument("--output", type=Path, help="table; by default the package's for this GPU")
    parser.add_argument("--again", action="store_true", help="also what the table has already")
    parser.add_argument("--compilers", type=int, default=max(1, multiprocessing.cpu_count() - 1))
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("valora-tile needs the CUDA GPU that the table is for")
    widths: list[tuple[int, tuple[int, ...]]] = []
    for name in args.model:
        if name in PRESETS:
            widths += groups_of_model(PRESETS[name])
        else:
            widths += groups_of_model(json.loads(Path(name).read_text()))
    for text in args.shape:
        before, after = text.split(":")
        widths.append((int(before), tuple(int(n) for n in after.split(","))))
    if not widths:
        parser.error("name a --model or a --shape")
    widths = list(dict.fromkeys(widths))
    gpu = torch.cuda.get_device_name()
    output = args.output or table_path(gpu)
    output.parent.mkdir(parents=True, exist_ok=True)
    known = Table.load(output).entries if output.exists() else {}
    columns = json.loads(output.read_text()) if known else {"microseconds": []}
    measured = dict(zip(known, columns["microseconds"], strict=True))
    search = Search(
        output.with_suffix(".partial.jsonl"), args.compilers, None if args.again else known
    )
    started = time.time()
    every, some = cases_of(ROWS, ADAPTERS), list(FEWER)
    between = cases_of(ROWS_BETWEEN, ADAPTERS + ADAPTERS_BETWEEN) + cases_of(ROWS, ADAPTERS_BETWEEN)
    plan = [
        (Group(*width, rank), every + between if width == widths[0] else some)
        for rank, width in product(args.ranks, widths)
    ]
    open_shapes = [group.shape(*case) for group, cases in plan for case in cases]
    bar = Progress(sum(shape not in search.found for shape in open_shapes))
    for rank in args.ranks:
        first = Group(*widths[0], rank)
        search.full(first, every, bar)
        search.derived(first, first, between, bar)
        for others in widths[1:]:
            search.derived(Group(*others, rank), first, some, bar)
        torch.cuda.empty_cache()
    best = {shape: finalists[0][1] for shape, finalists in search.found.items() if finalists}
    entries = {**known, **best}
    measured |= {s: round(found[0][0], 2) for s, found in search.found.items() if found[0][0]}
    times = [measured.get(shape) for shape in entries]
    Table(gpu, entries.items()).save(
        output, torch=torch.__version__, seconds=round(time.time() - started), microseconds=times
    )
    print(f"\n{output}: {bar.total} shapes in {time.time() - started:.0f} s, {len(entries)} in all")
    search.journal.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
