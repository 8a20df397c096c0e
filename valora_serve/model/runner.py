"""One step of the model: rows of many requests, with their adapters, through paged attention."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import product
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from valora_kernels.metadata import NONE, LoraBatch
from valora_serve.model.attention.base import Rows
from valora_serve.model.attention.registry import make_backend
from valora_serve.model.lmm import VisualFeatures, VisualRows
from valora_serve.model.sampler import Choice, Likely, likely, sample

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from valora_serve.model.attention.base import FixedAttentionPlan, KVCache
    from valora_serve.model.lmm import Lmm, Visual


T = TypeVar("T")

MOST_SEQUENCES = 256
"""Of a captured step with prompts."""

PROMPT_ROWS = 128
"""Rows of an adapter in a typical step with prompts, for which its tiles are chosen."""


def _steps_to(most: int) -> list[int]:
    """From 1 to `most`, two for each doubling."""
    steps = np.geomspace(1, most, num=1 + 2 * max(most - 1, 0).bit_length())
    return sorted({round(step) for step in steps.tolist()})


@dataclass(slots=True)
class Work:
    """One request's share of a step.

    Attributes:
        place: Of the request among those that run; its last token lies there on the device.
        start: Index of its first token in this step.
        count: How many.
        tokens: They; None for the one token that was generated last.
        table: Its pages.
        adapter: Slot of its adapter, `NONE` for the base model.
        delta: Position minus index, see `Prompt`.
        positions: [3, count] int64, where the prompt's images have their own positions.
        visuals: Visual rows: where in this share, and which rows of which features.
        choice: How the next token is chosen; None if the prompt goes on.
        logprobs: How many log probabilities are wanted; None for none.
        keep: Rows of this share whose hidden states are wanted (heads), None for none.
    """

    place: int
    start: int
    count: int
    tokens: Sequence[int] | None
    table: Sequence[int]
    adapter: int = NONE
    delta: int = 0
    positions: NDArray[np.int64] | None = None
    visuals: Sequence[tuple[NDArray[np.int64], VisualFeatures, NDArray[np.int64]]] = ()
    choice: Choice | None = None
    logprobs: int | None = None
    keep: NDArray[np.int64] | None = None


@dataclass(slots=True)
class StepResult:
    """What a step said, on its way to the host.

    Attributes:
        tokens: [choices] int64, in the order of the works that choose.
        likely: Log probabilities, if anybody wants some.
        hidden: For each work the rows that it wanted, on the device.
    """

    tokens: Tensor
    likely: Likely | None
    hidden: list[Tensor | None]
    _copied: torch.cuda.Event | None = None

    def read(self) -> list[int]:
        """Wait for the tokens."""
        if self._copied is not None:
            self._copied.synchronize()
        ids: list[int] = self.tokens.tolist()
        return ids


@dataclass(frozen=True, slots=True)
class AdapterTable:
    """What the kernels know of the adapters on the device.

    Attributes:
        ranks: [slots] int32, 0 for an empty one.
        scalings: [slots] float32.
    """

    ranks: NDArray[np.int32]
    scalings: NDArray[np.float32]


@dataclass(slots=True)
class _Graph:
    """A captured decode step of so many rows."""

    graph: Any
    plan: FixedAttentionPlan
    lora: LoraBatch | None
    inputs: Tensor
    logits: Tensor
    tokens: Tensor
    staging: list[Tensor] = field(default_factory=list)
    events: list[Any] = field(default_factory=list)
    turn: int = 0


@dataclass(slots=True)
class _PromptGraph:
    """The captured layers of a step of up to so many rows, prompts among them.

    Attributes:
        replay: Computes `hidden` from the others.
        plan: Attention.
        lora: Adapters of the rows, None without any.
        embedded: [rows, width].
        positions: [rows] or [3, rows] int64.
        hidden: [rows, width].
    """

    replay: Callable[[], None]
    plan: FixedAttentionPlan
    lora: LoraBatch | None
    embedded: Tensor
    positions: Tensor
    hidden: Tensor


class ModelRunner:
    """Computes steps.

    Args:
        lmm: The base model.
        cache: Its pages.
        adapters: Adapters on the device.
        backend: Name of the attention library.
        max_tokens: Most rows of a step.
        max_requests: Most requests that run.
        max_adapters: Most distinct adapters of a step.
        graphs: Numbers of rows for which decode steps are captured; none on a CPU.
        prompt_graphs: Numbers of rows for which the layers of steps with prompts are captured; on
            a CPU they run as they are, which tests the bookkeeping.
    """

    def __init__(
        self,
        lmm: Lmm,
        cache: KVCache,
        adapters: AdapterTable,
        *,
        backend: str,
        max_tokens: int,
        max_requests: int,
        max_adapters: int,
        graphs: Sequence[int] = (),
        prompt_graphs: Sequence[int] = (),
    ) -> None:
        self._lmm = lmm
        self._cache = cache
        self._adapters = adapters
        self._device = lmm.device
        self._backend = make_backend(backend, cache)
        self._most_segments = max_adapters + 1
        self._max_requests = max_requests
        # Place `max_requests` belongs to rows that only fill a graph up.
        self._last = torch.zeros(max_requests + 1, dtype=torch.int64, device=self._device)
        self._lora = LoraBatch(max_tokens, self._most_segments, self._device)
        self._sizes = sorted(graphs) if self._device.type == "cuda" else []
        self._graphs: dict[tuple[int, int], _Graph] = {}
        self._prompt_sizes = sorted(prompt_graphs)
        self._prompt_graphs: dict[tuple[int, int], _PromptGraph] = {}
        self._pool: Any = None
        self.has_lora = False
        """Whether any adapter is known: if not, no graph has LoRA in it."""

    # ------------------------------------------------------------------ a step

    def step(self, works: Sequence[Work], merged: int) -> StepResult:
        """Enqueue a step; nothing waits for the device.

        Args:
            works: What each request has computed; no request twice.
            merged: Slot of the adapter in the weights, `NONE` for pristine ones.
        """
        terms = self._terms(works, merged)
        graph = self._graph_for(works, terms)
        with torch.inference_mode():
            if graph is not None:
                return self._replay(graph, works, terms)
            return self._eager(works, terms)

    def _terms(
        self, works: Sequence[Work], merged: int
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]] | None:
        """Adapters and coefficients of every work, [n, 1 or 2] (design.md: rows and terms)."""
        own = np.array([work.adapter for work in works], np.int64)
        if merged == NONE:
            if (own == NONE).all():
                return None
            return own[:, None], np.ones((len(own), 1), np.float32)
        foreign = own != merged
        if not foreign.any():
            return None
        own[~foreign] = NONE
        back = np.where(foreign, merged, NONE)
        return np.stack([own, back], 1), np.tile(np.array([1, -1], np.float32), (len(own), 1))

    def _eager(
        self,
        works: Sequence[Work],
        terms: tuple[NDArray[np.int64], NDArray[np.float32]] | None,
    ) -> StepResult:
        counts = np.array([work.count for work in works], np.int64)
        starts = np.zeros(len(works) + 1, np.int32)
        np.cumsum(counts, out=starts[1:])
        total = int(starts[-1])
        ids = np.zeros(total, np.int64)
        positions = np.empty((3, total), np.int64)
        decoding, places = [], []
        for work, at in zip(works, starts.tolist(), strict=False):
            end = at + work.count
            positions[:, at:end] = np.arange(work.start, work.start + work.count) + work.delta
            if work.positions is not None:
                positions[:, at:end] = work.positions
            if work.tokens is None:
                decoding.append(at)
                places.append(work.place)
            else:
                ids[at:end] = work.tokens
        tokens = self._send(ids)
        if decoding:
            tokens[self._send(np.array(decoding))] = self._last[self._send(np.array(places))]
        where = self._send(positions if self._lmm.three_positions else positions[0])
        lengths = np.array([work.start + work.count for work in works], np.int32)
        rows = Rows(starts, lengths, [work.table for work in works])
        each = None
        if terms is not None:
            each = (np.repeat(terms[0], counts, axis=0), np.repeat(terms[1], counts, axis=0))
        hidden = self._layers(tokens, where, rows, each, self._visual_rows(works, starts))
        kept: list[Tensor | None] = [
            None if work.keep is None else hidden[self._send(work.keep + at)]
            for work, at in zip(works, starts.tolist(), strict=False)
        ]
        choosing = [i for i, work in enumerate(works) if work.choice is not None]
        if not choosing:
            return StepResult(torch.empty(0, dtype=torch.int64), None, kept)
        logits = self._lmm.logits(hidden[self._send(starts[1:][choosing].astype(np.int64) - 1)])
        chosen = [works[i] for i in choosing]
        found = sample(logits, [work.choice for work in chosen if work.choice is not None])
        self._last[self._send(np.array([work.place for work in chosen]))] = found
        return self._result(found, self._likely(chosen, logits, found), kept)

    def _layers(
        self,
        tokens: Tensor,
        where: Tensor,
        rows: Rows,
        terms: tuple[NDArray[np.int64], NDArray[np.float32]] | None,
        visual: VisualRows | None,
    ) -> Tensor:
        """Hidden states of a step, from a graph where one fits; `terms` are those of the rows."""
        graph = self._prompt_graph_for(rows, terms, visual)
        context, table = self._lmm.linears.context, self._adapters
        if graph is None:
            context.text = None
            if terms is not None:
                self._lora.update(terms[0], table.ranks, table.scalings, terms[1])
                context.text = self._lora
            hidden = self._lmm.hidden(tokens, where, self._backend.plan(rows), visual)
            context.text = None
            return hidden
        used, size = len(tokens), len(graph.embedded)
        graph.embedded[:used] = self._lmm.embed(tokens, visual)
        graph.positions[..., :used] = where
        graph.plan.update(rows)
        if graph.lora is not None and terms is not None:
            adapters = np.full((size, terms[0].shape[1]), NONE, np.int64)
            coefficients = np.ones((size, terms[0].shape[1]), np.float32)
            adapters[:used], coefficients[:used] = terms
            graph.lora.update(adapters, table.ranks, table.scalings, coefficients)
        graph.replay()
        return graph.hidden[:used]

    def _prompt_graph_for(
        self,
        rows: Rows,
        terms: tuple[NDArray[np.int64], NDArray[np.float32]] | None,
        visual: VisualRows | None,
    ) -> _PromptGraph | None:
        """The smallest captured step that these rows fit into."""
        used = int(rows.starts[-1])
        if not self._prompt_graphs or used > self._prompt_sizes[-1]:
            return None
        if visual is not None and visual.deep:
            return None  # images that change later layers too
        size = next(size for size in self._prompt_sizes if size >= used)
        if len(rows.lengths) > self._sequences(size):
            return None
        return self._prompt_graphs.get((size, 0 if terms is None else terms[0].shape[1]))

    def _sequences(self, rows: int) -> int:
        """Most sequences of a captured step with prompts."""
        return min(rows, self._max_requests, MOST_SEQUENCES)

    def _visual_rows(self, works: Sequence[Work], starts: NDArray[np.int32]) -> VisualRows | None:
        rows, embeddings, deep = [], [], []
        for work, at in zip(works, starts.tolist(), strict=False):
            for offsets, features, which in work.visuals:
                rows.append(offsets + at)
                whole = len(which) == len(features.embeddings)
                index = None if whole else self._send(which)
                parts = (features.embeddings, *features.deep)
                embeddings.append(parts[0] if index is None else parts[0][index])
                deep.append([part if index is None else part[index] for part in parts[1:]])
        if not rows:
            return None
        together = [torch.cat(layer) for layer in zip(*deep, strict=True)]
        return VisualRows(self._send(np.concatenate(rows)), torch.cat(embeddings), together)

    def _likely(self, works: Sequence[Work], logits: Tensor, tokens: Tensor) -> Likely | None:
        wanted = [work.logprobs for work in works if work.logprobs is not None]
        return likely(logits, tokens, max(wanted)) if wanted else None

    def _result(
        self, tokens: Tensor, found: Likely | None, kept: list[Tensor | None]
    ) -> StepResult:
        if self._device.type != "cuda":
            return StepResult(tokens, found, kept)
        host = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
        host.copy_(tokens, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()
        return StepResult(host, found, kept, copied)

    def _send(self, values: NDArray[Any]) -> Tensor:
        host = torch.from_numpy(np.ascontiguousarray(values))
        if self._device.type != "cuda":
            return host
        return host.pin_memory().to(self._device, non_blocking=True)

    # ------------------------------------------------------------------ CUDA graphs

    def _graph_for(
        self,
        works: Sequence[Work],
        terms: tuple[NDArray[np.int64], NDArray[np.float32]] | None,
    ) -> _Graph | None:
        """The captured step that fits, if all rows decode."""
        if not self._sizes or len(works) > self._sizes[-1]:
            return None
        if any(w.tokens is not None or w.choice is None or w.keep is not None for w in works):
            return None
        size = next(size for size in self._sizes if size >= len(works))
        return self._graphs.get((size, 0 if terms is None else terms[0].shape[1]))

    def capture(self, terms: Sequence[int] = (0, 1, 2)) -> int:
        """Capture decode steps of all sizes, largest first, so that they share memory.

        Args:
            terms: LoRA terms a row: 0 none, 1 for unmerged, 2 for mixture.

        Returns:
            How many graphs there are now.
        """
        for count in terms:
            if count and not self.has_lora:
                continue
            for size in reversed(self._prompt_sizes):
                if (size, count) not in self._prompt_graphs:
                    found = self._capture_prompt(size, count)
                    if found is None:
                        self._prompt_sizes = []
                        break
                    self._prompt_graphs[size, count] = found
            for size in reversed(self._sizes):
                if (size, count) not in self._graphs:
                    graph = self._capture(size, count)
                    if graph is None:
                        self._sizes = []
                        return 0
                    self._graphs[size, count] = graph
        return len(self._graphs) + len(self._prompt_graphs)

    @property
    def captured_prompts(self) -> tuple[int, ...]:
        """Rows of the steps with prompts that have graphs, ascending."""
        return tuple(self._prompt_sizes) if self._prompt_graphs else ()

    def rehearse(self, terms: Sequence[int] = (0, 1, 2)) -> None:
        """Run what steps without a graph may need: kernels are compiled at their first use.

        Which tiles LoRA takes depends on a step's rows and adapters; each new one would halt all
        running requests for up to a second.

        Args:
            terms: LoRA terms a row, as in `capture`.
        """
        most = self._lora.max_rows
        least = min(max(self.captured_prompts, default=0) + 1, most)
        groups = {
            (group.spec.in_features, group.spec.out_features): group
            for group in self._lmm.linears.groups.values()
            if group.spec.part == "text" and group.lora is not None
        }
        context = self._lmm.linears.context
        with torch.inference_mode():
            for count in terms if self.has_lora else (0,):
                context.text = self._lora if count else None
                self._rehearse_layers(min(2 * least, most), count)
                if not count:
                    continue
                for active, distinct in product(
                    _steps_to(most), _steps_to(self._most_segments - 1)
                ):
                    if distinct > active:
                        continue
                    rows = max(active, least)
                    self._typical(self._lora, rows, count, active, distinct)
                    for group in groups.values():
                        shape = (rows, group.spec.in_features)
                        x = torch.zeros(shape, dtype=self._lmm.dtype, device=self._device)
                        group.compute(x)
        context.text = None
        if context.last is not None:
            context.last.forget()

    def _rehearse_layers(self, rows: int, terms: int) -> None:
        """A step of one prompt; its keys and values go where graphs put those of unused rows."""
        shape = (3, rows) if self._lmm.three_positions else (rows,)
        positions = torch.zeros(shape, dtype=torch.int64, device=self._device)
        table = [0] * -(-rows // self._cache.block_size)
        plan = self._backend.plan(
            Rows(np.array([0, rows], np.int32), np.array([rows], np.int32), [table])
        )
        if terms:
            self._typical(self._lora, rows, terms, rows, 1)
        self._lmm.hidden(positions.new_zeros(rows), positions, plan)

    def forget_graphs(self) -> None:
        """Weights or adapters' memory have moved: capture again."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._graphs.clear()
        self._prompt_graphs.clear()

    def _capture_prompt(self, size: int, terms: int) -> _PromptGraph | None:
        plan = self._backend.mixed_plan(self._sequences(size), size)
        if plan is None:
            return None
        device, lmm = self._device, self._lmm
        table = [0] * -(-size // self._cache.block_size)
        plan.update(Rows(np.array([0, size], np.int32), np.array([size], np.int32), [table]))
        lora = None
        if terms:
            lora = LoraBatch(size, min(size, self._most_segments), device, fixed=True)
            self._typical(lora, size, terms, size, size // PROMPT_ROWS)
        shape = (3, size) if lmm.three_positions else (size,)
        with torch.inference_mode():  # as in steps without a graph, or layers are compiled twice
            embedded = torch.zeros((size, lmm.width), dtype=lmm.dtype, device=device)
            positions = torch.zeros(shape, dtype=torch.int64, device=device)

        def run() -> Tensor:
            lmm.linears.context.text = lora
            hidden = lmm.forward(embedded, positions, plan)
            lmm.linears.context.text = None
            return hidden

        if device.type != "cuda":
            hidden = torch.zeros_like(embedded)

            def again() -> None:
                hidden.copy_(run())

            return _PromptGraph(again, plan, lora, embedded, positions, hidden)
        graph, hidden = self._record(run)
        return _PromptGraph(graph.replay, plan, lora, embedded, positions, hidden)

    def _record(self, run: Callable[[], T]) -> tuple[Any, T]:
        """Warm a function up and capture it; all graphs share their memory."""
        with torch.inference_mode():
            stream = torch.cuda.Stream(self._device)
            stream.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(stream):
                for _ in range(2):
                    run()
            torch.cuda.current_stream(self._device).wait_stream(stream)
            torch.cuda.synchronize(self._device)
            graph = torch.cuda.CUDAGraph()
            # Adapters may be packed in another thread meanwhile, which locks host memory.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                found = run()
        if self._pool is None:
            self._pool = graph.pool()
        return graph, found

    def _capture(self, size: int, terms: int) -> _Graph | None:
        plan = self._backend.decode_plan(size)
        if plan is None:
            return None
        device, lmm = self._device, self._lmm
        rows = Rows(np.arange(size + 1, dtype=np.int32), np.ones(size, np.int32), [[0]] * size)
        plan.update(rows)
        lora = None
        if terms:
            lora = LoraBatch(size, min(size, self._most_segments), device, fixed=True)
            self._typical(lora, size, terms, size, size // 2)
        with torch.inference_mode():
            inputs = torch.zeros((4, size), dtype=torch.int64, device=device)
            inputs[0] = self._max_requests

        def run() -> tuple[Tensor, Tensor]:
            lmm.linears.context.text = lora
            positions = inputs[1:] if lmm.three_positions else inputs[1]
            hidden = lmm.hidden(self._last[inputs[0]], positions, plan)
            logits = lmm.logits(hidden)
            tokens = logits.argmax(-1)
            self._last[inputs[0]] = tokens
            lmm.linears.context.text = None
            return logits, tokens

        graph, (logits, tokens) = self._record(run)
        found = _Graph(graph, plan, lora, inputs, logits, tokens)
        found.staging = [torch.empty((4, size), dtype=torch.int64).pin_memory() for _ in "ab"]
        found.events = [torch.cuda.Event() for _ in "ab"]
        return found

    def _typical(self, lora: LoraBatch, size: int, terms: int, active: int, distinct: int) -> None:
        """A mix that the tables may choose tiles for; a graph serves every other one too.

        Args:
            lora: The batch to fill.
            size: Its rows.
            terms: LoRA terms a row.
            active: The first so many rows have adapters.
            distinct: Adapters, if there may be that many.
        """
        slots = len(self._adapters.ranks)
        rank = max(int(self._adapters.ranks.max(initial=0)), 8)
        distinct = max(1, min(slots + 1 - terms, self._most_segments - 1, distinct))
        own = np.full((size, terms), NONE, np.int64)
        own[:active, 0] = np.arange(active) * distinct // active
        # A single slot has no second adapter, and then no row ever has two terms.
        own[:active, 1:] = min(distinct, slots - 1)
        coefficients = np.tile(np.array([1, -1], np.float32)[:terms], (size, 1))
        ranks = np.full(slots, rank, np.int32)
        lora.update(own, ranks, np.ones(slots, np.float32), coefficients)

    def _replay(
        self,
        graph: _Graph,
        works: Sequence[Work],
        terms: tuple[NDArray[np.int64], NDArray[np.float32]] | None,
    ) -> StepResult:
        size, count = graph.inputs.shape[1], len(works)
        graph.turn ^= 1
        graph.events[graph.turn].synchronize()  # its copy was enqueued two steps ago
        staging = graph.staging[graph.turn].numpy()
        staging[0, count:] = self._max_requests
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
            adapters = np.full((size, terms[0].shape[1]), NONE, np.int64)
            coefficients = np.ones((size, terms[0].shape[1]), np.float32)
            adapters[:count], coefficients[:count] = terms
            table = self._adapters
            graph.lora.update(adapters, table.ranks, table.scalings, coefficients)
        graph.graph.replay()
        tokens, found = graph.tokens[:count], None
        choices = [work.choice for work in works if work.choice is not None]
        plain = all(choice.plain for choice in choices)
        if not plain or any(work.logprobs is not None for work in works):
            logits = graph.logits[:count]
            if not plain:
                tokens = sample(logits, choices)
                self._last[graph.inputs[0, :count]] = tokens
            found = self._likely(works, logits, tokens)
        return self._result(tokens, found, [None] * count)

    # ------------------------------------------------------------------ images

    def encode(self, visuals: Sequence[Visual], adapters: Sequence[int]) -> list[VisualFeatures]:
        """Encode images or videos of one kind and shape together.

        Args:
            visuals: They.
            adapters: Slot of the adapter that changes each one's encoding, `NONE` for none.
        """
        context = self._lmm.linears.context
        own = np.array(adapters, np.int64)
        if (own != NONE).any():
            weights = np.array([visual.tensors[next(iter(visual.tensors))].shape[0]
                                for visual in visuals], np.int64)  # fmt: skip
            table = self._adapters
            batches: dict[int, LoraBatch] = {}

            def batch(rows: int) -> LoraBatch:
                if rows not in batches:
                    each = weights * rows // int(weights.sum())
                    batches[rows] = LoraBatch(rows, len(own), self._device)
                    batches[rows].update(np.repeat(own, each), table.ranks, table.scalings)
                return batches[rows]

            context.vision = batch
        try:
            with torch.inference_mode():
                return self._lmm.encode(visuals)
        finally:
            context.vision = None
