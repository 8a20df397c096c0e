"""Request traces: workloads that are generated, or read from a file.

The adapter of every request is drawn independently, so the requests of the popular adapter are
scattered among the others. The same seed gives the same workload.
"""

import csv
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, TypedDict, Unpack

import numpy as np
from numpy.typing import NDArray
from pydantic import AliasChoices, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from valora_serve.errors import RequestError

FRAME_TOKENS = 256  # visual tokens of an image or a video frame in VaLoRA's evaluation
CLIP_FRAMES = 6  # frames of a clip for action recognition (VaLoRA §6.2)
BASE = -1  # adapter number of the base model


class TraceError(RequestError):
    """A trace file is damaged, or the options of a generator are out of range."""

    code = "invalid_trace"


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests in order of arrival; every array has the shape [requests]."""

    adapters: tuple[str, ...]  # names
    ranks: tuple[int, ...]  # of the adapters
    arrival: NDArray[np.float64]  # seconds from the start, in rising order
    adapter: NDArray[np.int32]  # indices into `adapters`, `BASE` for the base model
    prompt: NDArray[np.int32]  # tokens, including image tokens, at least 1
    output: NDArray[np.int32]  # tokens to generate; 0 for a request that a head answers
    images: NDArray[np.int32]  # to encode
    latency_limit: NDArray[np.float64]  # seconds; NaN for none

    def __len__(self) -> int:
        return len(self.arrival)

    def name(self, index: int) -> str | None:
        """Return the adapter of a request, None for the base model."""
        number = int(self.adapter[index])
        return None if number == BASE else self.adapters[number]

    def share(self) -> float:
        """Return the share of the requests that use the most popular adapter."""
        named = self.adapter[self.adapter != BASE]
        return float(np.bincount(named).max() / len(self)) if len(named) else 0.0


class Mix(TypedDict, total=False):
    """Who asks in a generated workload."""

    adapters: int  # 16; 0 for the base model only
    skew: float | None  # 0.6, share of the first adapter, others share the rest; None: all equal
    ranks: Sequence[int]  # (64,), of the adapters, round robin
    seed: int  # 0


def _workload(
    rng: np.random.Generator,
    arrival: NDArray[np.float64],
    prompt: Any,
    output: Any,
    images: Any = 0,
    chosen: NDArray[np.int32] | None = None,
    **mix: Unpack[Mix],
) -> Workload:
    n, adapters, ranks = len(arrival), mix.get("adapters", 16), mix.get("ranks", (64,))
    if n == 0:
        raise TraceError("The workload has no requests; raise the rate or the duration.")
    if chosen is None:
        chosen = _choose(rng, n, adapters, mix.get("skew", 0.6))
    prompt, output, images = (
        np.broadcast_to(np.asarray(one, dtype=np.int32), n) for one in (prompt, output, images)
    )
    names = tuple(f"adapter-{i + 1}" for i in range(adapters))
    all_ranks = tuple(ranks[i % len(ranks)] for i in range(adapters))
    return Workload(names, all_ranks, arrival, chosen, prompt, output, images, np.full(n, np.nan))


def _choose(
    rng: np.random.Generator, n: int, adapters: int, skew: float | None
) -> NDArray[np.int32]:
    if adapters == 0:
        return np.full(n, BASE, dtype=np.int32)
    if skew is None:
        return rng.integers(0, adapters, n, dtype=np.int32)
    if not 0 <= skew <= 1:
        raise TraceError(f"The skewness must be between 0 and 1, got {skew:g}.")
    if adapters == 1 and skew < 1:
        raise TraceError(f"Skewness {skew:g} needs at least 2 adapters, got 1.")
    others = rng.integers(1, max(2, adapters), n, dtype=np.int32)
    return np.where(rng.random(n) < skew, 0, others)


def _arrivals(
    rng: np.random.Generator, rate: float, duration: float, cv: float = 1.0
) -> NDArray[np.float64]:
    """Draw arrival times with Gamma gaps of shape 1/cv² and scale cv²/rate (S-LoRA §7.2)."""
    if not (0 < rate < math.inf and 0 < duration < math.inf and 0 < cv < math.inf):
        raise TraceError(f"Rate, duration and variation must be above 0: {rate}, {duration}, {cv}.")
    times = np.zeros(0)
    end = 0.0
    while end < duration:
        n = int(rate * duration * 1.1) + 64
        more = end + np.cumsum(rng.gamma(1 / cv**2, cv**2 / rate, n))
        times = np.concatenate([times, more])
        end = float(times[-1])
    return times[times < duration]


def _lengths(rng: np.random.Generator, within: tuple[int, int], n: int) -> NDArray[np.int32]:
    """Draw tokens of prompts, and of outputs: [2, n]."""
    return rng.integers(within[0], within[1] + 1, (2, n), dtype=np.int32)


def poisson(
    rate: float, duration: float, *, prompt: int = 256, output: int = 200, **mix: Unpack[Mix]
) -> Workload:
    """Generate text requests of equal length with Poisson arrivals for `duration` seconds."""
    rng = np.random.default_rng(mix.get("seed", 0))
    return _workload(rng, _arrivals(rng, rate, duration), prompt, output, **mix)


def retrieval(rate: float, duration: float, **mix: Unpack[Mix]) -> Workload:
    """Generate VaLoRA's visual retrieval: questions about an image with long answers (§6.1, §6.2).

    Each request has one image of 256 tokens, a question of 8 to 64 tokens and an answer of 150 to
    250 tokens (the paper: 256 input and more than 200 output tokens); otherwise as `poisson`.
    """
    rng = np.random.default_rng(mix.get("seed", 0))
    arrival = _arrivals(rng, rate, duration)
    n = len(arrival)
    prompt = FRAME_TOKENS + rng.integers(8, 65, n)
    output = rng.integers(150, 251, n, dtype=np.int32)
    return _workload(rng, arrival, prompt, output, 1, **mix)


def video(streams: int, duration: float, *, heads: bool = True, **mix: Unpack[Mix]) -> Workload:
    """Generate VaLoRA's video analytics: one chunk per second and stream (§6.1, §6.2).

    Each chunk makes two requests: one for the action in 6 frames of 256 tokens, and one for the
    objects in a single frame. With `heads` both end after prefill; without heads they generate 5 to
    10 and 20 to 40 tokens. Each of the `streams` starts at a random time within the first second.
    """
    if streams < 1:
        raise TraceError(f"Video analytics needs at least 1 stream, got {streams}.")
    rng = np.random.default_rng(mix.get("seed", 0))
    start = rng.random(streams)
    chunks = np.arange(max(0, math.floor(duration)))
    arrival = np.repeat((start[:, None] + chunks[None, :]).ravel(), 2)
    action = np.tile([True, False], len(arrival) // 2)
    order = np.argsort(arrival, kind="stable")
    arrival, action = arrival[order], action[order]
    n = len(arrival)
    generated = np.where(action, rng.integers(5, 11, n), rng.integers(20, 41, n))
    frames = np.where(action, CLIP_FRAMES, 1)
    output = 0 if heads else generated
    return _workload(rng, arrival, frames * FRAME_TOKENS, output, frames, **mix)


def slora(
    rate: float,
    duration: float = 300.0,
    *,
    adapters: int = 200,
    alpha: float = 1.0,
    cv: float = 1.0,
    lengths: tuple[int, int] = (8, 512),
    ranks: Sequence[int] = (8,),
    seed: int = 0,
) -> Workload:
    """Generate S-LoRA's synthetic workload (§7.2); otherwise as `poisson`.

    Adapter i of n is drawn with probability ((i+1)/n)^α − (i/n)^α, α = `alpha` > 0, so that 1 is
    uniform and a smaller α is more skewed. Gaps are Gamma with coefficient of variation `cv`;
    tokens of prompts and of outputs are uniform within `lengths`.
    """
    if adapters < 1 or not 0 < alpha < math.inf:
        raise TraceError(f"Adapters and alpha must be positive, got {adapters} and {alpha:g}.")
    rng = np.random.default_rng(seed)
    arrival = _arrivals(rng, rate, duration, cv)
    n = len(arrival)
    # The cumulative distribution at i/n is (i/n)^α, so its inverse at u is n·u^(1/α).
    chosen = np.minimum(adapters - 1, (adapters * rng.random(n) ** (1 / alpha)).astype(np.int32))
    prompt, output = _lengths(rng, lengths, n)
    return _workload(rng, arrival, prompt, output, chosen=chosen, adapters=adapters, ranks=ranks)


def at_once(
    requests: int = 400, *, lengths: tuple[int, int] = (8, 512), **mix: Unpack[Mix]
) -> Workload:
    """Generate a saturated system: all arrive at once, with lengths as in S-LoRA's Table 2."""
    rng = np.random.default_rng(mix.get("seed", 0))
    return _workload(rng, np.zeros(requests), *_lengths(rng, lengths, requests), **mix)


GENERATORS: Mapping[str, Callable[..., Workload]] = {
    make.__name__: make for make in (poisson, retrieval, video, slora, at_once)
}
"""The generated workloads by name; a further one is a function that is listed here."""


def options_of(make: Callable[..., Workload]) -> frozenset[str]:
    """Return the names of the options that a generator takes."""
    named = set(inspect.signature(make).parameters)
    return frozenset(named | set(Mix.__annotations__) if "mix" in named else named)


def generate(make: Callable[..., Workload], options: Mapping[str, Any]) -> Workload:
    """Generate a workload; options that the generator does not take are ignored."""
    return make(**{name: options[name] for name in options_of(make) & options.keys()})


def _seconds(value: Any) -> float:
    """A number as it is; a date and time in seconds, in UTC unless it says otherwise."""
    try:
        return float(value)
    except OverflowError:
        return math.inf
    except (TypeError, ValueError):
        date = datetime.fromisoformat(str(value).strip())
        return (date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp()


class _Line(BaseModel):
    """A request in a file, whose columns may have the names that Azure's traces have."""

    model_config = ConfigDict(extra="forbid", coerce_numbers_to_str=True)

    arrival: Annotated[float, BeforeValidator(_seconds)] = Field(
        ge=0, allow_inf_nan=False, validation_alias=AliasChoices("arrival", "timestamp", "time")
    )
    prompt: int = Field(ge=1, lt=2**31, validation_alias=AliasChoices(
        "prompt", "contexttokens", "input", "prompt_tokens", "input_length"))  # fmt: skip
    output: int = Field(ge=0, lt=2**31, validation_alias=AliasChoices(
        "output", "generatedtokens", "output_tokens", "output_length"))  # fmt: skip
    adapter: str | None = None
    rank: int = Field(64, ge=1, lt=2**31)
    images: int = Field(0, ge=0, lt=2**31)
    latency_limit: float | None = Field(None, gt=0, allow_inf_nan=False)


def _lines(path: Path, *, table: bool = False) -> list[tuple[str, _Line]]:
    """The requests of a file, JSON lines or a CSV table, each with its place; or a TraceError."""
    found: list[tuple[str, _Line]] = []
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows = csv.DictReader(file)
            numbered: Iterable[tuple[int, Any]] = enumerate(rows if table else file, 1)
            for number, row in numbered:
                where = f"{path}, line {rows.line_num if table else number}"
                if table:
                    named = {str(name).strip().lower(): value for name, value in row.items()}
                    found.append((where, _Line.model_validate(named, extra="ignore")))
                elif row.strip():
                    found.append((where, _Line.model_validate_json(row)))
    except ValidationError as error:
        first = error.errors()[0]
        column = "".join(f"{name}: " for name in first["loc"][:1])
        raise TraceError(f"{where}: {column}{first['msg']}.") from None
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise TraceError(f"{path} cannot be read: {error}.") from error
    if not found:
        raise TraceError(f"{path} has no requests.")
    return found


def azure(path: Path, *, rate: float | None = None, **mix: Unpack[Mix]) -> Workload:
    """Read arrivals and lengths from a file like the Azure LLM inference traces; draw adapters.

    The CSV file has one column each for the time (seconds, or a date and time), the prompt tokens
    and the generated tokens (``TIMESTAMP,ContextTokens,GeneratedTokens``). With `rate`, as many
    requests per second are kept on average, sampled at random (VaLoRA §6.1).
    """
    rng = np.random.default_rng(mix.get("seed", 0))
    rows = [(one.arrival, one.prompt, one.output) for _, one in _lines(path, table=True)]
    table = np.array(sorted(rows))
    span = float(table[-1, 0] - table[0, 0])
    if rate is not None and span:  # of requests that all come at once there is no rate
        there = len(table) / span
        if there < rate:
            raise TraceError(f"{path} has {there:.3g} requests per second: lower the rate.")
        table = table[rng.random(len(table)) < rate / there]
        if not len(table):
            raise TraceError(f"{path} has no request left at {rate:g} per second; raise the rate.")
    arrival = table[:, 0] - table[0, 0]
    return _workload(rng, arrival, table[:, 1], table[:, 2], **mix)


def read(path: Path) -> Workload:
    """Read a workload from JSON lines; a TraceError names a damaged line and its fault.

    Each line has ``arrival``, ``prompt`` and ``output``, and maybe ``adapter``, ``rank`` (64),
    ``images`` and ``latency_limit``.
    """
    ranks: dict[str, tuple[int, int]] = {}  # number and rank of each adapter
    rows = []
    for where, line in _lines(path):
        number = BASE
        if line.adapter is not None:
            number, known = ranks.setdefault(line.adapter, (len(ranks), line.rank))
            if known != line.rank:
                raise TraceError(f"{where}: {line.adapter} has rank {line.rank}, but {known} above")
        limit = math.nan if line.latency_limit is None else line.latency_limit
        rows.append((line.arrival, number, line.prompt, line.output, line.images, limit))
    rows.sort(key=lambda row: row[0])
    table = np.array(rows)
    asked, prompt, output, images = (table[:, i].astype(np.int32) for i in range(1, 5))
    of_each = tuple(rank for _, rank in ranks.values())
    return Workload(tuple(ranks), of_each, table[:, 0], asked, prompt, output, images, table[:, 5])


def with_latency_limit(workload: Workload, seconds: float) -> Workload:
    """Return the same requests, each with a latency limit of so many seconds."""
    return replace(workload, latency_limit=np.full(len(workload), seconds))
