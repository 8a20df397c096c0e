"""Times calls on cold weights, for the search of tilings and for the benchmark."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from valora_kernels.metadata import LoraBatch
from valora_kernels.weights import LoraWeights, Tensors, contiguous_tables

COLD_BYTES = 160 << 20
"""Bytes of other inputs between two uses of the same ones: more than twice an H200's L2 cache."""

ROOM = 128
"""Adapters that batches have room for where LoRA comes first, as the captured steps of engines."""


@dataclass(frozen=True, slots=True)
class Inputs:
    """Inputs of a call; with a base weight [outputs, inputs] the ys are slices of `y`."""

    ys: Tensors
    x: torch.Tensor
    weights: LoraWeights
    base: torch.Tensor | None = None
    y: torch.Tensor | None = None


def spread(
    rows: int, adapters: int, popularity: str = "uniform", seed: int = 0
) -> NDArray[np.int64]:
    """The adapter of each row, at least one row to each; neighbours as in a prefill.

    `popularity` is `uniform`, `zipf` (weights 1 / place) or `skewed` (the first has all the rest).
    """
    if popularity == "uniform":
        return np.arange(rows) * adapters // rows
    weight = np.zeros(adapters)
    weight[0] = 1
    if popularity == "zipf":
        weight = 1 / np.arange(1, adapters + 1)
    draw = np.random.default_rng(seed)
    counts = 1 + draw.multinomial(rows - adapters, weight / weight.sum())
    return np.repeat(np.arange(adapters), counts)


class KernelWorkload:
    """Inputs of one operator call, in enough copies that none is in the cache when it is used.

    `rows_of` [rows] and `ranks` [adapters] describe the batch. Between two uses of the same inputs
    `cold` bytes of others are read, from at most so many copies. With `first` they have a base
    weight, and the batch room for many adapters.
    """

    def __init__(
        self,
        rows_of: NDArray[np.int64],
        ranks: Sequence[int],
        in_features: int,
        out_features: Sequence[int],
        *,
        dtype: torch.dtype = torch.bfloat16,
        device: str = "cuda",
        cold: int = COLD_BYTES,
        max_copies: int = 320,
        first: bool = False,
    ) -> None:
        rows, slots, max_rank, outputs = len(rows_of), len(ranks), max(ranks), sum(out_features)
        self.rows_of, self.ranks = rows_of, tuple(ranks)
        self.scalings = [0.5 + 0.25 * (slot % 5) for slot in range(slots)]
        width = in_features + outputs
        base = in_features * outputs if first else 0
        used = np.unique(rows_of)
        read = sum(self.ranks[slot] for slot in used) * width + base
        self.bytes = dtype.itemsize * (read + rows * (in_features + 2 * outputs))
        self.flops = 2 * int(np.asarray(ranks)[rows_of].sum()) * width
        sizes = [
            len(out_features) * slots * max_rank * in_features,
            slots * max_rank * outputs,
            rows * in_features,
            rows * outputs,
            base,
        ]
        resident = dtype.itemsize * (slots * max_rank * width + rows * width + base)
        copies = int(min(max_copies, max(2, -(-cold // max(self.bytes, 1)), -(-cold // resident))))
        # All in one allocation: scattered small ones cost address translation, and differ from run
        # to run.
        room = [-(-size // 128) * 128 for size in sizes]
        memory = torch.empty(copies, sum(room), dtype=dtype, device=device)
        memory.normal_(generator=torch.Generator(device).manual_seed(0))
        tables = contiguous_tables(slots, max_rank, in_features, out_features, device)
        self.sets = []
        for copy in memory:
            a, b, x, y, w = (
                part[:size] for part, size in zip(copy.split(room), sizes, strict=True)
            )
            a *= in_features**-0.5
            b *= 0.1
            a = a.view(len(out_features), slots, max_rank, in_features)
            weights = LoraWeights(in_features, tuple(out_features), slots, max_rank, a, b, *tables)
            x = x.view(rows, in_features)
            if first:
                y, w = y.view(rows, outputs), w.view(outputs, in_features)
                w *= in_features**-0.5
                self.sets.append(Inputs(y.split(list(out_features), 1), x, weights, w, y))
            else:
                parts = zip(y.split([rows * n for n in out_features]), out_features, strict=True)
                self.sets.append(Inputs([part.view(rows, n) for part, n in parts], x, weights))
        self.batch = LoraBatch(rows, max(len(used), ROOM if first else 0), device, fixed=True)
        self.batch.update(rows_of, self.ranks, self.scalings)


def replay_times(
    calls: Sequence[Callable[[], object]], *, repeats: int = 7, at_least: int = 24
) -> NDArray[np.float64]:
    """Time one list of calls as `times_in_turn` does."""
    return times_in_turn({"": calls}, repeats=repeats, at_least=at_least)[""]


def times_in_turn(
    named: Mapping[str, Sequence[Callable[[], object]]], *, repeats: int = 7, at_least: int = 24
) -> dict[str, NDArray[np.float64]]:
    """Time lists of calls through graphs that take turns, so that they share the GPU's heat.

    A graph has `at_least` so many calls, which share the few microseconds of its launch. Returns
    [repeats] microseconds per call, for each name; two more replays are not timed.
    """
    stream = torch.cuda.Stream()
    graphs = {}
    for name, calls in named.items():
        calls[0]()
        torch.cuda.synchronize()
        graph, rounds = torch.cuda.CUDAGraph(), -(-at_least // len(calls))
        with torch.cuda.stream(stream):
            graph.capture_begin(capture_error_mode="thread_local")  # others may load adapters
            for _ in range(rounds):
                for call in calls:
                    call()
            graph.capture_end()
        graphs[name] = graph, rounds * len(calls)
    pairs: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {n: [] for n in graphs}
    with torch.cuda.stream(stream):
        for turn in range(repeats + 2):
            for name, (graph, _) in graphs.items():
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in "ab")
                begin.record()
                graph.replay()
                end.record()
                if turn > 1:
                    pairs[name].append((begin, end))
    stream.synchronize()
    return {
        name: np.asarray([a.elapsed_time(b) for a, b in found]) * 1e3 / graphs[name][1]
        for name, found in pairs.items()
    }
