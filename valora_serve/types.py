"""What goes into the engine and what comes out of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray
    from PIL.Image import Image

    from valora_data.contract.heads import HeadResult
    from valora_serve.errors import ServeError


class Mode(StrEnum):
    """How LoRA is computed (VaLoRA §4.4)."""

    UNMERGED = "unmerged"
    MERGED = "merged"
    MIXTURE = "mixture"


class Finish(StrEnum):
    """Why a request ended; the first two as in OpenAI's API."""

    STOP = "stop"
    LENGTH = "length"
    HEAD = "head"
    CANCELLED = "cancelled"
    ERROR = "error"


class Constraint(Protocol):
    """Restricts which tokens may come next, e.g. to a JSON schema; one object per request."""

    def mask(self, allowed: NDArray[np.bool_]) -> None:
        """Clear the entries of tokens that may not come next; `allowed` is [vocabulary] bool."""

    def advance(self, token: int) -> None:
        """Be told which token was chosen."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen.

    Attributes:
        max_tokens: Tokens to generate at most; None for as many as the context has room for.
        min_tokens: Do not stop before so many.
        temperature: 0 is greedy.
        top_k: Among the k likeliest; 0 for all.
        top_p: Among the likeliest that together have this probability.
        min_p: Among those at least so likely, as a share of the likeliest.
        seed: Makes this request's choices repeatable, whatever runs beside it.
        stop: Texts that end the answer; they are not part of it.
        logprobs: None for none; n for those of the chosen token and the n likeliest.
        ignore_eos: Go on to `max_tokens`.
        constraint: Restriction on the tokens.
    """

    max_tokens: int | None = 256
    min_tokens: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    logprobs: int | None = None
    ignore_eos: bool = False
    constraint: Constraint | None = None


@dataclass(frozen=True, slots=True)
class Request:
    """One question.

    Exactly one of `messages`, `text` and `token_ids` is given.

    Attributes:
        id: Unique among those that run.
        model: A domain, an adapter, or the base model; the base model if None.
        messages: Chat turns as transformers' chat templates read them: dicts of ``role`` and
            ``content``, a string or parts of type ``text``, ``image`` and ``video``; images and
            videos are named in the order of `images` and `videos`.
        text: A plain prompt, image placeholders included if there are images.
        token_ids: The prompt's tokens, no images.
        images: RGB images.
        videos: Each a sequence of RGB frames.
        head: Answer with the domain's head where it has one; otherwise generate. With only
            `images` and no text at all, the domain's own prompt is put.
        min_score: Confidence below which a detection head's boxes are dropped; the domain's
            threshold if None.
        sampling: How tokens are chosen.
        deadline: Seconds from arrival in which to answer; None for no limit.
    """

    id: str
    model: str | None = None
    messages: Sequence[dict[str, Any]] | None = None
    text: str | None = None
    token_ids: Sequence[int] | None = None
    images: Sequence[Image] = ()
    videos: Sequence[Sequence[Image]] = ()
    head: bool = True
    min_score: float | None = None
    sampling: SamplingParams = field(default_factory=SamplingParams)
    deadline: float | None = None


@dataclass(frozen=True, slots=True)
class Logprob:
    """A token and its log probability, before temperature and restrictions."""

    token: int
    text: str
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log probabilities at one place of the answer: the chosen token's, and the likeliest."""

    chosen: Logprob
    top: tuple[Logprob, ...]


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of a request: `prompt` includes `image`; `cached` were not computed again."""

    prompt: int
    completion: int
    image: int = 0
    cached: int = 0


@dataclass(frozen=True, slots=True)
class Times:
    """When things happened, seconds of `time.monotonic`; None if they did not."""

    arrival: float
    started: float | None = None
    first_token: float | None = None
    finished: float | None = None


@dataclass(frozen=True, slots=True)
class Output:
    """News of one request; the last one has `finish`.

    Attributes:
        id: Of the request.
        text: Text that is new since the last output.
        token_ids: Tokens that are new.
        logprobs: Theirs, if asked for.
        finish: Why it ended; None while it goes on.
        head: Answer of a head, with the last output.
        error: If `finish` is ``error`` or ``cancelled``.
        usage: With the last output.
        times: With the last output.
        mode: The mode that the last step of the request ran in.
    """

    id: str
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish: Finish | None = None
    head: HeadResult | None = None
    error: ServeError | None = None
    usage: Usage | None = None
    times: Times | None = None
    mode: Mode | None = None


@dataclass(frozen=True, slots=True)
class ServedModel:
    """Something that a request can name.

    Attributes:
        name: The name.
        kind: ``base``, ``adapter`` or ``domain``.
        root: Folder or hub name that it comes from.
        parent: What it builds on: the base model of an adapter, the adapter of a domain.
        adapter: The adapter that acts, None for the base model.
        head: Kind of the domain's head, None if it generates.
        task: Of a domain.
        labels: Of a domain.
        metric: Of a domain, e.g. ``f1@0.5``.
        accuracy: What the bundle promises, on the test split.
        required: What was required.
        prompt: The domain's own prompt.
        bundle: Name and version of the bundle, e.g. ``detection@1``.
        rank: Of the adapter.
        loaded_at: Unix time.
    """

    name: str
    kind: str
    root: str
    parent: str | None = None
    adapter: str | None = None
    head: str | None = None
    task: str | None = None
    labels: tuple[str, ...] = ()
    metric: str | None = None
    accuracy: float | None = None
    required: float | None = None
    prompt: str | None = None
    bundle: str | None = None
    rank: int | None = None
    loaded_at: float = 0.0


@dataclass(frozen=True, slots=True)
class EngineStats:
    """How the engine is doing, for metrics and the console.

    Attributes:
        running: Requests that hold memory.
        waiting: Requests in the queue.
        mode: Of the last step.
        merged_adapter: The adapter in the base weights.
        switches: Mode switches since the start.
        steps: Engine steps since the start.
        pages_total: Pages of the unified memory.
        pages_free: Of them free, cached ones included.
        pages_kv: Holding keys and values of running requests.
        pages_adapters: Holding adapters.
        adapters_resident: Adapters on the device.
        adapters_known: Adapters that can be asked for.
        prefix_hits: Prompt tokens served from the prefix cache since the start.
        prefix_queries: Prompt tokens looked up in it.
        image_hits: Images served from the cache of encoded images.
        image_queries: Images looked up in it.
        preemptions: Requests that lost their memory and were computed again.
        finished: Requests ended, by reason.
        prompt_tokens: Prompt tokens computed since the start.
        generated_tokens: Tokens generated since the start.
    """

    running: int = 0
    waiting: int = 0
    mode: Mode = Mode.UNMERGED
    merged_adapter: str | None = None
    switches: int = 0
    steps: int = 0
    pages_total: int = 0
    pages_free: int = 0
    pages_kv: int = 0
    pages_adapters: int = 0
    adapters_resident: tuple[str, ...] = ()
    adapters_known: int = 0
    prefix_hits: int = 0
    prefix_queries: int = 0
    image_hits: int = 0
    image_queries: int = 0
    preemptions: int = 0
    finished: dict[str, int] = field(default_factory=dict)
    prompt_tokens: int = 0
    generated_tokens: int = 0


class EngineClient(Protocol):
    """What the server needs of an engine; `AsyncEngine` is the real one, tests have a fake."""

    def generate(self, request: Request) -> AsyncIterator[Output]:
        """Ask; outputs come as they are made, the last one has `finish`.

        Errors of the request come as a last output with `error` set, never as an exception.
        Closing the iterator early cancels the request and frees its memory.
        """

    async def cancel(self, request_id: str) -> bool:
        """End a request; False if there is none of this id."""

    def models(self) -> list[ServedModel]:
        """What can be named: the base model first, then adapters, then domains."""

    def stats(self) -> EngineStats:
        """How the engine is doing; cheap."""

    async def load_adapter(self, name: str, folder: Path) -> ServedModel:
        """Load a PEFT folder under a name (the same name again replaces it).

        Raises:
            AdapterError: It cannot be served; nothing has changed then.
        """

    async def unload_adapter(self, name: str) -> None:
        """Forget an adapter; requests of it that run are finished first.

        Raises:
            UnknownModelError: There is none of this name.
            BusyError: A bundle's domains need it.
        """

    async def load_bundle(self, folder: Path) -> list[ServedModel]:
        """Verify and load a bundle: its adapters and domains.

        Raises:
            AdapterError: It cannot be served; nothing has changed then.
        """

    async def unload_bundle(self, name: str) -> None:
        """Forget a bundle, its domains and adapters."""

    def count_tokens(self, text: str) -> int:
        """Tokens of a text."""

    @property
    def tokenizer(self) -> Any:
        """The base model's tokenizer (transformers)."""

    @property
    def base(self) -> str:
        """Id of the base model."""

    @property
    def context_length(self) -> int:
        """Longest prompt and answer together, in tokens."""

    @property
    def healthy(self) -> bool:
        """Whether the engine's loop runs."""

    async def close(self, drain: float = 0.0) -> None:
        """Take nothing new, give running requests `drain` seconds, then stop."""
