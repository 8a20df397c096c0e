"""Requests to the engine and its outputs, and the interface between server and engine."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
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


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen and when generation stops.

    Attributes:
        max_tokens: Most tokens to generate; None for as many as the context length allows.
        min_tokens: Fewest tokens to generate before a stop token or a stop text counts.
        temperature: Divisor of the logits; greedy decoding below `GREEDY_BELOW`.
        top_k: Sample from the k most likely tokens; 0 for all.
        top_p: Sample from the fewest most likely tokens whose probabilities add up to this.
        min_p: Sample from tokens at least this likely, relative to the most likely token.
        seed: Seed of this request's random numbers, whatever else is in the batch; None for a
            random one.
        stop: Texts that end the answer; they are not part of it.
        logprobs: Number of most likely tokens whose log probabilities are returned, beside that of
            the chosen token; None for no log probabilities.
        prompt_logprobs: The same for each token of the prompt, which is then computed as a whole,
            without the prefix cache.
        ignore_eos: Whether stop tokens are ignored and generation goes on to `max_tokens`.
        frequency_penalty: Subtracted from a token's logit for each time that it was generated.
        presence_penalty: Subtracted from a token's logit if it was generated at all.
        repetition_penalty: Divisor of positive logits, and factor of negative ones, of tokens of
            the prompt and the answer; 1 for none.
        logit_bias: (token id, value) pairs; the values are added to the logits, after penalties.
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
    prompt_logprobs: int | None = None
    ignore_eos: bool = False
    constraint: Constraint | None = None
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()

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


MOST_MIXED, MOST_WEIGHT = 2, 4.0
"""Most adapters of a request, as kernels take so many a row; largest weight, negative or not."""


@dataclass(frozen=True, slots=True)
class Request:
    """A request to the engine.

    Exactly one of `messages`, `text` and `token_ids` is given. A request for a domain with images
    only may give none of them; it gets the domain's prompt.

    Attributes:
        id: Id of the request, unique among unfinished requests.
        model: Name of a domain, of an adapter or of the base model; the base model if None.
        adapters: Names of up to `MOST_MIXED` adapters that apply instead, with the factors of what
            they add. `model` then names the base model, or the first of them.
        messages: Chat turns for transformers' chat templates: dicts of ``role`` and ``content``,
            which is a string or a list of parts of type ``text``, ``image`` and ``video``. Image
            and video parts stand for `images` and `videos`, in this order.
        text: Prompt without a chat template, including placeholders of the images.
        token_ids: Token ids of a prompt without images.
        images: RGB images.
        videos: Videos, each a sequence of RGB frames.
        head: Whether the domain's head answers, if it has one; otherwise text is generated.
        embed: Whether the answer is an embedding instead: a `HeadResult` of kind ``embedding``
            whose `logits` are [1, width], the last hidden state of the prompt's last token.
        keep_kv: Whether an embedding's prompt returns its keys and values, see `Output.kv`.
        min_score: Least confidence of a box head's boxes; the domain's threshold if None.
        deadline: Seconds from arrival within which the request must be answered; None for no limit.
        client: Who asks, e.g. the name of an API key, for shares by key; None if that is not known.
        cache_salt: Requests share cached prompts and images only where this is the same.
        stream: Whether outputs are passed on to the client as they come. Otherwise all of them come
            at the end, and another replica may begin the answer again.
        also: Requests of other domains about the same images, answered together with this one.
    """

    id: str
    model: str | None = None
    adapters: tuple[tuple[str, float], ...] = ()
    messages: Sequence[dict[str, Any]] | None = None
    text: str | None = None
    token_ids: Sequence[int] | None = None
    images: Sequence[Image] = ()
    videos: Sequence[Sequence[Image]] = ()
    head: bool = True
    embed: bool = False
    keep_kv: bool = False
    min_score: float | None = None
    sampling: SamplingParams = field(default_factory=SamplingParams)
    deadline: float | None = None
    client: str | None = None
    cache_salt: str | None = None
    stream: bool = True
    also: tuple[Request, ...] = ()


@dataclass(frozen=True, slots=True)
class Logprob:
    """Log probability of a token, before temperature, penalties, bias and constraints.

    `raw` are its own bytes, also of a part of a character; None if texts leave it out.
    """

    token: int
    text: str
    logprob: float
    raw: bytes | None = None


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log probabilities of a chosen token and of the most likely ones, in descending order.

    `offset` is the number of the answer's characters before it, unfinished ones not counted.
    """

    chosen: Logprob
    top: tuple[Logprob, ...]
    offset: int = 0


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Log probabilities of a prompt's tokens, each given the tokens before it.

    The first token has none. n is the request's `SamplingParams.prompt_logprobs`.
    """

    ids: NDArray[np.int64]  # [tokens] int64, ids of the prompt's tokens
    # [tokens - 1] float32, those of the tokens from the second one on.
    logprobs: NDArray[np.float32]
    top_ids: NDArray[np.int64]  # [tokens - 1, n] int64, the most likely tokens at these places
    # [tokens - 1, n] float32, their log probabilities, in descending order.
    top_logprobs: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of a request: `image` and `cached` (by the prefix cache) are of the prompt."""

    prompt: int
    completion: int
    image: int = 0
    cached: int = 0


@dataclass(frozen=True, slots=True)
class Times:
    """Times of a request, in seconds of `time.monotonic`; None for what did not happen.

    It `started` when its first step was launched; `first_token` may be its head's result.
    """

    arrival: float
    started: float | None = None
    first_token: float | None = None
    finished: float | None = None


@dataclass(frozen=True, slots=True)
class Output:
    """A part of a request's answer; the last part has `finish`, `usage`, `times` and any `head`.

    Attributes:
        text: New text since the output before.
        token_ids: New token ids.
        logprobs: Log probabilities of the new tokens, if the request wants them.
        prompt: Log probabilities of the prompt, if the request wants them; in the first output
            with a token.
        kv: Keys and values of the prompt, if the request keeps them: a tensor [2, layers, kv_heads,
            tokens, head_dim] on the device; in the last output.
        error: What went wrong, if `finish` is ``error`` or ``cancelled``.
        mode: Inference mode of the request's last step.
    """

    id: str
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt: PromptLogprobs | None = None
    finish: Finish | None = None
    head: HeadResult | None = None
    kv: Any = None
    error: ServeError | None = None
    usage: Usage | None = None
    times: Times | None = None
    mode: Mode | None = None


def failure(request: Request, error: ServeError, arrival: float) -> Output:
    """Return the last output of a request that no engine has ended."""
    cancelled = isinstance(error, CancelledRequestError)
    return Output(
        request.id,
        finish=Finish.CANCELLED if cancelled else Finish.ERROR,
        error=error,
        times=Times(arrival, finished=time.monotonic()),
    )


@dataclass(frozen=True, slots=True)
class ServedModel:
    """Something that a request can name: the base model, an adapter or a domain.

    Attributes:
        kind: ``base``, ``adapter`` or ``domain``.
        root: Folder or hub name that it was loaded from.
        parent: Name of the base model of an adapter, or of the adapter of a domain; of a domain
            without an adapter, that of the base model.
        adapter: Name of the adapter that is applied, None for the base model as it is.
        head: Kind of the domain's head, None if it generates text.
        labels: Labels of the domain, in the order of its head's outputs.
        metric: Metric of the domain, e.g. ``f1@0.5``.
        accuracy: Accuracy of the domain on the test split, as measured for its bundle.
        required: Accuracy that the domain required.
        teacher: Accuracy of its teacher on the same samples.
        prompt: Prompt of the domain; ``{}`` in it stands for the request's own words.
        prompted: Whether requests to the domain have words of their own, such as a question.
        media: ``images``, ``video`` or ``text`` alone, what the domain was measured with, as
            `images` (a prompt's images or frames) and `max_tokens`; None if not known or varying.
        bundle: Name and version of the bundle, e.g. ``detection@1``.
        rank: Largest rank of the adapter, None without one.
        decode_only: Whether the adapter is applied only to the last token of a prompt and those
            after it, so that prompts use the base model's keys and values.
        form: Form of the memory of a context (``prefix``, ``memory_tokens``, ``adapter``), None for
            what is none; it has `memory_tokens` and `memory_bytes`, for `source_tokens`.
        encodes: Tokens of the memories that an encoder makes of documents; None for what is none.
        loaded_at: Unix time at which it was loaded.
    """

    name: str
    kind: str
    root: str
    parent: str | None = None
    adapter: str | None = None
    head: str | None = None
    boxes: bool = False
    task: str | None = None
    labels: tuple[str, ...] = ()
    metric: str | None = None
    accuracy: float | None = None
    required: float | None = None
    teacher: float | None = None
    prompt: str | None = None
    prompted: bool = False
    media: str | None = None
    images: int | None = None
    max_tokens: int | None = None
    bundle: str | None = None
    rank: int | None = None
    decode_only: bool = False
    form: str | None = None
    memory_tokens: int | None = None
    memory_bytes: int | None = None
    source_tokens: int | None = None
    encodes: int | None = None
    loaded_at: float = 0.0


@dataclass(frozen=True, slots=True)
class EngineStats:
    """State of the engine and counters since its start, for metrics and the console.

    Attributes:
        running: Requests that hold memory.
        mode: Inference mode of the last step.
        merged_adapter: Name of the adapter merged into the base weights, None if they are pristine.
        switches: How often the base weights were changed.
        steps: Steps that computed something.
        pages_free: Free pages, those of the prefix cache included.
        contexts_resident: Number of contexts whose prefix is on the device.
        adapters_known: Number of adapters, wherever they are.
        on_device: Names that requests can use for the adapters on the device, those of domains
            included.
        on_disk: The same for adapters that are in their files only; all others are in host memory.
        prefix_hits: Prompt tokens found in the prefix cache, of `prefix_queries`.
        image_hits: Images found in the image cache, of `image_queries`.
        finished: Requests that ended, by the value of `Finish`.
        shared_passes: Requests whose head read the hidden states of another request's pass.
        non_finite: Requests that failed because the model computed NaN or infinity for them.
        unmergeable: Names of the adapters that are never merged into the base weights.
        quarantined: Names of the adapters that requests cannot use any more, each with the reason.
        start_seconds: Seconds that each phase of the start took, by its name; what is prepared
            between requests is added.
        prepared: Graphs and kernels that are prepared, of `preparations`.
        tilings_measured: Shapes whose kernel tilings are measured, of `tilings_wanted`, on a GPU
            for which none are shipped.
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
    pages_contexts: int = 0
    contexts_resident: int = 0
    contexts_known: int = 0
    context_loads: int = 0
    adapters_resident: tuple[str, ...] = ()
    adapters_known: int = 0
    on_device: tuple[str, ...] = ()
    on_disk: tuple[str, ...] = ()
    prefix_hits: int = 0
    prefix_queries: int = 0
    image_hits: int = 0
    image_queries: int = 0
    preemptions: int = 0
    adapter_loads: int = 0
    finished: dict[str, int] = field(default_factory=dict)
    prompt_tokens: int = 0
    generated_tokens: int = 0
    shared_passes: int = 0
    non_finite: int = 0
    unmergeable: tuple[str, ...] = ()
    quarantined: dict[str, str] = field(default_factory=dict)
    start_seconds: dict[str, float] = field(default_factory=dict)
    prepared: int = 0
    preparations: int = 0
    tilings_measured: int = 0
    tilings_wanted: int = 0


@dataclass(frozen=True, slots=True)
class NewContext:
    """A document that is to become a context while others are served."""

    name: str  # name that requests will use
    document: str  # the document's text
    # ``prefix`` for its own keys and values, ``memory_tokens`` for those of an encoder.
    form: str = "prefix"
    # Tokens that a prefix keeps, None for all; an encoder makes as many as it has.
    tokens: int | None = None
    encoder: str | None = None  # name of the encoder, ``bundle/encoder``; None for the only one
    # Name of the adapter that answers; None for the base model, which encoders are trained for
    # unless they come with an adapter that decodes.
    adapter: str | None = None


class EngineClient(Protocol):
    """Interface that the server uses; `AsyncEngine` implements it, and a fake in the tests.

    What loads raises an `AdapterError`, and what unloads an `UnknownModelError` or a `BusyError`;
    nothing has changed then. Unfinished requests of what is unloaded are still answered.
    """

    def generate(self, request: Request) -> AsyncIterator[Output]:
        """Answer a request with a stream of outputs, the last of which has `finish`.

        The outputs of the requests in `Request.also` come among its own, with their ids. If a
        request fails, its last output has `error`; nothing is raised. Closing the iterator before
        its end cancels what has not ended.
        """

    async def cancel(self, request_id: str) -> bool:
        """Cancel a request; return False if there is no unfinished request of this id."""

    def models(self) -> list[ServedModel]:
        """Return what requests can name: the base model, then adapters, then domains."""

    def stats(self) -> EngineStats:
        """Return the state and counters of the engine as of its last step, without waiting."""

    def replicas(self) -> dict[str, EngineStats] | None:
        """Return the state of every replica by its name, of which `stats` is the sum; or None."""

    async def load_adapter(
        self, name: str, folder: Path, *, decode_only: bool = False
    ) -> ServedModel:
        """Load a PEFT folder under a name; an adapter of this name is replaced.

        With `decode_only`, it is applied only to the last token of a prompt and those after.
        """

    async def unload_adapter(self, name: str) -> None:
        """Unload an adapter that belongs to no bundle."""

    async def load_bundle(self, folder: Path) -> list[ServedModel]:
        """Verify and load a bundle with its adapters and domains."""

    async def unload_bundle(self, name: str) -> None:
        """Unload a bundle with its domains and adapters."""

    async def make_context(self, wanted: NewContext, folder: Path) -> ServedModel:
        """Compress a document into a new folder, and serve it; a context of this name is replaced.

        Raises:
            RequestError: The document cannot be compressed; nothing has changed then.
        """

    async def load_context(self, name: str, folder: Path) -> ServedModel:
        """Serve a context that `make_context` has made before."""

    async def unload_context(self, name: str) -> None:
        """Unload a context that was made at run time."""

    def count_tokens(self, text: str) -> int:
        """Return the number of tokens of a text."""

    @property
    def tokenizer(self) -> Any:
        """The base model's tokenizer, from transformers."""

    @property
    def base(self) -> str:
        """Id of the base model."""

    @property
    def context_length(self) -> int:
        """Longest prompt and answer together, in tokens."""

    @property
    def healthy(self) -> bool:
        """Whether the engine runs; False after it has failed or was closed."""

    async def close(self, drain: float = 0.0) -> None:
        """Stop the engine, after unfinished requests had `drain` seconds; new ones are refused."""
