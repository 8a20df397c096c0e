"""The state of one request in the engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from valora_serve.orchestrator.decision import RequestView
from valora_serve.types import PromptLogprobs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from torch import Generator, Tensor

    from valora_data.contract.head import Head
    from valora_serve.catalogue.store import ResolvedModel
    from valora_serve.memory.block_manager import ImageSpan
    from valora_serve.model.detokenizer import Detokenizer
    from valora_serve.model.prompt import Prompt, VisualFeatures
    from valora_serve.model.sampler import Bias, StepLogprobs, TokenCounts
    from valora_serve.types import Finish, Request


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request whose slow preparation is done.

    Attributes:
        request: The request.
        target: What its name stood for when it was prepared.
        prompt: Its token ids and images, ready for the model.
        head: Head that answers instead of the target's, None for that one.
    """

    request: Request
    target: ResolvedModel
    prompt: Prompt
    head: Head | None = None


@dataclass(slots=True, eq=False)
class SequenceState:
    """Everything that the engine knows of an unfinished request.

    Attributes:
        request: The request as it came.
        prompt: Its token ids and images, ready for the model.
        adapters: Weights of the adapters that it runs on, by their keys.
        head: Head that answers, None to generate text.
        view: What policies see of it; kept up to date.
        ids: Token ids of prompt and answer, as far as the host knows them.
        prompt_tokens: Number of prompt tokens in `ids`.
        salt: What its keys in the prefix cache contain besides tokens: `ResolvedModel.salt`.
        own_from: Index of the first token that its adapter is applied to: 0, or that of the
            prompt's last token if the adapter is applied at decoding only.
        spans: Images in the prompt, for its keys in the prefix cache.
        vision: Content hash of the adapter's weights that change how images are encoded; empty if
            there are none.
        tenant: Hash of its cache salt, for its keys in the image cache; empty without one.
        text: Turns tokens into text.
        generator: Random numbers of its own, None for greedy decoding.
        max_new: Most tokens to generate.
        arrival: Time of arrival, in seconds of `time.monotonic`.
        counts: How often each token has come, for its penalties; None without penalties.
        bias: Its `logit_bias`, None without any.
        scores: Log probabilities of its prompt, one entry for each step that computed some; None if
            it wants none, or has got them.
        prefix: Key of the prefix of its context, None without one.
        root: What its keys in the prefix cache begin with: hash of its cache salt, and content
            hash of that prefix.
        mask_seconds: Time that its constraint has taken to compute masks, in seconds.
        place: Its place in the batch, None while it waits.
        computed: Tokens whose keys and values are in the cache, those of the step under way
            included.
        pending: Tokens that the device has chosen and the host has not read yet.
        chosen: Whether its last token lies at its place on the device.
        cached: Prompt tokens that came from the prefix cache when it was first admitted.
        features: Encoded images by their number in the prompt, kept until the prompt is computed.
        memory: Memory tokens of its context, for the same time.
        hidden: Hidden states that its head reads, [rows, width] a step.
        kv: Keys and values of its prompt, if it keeps them, see `Output.kv`.
        started: Time of its first step, in seconds of `time.monotonic`.
        first_token: Time of its first token, or of its head's result.
        finish: Why it ended, None while it runs.
        preemptions: How often it was preempted.
        keys: Keys of its blocks in the prefix cache, once it has given them back.
        riders: Requests whose heads read the hidden states of its pass, and compute nothing else.
        carrier: The request that it rides on, None for one with a pass of its own.
        after: Request that computes the beginning of its prompt first, and that many tokens.
    """

    request: Request
    prompt: Prompt
    adapters: dict[str, float]
    head: Head | None
    view: RequestView
    ids: list[int]
    prompt_tokens: int
    salt: bytes
    spans: list[ImageSpan]
    vision: bytes
    text: Detokenizer
    generator: Generator | None
    max_new: int
    arrival: float
    counts: TokenCounts | None = None
    bias: Bias | None = None
    scores: list[StepLogprobs] | None = None
    own_from: int = 0
    tenant: bytes = b""
    prefix: str | None = None
    root: bytes = b""
    mask_seconds: float = 0.0
    place: int | None = None
    computed: int = 0
    pending: int = 0
    chosen: bool = False
    cached: int = 0
    features: dict[int, VisualFeatures] = field(default_factory=dict)
    memory: VisualFeatures | None = None
    hidden: list[Tensor] = field(default_factory=list)
    kv: Tensor | None = None
    started: float | None = None
    first_token: float | None = None
    finish: Finish | None = None
    preemptions: int = 0
    keys: list[bytes] = field(default_factory=list)
    riders: list[SequenceState] = field(default_factory=list)
    carrier: SequenceState | None = None
    after: tuple[SequenceState, int] | None = None

    @property
    def id(self) -> str:
        """Id of the request."""
        return self.request.id

    @property
    def length(self) -> int:
        """Tokens of prompt and answer, those included that only the device knows."""
        return len(self.ids) + self.pending

    @property
    def generated(self) -> int:
        """Tokens of the answer, those included that only the device knows."""
        return self.length - self.prompt_tokens

    @property
    def given(self) -> int:
        """Tokens at the beginning whose keys and values its context gives."""
        return self.prompt.given

    @property
    def left(self) -> int:
        """Tokens still to be computed before the next one can be chosen."""
        return self.length - self.computed

    def positions(self, start: int, end: int) -> NDArray[np.int64]:
        """Return the [3, rows] positions of tokens `start` to `end`, generated ones included."""
        assert self.prompt.positions is not None
        known = self.prompt.positions[:, start:end]
        first = start + known.shape[1]
        rest = np.arange(first, end)[None] + self.prompt.delta
        return np.concatenate([known, np.repeat(rest, 3, axis=0)], axis=1)

    def visuals(
        self, start: int, end: int
    ) -> list[tuple[NDArray[np.int64], VisualFeatures, NDArray[np.int64]]]:
        """Return the rows among tokens `start` to `end` that images or memory tokens take.

        Returns:
            For each image, and for the memory tokens: rows counted from `start`, its features, and
            the features' rows.
        """
        found = []
        for number, visual in enumerate(self.prompt.visuals):
            which = np.flatnonzero((visual.at >= start) & (visual.at < end))
            if which.size:
                found.append((visual.at[which] - start, self.features[number], which))
        memory = self.prompt.memory
        if memory is not None:
            which = np.flatnonzero((memory.at >= start) & (memory.at < end))
            if which.size:
                assert self.memory is not None
                found.append((memory.at[which] - start, self.memory, which))
        return found

    def targets(self, start: int, end: int) -> list[int]:
        """Return the prompt's tokens that follow tokens `start` to `end`, if they are scored."""
        if self.scores is None:
            return []
        return self.ids[start + 1 : min(end + 1, self.prompt_tokens)]

    def prompt_logprobs(self) -> PromptLogprobs | None:
        """Return the log probabilities of its prompt once; None if it wants none or has them."""
        if self.scores is None:
            return None
        scores, self.scores = self.scores, None
        count = self.request.sampling.prompt_logprobs or 0
        size = self.prompt_tokens - 1
        found = PromptLogprobs(
            np.array(self.ids[: size + 1], np.int64),
            np.empty(size, np.float32),
            np.empty((size, count), np.int64),
            np.empty((size, count), np.float32),
        )
        at = 0
        for part in scores:
            rows = slice(at, at + len(part.chosen))
            found.logprobs[rows] = part.chosen.cpu().numpy()
            found.top_ids[rows] = part.tokens[:, :count].cpu().numpy()
            found.top_logprobs[rows] = part.values[:, :count].cpu().numpy()
            at = rows.stop
        assert at == size
        return found

    def follow(self, others: Sequence[SequenceState]) -> None:
        """Ride on the pass of another request about the same images, or wait for its prefix.

        Args:
            others: Requests with passes of their own.
        """
        most = 0
        for other in others:
            if (self.root, self.vision, self.prefix) != (other.root, other.vision, other.prefix):
                continue
            alike = (self.salt, self.own_from) == (other.salt, other.own_from)
            if alike and self.ids == other.ids and self._reads_as(other):
                other.riders.append(self)
                self.carrier, self.after = other, None
                other.view.latency_limit = _least(other.view.latency_limit, self.view.latency_limit)
                return
            pairs = enumerate(zip(self.ids, other.ids, strict=False))
            common = next((at for at, (own, its) in pairs if own != its), len(other.ids))
            if not alike:  # up to there both have the base model's keys and values
                common = min(common, self.own_from, other.own_from)
            images = max((int(item.at[-1]) for item in self.prompt.visuals), default=-1)
            reads = self.head is not None and self.head.reads_visual
            if common > max(most, images) and not reads:
                most, self.after = common, (other, common)

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
            if other.finish is None and other.computed < tokens:
                return True
            self.after = None
        return False

    def kept(self, start: int, end: int) -> NDArray[np.int64]:
        """Return which tokens of `start` to `end` the head reads, counted from `start`."""
        assert self.head is not None
        if not self.head.reads_visual:
            first = max(self.prompt_tokens - self.head.last_tokens, start)
            return np.arange(first, max(min(end, self.prompt_tokens), first)) - start
        at = np.sort(np.concatenate([visual.read for visual in self.prompt.visuals]))
        return at[(at >= start) & (at < end)] - start


def _least(one: float | None, other: float | None) -> float | None:
    return min((limit for limit in (one, other) if limit is not None), default=None)
