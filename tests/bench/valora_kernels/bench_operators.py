"""The papers' operators beside ours in one run (VaLoRA's Figures 17 and 18 and Table 1).

Each time is of one eager call, which the device works off without waiting for the host, on inputs
that are not in its cache.
"""

from __future__ import annotations

import sys
from functools import partial

import numpy as np
import torch

from tests.bench.valora_kernels.operators.bgmv import Bgmv
from tests.bench.valora_kernels.operators.einsum import Einsum
from tests.bench.valora_kernels.operators.padded import Padded
from tests.bench.valora_kernels.operators.static import Static
from valora_kernels.atmm import Atmm, table_choice
from valora_kernels.search import SHRINK, call_of
from valora_kernels.tiling import Tiling
from valora_kernels.timing import KernelWorkload, replay_times, spread

WIDTH = 4096
OPERATORS = {
    "ATMM": Atmm(), "static (S-LoRA)": Static(), "BGMV (Punica)": Bgmv(), "padded": Padded(),
    "einsum (dLoRA)": Einsum(),
}  # fmt: skip
ROWS = {"1 to 16": (1, 16), "17 to 256": (17, 256), "257 to 1024": (257, 1024)}
ROUNDS, WARM = 100, 10
TILES = {"16, 64, 64 (Punica)": (16, 64, 64), "64, 32, 32": (64, 32, 32), "64, 64, 64": (64,) * 3}
"""Rows, inputs and outputs of a thread block's tile, as in Table 1."""
INPUTS = {"256 × 4096, 4096 × 32": (256, 32), "8192 × 4096, 4096 × 128": (8192, 128)}


def operators():
    """Mean, p90 and p95 of each operator on batches of random sizes, adapters and ranks."""
    print("\n## Operators, µs a call\n")
    print(
        "| rows | operator | mean | p50 | p90 | p95 | mean / ATMM |\n|---|---|---|---|---|---|---|"
    )
    for title, (least, most) in ROWS.items():
        draw, times = np.random.default_rng(0), {name: [] for name in OPERATORS}
        for number in range(WARM):  # shapes, each of which is called so many times
            rows = int(draw.integers(least, most + 1))
            adapters = int(draw.integers(1, min(rows, 16) + 1))
            ranks = draw.choice([16, 32, 64, 128], adapters).tolist()
            work = KernelWorkload(spread(rows, adapters), ranks, WIDTH, [WIDTH], max_copies=24)
            for name, operator in OPERATORS.items():
                calls = [partial(operator.add, s.ys, s.x, s.weights, work.batch) for s in work.sets]
                times[name] += in_turn(calls, WARM, ROUNDS // WARM)
            print(f"{title}: {number + 1} of {WARM}", file=sys.stderr, flush=True)
        for name, found in times.items():
            mean = np.mean(found)
            cells = [mean, *np.quantile(found, (0.5, 0.9, 0.95)), mean / np.mean(times["ATMM"])]
            print(f"| {title} | {name} | {' | '.join(f'{one:.3g}' for one in cells)} |", flush=True)


def in_turn(calls, warm, count):
    """Microseconds of each of so many calls, after some that warm up."""
    pairs = []
    for number in range(warm + count):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in "ab")
        torch.cuda._sleep(4_000_000)  # 2 ms in which the host gets ahead: launches are not timed
        begin.record()
        calls[number % len(calls)]()
        end.record()
        pairs.append((begin, end))
    torch.cuda.synchronize()
    return [1e3 * begin.elapsed_time(end) for begin, end in pairs[warm:]]


def tilings():
    """The first product of LoRA by tiling, without splits of its inputs, and as ours is chosen."""
    print("\n## First product of one adapter by tiling, µs\n")
    print(
        f"| rows, inputs, outputs of a tile | {' | '.join(INPUTS)} |\n|---|{'---|' * len(INPUTS)}"
    )
    works = [
        KernelWorkload(spread(rows, 1), [rank], WIDTH, [WIDTH], max_copies=8)
        for rows, rank in INPUTS.values()
    ]
    chosen = [table_choice(work.sets[0].weights, work.batch) for work in works]
    fixed = {
        title: [Tiling("shrink_expand", rows=a, inputs=b, ranks=c, split=WIDTH)] * len(works)
        for title, (a, b, c) in TILES.items()
    }
    for title, found in (fixed | {"chosen for each, with splits": chosen}).items():
        cells = []
        for work, tiling in zip(works, found, strict=True):
            if tiling.arrangement != "shrink_expand":
                cells.append(f"one kernel for both products: {tiling.rows} rows")
                continue
            calls = [call_of(SHRINK, tiling, work, one) for one in work.sets]
            cells.append(f"{np.median(replay_times(calls)):.3g}")
        print(f"| {title} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    print(f"GPU {torch.cuda.get_device_name()}, torch {torch.__version__}")
    tilings()
    operators()
