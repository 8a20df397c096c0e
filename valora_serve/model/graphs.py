"""Captured steps: CUDA graphs of decode steps, and of the layers of steps with prompts.

A graph replays kernels with the arguments of its capture, so its inputs lie in buffers of fixed
size and address, and smaller steps are padded. Graphs are captured for some numbers of rows, and
for zero, one and two LoRA terms per row.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
import torch

from valora_kernels.metadata import LoraBatch
from valora_serve.model.attention.base import Rows
from valora_serve.model.finite import finite_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from valora_serve.model.attention.base import FixedAttentionPlan
    from valora_serve.model.lmm import VisualRows
    from valora_serve.model.work import LoraTerms, StepResources, Work

T = TypeVar("T")
G = TypeVar("G")

MAX_SEQUENCES_WITH_PROMPTS = 256
"""Largest number of sequences in a captured step with prompts."""

TYPICAL_ROWS_PER_ADAPTER = 128
"""Rows of one adapter in a typical step with prompts, by which its LoRA tiles are chosen."""


class GraphRecorder:
    """Captures functions as CUDA graphs, which all share one memory pool.

    Args:
        device: The GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None

    def record(self, run: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
        """Warm a function up and capture it; returns the graph and the function's result."""
        with torch.inference_mode():
            stream = torch.cuda.Stream(self._device)
            stream.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(stream):
                run()  # compiles kernels, which a capture cannot
            torch.cuda.current_stream(self._device).wait_stream(stream)
            torch.cuda.synchronize(self._device)
            graph = torch.cuda.CUDAGraph()
            # Another thread may pack adapters meanwhile, which locks host memory.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                found = run()
        if self._pool is None:
            self._pool = graph.pool()
        return graph, found

    def forget(self) -> None:
        """Take a new pool from now on; all graphs are dropped.

        torch refuses to capture into a pool that no graph uses any more.
        """
        self._pool = None


@dataclass(slots=True)
class DecodeGraph:
    """A captured decode step of a fixed number of rows, from last tokens to next tokens.

    Attributes:
        graph: The CUDA graph.
        plan: Attention of the rows.
        lora: Adapters of the rows; None without LoRA terms.
        inputs: [4, rows] int64 on the device: each row's place in `StepResources.last_tokens`,
            and its position in time, height and width.
        logits: [rows, vocabulary] float32, written by a replay.
        tokens: [rows] int64, argmax of the logits, written by a replay.
        finite: [rows] bool, whether the logits are finite, written by a replay.
        staging: Two page-locked copies of `inputs`, used in turn.
        events: For each staging buffer, the end of its last copy to the device.
        turn: Index of the staging buffer used last.
    """

    graph: torch.cuda.CUDAGraph
    plan: FixedAttentionPlan
    lora: LoraBatch | None
    inputs: Tensor
    logits: Tensor
    tokens: Tensor
    finite: Tensor
    staging: list[Tensor]
    events: list[torch.cuda.Event]
    turn: int = 0


class _Graphs(ABC, Generic[G]):
    """Captured steps of one kind by their number of rows and of LoRA terms.

    Args:
        resources: Model, KV cache and adapters of the steps.
        recorder: Recorder that captures the graphs.
        sizes: Numbers of rows to capture.
    """

    def __init__(
        self, resources: StepResources, recorder: GraphRecorder, sizes: Sequence[int]
    ) -> None:
        self._resources, self._recorder = resources, recorder
        self._sizes = sorted(sizes)
        self._graphs: dict[tuple[int, int], G] = {}

    def __len__(self) -> int:
        """Number of graphs."""
        return len(self._graphs)

    def forget(self) -> None:
        """Drop all graphs."""
        self._graphs.clear()

    def capture(self, terms: int) -> None:
        """Capture all sizes, the largest first, so that the others fit into its memory."""
        for size in reversed(self._sizes):
            if (size, terms) not in self._graphs:
                graph = self._capture(size, terms)
                if graph is None:
                    self._sizes = []
                    return
                self._graphs[size, terms] = graph

    @abstractmethod
    def _capture(self, size: int, terms: int) -> G | None:
        """Capture one step; None if the attention backend has no plan for it."""


class DecodeGraphs(_Graphs[DecodeGraph]):
    """Captured decode steps by their number of rows and of LoRA terms.

    Args:
        resources: Model, KV cache and adapters of the steps.
        recorder: Recorder that captures the graphs.
        sizes: Numbers of rows to capture; none where there is no GPU.
    """

    def _capture(self, size: int, terms: int) -> DecodeGraph | None:
        resources = self._resources
        plan = resources.backend.decode_plan(size)
        if plan is None:
            return None
        lmm, last_tokens = resources.lmm, resources.last_tokens
        rows = Rows(np.arange(size + 1, dtype=np.int32), np.ones(size, np.int32), [[0]] * size)
        plan.update(rows)
        lora = None
        if terms:
            lora = LoraBatch(size, min(size, resources.max_segments), lmm.device, fixed=True)
            resources.fill_typical(lora, size, terms, size, size // 2)
        with torch.inference_mode():
            inputs = torch.zeros((4, size), dtype=torch.int64, device=lmm.device)
            inputs[0] = resources.max_requests

        def run() -> tuple[Tensor, Tensor, Tensor]:
            with lmm.linears.scope.text(lora):
                positions = inputs[1:] if lmm.three_positions else inputs[1]
                hidden = lmm.hidden(last_tokens[inputs[0]], positions, plan)
                logits = lmm.logits(hidden)
                tokens = logits.argmax(-1)
                last_tokens[inputs[0]] = tokens
            return logits, tokens, finite_rows(logits)

        graph, (logits, tokens, finite) = self._recorder.record(run)
        staging = [torch.empty((4, size), dtype=torch.int64).pin_memory() for _ in range(2)]
        events = [torch.cuda.Event() for _ in range(2)]
        return DecodeGraph(graph, plan, lora, inputs, logits, tokens, finite, staging, events)

    def find(self, works: Sequence[Work], terms: LoraTerms | None) -> DecodeGraph | None:
        """The smallest graph that holds a step; None unless all its works only decode."""
        if not self._sizes or len(works) > self._sizes[-1]:
            return None
        if any(w.tokens is not None or w.choice is None or w.keep is not None for w in works):
            return None
        size = next(size for size in self._sizes if size >= len(works))
        return self._graphs.get((size, 0 if terms is None else terms.width))

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
        graph.events[graph.turn].synchronize()  # its copy was enqueued two steps ago
        staging = graph.staging[graph.turn].numpy()
        staging[0, count:] = self._resources.max_requests
        staging[1:, count:] = 0
        staging[0, :count] = [work.place for work in works]
        staging[1:, :count] = [work.start + work.delta for work in works]
        graph.inputs.copy_(graph.staging[graph.turn], non_blocking=True)
        graph.events[graph.turn].record()
        lengths = np.ones(size, np.int32)
        lengths[:count] = [work.start + 1 for work in works]
        tables = [work.table for work in works] + [[0]] * (size - count)
        graph.plan.update(Rows(np.arange(size + 1, dtype=np.int32), lengths, tables))
        if graph.lora is not None and terms is not None:
            self._resources.adapters.fill(graph.lora, terms.padded(size))
        graph.graph.replay()
        places = graph.inputs[0, :count]
        return graph.logits[:count], graph.tokens[:count], graph.finite[:count], places


@dataclass(slots=True)
class PromptGraph:
    """The captured layers of a step of up to a fixed number of rows, with or without prompts.

    Attributes:
        replay: Computes `hidden` from the other buffers.
        plan: Attention of the rows.
        lora: Adapters of the rows; None without LoRA terms.
        embedded: [rows, width], input of the first layer.
        positions: [rows] or [3, rows] int64.
        hidden: [rows, width], hidden states after the final norm, written by a replay.
    """

    replay: Callable[[], None]
    plan: FixedAttentionPlan
    lora: LoraBatch | None
    embedded: Tensor
    positions: Tensor
    hidden: Tensor


class PromptGraphs(_Graphs[PromptGraph]):
    """Captured layers of steps with prompts, by their number of rows and of LoRA terms.

    On a CPU the layers run eagerly in the same fixed buffers, so that tests cover the bookkeeping.

    Args:
        resources: Model, KV cache and adapters of the steps.
        recorder: Recorder that captures the graphs.
        sizes: Numbers of rows to capture.
    """

    @property
    def sizes(self) -> tuple[int, ...]:
        """Numbers of rows of the captured steps, ascending."""
        return tuple(self._sizes) if self._graphs else ()

    def _max_sequences(self, rows: int) -> int:
        """Largest number of sequences in a captured step of `rows` rows."""
        return min(rows, self._resources.max_requests, MAX_SEQUENCES_WITH_PROMPTS)

    def _capture(self, size: int, terms: int) -> PromptGraph | None:
        resources, lmm = self._resources, self._resources.lmm
        plan = resources.backend.mixed_plan(self._max_sequences(size), size)
        if plan is None:
            return None
        table = [0] * -(-size // resources.cache.block_size)
        plan.update(Rows(np.array([0, size], np.int32), np.array([size], np.int32), [table]))
        lora = None
        if terms:
            lora = LoraBatch(size, min(size, resources.max_segments), lmm.device, fixed=True)
            resources.fill_typical(lora, size, terms, size, size // TYPICAL_ROWS_PER_ADAPTER)
        shape = (3, size) if lmm.three_positions else (size,)
        with torch.inference_mode():  # as in eager steps, or torch compiles the layers twice
            embedded = torch.zeros((size, lmm.width), dtype=lmm.dtype, device=lmm.device)
            positions = torch.zeros(shape, dtype=torch.int64, device=lmm.device)

        def run() -> Tensor:
            with lmm.linears.scope.text(lora):
                return lmm.forward(embedded, positions, plan)

        if lmm.device.type != "cuda":
            hidden = torch.zeros_like(embedded)

            def run_eagerly() -> None:
                hidden.copy_(run())

            return PromptGraph(run_eagerly, plan, lora, embedded, positions, hidden)
        graph, hidden = self._recorder.record(run)
        return PromptGraph(graph.replay, plan, lora, embedded, positions, hidden)

    def find(
        self, rows: Rows, terms: LoraTerms | None, visual: VisualRows | None
    ) -> PromptGraph | None:
        """The smallest graph that holds a step."""
        used = int(rows.starts[-1])
        if not self._graphs or used > self._sizes[-1]:
            return None
        if visual is not None and visual.deep:
            return None  # these images also change the output of later layers
        size = next(size for size in self._sizes if size >= used)
        if len(rows.lengths) > self._max_sequences(size):
            return None
        return self._graphs.get((size, 0 if terms is None else terms.width))

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
            self._resources.adapters.fill(graph.lora, terms.padded(size))
        graph.replay()
        return graph.hidden[:used]
