"""Requests to the engine and its outputs, and the interface between server and engine.

Without slots, as pickling frozen classes that have some runs Python code for each object: six
answers on their way from the engine's process took 0.5 ms instead of 0.3.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

from valora_serve.errors import CancelledRequestError, ServeError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from PIL.Image import Image

    from valora_data.contract.results import HeadResult


class Mode(StrEnum):
    """Inference mode of a step: how it computes LoRA (VaLoRA §4.4)."""

    UNMERGED = "unmerged"
    """The base weights are pristine; every request adds its own adapter."""
    MERGED = "merged"
    """One adapter is merged into the base weights, and all requests of the step use it."""
    MIXTURE = "mixture"
    """One adapter is merged; other requests subtract it and add their own (deLoRA)."""


class Finish(StrEnum):
    """Why a request ended; the first two are named as in OpenAI's API."""

    STOP = "stop"  # a stop token or a stop text was generated
    LENGTH = "length"  # `max_tokens` or the context length was reached
    HEAD = "head"  # a head gave the result
    CANCELLED = "cancelled"  # the client cancelled it
    ERROR = "error"  # the request failed


class Constraint(Protocol):
    """Restricts which token may come next, e.g. to a JSON schema; one object per request."""

    def mask(self, allowed: NDArray[np.bool_]) -> None:
        """Clear the entries of tokens that must not come next in [vocabulary] bool `allowed`.

        Raises:
            RequestError: The constraint cannot be kept any more.
        """

    def advance(self, token: int) -> bool | None:
        """Note the token that was chosen; may raise a `RequestError`, as `mask`.

        Returns:
            Whether stop texts end the answer where the token comes; None if they must not.
        """

    def check(self, text: str) -> None:
        """Raise a `RequestError` if a whole answer that ended by itself breaks the constraint."""


GREEDY_BELOW: Final = 1e-5
"""Temperatures below this are greedy decoding: logits that differ by 0.001 are then e¹⁰⁰ apart."""


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen and when generation stops."""

    max_tokens: int | None = 256  # None for as many as the context length allows
    min_tokens: int = 0  # before a stop token or a stop text counts
    temperature: float = 0.0  # divisor of the logits; greedy decoding below `GREEDY_BELOW`
    top_k: int = 0  # sample from the k most likely tokens; 0 for all
    top_p: float = 1.0  # sample from the fewest most likely tokens of this probability together
    min_p: float = 0.0  # sample from tokens at least this likely, relative to the most likely one
    seed: int | None = None  # of this request's random numbers, whatever else is in the batch
    stop: tuple[str, ...] = ()  # texts that end the answer; they are not part of it
    logprobs: int | None = None  # most likely tokens to return beside each chosen one
    prompt_logprobs: int | None = None  # the same of the prompt, computed without prefix cache
    ignore_eos: bool = False  # whether generation goes on to `max_tokens` after stop tokens
    constraint: Constraint | None = None
    frequency_penalty: float = 0.0  # subtracted from a logit for each time it was generated
    presence_penalty: float = 0.0  # subtracted from a logit if it was generated at all
    repetition_penalty: float = 1.0  # divides positive logits of tokens so far, else multiplies
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, value), added after the penalties

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature < GREEDY_BELOW

    @property
    def penalised(self) -> bool:
        """Whether tokens are less likely because they came before."""
        return bool(self.frequency_penalty or self.presence_penalty or self.repetition_penalty != 1)

    @property
    def needs_history(self) -> bool:
        """Whether a token can be chosen only when the host knows all tokens before it."""
        return self.constraint is not None or self.penalised


MAX_MIXED, MAX_WEIGHT = 2, 4.0
"""Most adapters of a request, as kernels take so many a row; largest weight, negative or not."""


@dataclass(frozen=True)
class Request:
    """A request to the engine.

    Exactly one of `messages`, `text` and `token_ids` is given. A request for a domain with images
    only may give none of them; it gets the domain's prompt.
    """

    id: str  # unique among unfinished requests
    model: str | None = None  # name of a domain, of an adapter or of the base model (None)
    # Up to `MAX_MIXED` adapters that apply instead, with the factors of what they add. `model`
    # then names the base model, or the first of them.
    adapters: tuple[tuple[str, float], ...] = ()
    # Turns for transformers' chat templates: dicts of ``role`` and ``content``, a string or a list
    # of parts of type ``text``, ``image`` and ``video``, which stand for `images` and `videos`.
    messages: Sequence[dict[str, Any]] | None = None
    text: str | None = None  # without a chat template, including placeholders of the images
    token_ids: Sequence[int] | None = None  # of a prompt without images
    images: Sequence[Image] = ()  # in RGB
    videos: Sequence[Sequence[Image]] = ()  # frames in RGB
    head: bool = True  # whether the domain's head answers, if it has one; otherwise text
    # Whether the answer is a `HeadResult` of kind ``embedding`` instead: its `logits` [1, width]
    # are the last hidden state of the prompt's last token.
    embed: bool = False
    keep_kv: bool = False  # whether an embedding's prompt returns `Output.kv`
    min_score: float | None = None  # least confidence of boxes; None for the domain's threshold
    sampling: SamplingParams = field(default_factory=SamplingParams)
    deadline: float | None = None  # seconds from arrival within which it must be answered
    arrival: float | None = None  # `time.monotonic()`; None: when the engine has prepared it
    client: str | None = None  # who asks, e.g. the name of an API key, for shares by key
    cache_salt: str | None = None  # requests of the same one share cached prompts and images
    stream: bool = True  # whether outputs come as they are made; otherwise one comes, at the end
    store: bool = True  # whether a server may keep it in its sample
    also: tuple[Request, ...] = ()  # of other domains about the same images, answered together

    @classmethod
    def about(
        cls, images: Sequence[Image], text: str | None, *, video: bool, **fields: Any
    ) -> Request:
        """Make a request about images or a video's frames; None asks with the domain's prompt."""
        shown = [{"type": "video"}] if video else [{"type": "image"}] * len(images)
        turn = {"role": "user", "content": [{"type": "text", "text": text}, *shown]}
        media: dict[str, Any] = {"videos": [images]} if video else {"images": images}
        return cls(messages=None if text is None else [turn], **media, **fields)


@dataclass(frozen=True)
class Logprob:
    """Log probability of a token, before temperature, penalties, bias and constraints.

    `raw` are its own bytes, also of a part of a character; None if texts leave it out.
    """

    token: int
    text: str
    logprob: float
    raw: bytes | None = None


@dataclass(frozen=True)
class TokenLogprobs:
    """Log probabilities of a chosen token and of the most likely ones, in descending order.

    `offset` is the number of the answer's characters before it, unfinished ones not counted.
    """

    chosen: Logprob
    top: tuple[Logprob, ...]
    offset: int = 0


@dataclass(frozen=True)
class PromptLogprobs:
    """Log probabilities of a prompt's tokens, each given the tokens before it.

    The first token has none. n is the request's `SamplingParams.prompt_logprobs`.
    """

    ids: NDArray[np.int64]  # [tokens] int64, ids of the prompt's tokens
    logprobs: NDArray[np.float32]  # [tokens - 1] float32, from the second token on
    top_ids: NDArray[np.int64]  # [tokens - 1, n] int64, the most likely tokens at these places
    top_logprobs: NDArray[np.float32]  # [tokens - 1, n] float32, in descending order


@dataclass(frozen=True)
class Usage:
    """Token counts of a request: `image` and `cached` (by the prefix cache) are of the prompt."""

    prompt: int
    completion: int
    image: int = 0
    cached: int = 0


@dataclass(frozen=True)
class Times:
    """Times of a request, in seconds of `time.monotonic`; None for what did not happen.

    It `started` when its first step was launched; `first_token` may be its head's result.
    """

    arrival: float
    started: float | None = None
    first_token: float | None = None
    finished: float | None = None


@dataclass(frozen=True)
class Output:
    """A part of a request's answer; the last part has `finish`, `usage`, `times` and any `head`."""

    id: str
    text: str = ""  # new since the output before
    token_ids: tuple[int, ...] = ()  # new
    logprobs: tuple[TokenLogprobs, ...] = ()  # of the new tokens, if the request wants them
    prompt: PromptLogprobs | None = None  # if the request wants them; with the first token
    finish: Finish | None = None
    head: HeadResult | None = None
    # Keys and values of the prompt, if the request keeps them: a tensor [2, layers, kv_heads,
    # tokens, head_dim] on the device; in the last output.
    kv: Any = None
    error: ServeError | None = None  # if `finish` is ``error`` or ``cancelled``
    usage: Usage | None = None
    times: Times | None = None
    mode: Mode | None = None  # of the request's last step


def joined(outputs: Sequence[Output]) -> Output:
    """The outputs of an answer as one."""
    return replace(
        outputs[-1],
        text="".join(one.text for one in outputs),
        token_ids=tuple(token for one in outputs for token in one.token_ids),
        logprobs=tuple(item for one in outputs for item in one.logprobs),
        prompt=next((one.prompt for one in outputs if one.prompt is not None), None),
    )


def failure(request: Request, error: ServeError, arrival: float) -> Output:
    """Return the last output of a request that no engine has ended."""
    cancelled = isinstance(error, CancelledRequestError)
    return Output(
        request.id,
        finish=Finish.CANCELLED if cancelled else Finish.ERROR,
        error=error,
        times=Times(arrival, finished=time.monotonic()),
    )


@dataclass(frozen=True)
class ServedModel:
    """Something that a request can name: the base model, an adapter or a domain."""

    name: str
    kind: str  # ``base``, ``adapter`` or ``domain``
    root: str  # folder or hub name that it was loaded from
    parent: str | None = None  # name of an adapter's base model, or of a domain's adapter if any
    adapter: str | None = None  # that is applied, None for the base model as it is
    head: str | None = None  # kind of the domain's head, None if it generates text
    boxes: bool = False
    task: str | None = None
    labels: tuple[str, ...] = ()  # of the domain, in the order of its head's outputs
    metric: str | None = None  # of the domain, e.g. ``f1@0.5``
    accuracy: float | None = None  # of the domain on the test split, as measured for its bundle
    required: float | None = None  # accuracy that the domain required
    teacher: float | None = None  # accuracy of its teacher on the same samples
    prompt: str | None = None  # of the domain; ``{}`` in it stands for the request's own words
    prompted: bool = False  # whether requests have words of their own, such as a question
    # What the domain was measured with: ``images``, ``video`` or ``text`` alone, a prompt's images
    # or frames, and the length of answers; None if not known or varying.
    media: str | None = None
    images: int | None = None
    max_tokens: int | None = None
    bundle: str | None = None  # with its version, e.g. ``detection@1``
    rank: int | None = None  # largest of the adapter
    # Whether the adapter is applied only to the last token of a prompt and those after it, so that
    # prompts use the base model's keys and values.
    decode_only: bool = False
    form: str | None = None  # of a context's memory: ``prefix``, ``memory_tokens``, ``adapter``
    memory_tokens: int | None = None
    memory_bytes: int | None = None
    source_tokens: int | None = None  # of its document
    encodes: int | None = None  # tokens of the memories that an encoder makes of documents
    loaded_at: float = 0.0  # Unix time

    @property
    def takes_words(self) -> bool:
        """Whether its prompt lacks words that only a request has, such as a question."""
        return self.prompted or not self.prompt or "{}" in self.prompt

    def client(self, share_by: str, key: str | None) -> str | None:
        """Who is charged for a request: an adapter or a key; None where no shares are kept."""
        if share_by == "adapter":
            return self.adapter or "base"
        return key if share_by == "key" else None

    def reads(self, *, video: bool) -> bool:
        """Whether it reads prompts with a video, or with a single image."""
        single = video or self.images in (None, 1)
        return single and self.form is None and self.media in (None, "video" if video else "images")


def short_name(bundle: str | None) -> str:
    """Name of a bundle without its version; empty for None."""
    return (bundle or "").partition("@")[0]


@dataclass(frozen=True)
class EngineStats:
    """State of the engine and counters since its start, for metrics and the console."""

    running: int = 0  # requests that hold memory
    waiting: int = 0
    mode: Mode = Mode.UNMERGED  # of the last step
    merged_adapter: str | None = None  # None if the base weights are pristine
    switches: int = 0  # how often the base weights were changed
    steps: int = 0  # that computed something
    pages_total: int = 0
    pages_free: int = 0  # those of the prefix cache included
    pages_kv: int = 0
    pages_adapters: int = 0
    pages_contexts: int = 0
    contexts_resident: int = 0  # whose prefix is on the device
    contexts_known: int = 0
    context_loads: int = 0
    adapters_resident: tuple[str, ...] = ()
    adapters_known: int = 0  # wherever they are
    on_device: tuple[str, ...] = ()  # names for the adapters on the device, of domains included
    on_disk: tuple[str, ...] = ()  # names for those in files only; others are in host memory
    prefix_hits: int = 0  # prompt tokens found in the prefix cache
    prefix_queries: int = 0
    image_hits: int = 0  # images found in the image cache
    image_queries: int = 0
    preemptions: int = 0
    adapter_loads: int = 0
    finished: dict[str, int] = field(default_factory=dict)  # requests, by the value of `Finish`
    prompt_tokens: int = 0
    generated_tokens: int = 0
    shared_passes: int = 0  # requests whose head read the hidden states of another one's pass
    non_finite: int = 0  # requests that failed as the model computed NaN or infinity
    unmergeable: tuple[str, ...] = ()  # adapters that are never merged into the base weights
    quarantined: dict[str, str] = field(default_factory=dict)  # adapters that are, and why
    start_seconds: dict[str, float] = field(default_factory=dict)  # by phase, later ones too
    prepared: int = 0  # graphs and kernels
    preparations: int = 0
    tilings_measured: int = 0  # shapes, on a GPU for which no tilings are shipped
    tilings_wanted: int = 0


@dataclass(frozen=True)
class NewContext:
    """A document that is to become a context while others are served."""

    name: str  # name that requests will use
    document: str  # the document's text
    form: str = "prefix"  # its own keys and values, or ``memory_tokens`` of an encoder
    tokens: int | None = None  # that a prefix keeps, None for all; not of an encoder
    encoder: str | None = None  # name of the encoder, ``bundle/encoder``; None for the only one
    # Name of the adapter that answers; None for the base model, which encoders are trained for
    # unless they come with an adapter that decodes.
    adapter: str | None = None


class EngineClient(Protocol):
    """Interface that the server uses; `EngineProcess` and `AsyncEngine` implement it.

    What loads raises an `AdapterError`, a document that cannot be compressed a `RequestError`, and
    what unloads an `UnknownModelError` or a `BusyError`; nothing has changed then. Unfinished
    requests of what is unloaded are still answered.
    """

    base: str  # id of the base model
    dtype: str  # data type that it computes in, as ``bfloat16``
    context_length: int  # longest prompt and answer together, in tokens
    tokenizer: Any  # the base model's, from transformers
    healthy: bool  # whether the engine runs; False after it has failed or was closed
    # State of every replica by its name, this one included; None without others.
    peers: dict[str, EngineStats] | None = None

    def generate(self, request: Request) -> AsyncGenerator[Output, None]:
        """Answer a request with a stream of outputs, the last of which has `finish`.

        The outputs of the requests in `Request.also` come among its own, with their ids. If a
        request fails, its last output has `error`; nothing is raised. Closing the iterator before
        its end cancels what has not ended.
        """

    def models(self) -> list[ServedModel]:
        """Return what requests can name: the base model, then adapters, then domains."""

    def stats(self) -> EngineStats:
        """Return the state and counters of the engine as of its last step, without waiting."""

    async def load(
        self, kind: str, folder: Path, name: str = "", *, decode_only: bool = False
    ) -> list[ServedModel]:
        """Load a ``bundle``, or under a name a PEFT ``adapter`` or a ``context``, in its place.

        With `decode_only`, an adapter applies only to a prompt's last token and those after.
        """

    async def unload(self, kind: str, name: str) -> None:
        """Unload an ``adapter`` or ``context`` of no bundle, or a ``bundle`` with all of its."""

    async def make_context(self, wanted: NewContext, folder: Path) -> None:
        """Compress a document into a new folder, to be loaded as a context."""

    def count_tokens(self, text: str) -> int:
        """Return the number of tokens of a text."""
        return len(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    async def close(self, drain: float = 0.0) -> None:
        """Stop the engine, after unfinished requests had `drain` seconds; new ones are refused."""
