"""Attention of captured steps with prompts: each backend's plans, on the device and on the host.

`python -m tests.bench.valora_serve.bench_attention` prints microseconds a layer that replays of a
CUDA graph take, and those that the host takes to describe a step, whatever the number of layers.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from itertools import product

import numpy as np
import torch

from tests.bench.valora_serve.harness import table
from valora_serve.model.attention.base import KVCache, Rows
from valora_serve.model.attention.registry import make_backend

PAGE, WIDTH = 16, 128
SEQUENCES = 512


@dataclass(frozen=True)
class Mix:
    """Sequences of a step.

    Attributes:
        decoding: Number of sequences that decode.
        context: Tokens of each of them.
        prompts: Number of prompts, which share the other rows.
        past: Tokens of each prompt that earlier steps have computed.
    """

    decoding: int
    context: int
    prompts: int
    past: int = 0

    def rows(self, size: int, pages: int) -> Rows | None:
        """A step of `size` rows in pages in random order; None if that is too few."""
        each = (size - self.decoding) // self.prompts
        if each < 2:
            return None
        counts = np.array([1] * self.decoding + [each] * self.prompts)
        lengths = counts + np.array([self.context - 1] * self.decoding + [self.past] * self.prompts)
        starts = np.concatenate([[0], np.cumsum(counts)])
        free = (1 + np.random.default_rng(0).permutation(pages - 1)).tolist()
        ends = np.cumsum(-(-lengths // PAGE)).tolist()
        if ends[-1] >= pages:
            return None
        tables = [free[a:b] for a, b in zip([0, *ends], ends, strict=False)]
        return Rows(starts.astype(np.int32), lengths.astype(np.int32), tables)


MIXES = (
    Mix(0, 0, 1), Mix(0, 0, 4), Mix(0, 0, 1, 1024), Mix(0, 0, 1, 4000),
    Mix(4, 700, 1), Mix(8, 700, 1), Mix(16, 700, 1), Mix(24, 700, 1), Mix(32, 700, 1),
    Mix(64, 700, 1), Mix(64, 700, 2, 600), Mix(130, 500, 1),
)  # fmt: skip


def measure(plan, rows, parts, layers, repeats):
    """Microseconds a layer on the device, and of `update` on the host."""
    device = parts[0].device
    plan.update(rows)

    def step():
        for layer in range(layers):
            plan.run(layer, *parts, WIDTH**-0.5)

    step()  # compiles kernels
    replay = step
    if device.type == "cuda":
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        replay = graph.replay
    spent, host = [], []
    for _ in range(repeats):
        began = time.perf_counter()
        plan.update(rows)
        host.append(time.perf_counter() - began)
        if device.type == "cuda":
            first, last = (torch.cuda.Event(enable_timing=True) for _ in "ab")
            first.record()
            replay()
            last.record()
            torch.cuda.synchronize()
            spent.append(first.elapsed_time(last) / 1e3)
        else:
            replay()
            spent.append(time.perf_counter() - began - host[-1])
    return 1e6 * float(np.median(spent)) / layers, 1e6 * float(np.median(host))


def main(given=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--backends", nargs="+", default=["flashinfer", "triton"])
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", nargs="+", type=int, default=[32, 8])
    parser.add_argument("--sizes", nargs="+", type=int, default=[64, 128, 256, 512, 1024])
    parser.add_argument("--pages", type=int, default=6000)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=12)
    arguments = parser.parse_args(given)
    device = torch.device(arguments.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    for kv_heads in arguments.kv_heads:
        shape = (2, arguments.pages, PAGE, kv_heads, WIDTH)
        layers = [torch.randn(shape, dtype=dtype, device=device) for _ in range(arguments.layers)]
        cache = KVCache([(keys, values) for keys, values in layers], PAGE, arguments.heads)
        makers = {}
        for name in arguments.backends:
            backend = make_backend(name, cache)
            makers[name] = backend.mixed_plan
            if backend.crowd(SEQUENCES) is not None:
                makers[f"{name}, crowded"] = backend.crowded_plan
        found = []
        for size, mix in product(arguments.sizes, MIXES):
            rows = mix.rows(size, arguments.pages)
            if rows is None:
                continue
            parts = [
                torch.randn(size, heads, WIDTH, dtype=dtype, device=device)
                for heads in (arguments.heads, kv_heads, kv_heads)
            ]
            row = [size, f"{mix.decoding} × {mix.context}", f"{mix.prompts}, after {mix.past}"]
            for make in makers.values():
                plan = make(min(size, SEQUENCES), size)
                row += measure(plan, rows, parts, arguments.layers, arguments.repeats)
            found.append(row)
        columns = [text for name in makers for text in (f"{name}, us a layer", "host, us")]
        heads = f"{arguments.heads} heads, {kv_heads} of keys and values"
        title = f"Captured steps with prompts, {heads}"
        table(title, ["rows", "decoding", "prompts", *columns], found)


if __name__ == "__main__":
    main()
