"""Where the time of a lone prompt goes: its graph, and what the host does while the GPU waits."""

from __future__ import annotations

import statistics
import time
from types import SimpleNamespace
from unittest.mock import patch

import torch

from tests.bench.valora_serve.harness import table
from valora_serve.model.graphs import PromptGraphs
from valora_serve.model.work import LoraTerms

LENGTHS = (256, 1024)
REPEATS = 12


def lone(bench):
    """Prompts of one request at a time, without adapters and with one of 16."""
    names = bench.start("slora", 16)
    bench.warm(names)
    rows = []
    for length in LENGTHS if bench.device.type == "cuda" else (8,):
        for asked in ([], names):
            rows.append(_measure(bench, length, asked))
            print(rows[-1], flush=True)
    table(f"Lone prompts (rank 64 on {bench.adapted})",
          ["tokens", "adapter", "first token, ms", "its layers on the GPU, ms",
           "before them: the host, ms", "of that attention, ms", "adapters, ms"],
          rows)  # fmt: skip


def _measure(bench, length, names):
    """Medians of a prompt's parts."""
    times = {"layers": [], "attention": [], "adapters": []}
    whole, seen = [], []
    with (
        patch.object(LoraTerms, "fill", _timed(LoraTerms.fill, times["adapters"])),
        patch.object(PromptGraphs, "replay", _noted(PromptGraphs.replay, seen)),
    ):
        for repeat in range(2 + REPEATS):
            name = names[repeat % len(names)] if names else None
            ask = bench.engine.prepare(bench.request(repeat, length, 1, name))
            bench.synchronize()
            start = time.perf_counter()
            bench.drive([ask])
            whole.append(time.perf_counter() - start)
            if seen:
                began, replay, plan = seen.pop()
                times["layers"].append(began - start)
                times["attention"].append(plan)
    graph = _seconds(replay) if bench.device.type == "cuda" and times["layers"] else None
    middle = [
        1e3 * statistics.median(found[2:]) if len(found) > 2 else None for found in times.values()
    ]
    return [length, "one of 16" if names else "–", 1e3 * statistics.median(whole[2:]),
            None if graph is None else 1e3 * graph, *middle]  # fmt: skip


def _timed(method, seconds):
    """The method, which notes how long it takes."""

    def timed(*given, **options):
        start = time.perf_counter()
        found = method(*given, **options)
        seconds.append(time.perf_counter() - start)
        return found

    return timed


def _noted(method, seen):
    """`PromptGraphs.replay`, which notes when a step's graph begins, and how long its plan took."""

    def noted(self, graph, *given):
        planned, begun = [], []

        def begin():
            begun.append(time.perf_counter())
            replay()

        plan, replay = graph.plan, graph.replay
        graph.plan = SimpleNamespace(update=_timed(plan.update, planned))
        graph.replay = begin
        try:
            return method(self, graph, *given)
        finally:
            graph.plan, graph.replay = plan, replay
            seen.append((begun[0], replay, planned[0]))

    return noted


def _seconds(replay):
    """Median seconds of a graph by itself."""
    found = []
    for _ in range(REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        replay()
        end.record()
        torch.cuda.synchronize()
        found.append(start.elapsed_time(end) / 1e3)
    return statistics.median(found)
