"""Captured steps: CUDA graphs of decode steps, and of the layers of steps with prompts.

A graph's inputs lie in buffers of fixed size and address, and smaller steps are padded. Graphs are
captured for some numbers of rows, each with zero, one and two LoRA terms per row.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeAlias, TypeVar

import numpy as np
import torch
from torch import Tensor

from valora_kernels.metadata import LoraBatch
from valora_serve.model.attention.base import FixedAttentionPlan, Rows, pinned
from valora_serve.model.lmm import VisualRows
from valora_serve.model.sampler import finite_rows
from valora_serve.model.work import (
    CROWDED,
    DECODE,
    PROMPT,
    LoraTerms,
    Preparation,
    StepResources,
    Work,
)

Replay: TypeAlias = Callable[[], None]


G = TypeVar("G")


class GraphRecorder:
    """Captures functions as CUDA graphs in one memory pool; without a GPU they run again."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None

    def record(self, run: Callable[[], Sequence[Tensor]]) -> tuple[Replay, list[Tensor]]:
        """Warm a function of buffers up and capture it; return its replay and its results."""
        found: list[Tensor] = []

        def run_again() -> None:
            new = run()
            if not found:
                found.extend(new)
            for buffer, one in zip(found, new, strict=True):
                buffer.copy_(one)

        with torch.inference_mode():
            if self._device.type != "cuda":
                return run_again, found
            # This compiles kernels, which a capture cannot. On the stream of eager steps, as torch
            # keeps the memory of each stream for that stream.
            run()
            torch.cuda.synchronize(self._device)
            graph = torch.cuda.CUDAGraph()
            # Another thread may pack adapters meanwhile, which locks host memory.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                found.extend(run())
        if self._pool is None:
            self._pool = graph.pool()
        return graph.replay, found

    def forget(self) -> None:
        """Take a new pool as all graphs are dropped: torch captures into none without graphs."""
        self._pool = None


def _holds(plan: FixedAttentionPlan, tables: Sequence[Sequence[int]]) -> bool:
    return plan.max_pages is None or sum(map(len, tables)) <= plan.max_pages


class Graphs(ABC, Generic[G]):
    """Captured steps of one kind by their number of rows and of LoRA terms."""

    rows_per_adapter = 1  # in a typical step, by which the LoRA tiles of a graph are chosen

    def __init__(
        self, kind: str, resources: StepResources, recorder: GraphRecorder, sizes: Sequence[int]
    ) -> None:
        self.kind, self._resources, self._recorder = kind, resources, recorder
        # Numbers of rows of the steps that are or will be captured, ascending.
        self.sizes = sorted(sizes)
        self.held: dict[tuple[int, int], G] = {}
        self.stale: set[tuple[int, int]] = set()  # are replayed until they are captured again
        # The graphs of a size share one plan, as a step is planned just before its replay.
        self._plans: dict[int, FixedAttentionPlan] = {}

    def forget(self) -> None:
        """Drop all graphs."""
        self.held.clear()
        self.stale.clear()

    def renew_plans(self) -> None:
        """Capture all graphs again, as another backend attends; steps replay them until then."""
        self._plans = {}
        self.stale.update(self.held)

    def missing(self, terms: int) -> list[int]:
        """Return the sizes that are not captured, or are out of date, the largest first."""
        there = self.held.keys() - self.stale
        return [size for size in reversed(self.sizes) if (size, terms) not in there]

    def give_up(self, size: int) -> None:
        """Capture a size no more; graphs that are there, larger ones or eager steps compute it."""
        self.stale = {key for key in self.stale if key[0] != size}
        if all(held != size for held, _ in self.held):
            self.sizes.remove(size)
        self._plans.pop(size, None)

    def capture(self, size: int, terms: int) -> bool:
        """Capture one size, maybe again; return False if the backend has no graphs."""
        graph = self._capture(size, terms)
        if graph is None:
            self.sizes = []
            return False
        self.held[size, terms] = graph
        self.stale.discard((size, terms))
        return True

    def _best(self, rows: int, terms: int) -> G | None:
        """Return the smallest captured step of at least so many rows, and note what is missing."""
        first = bisect_left(self.sizes, rows)
        if self._resources.left and first < len(self.sizes):
            wanted = Preparation(self.kind, self.sizes[first], terms)
            if wanted in self._resources.left:
                self._resources.missed[wanted] = None
        fitting = (self.held.get((size, terms)) for size in self.sizes[first:])
        return next((graph for graph in fitting if graph is not None), None)

    def typical(self, size: int, terms: int) -> LoraBatch | None:
        """Return typical adapters of a step, for which its graph is captured; None without any."""
        distinct = size // self.rows_per_adapter
        return self._resources.typical_batch(size, terms, distinct) if terms else None

    def _plan_of(
        self, size: int, make: Callable[[], FixedAttentionPlan | None]
    ) -> FixedAttentionPlan | None:
        plan = self._plans.get(size) or make()
        if plan is not None:
            self._plans[size] = plan
        return plan

    @abstractmethod
    def _capture(self, size: int, terms: int) -> G | None:
        """Capture one step; None if the attention backend has no plan for it."""


@dataclass(slots=True)
class DecodeGraph:
    """A captured decode step of a fixed number of rows, from last tokens to next tokens."""

    replay: Replay
    plan: FixedAttentionPlan
    lora: LoraBatch | None  # None without LoRA terms
    # [4, rows] int64 on the device: each row's place in `StepResources.last_tokens`, and its
    # position in time, height and width.
    inputs: Tensor
    logits: Tensor  # [rows, vocabulary] float32, written by a replay of any graph
    results: list[Tensor]  # their argmax [rows] int64, and whether they are finite [rows] bool
    staging: list[Tensor]  # two page-locked copies of `inputs`, used in turn
    events: list[torch.cuda.Event]  # end of the last copy of each to the device; none on a CPU
    turn: int = 0  # staging buffer used last


class DecodeGraphs(Graphs[DecodeGraph]):
    """Captured decode steps by their number of rows and of LoRA terms."""

    rows_per_adapter = 2

    def __init__(
        self, resources: StepResources, recorder: GraphRecorder, sizes: Sequence[int]
    ) -> None:
        super().__init__(DECODE, resources, recorder, sizes)
        lmm = resources.lmm
        # Of all graphs: what one has written is read before the next is replayed.
        self._logits = torch.zeros((max(sizes, default=0), lmm.vocabulary), device=lmm.device)

    def _capture(self, size: int, terms: int) -> DecodeGraph | None:
        resources = self._resources
        plan = self._plan_of(size, lambda: resources.backend.decode_plan(size))
        if plan is None:
            return None
        lmm, last_tokens, logits = resources.lmm, resources.last_tokens, self._logits[:size]
        rows = Rows(np.arange(size + 1, dtype=np.int32), np.ones(size, np.int32), [[0]] * size)
        plan.update(rows)
        lora = self.typical(size, terms)
        with torch.inference_mode():
            inputs = torch.zeros((4, size), dtype=torch.int64, device=lmm.device)
            inputs[0] = resources.max_requests

        def run() -> tuple[Tensor, Tensor]:
            with lmm.linears.scope.text(lora):
                positions = inputs[1:] if lmm.three_positions else inputs[1]
                hidden = lmm.hidden(last_tokens[inputs[0]], positions, plan)
                logits.copy_(lmm.logits(hidden))
                tokens = logits.argmax(-1)
                last_tokens[inputs[0]] = tokens
            return tokens, finite_rows(logits)

        replay, results = self._recorder.record(run)
        staging = [pinned(np.zeros((4, size), np.int64)) for _ in range(2)]
        events = [torch.cuda.Event() for _ in range(2)] if lmm.device.type == "cuda" else []
        return DecodeGraph(replay, plan, lora, inputs, logits, results, staging, events)

    def find(self, works: Sequence[Work], terms: LoraTerms | None) -> DecodeGraph | None:
        """The smallest graph that holds a step; None unless all its works only decode."""
        if not self.sizes or len(works) > self.sizes[-1]:
            return None
        if any(w.tokens is not None or w.choice is None or w.keep is not None for w in works):
            return None
        graph = self._best(len(works), 0 if terms is None else terms.width)
        if graph is None or not _holds(graph.plan, [work.table for work in works]):
            return None
        return graph

    def replay(
        self, graph: DecodeGraph, works: Sequence[Work], terms: LoraTerms | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Enqueue a decode step on the graph that `find` returned for it.

        Returns for every work logits [works, vocabulary] float32, argmax [works] int64, whether
        they are finite [works] bool, its slot in `StepResources.last_tokens` [works] int64.
        """
        size, count = graph.inputs.shape[1], len(works)
        graph.turn ^= 1
        if graph.events:
            graph.events[graph.turn].synchronize()  # its copy was enqueued two steps ago
        staging = graph.staging[graph.turn].numpy()
        staging[0, count:] = self._resources.max_requests
        staging[1:, count:] = 0
        staging[0, :count] = [work.slot for work in works]
        staging[1:, :count] = [work.start + work.delta for work in works]
        graph.inputs.copy_(graph.staging[graph.turn], non_blocking=True)
        if graph.events:
            graph.events[graph.turn].record()
        lengths = np.ones(size, np.int32)
        lengths[:count] = [work.start + 1 for work in works]
        tables = [work.table for work in works] + [[0]] * (size - count)
        graph.plan.update(Rows(np.arange(size + 1, dtype=np.int32), lengths, tables))
        if graph.lora is not None and terms is not None:
            terms.fill(graph.lora, self._resources.adapters, size)
        graph.replay()
        tokens, finite = graph.results
        return graph.logits[:count], tokens[:count], finite[:count], graph.inputs[0, :count]


@dataclass(slots=True)
class PromptGraph:
    """The captured layers of a step of up to a fixed number of rows, with or without prompts."""

    replay: Replay
    plan: FixedAttentionPlan
    sequences: int  # most of a step
    lora: LoraBatch | None  # None without LoRA terms
    embedded: Tensor  # [rows, width], input of the first layer; begins all graphs' buffer
    positions: Tensor  # [rows] or [3, rows] int64
    hidden: Tensor  # [rows, width] after the final norm, written by a replay of any graph


class PromptGraphs(Graphs[PromptGraph]):
    """Captured layers of steps with prompts; `crowded` ones for steps in which many rows decode."""

    rows_per_adapter = 128

    def __init__(
        self,
        resources: StepResources,
        recorder: GraphRecorder,
        sizes: Sequence[int],
        kind: str = PROMPT,
    ) -> None:
        super().__init__(kind, resources, recorder, sizes)
        lmm = resources.lmm
        with torch.inference_mode():  # as in eager steps, or torch compiles the layers twice
            # Of all graphs, as are `DecodeGraphs._logits`.
            shape = (2, max(sizes, default=0), lmm.width)
            self._embedded, self._hidden = torch.zeros(shape, dtype=lmm.dtype, device=lmm.device)

    def sequences_of(self, rows: int) -> int:
        """Most sequences of a graph of so many rows."""
        backend = self._resources.backend
        return min(rows, self._resources.max_requests, backend.max_mixed)

    def _capture(self, size: int, terms: int) -> PromptGraph | None:
        resources, backend, lmm = self._resources, self._resources.backend, self._resources.lmm
        make = backend.crowded_plan if self.kind == CROWDED else backend.mixed_plan
        sequences = self.sequences_of(size)
        plan = self._plan_of(size, lambda: make(sequences, size))
        if plan is None:
            return None
        table = [0] * -(-size // resources.cache.block_size)
        plan.update(Rows(np.array([0, size], np.int32), np.array([size], np.int32), [table]))
        lora = self.typical(size, terms)
        shape = (3, size) if lmm.three_positions else (size,)
        with torch.inference_mode():
            embedded, hidden = self._embedded[:size], self._hidden[:size]
            positions = torch.zeros(shape, dtype=torch.int64, device=lmm.device)

        def run() -> tuple[()]:
            with lmm.linears.scope.text(lora):
                hidden.copy_(lmm.forward(embedded, positions, plan))
            return ()

        replay, _ = self._recorder.record(run)
        return PromptGraph(replay, plan, sequences, lora, embedded, positions, hidden)

    def find(
        self, rows: Rows, terms: LoraTerms | None, visual: VisualRows | None
    ) -> PromptGraph | None:
        """The smallest graph that holds a step."""
        used = int(rows.starts[-1])
        if not self.sizes or used > self.sizes[-1]:
            return None
        if visual is not None and visual.deep:
            return None  # these images also change the output of later layers
        if rows.seen is not None:
            return None  # a graph's rows see the tokens up to their own
        graph = self._best(used, 0 if terms is None else terms.width)
        if graph is None or len(rows.lengths) > graph.sequences:
            return None
        return graph if _holds(graph.plan, rows.tables) else None

    def replay(
        self,
        graph: PromptGraph,
        embedded: Tensor,
        positions: Tensor,
        rows: Rows,
        terms: LoraTerms | None,
    ) -> Tensor:
        """Enqueue the layers of a step on the graph that `find` returned; until the next replay.

        `embedded` and what is returned are [rows, width], `positions` [rows] or [3, rows] int64.
        """
        used, size = len(embedded), len(graph.embedded)
        graph.embedded[:used] = embedded
        graph.positions[..., :used] = positions
        graph.plan.update(rows)
        if graph.lora is not None and terms is not None:
            terms.fill(graph.lora, self._resources.adapters, size)
        graph.replay()
        return graph.hidden[:used]
