"""CUDA graphs of decode steps, of the layers of steps with prompts, and of vision encoders.

A graph's inputs lie in buffers of fixed size and address, and smaller steps are padded. Graphs are
captured for some numbers of rows, each with zero, one and two LoRA terms per row; of images of one
shape for some numbers of them, or for some numbers of windows of an image of any shape.
"""

import logging
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from valora_data.models.base import IMAGE, PIXELS
from valora_kernels.metadata import LoraBatch
from valora_serve.model.attention.base import FixedAttentionPlan, Rows, pinned, to_device
from valora_serve.model.lmm import VisualRows
from valora_serve.model.prompt import Visual, VisualFeatures
from valora_serve.model.sampler import finite_rows
from valora_serve.model.work import (
    CROWDED,
    DECODE,
    PROMPT,
    VISION,
    LoraTerms,
    Preparation,
    Replay,
    StepResources,
    Work,
)

log = logging.getLogger(__name__)

WINDOWS = (4, 8, 16, 32, 64, 128)  # numbers that are captured; a window has 112 × 112 pixels
KNOWN = 256  # image sizes whose arrangement stays on the device


@dataclass(slots=True)
class Graph:
    """A captured function of buffers, of fixed size and address."""

    replay: Replay
    inputs: list[Tensor]
    results: list[Tensor]  # are overwritten by the next replay, maybe that of another graph
    plan: FixedAttentionPlan | None = None  # None for images
    lora: LoraBatch | None = None  # None without LoRA terms
    sequences: int = 0  # most of a step with prompts


class Graphs(ABC):
    """Captured steps of one kind by their number of rows and of LoRA terms."""

    rows_per_adapter = 1  # in a typical step, by which the LoRA tiles of a graph are chosen

    def __init__(self, kind: str, resources: StepResources, sizes: Sequence[int]) -> None:
        self.kind, self._resources = kind, resources
        # Numbers of rows of the steps that are or will be captured, ascending.
        self.sizes = sorted(sizes)
        self.held: dict[tuple[int, int], Graph] = {}
        self.stale: set[tuple[int, int]] = set()  # are replayed until they are captured again
        # The graphs of a size share one plan, as a step is planned just before its replay.
        self._plans: dict[int, FixedAttentionPlan | None] = {}

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

    def _best(self, rows: int, terms: int, tables: Sequence[Sequence[int]] = ()) -> Graph | None:
        """The smallest captured step of at least so many rows, unless its page tables are longer.

        Notes what is missing.
        """
        first = bisect_left(self.sizes, rows)
        if self._resources.left and first < len(self.sizes):
            wanted = Preparation(self.kind, self.sizes[first], terms)
            if wanted in self._resources.left:
                self._resources.missed[wanted] = None
        fitting = (self.held.get((size, terms)) for size in self.sizes[first:])
        graph = next((graph for graph in fitting if graph is not None), None)
        limit = graph.plan.max_pages if graph is not None and graph.plan is not None else None
        return None if limit is not None and sum(map(len, tables)) > limit else graph

    def _fill(self, graph: Graph, rows: Rows, terms: LoraTerms | None, size: int) -> None:
        """Describe a step to the plan and the adapters of its graph."""
        assert graph.plan is not None
        graph.plan.update(rows)
        if graph.lora is not None and terms is not None:
            terms.fill(graph.lora, self._resources.adapters, size)

    def typical(self, size: int, terms: int) -> LoraBatch | None:
        """Return typical adapters of a step, for which its graph is captured; None without any."""
        if not terms:
            return None
        resources, segments = self._resources, min(size, self._resources.max_segments)
        device, scratch = resources.lmm.device, resources.scratch
        lora = LoraBatch(size, segments, device, fixed=True, scratch=scratch)
        resources.fill_typical(lora, size, terms, size, size // self.rows_per_adapter)
        return lora

    @abstractmethod
    def _capture(self, size: int, terms: int) -> Graph | None:
        """Capture one step; None if the attention backend has no plan for it."""


class DecodeGraphs(Graphs):
    """Captured decode steps by their number of rows and of LoRA terms.

    Their input is [4, rows] int64: each row's place in `StepResources.last_tokens`, and its
    position in time, height and width. Results are logits [rows, vocabulary] float32, their argmax
    [rows] int64, and whether they are finite [rows] bool.
    """

    rows_per_adapter = 2

    def __init__(self, resources: StepResources, sizes: Sequence[int]) -> None:
        super().__init__(DECODE, resources, sizes)
        lmm, largest = resources.lmm, max(sizes, default=0)
        # Of all graphs: what one has written is read before the next is replayed.
        self._logits = torch.zeros((largest, lmm.vocabulary), device=lmm.device)

    def _capture(self, size: int, terms: int) -> Graph | None:
        resources = self._resources
        plan = self._plans[size] = self._plans.get(size) or resources.backend.decode_plan(size)
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

        replay, results = resources.recorder.record(run)
        return Graph(replay, [inputs], results, plan, lora)

    def find(self, works: Sequence[Work], terms: LoraTerms | None) -> Graph | None:
        """The smallest graph that holds a step; None unless all its works only decode."""
        if not self.sizes or len(works) > self.sizes[-1]:
            return None
        if any(w.tokens is not None or w.choice is None or w.keep is not None for w in works):
            return None
        return self._best(len(works), terms.width if terms else 0, [work.table for work in works])

    def replay(
        self, graph: Graph, works: Sequence[Work], terms: LoraTerms | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Enqueue a decode step on the graph that `find` returned for it.

        Returns for every work logits, argmax, whether they are finite, and its slot in
        `StepResources.last_tokens` [works] int64.
        """
        (inputs,), count = graph.inputs, len(works)
        size = inputs.shape[1]
        host = np.zeros((4, size), np.int64)
        host[0, count:] = self._resources.max_requests
        host[0, :count] = [work.slot for work in works]
        host[1:, :count] = [work.start + work.delta for work in works]
        inputs.copy_(pinned(host), non_blocking=True)
        lengths = np.ones(size, np.int32)
        lengths[:count] = [work.start + 1 for work in works]
        tables = [work.table for work in works] + [[0]] * (size - count)
        rows = Rows(np.arange(size + 1, dtype=np.int32), lengths, tables)
        self._fill(graph, rows, terms, size)
        graph.replay()
        tokens, finite = graph.results
        return self._logits[:count], tokens[:count], finite[:count], inputs[0, :count]


class PromptGraphs(Graphs):
    """Captured layers of steps with prompts; `crowded` ones for steps in which many rows decode.

    Their inputs are the first layer's [rows, width] and positions [rows] or [3, rows] int64.
    """

    rows_per_adapter = 128

    def __init__(self, resources: StepResources, sizes: Sequence[int], kind: str = PROMPT) -> None:
        super().__init__(kind, resources, sizes)
        lmm = resources.lmm
        with torch.inference_mode():  # as in eager steps, or torch compiles the layers twice
            # Of all graphs, as are `DecodeGraphs._logits`.
            shape = (2, max(sizes, default=0), lmm.width)
            self._embedded, self._hidden = torch.zeros(shape, dtype=lmm.dtype, device=lmm.device)

    def sequences_of(self, rows: int) -> int:
        """Most sequences of a graph of so many rows."""
        backend = self._resources.backend
        return min(rows, self._resources.max_requests, backend.max_mixed)

    def _capture(self, size: int, terms: int) -> Graph | None:
        resources, backend, lmm = self._resources, self._resources.backend, self._resources.lmm
        make = backend.crowded_plan if self.kind == CROWDED else backend.mixed_plan
        sequences = self.sequences_of(size)
        plan = self._plans[size] = self._plans.get(size) or make(sequences, size)
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

        replay, _ = resources.recorder.record(run)
        return Graph(replay, [embedded, positions], [hidden], plan, lora, sequences)

    def find(self, rows: Rows, terms: LoraTerms | None, visual: VisualRows | None) -> Graph | None:
        """The smallest graph that holds a step."""
        used = int(rows.starts[-1])
        if not self.sizes or used > self.sizes[-1]:
            return None
        if visual is not None and visual.deep:
            return None  # these images also change the output of later layers
        if rows.seen is not None:
            return None  # a graph's rows see the tokens up to their own
        graph = self._best(used, terms.width if terms else 0, rows.tables)
        return None if graph is None or len(rows.lengths) > graph.sequences else graph

    def replay(
        self, graph: Graph, embedded: Tensor, positions: Tensor, rows: Rows,
        terms: LoraTerms | None,
    ) -> Tensor:  # fmt: skip
        """Enqueue the layers of a step on the graph that `find` returned; until the next replay.

        `embedded` and what is returned (after the final norm) are [rows, width].
        """
        used = len(embedded)
        graph.inputs[0][:used] = embedded
        graph.inputs[1][..., :used] = positions
        self._fill(graph, rows, terms, len(graph.inputs[0]))
        graph.replay()
        return graph.results[0][:used]


class ImageGraphs(Graphs):
    """Captured encoders by their number of images; LoRA terms of the tower run without a graph."""

    def missing(self, terms: int) -> list[int]:
        """Return the sizes that are not captured; images have no LoRA terms."""
        return [] if terms else super().missing(0)

    def _inputs(self, size: int) -> list[Tensor]:
        """Buffers of the encoder's inputs: pixels [images, channels, height, width] first."""
        lmm = self._resources.lmm
        assert lmm.pixel_shape is not None
        return [torch.zeros((size, *lmm.pixel_shape), dtype=lmm.dtype, device=lmm.device)]

    def _embed(self, inputs: list[Tensor]) -> Tensor:
        """[images, visual tokens, width]."""
        lmm = self._resources.lmm
        return torch.stack(
            lmm.architecture.visual_features(lmm.model, {PIXELS[IMAGE]: inputs[0]})[0]
        )

    def _capture(self, size: int, terms: int) -> Graph | None:
        """Capture one size; None if this encoder waits for the host, which no graph can."""
        with torch.inference_mode():
            inputs = self._inputs(size)
            try:
                replay, results = self._resources.recorder.record(lambda: (self._embed(inputs),))
                if not results:  # without a GPU
                    replay()
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                log.warning("the vision encoder runs without CUDA graphs: %s", error)
                return None
        return Graph(replay, inputs, results)

    def encode(self, visuals: Sequence[Visual]) -> list[VisualFeatures] | None:
        """Encode visuals of one kind and shape without adapters; None if no graph holds them."""
        if not self.sizes:
            return None
        shape = 1, *(self._resources.lmm.pixel_shape or ())
        pixels = [visual.tensors.get(PIXELS[IMAGE]) for visual in visuals]
        fitting = [one for one in pixels if one is not None and tuple(one.shape) == shape]
        if len(fitting) < len(visuals) or any(len(visual.tensors) > 1 for visual in visuals):
            return None
        found: list[VisualFeatures] = []
        while len(found) < len(fitting):
            part = fitting[len(found) : len(found) + self.sizes[-1]]
            graph = self._best(len(part), 0)
            if graph is None:
                return None
            held = graph.inputs[0]
            held[: len(part)].copy_(_on_host(torch.cat(part), held), non_blocking=True)
            graph.replay()
            # The next replay of any graph may overwrite them.
            found += [VisualFeatures(one.clone()) for one in graph.results[0][: len(part)]]
        return found


class WindowGraphs(ImageGraphs):
    """Captured encoders of one image of any size, by numbers of windows (Qwen2.5-VL)."""

    def __init__(self, encoder: Any, *resources: Any) -> None:
        super().__init__(*resources)
        self._encoder = encoder
        self._arranged = lru_cache(KNOWN)(self._arrange)

    def _inputs(self, size: int) -> list[Tensor]:
        """Pixels of each slot, zeros where there is no patch; its row and column; whether it is."""
        slots, lmm = size * self._encoder.slots, self._resources.lmm
        return [
            torch.zeros((slots, self._encoder.columns), dtype=lmm.dtype, device=lmm.device),
            torch.zeros((slots, 2), dtype=torch.int64, device=lmm.device),
            torch.ones(slots, dtype=torch.bool, device=lmm.device),
        ]

    def _embed(self, inputs: list[Tensor]) -> Tensor:
        """[merged slots, width]."""
        found: Tensor = self._encoder.encode(*inputs)
        return found

    def encode(self, visuals: Sequence[Visual]) -> list[VisualFeatures] | None:
        """Encode images or videos of one kind; None if no graph holds one of them."""
        parts = [tuple(visual.tensors.values()) for visual in visuals]  # pixels and grid
        grids = [tuple(int(n) for n in grid[0]) for _, grid, *_ in parts]
        graphs = [self._best(self._encoder.windows(*grid[1:]), 0) for grid in grids]
        held = [graph for graph in graphs if graph is not None]
        if len(held) < len(visuals):
            return None  # before any of them is encoded
        found = []
        for (pixels, *_), (times, rows, columns), graph in zip(parts, grids, held, strict=True):
            to = graph.inputs[0]
            patches = _on_host(pixels, to).to(to.device, non_blocking=True)
            frames = [
                self._replay(graph, frame, rows, columns)
                for frame in patches.view(times, rows * columns, -1)
            ]
            found.append(VisualFeatures(frames[0] if len(frames) == 1 else torch.cat(frames)))
        return found

    def _replay(self, graph: Graph, patches: Tensor, rows: int, columns: int) -> Tensor:
        """Encode one image or frame of patches [rows · columns, columns of pixels]."""
        slots, where, tokens = self._arranged(rows, columns)
        pixels, places, present = graph.inputs
        pixels.zero_()
        pixels.index_copy_(0, slots, patches)
        places.index_copy_(0, slots, where)
        present.zero_()
        present.index_fill_(0, slots, True)
        graph.replay()
        return graph.results[0][tokens]  # a copy: the next replay overwrites them

    def _arrange(self, rows: int, columns: int) -> list[Tensor]:
        made, device = self._encoder.arrange(rows, columns), self._resources.lmm.device
        return [to_device(part, device) for part in (made.slots, made.places, made.tokens)]


def _on_host(pixels: Tensor, like: Tensor) -> Tensor:
    """Pixels in the type of the weights on the host already, which halves the copy."""
    pixels = pixels.to(like.dtype)  # those of another rank of a group are on the device
    return pixels.pin_memory() if like.is_cuda and not pixels.is_cuda else pixels


def image_graphs(resources: StepResources, counts: Sequence[int]) -> ImageGraphs:
    """Graphs of the model's encoder, for these numbers of images where they have one shape."""
    lmm = resources.lmm
    encoder = lmm.architecture.window_encoder(lmm.model)
    if encoder is not None:
        return WindowGraphs(encoder, VISION, resources, WINDOWS if counts else ())
    return ImageGraphs(VISION, resources, () if lmm.pixel_shape is None else counts)
