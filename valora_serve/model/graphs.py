"""Captured steps: CUDA graphs of decode steps, and of the layers of steps with prompts.

`vision_graphs` captures the encoding of images, which comes before them.

A graph replays kernels with the arguments of its capture, so its inputs lie in buffers of fixed
size and address, and smaller steps are padded. Graphs are captured for some numbers of rows, and
for zero, one and two LoRA terms per row.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar

import numpy as np
import torch

from valora_kernels.metadata import LoraBatch
from valora_serve.model.attention.base import Rows, pinned
from valora_serve.model.finite import finite_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from valora_serve.model.attention.base import FixedAttentionPlan
    from valora_serve.model.lmm import VisualRows
    from valora_serve.model.work import LoraTerms, StepResources, Work

    Replay: TypeAlias = Callable[[], None]

G = TypeVar("G")

TYPICAL_ROWS_PER_ADAPTER = 128
"""Rows of one adapter in a typical step with prompts, by which its LoRA tiles are chosen."""


class GraphRecorder:
    """Captures functions as CUDA graphs, which all share one memory pool.

    Without a GPU the functions run again at each replay, so that tests cover the bookkeeping.

    Args:
        device: The device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None

    def record(
        self, run: Callable[[], tuple[Tensor, ...]], result: Callable[[], tuple[Tensor, ...]]
    ) -> tuple[Replay, tuple[Tensor, ...]]:
        """Warm a function up and capture it.

        Args:
            run: A function of buffers of fixed address.
            result: Returns buffers for its result, where it is not captured.

        Returns:
            What replays it, and its result, which a replay overwrites.
        """
        with torch.inference_mode():
            if self._device.type != "cuda":
                buffers = result()
                return partial(_run_into, run, buffers), buffers
            # This compiles kernels, which a capture cannot. On the stream of eager steps, as torch
            # keeps the memory of each stream for that stream.
            run()
            torch.cuda.synchronize(self._device)
            graph = torch.cuda.CUDAGraph()
            # Another thread may pack adapters meanwhile, which locks host memory.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                found = run()
        if self._pool is None:
            self._pool = graph.pool()
        return graph.replay, found

    def forget(self) -> None:
        """Take a new pool from now on; all graphs are dropped.

        torch refuses to capture into a pool that no graph uses any more.
        """
        self._pool = None


def _run_into(run: Callable[[], tuple[Tensor, ...]], buffers: Sequence[Tensor]) -> None:
    for buffer, new in zip(buffers, run(), strict=True):
        buffer.copy_(new)


def _holds(plan: FixedAttentionPlan, tables: Sequence[Sequence[int]]) -> bool:
    """Return whether a plan has room for the page tables of a step."""
    return plan.max_pages is None or sum(map(len, tables)) <= plan.max_pages


@dataclass(slots=True)
class DecodeGraph:
    """A captured decode step of a fixed number of rows, from last tokens to next tokens.

    Attributes:
        graph: Replays the CUDA graph.
        plan: Attention of the rows.
        lora: Adapters of the rows; None without LoRA terms.
        inputs: [4, rows] int64 on the device: each row's place in `StepResources.last_tokens`,
            and its position in time, height and width.
        logits: [rows, vocabulary] float32, written by a replay of any graph.
        tokens: [rows] int64, argmax of the logits, written by a replay.
        finite: [rows] bool, whether the logits are finite, written by a replay.
        staging: Two page-locked copies of `inputs`, used in turn.
        events: For each staging buffer, the end of its last copy to the device; none on a CPU.
        turn: Index of the staging buffer used last.
    """

    graph: Replay
    plan: FixedAttentionPlan
    lora: LoraBatch | None
    inputs: Tensor
    logits: Tensor
    tokens: Tensor
    finite: Tensor
    staging: list[Tensor]
    events: list[torch.cuda.Event]
    turn: int = 0


class Graphs(ABC, Generic[G]):
    """Captured steps of one kind by their number of rows and of LoRA terms.

    Args:
        resources: Model, KV cache and adapters of the steps.
        recorder: Recorder that captures the graphs.
        sizes: Numbers of rows to capture.

    Attributes:
        missed: Sizes and terms of steps that wanted a graph that is not captured yet, oldest first.
    """

    def __init__(
        self, resources: StepResources, recorder: GraphRecorder, sizes: Sequence[int]
    ) -> None:
        self._resources, self._recorder = resources, recorder
        self._sizes = sorted(sizes)
        self._graphs: dict[tuple[int, int], G] = {}
        self._plans: dict[int, FixedAttentionPlan] = {}
        self._stale: set[tuple[int, int]] = set()  # are replayed until they are captured again
        self._given_up: set[int] = set()  # sizes of which no more graphs are captured
        self.missed: dict[tuple[int, int], None] = {}

    def __len__(self) -> int:
        """Number of graphs."""
        return len(self._graphs)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Numbers of rows of the steps that are or will be captured, ascending."""
        return tuple(self._sizes)

    def forget(self) -> None:
        """Drop all graphs."""
        self._graphs.clear()
        self._stale.clear()
        self._given_up.clear()
        self.missed.clear()

    def renew_plans(self) -> None:
        """Capture all graphs again, as another backend attends; steps replay them until then."""
        self._plans = {}
        self._stale.update(self._graphs)

    def missing(self, terms: int) -> list[int]:
        """Return the sizes that are not captured, or are out of date, the largest first."""
        return [size for size in reversed(self._sizes) if self._is_missing(size, terms)]

    def _is_missing(self, size: int, terms: int) -> bool:
        if size in self._given_up:
            return False
        return (size, terms) not in self._graphs or (size, terms) in self._stale

    def give_up(self, size: int) -> None:
        """Capture a size no more; graphs that are there, larger ones or eager steps compute it."""
        self._given_up.add(size)
        self._stale = {key for key in self._stale if key[0] != size}
        if all(captured != size for captured, _ in self._graphs):
            self._sizes = [other for other in self._sizes if other != size]
        self._plans.pop(size, None)
        self.missed.clear()

    def capture(self, terms: int) -> None:
        """Capture all sizes, the largest first, so that the others fit into its memory."""
        for size in self.missing(terms):
            self.capture_one(size, terms)

    def capture_one(self, size: int, terms: int) -> bool:
        """Capture one size if it is `missing`; return False if the backend has no graphs."""
        self.missed.pop((size, terms), None)
        if size in self._sizes and self._is_missing(size, terms):
            graph = self._capture(size, terms)
            if graph is None:
                self._sizes = []
            else:
                self._graphs[size, terms] = graph
                self._stale.discard((size, terms))
        return bool(self._sizes)

    def captured(self) -> list[tuple[int, int]]:
        """Return the sizes and terms that are captured."""
        return list(self._graphs)

    def recapture(self, size: int, terms: int) -> None:
        """Capture one size again; steps replay what there was until then."""
        if (size, terms) in self._graphs and (graph := self._capture(size, terms)) is not None:
            self._graphs[size, terms] = graph
            self._stale.discard((size, terms))

    def _best(self, rows: int, terms: int) -> G | None:
        """Return the smallest captured step of at least so many rows, and note what is missing."""
        first = bisect_left(self._sizes, rows)
        for size in self._sizes[first:]:
            if size == self._sizes[first] and self._is_missing(size, terms):
                self.missed[size, terms] = None
            graph = self._graphs.get((size, terms))
            if graph is not None:
                return graph
        return None

    def typical(self, size: int, terms: int) -> LoraBatch | None:
        """Return typical adapters of a step, for which its graph is captured; None without any."""
        return None

    def _plan_of(
        self, size: int, make: Callable[[], FixedAttentionPlan | None]
    ) -> FixedAttentionPlan | None:
        """The plan of a size: its graphs share one, as a step is planned just before its replay."""
        if size not in self._plans:
            made = make()
            if made is None:
                return None
            self._plans[size] = made
        return self._plans[size]

    @abstractmethod
    def _capture(self, size: int, terms: int) -> G | None:
        """Capture one step; None if the attention backend has no plan for it."""


class DecodeGraphs(Graphs[DecodeGraph]):
    """Captured decode steps by their number of rows and of LoRA terms.

    Args:
        resources: Model, KV cache and adapters of the steps.
        recorder: Recorder that captures the graphs.
        sizes: Numbers of rows to capture.
    """

    def __init__(
        self, resources: StepResources, recorder: GraphRecorder, sizes: Sequence[int]
    ) -> None:
        super().__init__(resources, recorder, sizes)
        lmm = resources.lmm
        # Of all graphs: what one has written is read before the next is replayed.
        self._logits = torch.zeros((max(sizes, default=0), lmm.vocabulary), device=lmm.device)

    def typical(self, size: int, terms: int) -> LoraBatch | None:
        """Return a batch in which every other row has an adapter of its own."""
        return self._resources.typical_batch(size, terms, size // 2) if terms else None

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

        def result() -> tuple[Tensor, ...]:
            tokens = torch.zeros(size, dtype=torch.int64, device=lmm.device)
            return tokens, torch.zeros_like(tokens, dtype=torch.bool)

        graph, (tokens, finite) = self._recorder.record(run, result)
        staging = [pinned(np.zeros((4, size), np.int64)) for _ in range(2)]
        events = [torch.cuda.Event() for _ in range(2)] if lmm.device.type == "cuda" else []
        return DecodeGraph(graph, plan, lora, inputs, logits, tokens, finite, staging, events)

    def find(self, works: Sequence[Work], terms: LoraTerms | None) -> DecodeGraph | None:
        """The smallest graph that holds a step; None unless all its works only decode."""
        if not self._sizes or len(works) > self._sizes[-1]:
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
        """Enqueue a decode step.

        Args:
            graph: The graph that `find` returned for the step.
            works: The works of the step.
            terms: Their LoRA terms.

        Returns:
            Of every work: its logits [works, vocabulary] float32, their argmax [works] int64,
            whether they are finite [works] bool, and its place in `StepResources.last_tokens`
            [works] int64.
        """
        size, count = graph.inputs.shape[1], len(works)
        graph.turn ^= 1
        if graph.events:
            graph.events[graph.turn].synchronize()  # its copy was enqueued two steps ago
        staging = graph.staging[graph.turn].numpy()
        staging[0, count:] = self._resources.max_requests
        staging[1:, count:] = 0
        staging[0, :count] = [work.place for work in works]
        staging[1:, :count] = [work.start + work.delta for work in works]
        graph.inputs.copy_(graph.staging[graph.turn], non_blocking=True)
        if graph.events:
            graph.events[graph.turn].record()
        lengths = np.ones(size, np.int32)
        lengths[:count] = [work.start + 1 for work in works]
        tables = [work.table for work in works] + [[0]] * (size - count)
        graph.plan.update(Rows(np.arange(size + 1, dtype=np.int32), lengths, tables))
        if graph.lora is not None and terms is not None:
            self._resources.adapters.fill(graph.lora, terms, size)
        graph.graph()
        places = graph.inputs[0, :count]
        return graph.logits[:count], graph.tokens[:count], graph.finite[:count], places


@dataclass(slots=True)
class PromptGraph:
    """The captured layers of a step of up to a fixed number of rows, with or without prompts.

    Attributes:
        replay: Computes `hidden` from the other buffers.
        plan: Attention of the rows.
        sequences: Most sequences of a step.
        lora: Adapters of the rows; None without LoRA terms.
        embedded: [rows, width], input of the first layer; other graphs begin with the same rows.
        positions: [rows] or [3, rows] int64.
        hidden: [rows, width], hidden states after the final norm, written by a replay of any graph.
    """

    replay: Callable[[], None]
    plan: FixedAttentionPlan
    sequences: int
    lora: LoraBatch | None
    embedded: Tensor
    positions: Tensor
    hidden: Tensor


class PromptGraphs(Graphs[PromptGraph]):
    """Captured layers of steps with prompts, by their number of rows and of LoRA terms.

    Args:
        resources: Model, KV cache and adapters of the steps.
        recorder: Recorder that captures the graphs.
        sizes: Numbers of rows to capture.
        crowded: Whether they are for steps in which many rows decode.
    """

    def __init__(
        self,
        resources: StepResources,
        recorder: GraphRecorder,
        sizes: Sequence[int],
        *,
        crowded: bool = False,
    ) -> None:
        super().__init__(resources, recorder, sizes)
        lmm = resources.lmm
        self._crowded = crowded
        with torch.inference_mode():  # as in eager steps, or torch compiles the layers twice
            # Of all graphs, as are `DecodeGraphs._logits`.
            shape = (2, max(sizes, default=0), lmm.width)
            self._embedded, self._hidden = torch.zeros(shape, dtype=lmm.dtype, device=lmm.device)

    def typical(self, size: int, terms: int) -> LoraBatch | None:
        """Return a batch of prompts, each with an adapter of its own."""
        distinct = size // TYPICAL_ROWS_PER_ADAPTER
        return self._resources.typical_batch(size, terms, distinct) if terms else None

    def sequences_of(self, rows: int) -> int:
        """Most sequences of a graph of so many rows."""
        backend = self._resources.backend
        return min(rows, self._resources.max_requests, backend.most_mixed)

    def _capture(self, size: int, terms: int) -> PromptGraph | None:
        resources, backend, lmm = self._resources, self._resources.backend, self._resources.lmm
        make = backend.crowded_plan if self._crowded else backend.mixed_plan
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

        replay, _ = self._recorder.record(run, tuple)
        return PromptGraph(replay, plan, sequences, lora, embedded, positions, hidden)

    def find(
        self, rows: Rows, terms: LoraTerms | None, visual: VisualRows | None
    ) -> PromptGraph | None:
        """The smallest graph that holds a step."""
        used = int(rows.starts[-1])
        if not self._sizes or used > self._sizes[-1]:
            return None
        if visual is not None and visual.deep:
            return None  # these images also change the output of later layers
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
        """Enqueue the layers of a step.

        Args:
            graph: The graph that `find` returned for the step.
            embedded: [rows, width], input of the first layer.
            positions: [rows] or [3, rows] int64.
            rows: The rows.
            terms: LoRA terms of the rows.

        Returns:
            [rows, width] hidden states after the final norm; the next replay overwrites them.
        """
        used, size = len(embedded), len(graph.embedded)
        graph.embedded[:used] = embedded
        graph.positions[..., :used] = positions
        graph.plan.update(rows)
        if graph.lora is not None and terms is not None:
            self._resources.adapters.fill(graph.lora, terms, size)
        graph.replay()
        return graph.hidden[:used]
