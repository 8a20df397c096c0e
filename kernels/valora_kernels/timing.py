"""Times calls on cold weights, for the search of tilings and for the benchmark."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from valora_kernels.metadata import LoraBatch
from valora_kernels.weights import LoraWeights

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

COLD_BYTES = 160 << 20
"""Bytes of other inputs between two uses of the same ones: more than twice an H200's L2 cache."""

ROOM = 128
"""Adapters that batches have room for where LoRA comes first, as the captured steps of engines."""


@dataclass(frozen=True, slots=True)
class Inputs:
    """One set of inputs of a call.

    Attributes:
        ys: [P] tensors [rows, out_features[p]].
        x: [rows, in_features].
        weights: A and B of every adapter.
        base: [sum of out_features, in_features] base weight, for which the ys are slices of `y`;
            None without.
        y: [rows, sum of out_features] or None.
    """

    ys: Sequence[torch.Tensor]
    x: torch.Tensor
    weights: LoraWeights
    base: torch.Tensor | None = None
    y: torch.Tensor | None = None

    def add_base(self) -> None:
        """Add the base product to y, as a step does where LoRA comes first."""
        assert self.y is not None
        assert self.base is not None
        self.y.addmm_(self.x, self.base.T)


def spread(
    rows: int, adapters: int, popularity: str = "uniform", seed: int = 0
) -> NDArray[np.int64]:
    """Assign rows to adapters, at least one row to each.

    Args:
        rows: Number of rows, at least `adapters`.
        adapters: Number of adapters.
        popularity: `uniform`; `zipf` (weights 1 / place); `skewed` (the first adapter has all rows
            but one for each other).
        seed: Seed of the draw.

    Returns:
        [rows] adapter of each row; rows of one adapter are neighbours, as in a prefill.
    """
    if popularity == "uniform":
        return np.arange(rows) * adapters // rows
    rest = rows - adapters
    weight = np.zeros(adapters)
    weight[0] = 1
    if popularity == "zipf":
        weight = 1 / np.arange(1, adapters + 1)
    counts = 1 + np.random.default_rng(seed).multinomial(rest, weight / weight.sum())
    return np.repeat(np.arange(adapters), counts)


class KernelWorkload:
    """Inputs of one operator call, in enough copies that none is in the cache when it is used.

    Args:
        rows_of: [rows] adapter of each row.
        ranks: [adapters] rank of each adapter.
        in_features: Width of x.
        out_features: Width of each projection.
        dtype: Type of all tensors.
        device: A CUDA device.
        cold: Bytes of other inputs between two uses of the same ones.
        most: Most copies.
        first: Whether the inputs have a base weight, and the batch room for many adapters.

    Attributes:
        rows_of: [rows] adapter of each row.
        ranks: [adapters] rank of each adapter.
        scalings: [adapters] scaling of each adapter.
        bytes: Bytes that one call reads and writes.
        flops: Floating-point operations of one call.
        sets: The copies of the inputs.
        batch: The batch that describes the rows, for CUDA graphs.
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
        most: int = 320,
        first: bool = False,
    ) -> None:
        rows, slots = len(rows_of), len(ranks)
        self.rows_of, self.ranks = rows_of, tuple(ranks)
        self.scalings = [0.5 + 0.25 * (slot % 5) for slot in range(slots)]
        width = in_features + sum(out_features)
        size = dtype.itemsize
        base = in_features * sum(out_features) if first else 0
        self.bytes = size * (
            sum(self.ranks[slot] for slot in np.unique(rows_of)) * width
            + rows * (in_features + 2 * sum(out_features))
            + base
        )
        resident = size * (slots * max(ranks) * width + rows * width + base)
        copies = int(min(most, max(2, -(-cold // max(self.bytes, 1)), -(-cold // resident))))
        self.flops = 2 * int(np.asarray(ranks)[rows_of].sum()) * width
        self.sets = self._make_sets(copies, rows, in_features, out_features, dtype, device, first)
        segments = len(np.unique(rows_of))
        self.batch = LoraBatch(rows, max(segments, ROOM if first else 0), device, fixed=True)
        self.batch.update(rows_of, self.ranks, self.scalings)

    def _make_sets(
        self,
        copies: int,
        rows: int,
        in_features: int,
        out_features: Sequence[int],
        dtype: torch.dtype,
        device: str,
        first: bool,
    ) -> list[Inputs]:
        """Random inputs, all in one allocation.

        Scattered small allocations cost address translation, and differ from run to run.
        """
        random = torch.Generator(device).manual_seed(0)
        slots, max_rank = len(self.ranks), max(self.ranks)
        slot_rows = slots * max_rank
        sizes = [slot_rows * len(out_features) * in_features, slot_rows * sum(out_features)]
        outputs = sum(out_features)
        sizes += [rows * in_features, rows * outputs, in_features * outputs if first else 0]
        sizes = [-(-size // 128) * 128 for size in sizes]
        memory = torch.empty(copies, sum(sizes), dtype=dtype, device=device)
        memory.normal_(generator=random)
        memory[:, : sizes[0]] *= in_features**-0.5
        memory[:, sizes[0] : sizes[0] + sizes[1]] *= 0.1
        sets = []
        for copy in memory:
            a, b, x, y, base = copy.split(sizes)
            weights = LoraWeights(
                in_features,
                tuple(out_features),
                slots,
                max_rank,
                a[: slot_rows * len(out_features) * in_features].view(
                    len(out_features), slots, max_rank, in_features
                ),
                b[: slot_rows * sum(out_features)],
            )
            x = x[: rows * in_features].view(rows, in_features)
            y = y[: rows * outputs]
            if first:
                y = y.view(rows, outputs)
                base = base[: in_features * outputs].view(outputs, in_features)
                base *= in_features**-0.5
                sets.append(Inputs(y.split(list(out_features), 1), x, weights, base, y))
                continue
            parts = y.split([rows * n for n in out_features])
            outs = [part.view(rows, n) for part, n in zip(parts, out_features, strict=True)]
            sets.append(Inputs(outs, x, weights))
        return sets


def replay_times(
    calls: Sequence[Callable[[], object]], *, repeats: int = 7, at_least: int = 24
) -> NDArray[np.float64]:
    """Time calls through replays of a CUDA graph that makes all of them in turn.

    Args:
        calls: One call for each set of inputs.
        repeats: Number of replays that are timed, after two that are not.
        at_least: Fewest calls per graph, which share the few microseconds that its launch costs.

    Returns:
        [repeats] microseconds per call, one value for each replay.
    """
    return times_in_turn({"": calls}, repeats=repeats, at_least=at_least)[""]


def times_in_turn(
    named: Mapping[str, Sequence[Callable[[], object]]], *, repeats: int = 7, at_least: int = 24
) -> dict[str, NDArray[np.float64]]:
    """Time several lists of calls as `replay_times` does, with their replays taking turns.

    A large product heats the GPU, which lowers its clock, so calls that are compared must share
    the heat.

    Args:
        named: The calls by the name of each list.
        repeats: Number of replays that are timed, after two that are not.
        at_least: Fewest calls per graph.

    Returns:
        [repeats] microseconds per call, for each name.
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
