"""``valora-serve bench``: replays a trace against a running server and measures the answers.

Requests are sent at the times that the trace says, however slow the answers are (open loop).
Prompts have the lengths of the trace. Every image is different, so that no cache can answer.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import json
import math
import os
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import numpy as np
from PIL import Image
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn
from rich.table import Table

from valora_data.wording import plural
from valora_serve.errors import ServeError, SettingsError, StorageError
from valora_serve.workloads import traces

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from valora_serve.workloads.traces import Workload

TEMPLATE_TOKENS = 64  # tokens left free for the chat template and the image placeholders
LATE = 0.1  # seconds of delay in the client itself from which on it is reported
PERCENTILES = (50, 90, 95, 99)
FORMULA = "average token latency = sum of latencies / sum of tokens (input, image and output)"


@dataclass(frozen=True, slots=True)
class TimedRequest:
    """A request to send.

    Attributes:
        at: Time at which to send it, in seconds from the start.
        model: Model that the request names.
        path: Path of the endpoint.
        body: JSON body.
        stream: Whether the answer is streamed.
        latency_limit: Latency limit in seconds; NaN for none.
    """

    at: float
    model: str
    path: str
    body: dict[str, Any]
    stream: bool
    latency_limit: float


@dataclass(slots=True)
class Result:
    """Measurements of a request; times are in seconds.

    Attributes:
        model: Model that the request names.
        late: Delay of sending the request, caused by the client itself.
        latency: Time from when the request was due to the end of its answer.
        first: Time from when the request was due to the first token, or to the head's answer.
        gaps: Times between tokens.
        prompt: Prompt tokens, including image tokens.
        output: Generated tokens.
        error: Status and error code of a request that was not answered.
        latency_limit: Latency limit; NaN for none.
    """

    model: str
    late: float = 0.0
    latency: float = math.nan
    first: float = math.nan
    gaps: list[float] = field(default_factory=list)
    prompt: int = 0
    output: int = 0
    error: str | None = None
    latency_limit: float = math.nan


@dataclass(frozen=True)
class Target:
    """Models of the server under test.

    Attributes:
        context_length: Longest sequence (prompt and answer) in tokens.
        base: Name of the base model.
        heads: Domains that a head answers.
        others: Adapters, and domains that generate.
        media: What each domain reads, ``images`` or ``video``, where the server says so.
        prompted: Domains whose prompt takes words of the request.
    """

    context_length: int
    base: str
    heads: tuple[str, ...]
    others: tuple[str, ...]
    media: Mapping[str, str] = field(default_factory=dict)
    prompted: frozenset[str] = frozenset()

    @classmethod
    def from_cards(cls, cards: Sequence[dict[str, Any]]) -> Target:
        """Read the model cards that ``/v1/models`` lists."""
        heads = tuple(card["id"] for card in cards if card.get("head"))
        others = tuple(
            card["id"] for card in cards if card.get("kind") != "base" and not card.get("head")
        )
        media = {card["id"]: card["media"] for card in cards if card.get("media")}
        prompted = frozenset(card["id"] for card in cards if "{}" in (card.get("prompt") or ""))
        first = cards[0]
        return cls(int(first["max_model_len"]), str(first["id"]), heads, others, media, prompted)


def build_requests(workload: Workload, target: Target, seed: int) -> tuple[list[TimedRequest], int]:
    """Turn a workload into requests for a server.

    An adapter of the workload keeps its name if the server has a model of this name. Otherwise one
    of the server's models stands in for it: a domain with a head where the workload generates no
    tokens, an adapter or a domain that generates elsewhere.

    Args:
        workload: Requests to replay.
        target: Models of the server.
        seed: Random seed of prompts and images.

    Returns:
        The requests, and how many prompts were cut to the server's context length.
    """
    rng = np.random.default_rng(seed)
    requests, cut = [], 0
    for i in range(len(workload)):
        number = int(workload.adapter[i])
        output, images = int(workload.output[i]), int(workload.images[i])
        name = workload.adapters[number] if number != traces.BASE else target.base
        head = output == 0 and bool(target.heads)
        if number == traces.BASE:
            head = False
        elif name not in (*target.heads, *target.others):
            stand_ins = target.heads if head else target.others
            name = stand_ins[number % len(stand_ins)] if stand_ins else target.base
        head = name in target.heads
        output = max(1, output)
        prompt = int(workload.prompt[i])
        limit = float(workload.latency_limit[i])
        at = float(workload.arrival[i])
        if head:
            urls = [_picture(rng) for _ in range(max(1, images))]
            video = target.media.get(name, "video" if images > 1 else "images") == "video"
            body: dict[str, Any] = {"frames" if video else "images": urls}
            if name in target.prompted:
                body["prompt"] = _words(rng)
            requests.append(TimedRequest(at, name, f"/v1/vision/{name}", body, False, limit))
            continue
        output = min(output, target.context_length // 2)
        most = target.context_length - output - TEMPLATE_TOKENS
        if prompt > most:
            prompt, cut = most, cut + 1
        common = {
            "model": name, "max_tokens": output, "ignore_eos": True, "stream": True,
            "temperature": 0, "stream_options": {"include_usage": True},
        }  # fmt: skip
        if images:
            parts: list[dict[str, Any]] = [{"type": "text", "text": _words(rng)}]
            parts += [
                {"type": "image_url", "image_url": {"url": _picture(rng)}} for _ in range(images)
            ]
            path, body = "/v1/chat/completions", {"messages": [{"role": "user", "content": parts}]}
        else:
            # Token ids that are ordinary in any tokenizer: special ones are below, rare ones above.
            path, body = "/v1/completions", {"prompt": rng.integers(100, 1000, prompt).tolist()}
        requests.append(TimedRequest(at, name, path, common | body, True, limit))
    return requests, cut


def _words(rng: np.random.Generator) -> str:
    return " ".join("abcdefghij"[k] for k in rng.integers(0, 10, 8))


def _picture(rng: np.random.Generator) -> str:
    pixels = rng.integers(0, 256, (12, 12, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).resize((224, 224)).save(buffer, "JPEG")
    return "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode()


async def replay(
    url: str, requests: Sequence[TimedRequest], key: str | None, timeout: float
) -> list[Result]:
    """Send each request when it is due.

    Args:
        url: URL of the server.
        requests: Requests in order of time.
        key: API key.
        timeout: Time limit for an answer in seconds.

    Returns:
        The result of each request, in the same order.
    """
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=256)
    columns = ("{task.description}", BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    results = [Result(request.model, latency_limit=request.latency_limit) for request in requests]
    timeouts = httpx.Timeout(timeout, connect=30.0, pool=None)
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task("requests", total=len(requests))
        async with httpx.AsyncClient(
            base_url=url, headers=headers, limits=limits, timeout=timeouts, trust_env=False
        ) as client:
            start = time.perf_counter() + 0.1

            async def one(request: TimedRequest, result: Result) -> None:
                due = start + request.at
                await asyncio.sleep(max(0.0, due - time.perf_counter()))
                result.late = time.perf_counter() - due
                try:
                    await _send(client, request, result, due)
                except (httpx.HTTPError, ValueError, KeyError) as error:
                    result.error = type(error).__name__
                progress.advance(bar)

            await asyncio.gather(*(one(*pair) for pair in zip(requests, results, strict=True)))
    return results


async def _send(
    client: httpx.AsyncClient, request: TimedRequest, result: Result, due: float
) -> None:
    if not request.stream:
        response = await client.post(request.path, json=request.body)
        done = time.perf_counter()
        if response.status_code != 200:
            result.error = _error(response.status_code, response.content)
            return
        usage = response.json()["usage"]
        result.first = result.latency = done - due
        result.prompt, result.output = usage["prompt_tokens"], usage["completion_tokens"]
        return
    last = math.nan
    async with client.stream("POST", request.path, json=request.body) as response:
        if response.status_code != 200:
            result.error = _error(response.status_code, await response.aread())
            return
        async for line in response.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            now = time.perf_counter()
            event = json.loads(line[6:])
            if "error" in event:
                result.error = str(event["error"].get("code"))
                return
            if event.get("usage"):
                result.prompt = event["usage"]["prompt_tokens"]
                result.output = event["usage"]["completion_tokens"]
            if event["choices"] and _has_text(event["choices"][0]):
                if math.isnan(result.first):
                    result.first = now - due
                else:
                    result.gaps.append(now - last)
                last = now
    result.latency = time.perf_counter() - due
    if math.isnan(result.first):
        result.first = result.latency


def _has_text(choice: dict[str, Any]) -> bool:
    return bool(choice.get("text") or choice.get("delta", {}).get("content"))


def _error(status: int, content: bytes) -> str:
    try:
        return f"{status} {json.loads(content)['error']['code']}"
    except (ValueError, KeyError, TypeError):
        return str(status)


def summarise(results: Sequence[Result], slo: float | None) -> dict[str, Any]:
    """Compute the figures of a run.

    Args:
        results: The result of each request.
        slo: Latency limit in seconds of the requests for which the trace has none; None for none.

    Returns:
        Counts, rates, and percentiles in seconds. Requests that were not answered count as missing
        their latency limit, and are left out of the latencies.
    """
    answered = [result for result in results if result.error is None]
    tokens = sum(result.prompt + result.output for result in answered)
    seconds = {
        "time to first token": [result.first for result in answered],
        "between tokens": [gap for result in answered for gap in result.gaps],
        "latency": [result.latency for result in answered],
    }
    limits = [slo if math.isnan(r.latency_limit) else r.latency_limit for r in results]
    limited = [(result, limit) for result, limit in zip(results, limits, strict=True) if limit]
    met = sum(result.error is None and result.latency <= limit for result, limit in limited)
    return {
        "requests": len(results),
        "answered": len(answered),
        "errors": dict(Counter(result.error for result in results if result.error is not None)),
        "prompt_tokens": sum(result.prompt for result in answered),
        "output_tokens": sum(result.output for result in answered),
        "average_token_latency": sum(r.latency for r in answered) / tokens if tokens else None,
        "slo_attainment": met / len(limited) if limited else None,
        "sent_late_p99": _percentile([result.late for result in results], 99),
        "seconds": {
            name: {"mean": float(np.mean(values)) if values else None}
            | {f"p{p}": _percentile(values, p) for p in PERCENTILES}
            for name, values in seconds.items()
        },
    }


def _percentile(values: Sequence[float], percent: float) -> float | None:
    return float(np.percentile(values, percent)) if len(values) else None


def table(figures: dict[str, Any]) -> Table:
    """Lay out the mean and the percentiles of the times as a table."""
    made = Table()
    made.add_column("milliseconds")
    for name in ("mean", *(f"p{p}" for p in PERCENTILES)):
        made.add_column(name, justify="right")
    for name, values in figures["seconds"].items():
        cells = [("–" if value is None else f"{1000 * value:.1f}") for value in values.values()]
        made.add_row(name, *cells)
    return made


def sentences(figures: dict[str, Any], wall: float) -> list[str]:
    """Put the other figures into sentences.

    Args:
        figures: Figures of the run, as `summarise` returns them.
        wall: Seconds that the run took.
    """
    tokens = figures["prompt_tokens"] + figures["output_tokens"]
    lines = [
        f"{figures['answered']} of {plural(figures['requests'], 'request')} answered in "
        f"{wall:.1f} s: "
        f"{figures['answered'] / wall:.2f} requests/s, "
        f"{figures['output_tokens'] / wall:.1f} output tokens/s, {tokens / wall:.1f} tokens/s"
    ]
    if figures["average_token_latency"] is not None:
        lines.append(f"{1000 * figures['average_token_latency']:.3f} ms: {FORMULA}")
    if figures["slo_attainment"] is not None:
        lines.append(f"{100 * figures['slo_attainment']:.1f} % answered within their latency limit")
    if figures["errors"]:
        errors = ", ".join(f"{count} × {code}" for code, count in figures["errors"].items())
        lines.append(f"not answered: {errors}")
    late = figures["sent_late_p99"]
    if late is not None and late > LATE:
        lines.append(
            f"this client sent requests late (p99 {1000 * late:.0f} ms): run it on a faster machine"
        )
    return lines


def parser() -> argparse.ArgumentParser:
    """Make the parser of the command's options."""
    made = argparse.ArgumentParser(
        "valora-serve bench",
        description="Replay a trace against a running server, and print latencies and throughput.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    made.add_argument("--url", default="http://127.0.0.1:8000", help="URL of the server")
    made.add_argument("--key", default=os.environ.get("VALORA_BENCH_KEY"), help="API key")
    made.add_argument("--trace", type=Path, help="JSON lines: arrival, adapter, prompt, output, …")
    made.add_argument(
        "--workload", choices=sorted(traces.GENERATORS), default="poisson",
        help="generator, if there is no --trace",
    )  # fmt: skip
    made.add_argument("--rate", type=float, default=4.0, help="requests per second; video: streams")
    made.add_argument("--duration", type=float, default=30.0, help="seconds of arrivals")
    made.add_argument("--adapters", type=int, default=4, help="number of adapters")
    made.add_argument("--skew", type=float, default=0.6, help="share of the most popular adapter")
    made.add_argument("--prompt", type=int, default=128, help="poisson: prompt tokens")
    made.add_argument("--output", type=int, default=64, help="poisson: tokens to generate")
    made.add_argument("--requests", type=int, default=100, help="at_once: number of requests")
    made.add_argument("--first", type=int, help="replay only the first so many requests")
    made.add_argument("--speed", type=float, default=1.0, help="replay so many times faster")
    made.add_argument("--slo", type=float, help="latency limit in seconds, if the trace has none")
    made.add_argument("--timeout", type=float, default=600.0, help="seconds to wait for an answer")
    made.add_argument("--seed", type=int, default=0, help="random seed of trace and contents")
    made.add_argument("--json", type=Path, help="also write all figures to this file")
    return made


def make_workload(options: argparse.Namespace) -> Workload:
    """Read or generate the workload that the options name.

    Raises:
        TraceError: The file is damaged, or an option is out of range.
    """
    if options.trace is not None:
        return traces.read(options.trace)
    given = vars(options) | {"streams": round(options.rate)}
    return traces.generate(traces.GENERATORS[options.workload], given)


def query_target(url: str, key: str | None) -> Target:
    """Ask a server for its models.

    Raises:
        SettingsError: No server answers at this URL, or it refuses.
    """
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        response = httpx.get(f"{url}/v1/models", headers=headers, timeout=30, trust_env=False)
        response.raise_for_status()
        return Target.from_cards(response.json()["data"])
    except (httpx.HTTPError, ValueError, KeyError, IndexError) as error:
        raise SettingsError(
            f"{url} does not answer as a valora-serve server: {error}; check --url and --key"
        ) from error


def main(arguments: Sequence[str]) -> int:
    """Run the command ``valora-serve bench``.

    Returns:
        Exit status: 1 if no request was answered.
    """
    options = parser().parse_args(list(arguments))
    if not (options.speed > 0 and options.rate > 0):
        raise SettingsError(
            f"--speed and --rate must be above 0, got {options.speed:g} and {options.rate:g}"
        )
    url = options.url.rstrip("/")
    target = query_target(url, options.key)
    requests, cut = build_requests(make_workload(options), target, options.seed)
    requests = [
        replace(request, at=request.at / options.speed) for request in requests[: options.first]
    ]
    console = Console()
    models = Counter(request.model for request in requests)
    counts = ", ".join(f"{name} {count}" for name, count in models.most_common(8))
    console.print(f"{plural(len(requests), 'request')}: {counts}", markup=False, highlight=False)
    if cut:
        console.print(
            f"{plural(cut, 'prompt|prompts was|were')} cut to the context length of "
            f"{target.context_length} tokens"
        )
    began = time.perf_counter()
    results = asyncio.run(replay(url, requests, options.key, options.timeout))
    wall = time.perf_counter() - began
    figures = summarise(results, options.slo)
    console.print(table(figures))
    for line in sentences(figures, wall):
        console.print(line, markup=False, highlight=False)
    if options.json is not None:
        given = {name: str(value) for name, value in vars(options).items() if name != "key"}
        content = {
            "options": given, "wall_seconds": wall, "figures": figures,
            "requests": [asdict(result) for result in results],
        }  # fmt: skip
        try:
            options.json.write_text(json.dumps(content, indent=1, default=str), encoding="utf-8")
        except OSError as error:
            raise StorageError(
                f"{options.json} cannot be written ({error.strerror}): the figures above are all "
                "that is left; make room or name another file"
            ) from error
    return 0 if figures["answered"] else 1


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except ServeError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
