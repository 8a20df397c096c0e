"""Replays a trace against a running server and measures the answers.

`python -m tests.bench.valora_serve.bench_load --trace FILE`; other tools know no adapters.

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
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from PIL import Image
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn
from rich.table import Table

from valora_data.errors import ValoraError
from valora_data.wording import plural
from valora_serve.errors import SettingsError, StorageError
from valora_serve.workloads import traces
from valora_serve.workloads.traces import Workload

TEMPLATE_TOKENS = 64  # tokens left free for the chat template and the image placeholders
LATE = 0.1  # seconds of delay in the client itself from which on it is reported
PERCENTILES = (50, 90, 95, 99)
FORMULA = "average token latency = sum of latencies / sum of tokens (input, image and output)"


@dataclass(frozen=True, slots=True)
class TimedRequest:
    """A request to send."""

    at: float  # seconds from the start
    model: str
    path: str
    body: dict[str, Any]
    stream: bool
    latency_limit: float  # seconds; NaN for none


@dataclass(slots=True)
class Result:
    """Measurements of a request; times are in seconds, the first two from when it was due."""

    model: str
    latency: float = math.nan
    first: float = math.nan  # to the first token, or to the head's answer
    late: float = 0.0  # delay of sending, caused by the client itself
    gaps: list[float] = field(default_factory=list)  # between tokens
    prompt: int = 0  # tokens, including image tokens
    output: int = 0
    error: str | None = None  # status and error code, if it was not answered
    latency_limit: float = math.nan


@dataclass(frozen=True)
class Target:
    """Models of the server under test."""

    context_length: int
    base: str
    heads: tuple[str, ...]  # domains that a head answers
    others: tuple[str, ...]  # adapters, and domains that generate
    media: Mapping[str, str] = field(default_factory=dict)  # ``images`` or ``video`` by domain
    prompted: frozenset[str] = frozenset()  # domains whose prompt takes words of the request

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
    """Turn a workload into requests for a server, and say how many prompts were cut to its context.

    Where the server has no model of an adapter's name, one of its models stands in: a domain with a
    head where the workload generates no tokens, an adapter or a domain that generates elsewhere.
    """
    rng = np.random.default_rng(seed)
    requests, cut = [], 0
    for i in range(len(workload)):
        number = int(workload.adapter[i])
        output, images = int(workload.output[i]), int(workload.images[i])
        name = workload.adapters[number] if number != traces.BASE else target.base
        if number != traces.BASE and name not in (*target.heads, *target.others):
            stand_ins = target.others if output or not target.heads else target.heads
            name = stand_ins[number % len(stand_ins)] if stand_ins else target.base
        prompt = int(workload.prompt[i])
        limit, at = float(workload.latency_limit[i]), float(workload.arrival[i])
        if name in target.heads:
            urls = [_picture(rng) for _ in range(max(1, images))]
            video = target.media.get(name, "video" if images > 1 else "images") == "video"
            body: dict[str, Any] = {"frames" if video else "images": urls}
            if name in target.prompted:
                body["prompt"] = _words(rng)
            requests.append(TimedRequest(at, name, f"/v1/vision/{name}", body, False, limit))
            continue
        output = min(max(1, output), target.context_length // 2)
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
    """Send each request when it is due; return the result of each, in the same order."""
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
            if usage := event.get("usage"):
                result.prompt, result.output = usage["prompt_tokens"], usage["completion_tokens"]
            choice = (event["choices"] or [{}])[0]
            if choice.get("text") or choice.get("delta", {}).get("content"):
                if math.isnan(result.first):
                    result.first = now - due
                else:
                    result.gaps.append(now - last)
                last = now
    result.latency = time.perf_counter() - due
    if math.isnan(result.first):
        result.first = result.latency


def _error(status: int, content: bytes) -> str:
    try:
        return f"{status} {json.loads(content)['error']['code']}"
    except (ValueError, KeyError, TypeError):
        return str(status)


def summarise(results: Sequence[Result], slo: float | None) -> dict[str, Any]:
    """Compute counts, rates, and percentiles in seconds; what was not answered missed its limit."""
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


def print_figures(figures: dict[str, Any], wall: float, console: Console) -> None:
    """Print the figures of a run that took `wall` seconds: a table of times, then sentences."""
    made = Table()
    made.add_column("milliseconds")
    for name in ("mean", *(f"p{p}" for p in PERCENTILES)):
        made.add_column(name, justify="right")
    for name, values in figures["seconds"].items():
        made.add_row(name, *("–" if v is None else f"{1000 * v:.1f}" for v in values.values()))
    console.print(made)
    tokens = figures["prompt_tokens"] + figures["output_tokens"]
    lines = [
        f"{figures['answered']} of {plural(figures['requests'], 'request')} answered in "
        f"{wall:.1f} s: {figures['answered'] / wall:.2f} requests/s, "
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
    for line in lines:
        console.print(line, markup=False, highlight=False)


def _parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        "bench_load",
        description="Replay a trace against a running server, and print latencies and throughput.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    for name, kind, default, text in (
        ("url", str, "http://127.0.0.1:8000", "URL of the server"),
        ("key", str, os.environ.get("VALORA_BENCH_KEY"), "API key"),
        ("trace", Path, None, "JSON lines: arrival, adapter, prompt, output, …"),
        ("rate", float, 4.0, "requests per second; video: streams"),
        ("duration", float, 30.0, "seconds of arrivals"),
        ("adapters", int, 4, "number of adapters"),
        ("skew", float, 0.6, "share of the most popular adapter"),
        ("prompt", int, 128, "poisson: prompt tokens"),
        ("output", int, 64, "poisson: tokens to generate"),
        ("requests", int, 100, "at_once: number of requests"),
        ("first", int, None, "replay only the first so many requests"),
        ("speed", float, 1.0, "replay so many times faster"),
        ("slo", float, None, "latency limit in seconds, if the trace has none"),
        ("timeout", float, 600.0, "seconds to wait for an answer"),
        ("seed", int, 0, "random seed of trace and contents"),
        ("json", Path, None, "also write all figures to this file"),
    ):
        made.add_argument(f"--{name}", type=kind, default=default, help=text)
    made.add_argument("--workload", choices=sorted(traces.GENERATORS), default="poisson",
                      help="generator, if there is no --trace")  # fmt: skip
    return made


def _target(url: str, key: str | None) -> Target:
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
    """Run the command; return 1 if no request was answered."""
    options = _parser().parse_args(list(arguments))
    if not (options.speed > 0 and options.rate > 0):
        raise SettingsError(
            f"--speed and --rate must be above 0, got {options.speed:g} and {options.rate:g}"
        )
    url = options.url.rstrip("/")
    target = _target(url, options.key)
    if options.trace is not None:
        workload = traces.read(options.trace)
    else:
        given = vars(options) | {"streams": round(options.rate)}
        workload = traces.generate(traces.GENERATORS[options.workload], given)
    requests, cut = build_requests(workload, target, options.seed)
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
    print_figures(figures, wall, console)
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
    except ValoraError as error:
        sys.exit(f"error: {error}")
