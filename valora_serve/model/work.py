"""What a step computes: each request's share, the adapters of its rows, and the result."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from valora_kernels.grouping import NONE
from valora_kernels.metadata import LoraBatch, Scratch

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from numpy.typing import NDArray
    from torch import Tensor

    from valora_serve.model.attention.base import AttentionBackend, KVCache
    from valora_serve.model.lmm import Lmm
    from valora_serve.model.prompt import VisualFeatures
    from valora_serve.model.sampler import StepLogprobs, TokenChoice


@dataclass(slots=True)
class Work:
    """One request's share of a step.

    Attributes:
        place: Index of the request among the running ones, below the engine's `max_requests`; the
            device keeps its last token there.
        start: Index of the share's first token in the sequence.
        count: Number of tokens of the share.
        tokens: [count] token ids; None for a decode step, whose token is on the device.
        table: Page table of the sequence: its pages in order.
        adapter: Slot of the request's adapter, `NONE` for the base model.
        weighted: Slots and weights of its adapters where that is not one with weight 1.
        plain: Number of tokens at the start of the share that its adapter is not applied to, as it
            is applied at decoding only.
        delta: Position minus index of the tokens, see `Prompt.delta`.
        positions: [3, count] int64, positions of prompt tokens in time, height and width; None
            where they follow from the index.
        visuals: For each image or video in the share: the visual tokens' offsets in the share
            ([tokens] int64), its features, and the rows of the features that they take.
        choice: How the next token is chosen; None while prompt tokens are left to prefill.
        logprobs: Number of top log probabilities to return; None for no log probabilities.
        keep: [rows] int64, offsets in the share of the hidden states that a head reads; None
            without a head.
        targets: Tokens of the prompt that follow the first rows of the share, whose log
            probabilities are returned; empty if none are wanted.
        prompt_logprobs: Number of top log probabilities to return for each of the `targets`.
    """

    place: int
    start: int
    count: int
    tokens: Sequence[int] | None
    table: Sequence[int]
    adapter: int = NONE
    weighted: Sequence[tuple[int, float]] = ()
    plain: int = 0
    delta: int = 0
    positions: NDArray[np.int64] | None = None
    visuals: Sequence[tuple[NDArray[np.int64], VisualFeatures, NDArray[np.int64]]] = ()
    choice: TokenChoice | None = None
    logprobs: int | None = None
    keep: NDArray[np.int64] | None = None
    targets: Sequence[int] = ()
    prompt_logprobs: int = 0


@dataclass(slots=True)
class StepResult:
    """The result of a step, on its way to the host.

    Attributes:
        tokens: [choices] int64, the chosen tokens in the order of the works that have a choice;
            `BROKEN` for logits that are not finite.
        logprobs: Log probabilities of those rows; None if no work asks for them.
        hidden: For each work the hidden states that it keeps, on the device; None without any.
        prompts: Log probabilities of the targets of the works that have some, in their order.
    """

    tokens: Tensor
    logprobs: StepLogprobs | None
    hidden: list[Tensor | None]
    prompts: list[StepLogprobs]
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
    own adapter with +1, and the merged one with −1, which takes it back out of the weights. In
    unmerged mode a request may have two adapters; an adapter's weight is in its coefficient.

    Attributes:
        adapters: [runs, terms] int64, slots; `NONE` for no adapter.
        coefficients: [runs, terms] float32.
        counts: [runs] int64, number of rows of each run.
    """

    adapters: NDArray[np.int64]
    coefficients: NDArray[np.float32]
    counts: NDArray[np.int64]

    @classmethod
    def of(cls, works: Sequence[Work], merged: int) -> LoraTerms | None:
        """Terms of a step; None if no row needs any.

        A work is one run of rows, or two if it begins with rows without its adapter.

        Args:
            works: The works of a step.
            merged: Slot of the adapter that is merged into the weights, `NONE` for none.
        """
        if any(work.weighted or work.plain for work in works):
            return cls._of_each(works, merged)
        own = np.array([work.adapter for work in works], np.int64)
        counts = np.array([work.count for work in works], np.int64)
        if merged == NONE:
            if (own == NONE).all():
                return None
            return cls(own[:, None], np.ones((len(own), 1), np.float32), counts)
        foreign = own != merged
        if not foreign.any():
            return None
        own[~foreign] = NONE
        back = np.where(foreign, merged, NONE)
        coefficients = np.tile(np.array([1, -1], np.float32), (len(own), 1))
        return cls(np.stack([own, back], 1), coefficients, counts)

    @classmethod
    def _of_each(cls, works: Sequence[Work], merged: int) -> LoraTerms | None:
        """`of`, work by work: with weights, and rows without adapters before others."""
        runs: list[tuple[int, list[tuple[int, float]]]] = []
        for work in works:
            own = work.weighted or ((work.adapter, 1.0),)
            for count, applied in ((work.plain, ()), (work.count - work.plain, own)):
                terms = {slot: weight for slot, weight in applied if slot != NONE}
                if merged != NONE:
                    terms[merged] = terms.get(merged, 0.0) - 1
                if count:
                    runs.append((count, [term for term in terms.items() if term[1]]))
        width = max(len(terms) for _, terms in runs)
        if not width:
            return None
        filled = np.array([terms + [(NONE, 0.0)] * (width - len(terms)) for _, terms in runs])
        counts = np.array([count for count, _ in runs], np.int64)
        return cls(filled[..., 0].astype(np.int64), filled[..., 1].astype(np.float32), counts)

    @property
    def width(self) -> int:
        """Terms per row: 1 in unmerged mode, 2 in mixture mode and beside two adapters."""
        return int(self.adapters.shape[1])


@dataclass(frozen=True, slots=True)
class AdapterTable:
    """What the kernels know of the adapters on the device.

    Attributes:
        ranks: [slots] int32, rank of the adapter in each slot, 0 for an empty one.
        scalings: [slots] float32, scaling of the adapter in each slot.
    """

    ranks: NDArray[np.int32]
    scalings: NDArray[np.float32]

    def fill(self, lora: LoraBatch, terms: LoraTerms, rows: int | None = None) -> None:
        """Describe the rows of a step to the LoRA kernels.

        Args:
            lora: The batch that the kernels read.
            terms: Terms of the runs of rows.
            rows: Number of rows, of which those behind the runs pad the step; no more by default.
        """
        lora.update(
            terms.adapters, self.ranks, self.scalings, terms.coefficients, terms.counts, rows
        )


@dataclass(slots=True)
class StepResources:
    """What eager and captured steps share.

    Attributes:
        lmm: The base model.
        cache: Its KV cache.
        backend: The attention backend; another one may take over between two steps.
        adapters: The adapters on the device.
        last_tokens: [max_requests + 1] int64 on the device, the last token of each running
            request by its place; the extra place belongs to rows that pad a graph.
        max_requests: Largest number of running requests.
        max_segments: Largest number of distinct adapters in a step, no adapter included.
        scratch: Working memory of the LoRA kernels, as steps run one after the other.
    """

    lmm: Lmm
    cache: KVCache
    backend: AttentionBackend
    adapters: AdapterTable
    last_tokens: Tensor
    max_requests: int
    max_segments: int
    scratch: Scratch

    def typical_batch(self, rows: int, terms: int, distinct: int) -> LoraBatch:
        """Return a batch for a graph, with a typical mix of adapters, see `fill_typical`."""
        lora = LoraBatch(
            rows,
            min(rows, self.max_segments),
            self.lmm.device,
            fixed=True,
            scratch=self.scratch,
        )
        self.fill_typical(lora, rows, terms, rows, distinct)
        return lora

    def fill_typical(
        self, lora: LoraBatch, rows: int, terms: int, active: int, distinct: int
    ) -> None:
        """Describe a typical mix of adapters, by which the LoRA kernels choose their tiles.

        Args:
            lora: The batch to fill; a graph that is captured with it serves every other mix too.
            rows: Number of rows.
            terms: LoRA terms per row.
            active: Number of rows with an adapter; they come first.
            distinct: Number of distinct adapters, reduced to what a step can have.
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
