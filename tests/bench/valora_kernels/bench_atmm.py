"""Time the LoRA operator beside its lower bound and other implementations: `make bench-kernels`.

Every time is the median over replays of a CUDA graph that cycles through sets of inputs larger than
the L2 cache, so weights and activations are cold. `best` is the fastest of the others in the same
run (`others/`): kernels of vLLM and SGLang where they can be imported (`PYTHONPATH=FOLDER`), and
constructions from torch's operators. `lora_kernels_h200.csv` beside this file has the cases of the
grid, and what others took earlier on an H200: a line below the table compares with that.
"""

from __future__ import annotations

import argparse
import csv
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
import torch

from tests.bench.valora_kernels.others.registry import operators, versions
from valora_kernels.arrangements import ALL
from valora_kernels.atmm import atmm, table_choice
from valora_kernels.gpus import gpu_of
from valora_kernels.lookup import choose, table_of
from valora_kernels.merge import MergeableWeights
from valora_kernels.metadata import LoraBatch, group_rows
from valora_kernels.project import _apart as apart
from valora_kernels.project import add_projection
from valora_kernels.search import Job, Search
from valora_kernels.tiling import ProjectionGroup
from valora_kernels.timing import Inputs, KernelWorkload, replay_times, spread, times_in_turn
from valora_kernels.weights import LoraWeights

WIDTH = 4096
GRID = Path(__file__).with_name("lora_kernels_h200.csv")
MIXED = (64, 32, 16, 8)
LARGEST_ERROR = 0.02
"""Relative error that the result of another operator may have."""
SECTIONS = ("grid", "off", "projection", "layer", "merge")
LAYER = {
    "q, k, v": (4096, (4096, 4096, 4096)),
    "o": (4096, (4096,)),
    "gate, up": (4096, (11008, 11008)),
    "down": (11008, (4096,)),
}
"""Linears of a 7B decoder layer that share their input: inputs, and outputs of each."""


@dataclass
class Case:
    """One row of the first table."""

    group: str
    rows: int
    ranks: list[int]
    popularity: str = "uniform"
    in_features: int = WIDTH
    out_features: tuple[int, ...] = (WIDTH,)
    earlier_us: float | None = None

    @property
    def name(self) -> str:
        """The first column of the table."""
        ranks = str(self.ranks[0]) if len(set(self.ranks)) == 1 else "mixed"
        widths = "" if (self.in_features, *self.out_features) == (WIDTH, WIDTH) else (
            f" {self.in_features}→{'+'.join(map(str, self.out_features))}"
        )  # fmt: skip
        how = "" if self.popularity == "uniform" else f" {self.popularity}"
        return f"{ranks} {self.rows}×{len(self.ranks)}{widths}{how}"


@dataclass
class Result:
    """Microseconds that were measured for a case."""

    case: Case
    floor: float
    ours: float
    p95: float
    eager: float
    error: float
    tiling: str
    base: float
    base_p95: float
    peers: dict[str, float] = field(default_factory=dict)

    @property
    def best(self) -> float:
        """The fastest other implementation of this run; NaN if there is none."""
        return min((us for us in self.peers.values() if np.isfinite(us)), default=float("nan"))


def grid() -> Iterator[Case]:
    """The cases of the grid, with the fastest time that was measured earlier."""
    with GRID.open() as file:
        for row in csv.DictReader(file):
            count = int(row["adapters"])
            ranks = MIXED if row["ranks"] == "mixed" else (int(row["ranks"]),)
            yield Case(
                "grid",
                int(row["tokens"]),
                [ranks[i % len(ranks)] for i in range(count)],
                earlier_us=float(row["best_us"]),
            )


def off_grid() -> Iterator[Case]:
    """Shapes that the grid does not have."""
    for rows, adapters in ((7, 3), (24, 8), (48, 32), (100, 10), (190, 24), (700, 6), (3000, 40)):
        for ranks in ((8,), (32,), (64,), (128,), MIXED):
            yield Case("between", rows, [ranks[i % len(ranks)] for i in range(adapters)])
    for rows, adapters in ((300, 1), (1500, 2), (6000, 1), (6000, 2)):
        for rank in (16, 64, 128):
            yield Case("few adapters", rows, [rank] * adapters)
    for popularity in ("skewed", "zipf"):
        for rows, adapters in ((64, 16), (256, 32), (1500, 16), (4096, 64)):
            yield Case("popularity", rows, [64] * adapters, popularity)
    for wide in (
        (4096, (1024,)),
        (4096, (11008,)),
        (11008, (4096,)),
        (3584, (3584,)),
        (5120, (5120,)),
    ):
        for rows, adapters in ((16, 4), (64, 16), (512, 4), (2048, 16)):
            yield Case("widths", rows, [64] * adapters, in_features=wide[0], out_features=wide[1])
    for outs in ((4096, 4096, 4096), (4096, 1024, 1024)):
        for rows, adapters in ((1, 1), (32, 16), (64, 64), (512, 4), (2048, 16)):
            yield Case("q, k, v", rows, [64] * adapters, out_features=outs)


def exact(work: KernelWorkload, s: Inputs, ys: list[torch.Tensor]) -> list[torch.Tensor]:
    """The result in fp32, computed adapter by adapter."""
    totals = [y.float().clone() for y in ys]
    rows_of = torch.from_numpy(work.rows_of).to(s.x.device)
    for p, total in enumerate(totals):
        for slot, rank in enumerate(work.ranks):
            mine = (rows_of == slot).nonzero()[:, 0]
            a, b = s.weights.rows_of(p, slot, rank)
            hidden = s.x[mine].float() @ a.float().T
            total[mine] += (hidden @ b.float()) * work.scalings[slot]
    return totals


def eager_time(call: Callable[[], object], repeats: int = 30) -> float:
    """Microseconds per call when Python launches calls back to back."""
    call()
    torch.cuda.synchronize()
    spans = []
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(repeats):
            call()
        torch.cuda.synchronize()
        spans.append((time.perf_counter() - start) / repeats * 1e6)
    return float(np.median(spans))


def device_time(call: Callable[[], object], repeats: int = 7) -> float:
    """Median microseconds on the device, launched from Python.

    For calls of milliseconds; a copy within a graph is slower than the same copy outside.
    """
    call()
    spans = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in "ab")
        torch.cuda.synchronize()
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        spans.append(begin.elapsed_time(end) * 1e3)
    return float(np.median(spans))


class Ceilings:
    """Memory bandwidth and arithmetic rate of this GPU, measured in this run."""

    def __init__(self) -> None:
        source = torch.empty(1 << 30, dtype=torch.bfloat16, device="cuda").normal_()
        target = torch.empty_like(source)
        us = device_time(partial(target.copy_, source))
        self.bytes_per_us = 2 * source.nbytes / us
        del source, target
        torch.cuda.empty_cache()
        a, b = (torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda") for _ in "ab")
        us = np.median(replay_times([lambda: a @ b], at_least=3))
        self.flops_per_us = 2 * 8192**3 / us

    def floor(self, work: KernelWorkload) -> float:
        """Lower bound of a call in microseconds: max(bytes / bandwidth, flops / rate)."""
        return max(work.bytes / self.bytes_per_us, work.flops / self.flops_per_us)


def measure(case: Case, ceilings: Ceilings, *, with_peers: bool, repeats: int) -> Result:
    """Time our operator, the base product and the peers on the same inputs."""
    work = KernelWorkload(
        spread(case.rows, len(case.ranks), case.popularity),
        case.ranks,
        case.in_features,
        case.out_features,
    )
    calls = [partial(atmm, s.ys, s.x, s.weights, work.batch) for s in work.sets]
    first = work.sets[0]
    before = [y.clone() for y in first.ys]
    poisoned = [y.clone() for y in first.ys]
    atmm(poisoned, first.x, first.weights, work.batch)
    want = exact(work, first, before)
    error = max(
        float((y.float() - w).norm() / w.norm()) for y, w in zip(poisoned, want, strict=True)
    )
    times = replay_times(calls, repeats=repeats)
    bases = [
        torch.randn(sum(case.out_features), case.in_features, device="cuda", dtype=first.x.dtype)
        for _ in range(min(len(work.sets), 8))
    ]
    outs = torch.empty(case.rows, sum(case.out_features), device="cuda", dtype=first.x.dtype)
    base = replay_times(
        [
            partial(torch.mm, work.sets[i % len(work.sets)].x, w.T, out=outs)
            for i, w in enumerate(bases)
        ],
        repeats=repeats,
    )
    result = Result(
        case=case,
        floor=ceilings.floor(work),
        ours=float(np.median(times)),
        p95=float(np.percentile(times, 95)),
        eager=eager_time(calls[0]),
        error=error,
        tiling=str(table_choice(first.weights, work.batch)),
        base=float(np.median(base)),
        base_p95=float(np.percentile(base, 95)),
    )
    if with_peers:
        for name, call in operators(work).items():
            if name in ("loop", "peft") and len(case.ranks) > 16:
                continue  # a millisecond each
            few = [partial(call, s) for s in work.sets[: max(2, 64 // len(case.ranks))]]
            try:
                check(name, work, call)
                result.peers[name] = float(np.median(replay_times(few, repeats=5, at_least=4)))
            except (RuntimeError, NotImplementedError, AssertionError) as error_:
                reason = (str(error_).splitlines() or [""])[0][:100]
                print(f"  {name}: {type(error_).__name__}: {reason}", file=sys.stderr)
                result.peers[name] = float("nan")
            finally:
                torch.cuda.synchronize()
    return result


def check(name: str, work: KernelWorkload, call: Callable[[Inputs], object]) -> None:
    """Check the result of another operator, if it returns one.

    Raises:
        RuntimeError: It differs from the result in fp32 by more than bf16 explains.
    """
    first = work.sets[0]
    out = call(first)
    if not isinstance(out, torch.Tensor):
        return
    out.zero_()
    out = call(first)
    assert isinstance(out, torch.Tensor)
    want = torch.cat(exact(work, first, [torch.zeros_like(y) for y in first.ys]), dim=1)
    error = float((out.float() - want).norm() / want.norm())
    if not error < LARGEST_ERROR:
        raise RuntimeError(f"{name} differs from fp32 by {error:.1e}")


def compile_ahead(cases: list[Case]) -> None:
    """Compile the chosen kernels of all cases on all cores."""
    gpu = gpu_of(torch.device("cuda"))
    jobs = []
    for case in cases:
        rank = max(case.ranks)
        rows_of = spread(case.rows, len(case.ranks), case.popularity)
        grouping = group_rows(rows_of, case.ranks, [1.0] * len(case.ranks))
        group = ProjectionGroup(case.in_features, case.out_features, rank)
        shape = replace(
            group.shape(case.rows, 1),
            rank=max(16, 1 << (rank - 1).bit_length()),
            adapters=grouping.effective_adapters,
        )
        jobs.append(Job(group, ALL, choose(gpu, shape)))
    search = Search(table_of(gpu), Path(os.devnull), multiprocessing.cpu_count() - 1)
    search.compile(jobs)
    if search.pool:
        search.pool.terminate()


def geometric_mean(values: list[float]) -> float:
    """Geometric mean; NaN for an empty list."""
    return float(np.exp(np.mean(np.log(values)))) if values else float("nan")


def report(results: list[Result], lines: list[str]) -> None:
    """Write the first table as Markdown, and its summary."""
    names = sorted({name for r in results for name in r.peers})
    head = ["case", "floor", "base", "ours", "best", "ours/best", "by", "eager", "error", *names]
    lines += ["", "| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for r in results:
        known = {n: us for n, us in r.peers.items() if np.isfinite(us)}
        by = min(known, key=lambda n: known[n], default="")
        cells = [
            r.case.name, f"{r.floor:.2f}", f"{r.base:.2f}", f"{r.ours:.2f}", f"{r.best:.2f}",
            f"{r.ours / r.best:.2f}", by, f"{r.eager:.0f}", f"{r.error:.1e}",
            *(f"{r.peers.get(n, float('nan')):.1f}" for n in names),
        ]  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    groups = {"all": results}
    for r in results:
        groups.setdefault(r.case.group, []).append(r)
        kind = "decode (rows ≤ 256)" if r.case.rows <= 256 else "prefill"
        groups.setdefault(f"{r.case.group}, {kind}", []).append(r)
    lines += ["", "| group | cases | geometric mean of ours / best | worst | ours / floor |"]
    lines += ["|---|---|---|---|---|"]
    for name, members in groups.items():
        ratios = [r.ours / r.best for r in members]
        over = geometric_mean([r.ours / r.floor for r in members])
        lines.append(
            f"| {name} | {len(members)} | {geometric_mean(ratios):.3f} | {max(ratios):.3f} "
            f"| {over:.2f} |"
        )
    spreads = [r.p95 / r.ours for r in results]
    base = [r.base_p95 / r.base for r in results]
    lines += [
        "",
        f"Latency spread p95/p50: ours {np.median(spreads):.4f} (worst {max(spreads):.3f}), "
        f"base GEMM {np.median(base):.4f} (worst {max(base):.3f}). "
        f"Largest relative error {max(r.error for r in results):.1e}.",
    ]


def by_rows(results: list[Result], lines: list[str]) -> None:
    """Write rank 64 of the grid by rows and adapters, beside the fastest times of others."""
    cells = {
        (r.case.rows, len(r.case.ranks)): f"{r.ours:.1f} ({r.ours / r.case.earlier_us:.2f})"
        for r in results
        if set(r.case.ranks) == {64} and r.case.earlier_us is not None
    }
    counts = sorted({count for _, count in cells})
    lines += ["", f"| rows | {' | '.join(map(str, counts))} |", "|---" * (1 + len(counts)) + "|"]
    for rows in sorted({rows for rows, _ in cells}):
        found = (cells.get((rows, count), "") for count in counts)
        lines.append(f"| {rows} | {' | '.join(found)} |")


def against_earlier(results: list[Result], lines: list[str]) -> None:
    """Say how we compare with what others took earlier on an H200; no part of the table."""
    ratios = [r.ours / r.case.earlier_us for r in results if r.case.earlier_us is not None]
    if ratios and "H200" in torch.cuda.get_device_name():
        lines += [
            "",
            f"Against the fastest times of others measured earlier on an H200 ({GRID.name}): "
            f"geometric mean {geometric_mean(ratios):.3f}, worst {max(ratios):.3f}.",
        ]


def projection_totals(lines: list[str], repeats: int) -> list[dict[str, float]]:
    """Time x·W + LoRA relative to x·W alone, with 16 adapters of rank 64."""
    found = []
    lines += [
        "",
        "| tokens | x·W | x·W + LoRA | ratio | LoRA after x·W | ratio |",
        "|---" * 6 + "|",
    ]
    for rows in (1, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192):
        adapters = min(rows, 16)
        work = KernelWorkload(spread(rows, adapters), [64] * adapters, WIDTH, [WIDTH], max_copies=8)
        sets = (work.sets * 8)[: max(8, len(work.sets))]
        bases = [
            torch.randn(WIDTH, WIDTH, device="cuda", dtype=torch.bfloat16) / 64 for _ in range(8)
        ]

        def separate(s: Inputs, w: torch.Tensor, work: KernelWorkload = work) -> None:
            torch.mm(s.x, w.T, out=s.ys[0])
            atmm(s.ys, s.x, s.weights, work.batch)

        pairs = list(zip(sets, bases, strict=False))
        times = times_in_turn(
            {
                "base": [partial(torch.mm, s.x, w.T, out=s.ys[0]) for s, w in pairs],
                "total": [
                    partial(add_projection, s.ys, s.x, [w], s.weights, work.batch) for s, w in pairs
                ],
                "after": [partial(separate, s, w) for s, w in pairs],
            },
            repeats=repeats,
        )
        base, both, two = (float(np.median(found_)) for found_ in times.values())
        found.append({"rows": rows, "base": base, "total": both, "separate": two})
        lines.append(
            f"| {rows} | {base:.2f} | {both:.2f} | {both / base:.3f} | {two:.2f} "
            f"| {two / base:.3f} |"
        )
    return found


def layer_totals(lines: list[str], repeats: int) -> list[dict[str, float | str]]:
    """Time the groups of linears of a layer in prompts, an adapter of rank 64 per 1,024 rows."""
    found: list[dict[str, float | str]] = []
    rules = gpu_of(torch.device("cuda")).projections
    folded = next((rule.tiling for rule in rules if rule.tiling.fold), None)
    lines += [
        "",
        "| rows | linears | x·W | as chosen | ratio | room for 128 adapters "
        "| library, LoRA before or after | folded | LoRA after x·W |",
        "|---" * 9 + "|",
    ]
    for rows, (name, (width, outs)) in product((256, 1024, 2048, 4096, 8192), LAYER.items()):
        adapters = max(1, rows // 1024)
        work = KernelWorkload(spread(rows, adapters), [64] * adapters, width, outs, max_copies=4)
        roomy = LoraBatch(rows, 129, "cuda", fixed=True)  # as an engine's graphs have
        roomy.update(work.rows_of, work.ranks, work.scalings)
        calls: dict[str, list[Callable[[], object]]] = {}
        for one in work.sets:
            # As in a model: one matrix of all weights, one of all outputs.
            whole = torch.empty(rows, sum(outs), device="cuda", dtype=torch.bfloat16)
            ys = list(whole.split(outs, dim=1))
            weight = torch.randn(sum(outs), width, device="cuda", dtype=torch.bfloat16) / 64
            given = (ys, one.x, list(weight.split(outs)), one.weights, work.batch)
            base = partial(torch.mm, one.x, weight.T, out=whole)

            def after(base=base, ys=ys, one=one, batch=work.batch) -> None:
                base()
                atmm(ys, one.x, one.weights, batch)

            ways = {
                "base": base,
                "chosen": partial(add_projection, *given),
                "roomy": partial(add_projection, *given[:4], roomy),
                "apart": partial(apart, *given[:3], [None] * len(outs), *given[3:]),
                "after": after,
            }
            if folded is not None:  # where the GPU can
                ways["folded"] = partial(add_projection, *given, tiling=folded)
            for way, call in ways.items():
                calls.setdefault(way, []).append(call)
        measured = times_in_turn(calls, repeats=repeats, at_least=8)
        times = {way: float(np.median(us)) for way, us in measured.items()}
        found.append({"rows": rows, "linears": name, **times})
        ratio = times["chosen"] / times["base"]
        cells = [times.get(way, float("nan")) for way in ("roomy", "apart", "folded", "after")]
        lines.append(
            f"| {rows} | {name} | {times['base']:.1f} | {times['chosen']:.1f} | {ratio:.3f} | "
            + " | ".join(f"{us:.1f}" for us in cells) + " |"
        )  # fmt: skip
        del work, calls
        torch.cuda.empty_cache()
    return found


def peft_merge_time(layers: int, rank: int) -> float:
    """Microseconds that PEFT's own `merge_adapter` takes for the same model."""
    from peft import LoraConfig, get_peft_model

    def layer() -> torch.nn.ModuleDict:
        return torch.nn.ModuleDict(
            {
                f"{name}_proj": torch.nn.Linear(
                    WIDTH, WIDTH, bias=False, device="cuda", dtype=torch.bfloat16
                )
                for name in "qkvo"
            }
        )

    model = torch.nn.ModuleDict({str(number): layer() for number in range(layers)})
    targets = [f"{name}_proj" for name in "qkvo"]
    wrapped = get_peft_model(model, LoraConfig(r=rank, target_modules=targets))
    spans = []
    for _ in range(5):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in "ab")
        torch.cuda.synchronize()
        begin.record()
        wrapped.merge_adapter()
        end.record()
        torch.cuda.synchronize()
        spans.append(begin.elapsed_time(end) * 1e3)
        wrapped.unmerge_adapter()
    return float(np.median(spans))


def merging(lines: list[str]) -> dict[str, float]:
    """Time the merge of rank 64 into q, k, v and o of 32 layers of width 4096."""
    layers, rank = 32, 64
    shapes = {f"{layer}.{p}": (WIDTH, WIDTH) for layer in range(layers) for p in "qkvo"}
    merged = MergeableWeights(shapes, dtype=torch.bfloat16, device="cuda")
    merged.pristine.normal_(std=0.02)
    merged.unmerge()
    sources: dict[str, tuple[LoraWeights, int]] = {}
    for layer in range(layers):
        for names in ("qkv", "o"):
            weights = LoraWeights.contiguous(
                1, rank, WIDTH, (WIDTH,) * len(names), dtype=torch.bfloat16, device="cuda"
            )
            weights.a.normal_(std=0.02)
            weights.b.normal_(std=0.02)
            sources |= {f"{layer}.{name}": (weights, p) for p, name in enumerate(names)}
    merged.bind(sources)
    pairs = [
        (merged.weight(name), *weights.rows_of(p, 0, rank))
        for name, (weights, p) in sources.items()
    ]

    size = WIDTH * WIDTH
    pristine = [
        merged.pristine[i * size : (i + 1) * size].view(WIDTH, WIDTH) for i in range(len(pairs))
    ]

    def add_in_place() -> None:
        for weight, a, b in pairs:
            weight.addmm_(b.T, a, alpha=0.5)

    def add_exactly() -> None:
        for old, (weight, a, b) in zip(pristine, pairs, strict=True):
            weight.copy_(torch.addmm(old.float(), b.T.float(), a.float(), alpha=0.5))

    target = torch.empty_like(merged.live)
    found = {
        "copy": device_time(partial(target.copy_, merged.pristine)),
        "merge": device_time(partial(merged.merge, 0, rank, 0.5)),
        "unmerge": device_time(merged.unmerge),
        "addmm a layer, from the pristine weights in fp32": device_time(add_exactly),
        "addmm a layer, in place in bf16 (drifts)": device_time(add_in_place),
        "PEFT merge_adapter": peft_merge_time(layers, rank),
    }
    merged.merge(0, rank, 0.5)
    differing = 0.0
    for name in ("0.q", "15.k", "31.o"):
        weights, p = sources[name]
        a, b = weights.rows_of(p, 0, rank)
        start = list(shapes).index(name) * WIDTH * WIDTH
        base = merged.pristine[start : start + WIDTH * WIDTH].view(WIDTH, WIDTH)
        once = torch.addmm(base.double(), b.T.double(), a.double(), alpha=0.5).to(base.dtype)
        differing = max(differing, float((once != merged.weight(name)).double().mean()))
    found["differing"] = differing
    lines += ["", "| what | µs | over the copy |", "|---|---|---|"]
    lines += [
        f"| {name} | {us:.0f} | {us / found['copy']:.3f} |"
        for name, us in found.items()
        if name != "differing"
    ]
    lines.append(f"\nMerged weights that differ from one rounding of fp64: {differing:.1e}.")
    return found


def main() -> None:
    """Run all tables; write Markdown and JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("outputs/bench-kernels"))
    parser.add_argument("--no-peers", action="store_true", help="ours and the base GEMM only")
    parser.add_argument("--repeats", type=int, default=11)
    parser.add_argument(
        "--only", nargs="+", choices=SECTIONS, default=list(SECTIONS), help="tables to run"
    )
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("bench_atmm needs a CUDA GPU")
    started = time.time()
    ceilings = Ceilings()
    lines = [
        f"GPU {torch.cuda.get_device_name()}, torch {torch.__version__}; copy "
        f"{ceilings.bytes_per_us / 1e6:.2f} TB/s, matrix product "
        f"{ceilings.flops_per_us / 1e6:.0f} TFLOP/s. Times in µs.",
    ]
    results = []
    cases = [
        *(grid() if "grid" in args.only else ()),
        *(off_grid() if "off" in args.only else ()),
    ]
    compile_ahead(cases)
    # The small ones first: a large one heats the GPU, and the next runs at a lower clock.
    for case in sorted(
        cases, key=lambda case: case.rows * (case.in_features + sum(case.out_features))
    ):
        result = measure(case, ceilings, with_peers=not args.no_peers, repeats=args.repeats)
        results.append(result)
        print(f"{case.name:40s} {result.ours:8.2f} / {result.best:8.2f}", flush=True)
        torch.cuda.empty_cache()
    results.sort(key=lambda result: cases.index(result.case))
    if not args.no_peers:
        lines.append(f"Others: {versions()}.")
    data: dict[str, object] = {"cases": [asdict(r) for r in results]}
    if "grid" in args.only:
        by_rows(results, lines)
    for on_grid in (True, False):
        some = [r for r in results if (r.case.group == "grid") == on_grid]
        if some:
            report(some, lines)
            against_earlier(some, lines)
    if "projection" in args.only:
        data["projection"] = projection_totals(lines, args.repeats)
        torch.cuda.empty_cache()
    if "layer" in args.only:
        data["layer"] = layer_totals(lines, args.repeats)
    if "merge" in args.only:
        data["merge"] = merging(lines)
    lines.append(f"\nTook {time.time() - started:.0f} s.")
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "bench_atmm.md").write_text("\n".join(lines) + "\n")
    (args.out / "bench_atmm.json").write_text(json.dumps(data))
    print("\n".join(lines))


if __name__ == "__main__":
    main()
