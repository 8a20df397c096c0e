"""The state of one request in the engine, and what the model computes for it in a step."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Generator, Tensor

from valora_data.contract.head import Head
from valora_kernels.metadata import NONE
from valora_serve.catalogue.store import ResolvedModel
from valora_serve.errors import RequestError
from valora_serve.memory.block_manager import BlockTable
from valora_serve.memory.residency import Residency
from valora_serve.memory.unified import AdapterMemory
from valora_serve.model.detokenizer import Detokenizer
from valora_serve.model.heads import HeadRequest
from valora_serve.model.lmm import Lmm
from valora_serve.model.prompt import Prompt, VisualFeatures
from valora_serve.model.sampler import Bias, StepLogprobs, TokenChoice, TokenCounts
from valora_serve.model.work import Work
from valora_serve.orchestrator.decision import RequestView
from valora_serve.types import Finish, PromptLogprobs, Request


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request whose slow preparation is done."""

    request: Request
    target: ResolvedModel
    prompt: Prompt
    head: Head | None = None  # answers instead of the target's


@dataclass(slots=True, eq=False, kw_only=True)
class SequenceState(RequestView):
    """Everything that the engine knows of an unfinished request.

    Its `kv_tokens` include those of the step under way.
    """

    request: Request
    prompt: Prompt
    adapters: dict[str, float]  # weights of the adapters that it runs on, by their keys
    prefix: str | None  # key of the prefix of its context
    uses: list[tuple[Residency[Any], str]]  # where those adapters and that prefix are, with keys
    head: Head | None  # that answers; None to generate text
    ids: list[int]  # of prompt and answer, as far as the host knows them
    table: BlockTable  # of these tokens
    prompt_tokens: int
    vision: bytes  # content hash of the adapters' weights that change how images are encoded
    text: Detokenizer
    generator: Generator | None  # random numbers of its own; None for greedy decoding
    max_new: int  # most tokens to generate
    counts: TokenCounts | None = None  # of each token, for its penalties
    bias: Bias | None = None  # its `logit_bias`
    # Log probabilities of its prompt, of each step that computed some; None if it wants none, or
    # has got them.
    scores: list[StepLogprobs] | None = None
    tenant: bytes = b""  # hash of its cache salt, for its keys in the image cache
    mask_seconds: float = 0.0  # that its constraint has taken to compute masks
    slot: int | None = None  # in the batch, None while it waits
    pending: int = 0  # tokens that the device has chosen and the host has not read yet
    chosen: bool = False  # whether its last token lies in its slot on the device
    cached: int = 0  # prompt tokens from the prefix cache when it was first admitted
    features: dict[int, VisualFeatures] = field(default_factory=dict)  # by number of the image
    memory: VisualFeatures | None = None  # memory tokens of its context
    hidden: list[Tensor] = field(default_factory=list)  # that its head reads, [rows, width] a step
    kv: Tensor | None = None  # see `Output.kv`
    started: float | None = None  # time of its first step, in seconds of `time.monotonic`
    first_token: float | None = None  # time of its first token, or of its head's result
    finish: Finish | None = None
    preemptions: int = 0
    riders: list[SequenceState] = field(default_factory=list)  # whose heads read its hidden states
    carrier: SequenceState | None = None  # the request that it rides on
    after: tuple[SequenceState, int] | None = None  # computes so many of its first tokens

    @property
    def length(self) -> int:
        """Tokens of prompt and answer, those included that only the device knows."""
        return len(self.ids) + self.pending

    @property
    def generated(self) -> int:
        """Tokens of the answer, those included that only the device knows."""
        return self.length - self.prompt_tokens

    def work(self, count: int, adapters: AdapterMemory, lmm: Lmm) -> Work:
        """Return what the model computes for the next tokens; `RequestError` if none is allowed."""
        start, prompt = self.kv_tokens, self.prompt
        end = start + count
        terms = [(adapters[key].slot, weight) for key, weight in self.adapters.items()]
        assert self.slot is not None
        work = Work(
            self.slot, start, count,
            tokens=None if self.chosen and count == 1 else self.ids[start:end],
            table=self.table.blocks,
            adapter=terms[0][0] if terms else NONE,
            weighted=() if self.adapter in self.adapters else terms,
            plain=min(max(self.table.since - start, 0), count),
            delta=prompt.delta,
        )  # fmt: skip
        if start < self.prompt_tokens:
            if prompt.positions is not None:
                work.positions = self._positions(start, end)
            work.visuals = self._visuals(start, end)
            blocks = self.blocks
            work.blocks = [one for one in blocks if start <= one[0] and one[1] <= end]
            if self.scores is not None:  # those of the prompt's tokens that follow
                work.targets = self.ids[start + 1 : min(end + 1, self.prompt_tokens)]
            work.prompt_logprobs = self.request.sampling.prompt_logprobs or 0
        if self.head is not None:
            work.keep = self._kept(start, end)
        elif end == self.length:
            work.choice = self._choice(lmm)
            work.logprobs = self.request.sampling.logprobs
        return work

    def _choice(self, lmm: Lmm) -> TokenChoice:
        params = self.request.sampling
        early = self.generated < params.min_tokens
        forbidden = tuple(lmm.stop_ids) if early else ()
        counts = self.counts
        if counts is not None:
            counts.update(self.ids, self.prompt_tokens)
        choice = TokenChoice(params, self.generator, forbidden, None, counts, self.bias)
        if params.constraint is None:
            return choice
        allowed = np.ones(lmm.vocabulary, dtype=np.bool_)
        began = time.monotonic()
        params.constraint.mask(allowed)
        self.mask_seconds += time.monotonic() - began
        if not allowed.any():
            raise RequestError(
                f"request {self.id} was given up, as its JSON schema allows no token that the "
                "model has: simplify the schema"
            )
        if forbidden and allowed.sum() == allowed[list(forbidden)].sum():
            forbidden = ()  # only stop tokens are allowed: the answer ends before min_tokens
        return replace(choice, allowed=allowed, forbidden=forbidden)

    def _positions(self, start: int, end: int) -> NDArray[np.int64]:
        """Return the [3, rows] positions of tokens `start` to `end`, generated ones included."""
        assert self.prompt.positions is not None
        known = self.prompt.positions[:, start:end]
        rest = np.arange(start + known.shape[1], end)[None] + self.prompt.delta
        return np.concatenate([known, np.repeat(rest, 3, axis=0)], axis=1)

    def _visuals(
        self, start: int, end: int
    ) -> list[tuple[NDArray[np.int64], VisualFeatures, NDArray[np.int64]]]:
        """Images and memory tokens from `start` to `end`, see `Work.visuals`."""
        # In the order of their tokens: a mask says which rows deep features are of.
        parts = [] if (memory := self.prompt.memory) is None else [(self.memory, memory.at)]
        parts += [(self.features.get(n), one.at) for n, one in enumerate(self.prompt.visuals)]
        found = []
        for features, at in parts:
            which = np.flatnonzero((at >= start) & (at < end))
            if which.size:
                assert features is not None
                found.append((at[which] - start, features, which))
        return found

    def prompt_logprobs(self) -> PromptLogprobs | None:
        """Return the log probabilities of its prompt once; None if it wants none or has them."""
        if self.scores is None:
            return None
        scores, self.scores = self.scores, None
        count = self.request.sampling.prompt_logprobs or 0
        none = torch.zeros(0), torch.zeros((0, count), dtype=torch.int64), torch.zeros((0, count))
        parts = [(one.chosen, one.tokens[:, :count], one.values[:, :count]) for one in scores]
        found = (torch.cat([part.cpu() for part in own]) for own in zip(none, *parts, strict=True))
        ids = np.array(self.ids[: self.prompt_tokens], np.int64)
        return PromptLogprobs(ids, *(one.numpy() for one in found))

    def follow(self, others: Sequence[SequenceState]) -> None:
        """Ride on the pass of another request about the same images, or wait for its prefix."""
        longest = 0
        for other in others:
            own, its = self.table, other.table
            if (own.root, self.vision, self.prefix) != (its.root, other.vision, other.prefix):
                continue
            alike = (own.salt, own.since) == (its.salt, its.since)
            if alike and self.ids == other.ids and self._reads_as(other):
                other.riders.append(self)
                self.carrier, self.after = other, None
                limits = (other.latency_limit, self.latency_limit)
                other.latency_limit = min((n for n in limits if n is not None), default=None)
                return
            pairs = enumerate(zip(self.ids, other.ids, strict=False))
            common = next((at for at, (one, two) in pairs if one != two), len(other.ids))
            if not alike:  # up to there both have the base model's keys and values
                common = min(common, own.since, its.since)
            images = max((int(item.at[-1]) for item in self.prompt.visuals), default=-1)
            reads = self.head is not None and self.head.reads_visual
            if common > max(longest, images) and not reads:
                longest, self.after = common, (other, common)

    def _reads_as(self, other: SequenceState) -> bool:
        """Whether heads of both read the same hidden states of the same prompt."""
        if self.head is None or other.head is None or other.request.keep_kv:
            return False
        same = self.head.reads_visual == other.head.reads_visual
        keys = [[item.key for item in one.prompt.visuals] for one in (self, other)]
        return same and self.head.last_tokens == other.head.last_tokens and keys[0] == keys[1]

    @property
    def early(self) -> bool:
        """Whether another request still has to compute the beginning of its prompt."""
        if self.after is not None:
            other, tokens = self.after
            if other.finish is None and other.kv_tokens < tokens:
                return True
            self.after = None
        return False

    def _kept(self, start: int, end: int) -> NDArray[np.int64]:
        """Return which of the tokens `start` to `end` the head reads, see `Work.keep`."""
        assert self.head is not None
        if not self.head.reads_visual:
            first = max(self.prompt_tokens - self.head.last_tokens, start)
            return np.arange(first, max(min(end, self.prompt_tokens), first)) - start
        at = np.sort(np.concatenate([visual.read for visual in self.prompt.visuals]))
        return at[(at >= start) & (at < end)] - start

    def head_request(self) -> HeadRequest:
        """Return what the head of a request computes from the hidden states that it reads."""
        head, visuals = self.head, self.prompt.visuals
        assert head is not None
        (hidden,), self.hidden = self.hidden, []
        sizes: list[tuple[int, int]] = []
        if head.reads_visual:
            if any(item.cells is not None for item in visuals):
                # They were kept in the order of the prompt; a head reads whole rows of the grid.
                order = np.concatenate([item.read for item in visuals]).argsort().argsort()
                hidden = hidden[torch.from_numpy(order).to(hidden.device)]
            sizes = [item.size for item in visuals]
        places = torch.cat([item.places() for item in visuals]) if head.reads_places else None
        return HeadRequest(head, hidden, sizes, self.request.min_score, places)
