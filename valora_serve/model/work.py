"""What steps compute: requests' shares, the adapters of rows, results, and what is prepared."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from valora_kernels.metadata import NONE, LoraBatch, Scratch
from valora_serve.memory.unified import AdapterMemory
from valora_serve.model.attention.base import AttentionBackend, KVCache
from valora_serve.model.lmm import Lmm
from valora_serve.model.prompt import VisualFeatures
from valora_serve.model.sampler import StepLogprobs, TokenChoice


@dataclass(slots=True)
class Work:
    """One request's share of a step."""

    slot: int  # of the request among the running ones; the device keeps its last token there
    start: int  # index of the share's first token in the sequence
    count: int  # tokens of the share
    tokens: Sequence[int] | None  # their ids; None for a decode step: its token is on the device
    table: Sequence[int]  # pages of the sequence in order
    adapter: int = NONE  # slot of the request's adapter
    weighted: Sequence[tuple[int, float]] = ()  # slots and weights of several, or not of weight 1
    plain: int = 0  # first tokens of the share that the adapter does not apply to
    delta: int = 0  # position minus index of the tokens, see `Prompt.delta`
    # [3, count] int64, positions in time, height and width; None where they follow from the index.
    positions: NDArray[np.int64] | None = None
    # Of each image or video in the share: offsets of its visual tokens in the share ([tokens]
    # int64), its features, and the rows of the features that they take.
    visuals: Sequence[tuple[NDArray[np.int64], VisualFeatures, NDArray[np.int64]]] = ()
    blocks: Sequence[tuple[int, int]] = ()  # see `RequestView.blocks`, those in the share
    choice: TokenChoice | None = None  # None while prompt tokens are left to prefill
    logprobs: int | None = None  # top log probabilities to return; None for none at all
    keep: NDArray[np.int64] | None = None  # [rows] offsets of the states that a head reads
    targets: Sequence[int] = ()  # prompt tokens behind the first rows, which are scored
    prompt_logprobs: int = 0  # top log probabilities to return for each of the `targets`


@dataclass(slots=True)
class StepResult:
    """The result of a step, on its way to the host."""

    tokens: Tensor  # [choices] int64, of works that have a choice; `BROKEN`: logits not finite
    logprobs: StepLogprobs | None  # of those rows, if any work asks for them
    hidden: list[Tensor | None]  # of each work what it keeps, on the device
    prompts: list[StepLogprobs]  # of the targets of the works that have some, in their order
    _copied: torch.cuda.Event | None = None

    def read(self) -> list[int]:
        """Wait for the tokens, and return them."""
        if self._copied is not None:
            self._copied.synchronize()
        ids: list[int] = self.tokens.tolist()
        return ids


@dataclass(frozen=True, slots=True)
class LoraTerms:
    """LoRA terms of runs of rows: which adapters apply, and with which coefficients.

    A merged adapter needs no term. Beside it, in mixture mode, other rows have two terms: their
    own adapter with +1, and the merged one with −1. In unmerged mode a row may have two adapters.
    """

    adapters: NDArray[np.int64]  # [runs, terms] slots, `NONE` for no adapter
    coefficients: NDArray[np.float32]  # [runs, terms]
    counts: NDArray[np.int64]  # [runs] rows of each run

    @classmethod
    def of(cls, works: Sequence[Work], merged: int) -> LoraTerms | None:
        """Terms of a step with the adapter of slot `merged`; None if no row needs any."""
        width = max(1, *(len(work.weighted) for work in works))
        slots = np.full((len(works), width), NONE, np.int64)
        slots[:, 0] = [work.adapter for work in works]
        weights = np.ones(slots.shape, np.float32)
        for row, work in enumerate(works):
            if work.weighted:
                own = np.s_[row, : len(work.weighted)]
                slots[own], weights[own] = zip(*work.weighted, strict=True)
        counts = np.array([work.count for work in works], np.int64)
        if any(work.plain for work in works):  # runs of them, which may be empty, before others
            plain = np.array([work.plain for work in works], np.int64)
            counts = np.stack([plain, counts - plain], 1).ravel()
            slots, weights = slots.repeat(2, 0), weights.repeat(2, 0)
            slots[::2] = NONE
            held = counts > 0
            slots, weights, counts = slots[held], weights[held], counts[held]
        if merged == NONE:
            return None if (slots == NONE).all() else cls(slots, weights, counts)
        if ((slots == merged) & (weights == 1)).all():
            return None
        # Of its own rows, both terms cancel out.
        slots = np.column_stack([slots, np.full(len(slots), merged)])
        weights = np.column_stack([weights, np.full(len(slots), -1, np.float32)])
        return cls(slots, weights, counts)

    def fill(self, lora: LoraBatch, known: AdapterMemory, rows: int | None = None) -> None:
        """Describe the terms to the LoRA kernels; `rows` includes those that pad a step."""
        ranks, scalings = known.ranks, known.scalings
        lora.update(self.adapters, ranks, scalings, self.coefficients, self.counts, rows)

    @property
    def width(self) -> int:
        """Terms per row: 1 in unmerged mode, 2 in mixture mode and beside two adapters."""
        return int(self.adapters.shape[1])


# Graphs of decode steps, of steps with prompts, of those beside which many rows decode, and of the
# encoding of images; and compiled kernels.
DECODE, PROMPT, CROWDED, VISION, KERNELS = "decode", "prompt", "crowded", "vision", "kernels"
# Rows of the steps that most servers compute first, and numbers of images, or of windows of an
# image (32 hold 640 × 480 pixels).
LIKELY = {DECODE: (1, 8, 32), PROMPT: (64, 256, 1024), VISION: (1, 4, 32)}
MIXTURE = 2  # LoRA terms per row in mixture mode, which needs several adapters with requests


class Preparation(NamedTuple):
    """Something that is prepared once."""

    kind: str
    size: int  # rows of a graph, or images; rows with an adapter for kernels, 0: of a whole step
    terms: int  # LoRA terms per row

    @property
    def likely(self) -> bool:
        """Whether most servers need it soon."""
        return self.size in LIKELY.get(self.kind, ())

    def order(self, largest: int) -> tuple[bool, bool, bool, int]:
        """Order of captures: the largest of a kind first, in whose memory smaller ones fit."""
        return self.size != largest, not self.likely, self.terms == MIXTURE, self.size


Replay: TypeAlias = Callable[[], None]


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


@dataclass(eq=False, repr=False)
class StepResources:
    """What eager and captured steps share."""

    lmm: Lmm
    cache: KVCache
    adapters: AdapterMemory
    backend: AttentionBackend  # another one may take over between two steps
    max_requests: int
    max_segments: int  # distinct adapters in a step, no adapter included
    left: Mapping[Preparation, None]  # what is to be prepared, the next one first

    def __post_init__(self) -> None:
        self.device = self.lmm.device
        # [max_requests + 1] int64, the last token of each running request by its place; the extra
        # place belongs to rows that pad a graph.
        self.last_tokens = torch.zeros(self.max_requests + 1, dtype=torch.int64, device=self.device)
        self.recorder = GraphRecorder(self.device)
        self.scratch = Scratch(self.device)  # of the LoRA kernels: steps run one after the other
        # Graphs that steps have missed, the longest ago first; some may be there by now.
        self.missed: dict[Preparation, None] = {}

    def fill_typical(
        self, lora: LoraBatch, rows: int, terms: int, active: int, distinct: int
    ) -> None:
        """Describe a typical mix, by which the tiles of a captured graph are chosen.

        The `active` first rows have an adapter, of `distinct` ones as far as a step can have them.
        """
        slots = len(self.adapters.ranks)
        rank = max(int(self.adapters.ranks.max(initial=0)), 8)
        distinct = max(1, min(slots + 1 - terms, self.max_segments - 1, distinct))
        own = np.full((rows, terms), NONE, np.int64)
        own[:active, 0] = np.arange(active) * distinct // active
        # A single slot has no second adapter, and then no row ever has two terms.
        own[:active, 1:] = min(distinct, slots - 1)
        coefficients = np.tile(np.array([1, -1], np.float32)[:terms], (rows, 1))
        ranks = np.full(slots, rank, np.int32)
        lora.update(own, ranks, np.ones(slots, np.float32), coefficients)
