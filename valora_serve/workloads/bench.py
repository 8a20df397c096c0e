"""``valora-serve bench``: replays a trace against a running server, and says how it did.

Requests are sent when the trace says so, however slow the answers are (open loop). Prompts are of
the trace's lengths; images are drawn, no two alike, so that no cache answers in the model's place.
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
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from valora_serve.errors import ServeError, SettingsError
from valora_serve.workloads import traces

if TYPE_CHECKING:
    from collections.abc import Sequence

    import httpx
    from rich.table import Table

    from valora_serve.workloads.traces import Workload

ROOM = 64  # tokens of the context kept for the template and the images' frames
LATE = 0.1  # seconds that a client may be late itself before it is said
PERCENTILES = (50, 90, 95, 99)
FORMULA = "average token latency = sum of latencies / sum of tokens (input, image and output)"


@dataclass(frozen=True, slots=True)
class Shot:
    """A request as it is sent.

    Attributes:
        at: Seconds from the start.
        model: What is asked.
        path: Endpoint.
        body: JSON body.
        streamed: Whether the answer is streamed.
        limit: Seconds in which it should be answered; NaN for any.
    """

    at: float
    model: str
    path: str
    body: dict[str, Any]
    streamed: bool
    limit: float


@dataclass(slots=True)
class Hit:
    """What came of a request; times in seconds.

    Attributes:
        model: What was asked.
        late: By how much it was sent too late, which is the client's fault.
        latency: From the time that it was due until the end of the answer.
        first: Until the first token, or the head's answer.
        gaps: Between tokens.
        prompt: Prompt tokens, images' included.
        output: Tokens of the answer.
        error: Status and code if it was not answered.
        limit: Seconds in which it should be answered; NaN for any.
    """

    model: str
    late: float = 0.0
    latency: float = math.nan
    first: float = math.nan
    gaps: list[float] = field(default_factory=list)
    prompt: int = 0
    output: int = 0
    error: str | None = None
    limit: float = math.nan


@dataclass(frozen=True)
class Target:
    """What a server has to offer.

    Attributes:
        context: Longest prompt and answer together, in tokens.
        base: The base model.
        heads: Domains that answer with a head.
        others: Adapters, and domains that generate.
    """

    context: int
    base: str
    heads: tuple[str, ...]
    others: tuple[str, ...]

    @classmethod
    def from_cards(cls, cards: Sequence[dict[str, Any]]) -> Target:
        """From what ``/v1/models`` lists."""
        heads = tuple(card["id"] for card in cards if card.get("head"))
        others = tuple(
            card["id"] for card in cards if card.get("kind") != "base" and not card.get("head")
        )
        return cls(int(cards[0]["max_model_len"]), str(cards[0]["id"]), heads, others)


def plan(workload: Workload, target: Target, seed: int) -> tuple[list[Shot], int]:
    """Turn a workload into requests for a server.

    An adapter of the workload is asked for by its name if the server has it; otherwise each stands
    for one that it has, in turn: a domain with a head where the workload wants no tokens, an
    adapter or a domain that generates elsewhere.

    Args:
        workload: Who asks what and when.
        target: What there is.
        seed: Of prompts and images.

    Returns:
        The requests, and how many had to be cut to the server's context.
    """
    rng = np.random.default_rng(seed)
    shots, cut = [], 0
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
        limit = float(workload.limit[i])
        at = float(workload.arrival[i])
        if head:
            urls = [_picture(rng) for _ in range(max(1, images))]
            body: dict[str, Any] = {"frames": urls} if images > 1 else {"images": urls}
            shots.append(Shot(at, name, f"/v1/vision/{name}", body, False, limit))
            continue
        output = min(output, target.context // 2)
        most = target.context - output - ROOM
        if prompt > most:
            prompt, cut = most, cut + 1
        common = {
            "model": name, "max_tokens": output, "ignore_eos": True, "stream": True,
            "temperature": 0, "stream_options": {"include_usage": True},
        }  # fmt: skip
        if images:
            words = " ".join("abcdefghij"[k] for k in rng.integers(0, 10, 8))
            parts: list[dict[str, Any]] = [{"type": "text", "text": words}]
            parts += [
                {"type": "image_url", "image_url": {"url": _picture(rng)}} for _ in range(images)
            ]
            body = common | {"messages": [{"role": "user", "content": parts}]}
            shots.append(Shot(at, name, "/v1/chat/completions", body, True, limit))
        else:
            # Ordinary tokens of any tokenizer: special ones come before, rare ones after.
            body = common | {"prompt": rng.integers(100, 1000, prompt).tolist()}
            shots.append(Shot(at, name, "/v1/completions", body, True, limit))
    return shots, cut


def _picture(rng: np.random.Generator) -> str:
    from PIL import Image

    pixels = rng.integers(0, 256, (12, 12, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).resize((224, 224)).save(buffer, "JPEG")
    return "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode()


async def replay(url: str, shots: Sequence[Shot], key: str | None, seconds: float) -> list[Hit]:
    """Send requests when they are due.

    Args:
        url: Of the server.
        shots: Requests by rising time.
        key: API key.
        seconds: Time limit for one answer.

    Returns:
        What came of each.
    """
    import httpx
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    headers = {"Authorization": f"Bearer {key}"} if key else {}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=256)
    columns = ("{task.description}", BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    hits = [Hit(shot.model, limit=shot.limit) for shot in shots]
    timeout = httpx.Timeout(seconds, connect=30.0, pool=None)
    from rich.console import Console

    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task("requests", total=len(shots))
        async with httpx.AsyncClient(
            base_url=url, headers=headers, limits=limits, timeout=timeout, trust_env=False
        ) as client:
            start = time.perf_counter() + 0.1

            async def one(shot: Shot, hit: Hit) -> None:
                await asyncio.sleep(max(0.0, start + shot.at - time.perf_counter()))
                due = start + shot.at
                hit.late = time.perf_counter() - due
                try:
                    await _send(client, shot, hit, due)
                except (httpx.HTTPError, ValueError, KeyError) as error:
                    hit.error = type(error).__name__
                progress.advance(bar)

            await asyncio.gather(*(one(*pair) for pair in zip(shots, hits, strict=True)))
    return hits


async def _send(client: httpx.AsyncClient, shot: Shot, hit: Hit, due: float) -> None:
    if not shot.streamed:
        response = await client.post(shot.path, json=shot.body)
        done = time.perf_counter()
        if response.status_code != 200:
            hit.error = _error(response.status_code, response.content)
            return
        usage = response.json()["usage"]
        hit.first = hit.latency = done - due
        hit.prompt, hit.output = usage["prompt_tokens"], usage["completion_tokens"]
        return
    last = math.nan
    async with client.stream("POST", shot.path, json=shot.body) as response:
        if response.status_code != 200:
            hit.error = _error(response.status_code, await response.aread())
            return
        async for line in response.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            now = time.perf_counter()
            event = json.loads(line[6:])
            if "error" in event:
                hit.error = str(event["error"].get("code"))
                return
            if event.get("usage"):
                hit.prompt = event["usage"]["prompt_tokens"]
                hit.output = event["usage"]["completion_tokens"]
            if event["choices"] and _has_text(event["choices"][0]):
                if math.isnan(hit.first):
                    hit.first = now - due
                else:
                    hit.gaps.append(now - last)
                last = now
    hit.latency = time.perf_counter() - due
    if math.isnan(hit.first):
        hit.first = hit.latency


def _has_text(choice: dict[str, Any]) -> bool:
    return bool(choice.get("text") or choice.get("delta", {}).get("content"))


def _error(status: int, content: bytes) -> str:
    try:
        return f"{status} {json.loads(content)['error']['code']}"
    except (ValueError, KeyError, TypeError):
        return str(status)


def summary(hits: Sequence[Hit], slo: float | None) -> dict[str, Any]:
    """Figures of a run.

    Args:
        hits: What came of each request.
        slo: Seconds in which a request should be answered where the trace does not say it.

    Returns:
        Counts, rates, and percentiles in seconds. Requests that were not answered miss their
        limit, and are in no latency.
    """
    good = [hit for hit in hits if hit.error is None]
    tokens = sum(hit.prompt + hit.output for hit in good)
    spread = {
        "time to first token": [hit.first for hit in good],
        "between tokens": [gap for hit in good for gap in hit.gaps],
        "latency": [hit.latency for hit in good],
    }
    limits = [slo if math.isnan(hit.limit) else hit.limit for hit in hits]
    bound = [(hit, limit) for hit, limit in zip(hits, limits, strict=True) if limit]
    kept = sum(hit.error is None and hit.latency <= limit for hit, limit in bound)
    return {
        "requests": len(hits),
        "answered": len(good),
        "errors": dict(Counter(hit.error for hit in hits if hit.error is not None)),
        "prompt_tokens": sum(hit.prompt for hit in good),
        "output_tokens": sum(hit.output for hit in good),
        "average_token_latency": sum(hit.latency for hit in good) / tokens if tokens else None,
        "slo_attainment": kept / len(bound) if bound else None,
        "sent_late_p99": _percentile([hit.late for hit in hits], 99),
        "seconds": {
            name: {"mean": float(np.mean(values)) if values else None}
            | {f"p{p}": _percentile(values, p) for p in PERCENTILES}
            for name, values in spread.items()
        },
    }


def _percentile(values: Sequence[float], percent: float) -> float | None:
    return float(np.percentile(values, percent)) if len(values) else None


def table(figures: dict[str, Any]) -> Table:
    """The spread of times, for people."""
    from rich.table import Table

    made = Table()
    made.add_column("milliseconds")
    for name in ("mean", *(f"p{p}" for p in PERCENTILES)):
        made.add_column(name, justify="right")
    for name, values in figures["seconds"].items():
        cells = [("–" if value is None else f"{1000 * value:.1f}") for value in values.values()]
        made.add_row(name, *cells)
    return made


def sentences(figures: dict[str, Any], wall: float) -> list[str]:
    """The other figures, for people: totals first."""
    tokens = figures["prompt_tokens"] + figures["output_tokens"]
    lines = [
        f"{figures['answered']} of {figures['requests']} requests answered in {wall:.1f} s: "
        f"{figures['answered'] / wall:.2f} requests/s, "
        f"{figures['output_tokens'] / wall:.1f} output tokens/s, {tokens / wall:.1f} tokens/s"
    ]
    if figures["average_token_latency"] is not None:
        lines.append(f"{1000 * figures['average_token_latency']:.3f} ms: {FORMULA}")
    if figures["slo_attainment"] is not None:
        lines.append(f"{100 * figures['slo_attainment']:.1f} % answered within their limit")
    if figures["errors"]:
        told = ", ".join(f"{count} × {code}" for code, count in figures["errors"].items())
        lines.append(f"not answered: {told}")
    late = figures["sent_late_p99"]
    if late is not None and late > LATE:
        lines.append(f"the client was late itself: p99 {1000 * late:.0f} ms; use a faster one")
    return lines


def parser() -> argparse.ArgumentParser:
    """Options of the command."""
    made = argparse.ArgumentParser(
        "valora-serve bench",
        description="Replay a trace against a running server, and print how it did.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    made.add_argument("--url", default="http://127.0.0.1:8000", help="the server")
    made.add_argument("--key", default=os.environ.get("VALORA_BENCH_KEY"), help="API key")
    made.add_argument("--trace", type=Path, help="JSON lines: arrival, adapter, prompt, output, …")
    made.add_argument(
        "--workload", choices=("poisson", "retrieval", "video", "slora", "at_once"),
        default="poisson", help="generated trace, where no file is named",
    )  # fmt: skip
    made.add_argument("--rate", type=float, default=4.0, help="requests/s (video: streams)")
    made.add_argument("--duration", type=float, default=30.0, help="seconds")
    made.add_argument("--adapters", type=int, default=4, help="adapters asked for")
    made.add_argument("--skew", type=float, default=0.6, help="share of the most popular adapter")
    made.add_argument("--prompt", type=int, default=128, help="prompt tokens (poisson)")
    made.add_argument("--output", type=int, default=64, help="tokens to generate (poisson)")
    made.add_argument("--count", type=int, default=100, help="requests (at_once)")
    made.add_argument("--most", type=int, help="replay only the first so many requests")
    made.add_argument("--speed", type=float, default=1.0, help="replay so many times faster")
    made.add_argument("--slo", type=float, help="seconds in which a request should be answered")
    made.add_argument("--timeout", type=float, default=600.0, help="seconds for one answer")
    made.add_argument("--seed", type=int, default=0, help="of trace, prompts and images")
    made.add_argument("--json", type=Path, help="also write all figures to this file")
    return made


def workload(found: argparse.Namespace) -> Workload:
    """The workload that the options name.

    Raises:
        TraceError: There is none.
    """
    if found.trace is not None:
        return traces.read(found.trace)
    common: dict[str, Any] = {"adapters": found.adapters, "seed": found.seed}
    if found.workload == "slora":
        return traces.slora(found.rate, found.duration, **common)
    common["skew"] = found.skew
    if found.workload == "at_once":
        return traces.at_once(found.count, **common)
    if found.workload == "video":
        return traces.video(round(found.rate), found.duration, **common)
    if found.workload == "retrieval":
        return traces.retrieval(found.rate, found.duration, **common)
    return traces.poisson(
        found.rate, found.duration, prompt=found.prompt, output=found.output, **common
    )


def look(url: str, key: str | None) -> Target:
    """Ask a server what it has to offer.

    Raises:
        SettingsError: There is none, or it refuses.
    """
    import httpx

    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        response = httpx.get(f"{url}/v1/models", headers=headers, timeout=30, trust_env=False)
        response.raise_for_status()
        return Target.from_cards(response.json()["data"])
    except (httpx.HTTPError, ValueError, KeyError, IndexError) as error:
        raise SettingsError(f"{url} does not answer as a server of ours would: {error}") from error


def main(arguments: Sequence[str]) -> int:
    """Command ``valora-serve bench``.

    Returns:
        Exit status: 1 if nothing was answered.
    """
    from rich.console import Console

    found = parser().parse_args(list(arguments))
    if not (found.speed > 0 and found.rate > 0):
        raise SettingsError("speed and rate are more than 0")
    target = look(found.url.rstrip("/"), found.key)
    trace = workload(found)
    shots, cut = plan(trace, target, found.seed)
    shots = [
        Shot(shot.at / found.speed, shot.model, shot.path, shot.body, shot.streamed, shot.limit)
        for shot in shots[: found.most]
    ]
    console = Console()
    asked = Counter(shot.model for shot in shots)
    told = ", ".join(f"{name} {count}" for name, count in asked.most_common(8))
    console.print(f"{len(shots)} requests: {told}", markup=False, highlight=False)
    if cut:
        console.print(f"{cut} prompts were cut to the context of {target.context} tokens")
    began = time.perf_counter()
    hits = asyncio.run(replay(found.url.rstrip("/"), shots, found.key, found.timeout))
    wall = time.perf_counter() - began
    figures = summary(hits, found.slo)
    console.print(table(figures))
    for line in sentences(figures, wall):
        console.print(line, markup=False, highlight=False)
    if found.json is not None:
        options = {name: str(value) for name, value in vars(found).items() if name != "key"}
        content = {
            "options": options, "wall_seconds": wall, "figures": figures,
            "requests": [asdict(hit) for hit in hits],
        }  # fmt: skip
        found.json.write_text(json.dumps(content, indent=1, default=str), encoding="utf-8")
    return 0 if figures["answered"] else 1


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except ServeError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
