"""Measures one job: `python -m tests.bench.valora_serve.peers.worker JOB ANSWER`.

Both are JSON files; peers print what they like. The process has the peer's packages on its path.
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
import time
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from tests.bench.valora_serve.peers.base import Answer, Ask, Job, Peer
from tests.bench.valora_serve.peers.registry import find

if TYPE_CHECKING:
    from collections.abc import Callable

WARM = 128
"""Requests of each round that are answered before the clock runs, at most."""


def measure(job: Job, report: Callable[[Answer], None]) -> None:
    """Start the peer, warm it up and measure every round.

    Args:
        job: What to measure.
        report: Called with the measurements, or with the reason why there are none, before the
            peer is closed: some never end.
    """
    version = torch = None
    peer: Peer | None = None
    try:
        kind = find(job.peer)
        version, torch = version_of(kind.package), version_of("torch")
        start = time.perf_counter()
        peer = kind(job)
        ready = time.perf_counter() - start
        for asks in job.rounds.values():
            answer(peer, fresh(asks[:WARM], job.repeats))
        seconds: dict[str, list[float]] = {label: [] for label in job.rounds}
        counted: dict[str, dict[str, float]] = {}
        for repeat in range(job.repeats):
            for label, asks in job.rounds.items():
                before = peer.counters()
                seconds[label].append(answer(peer, fresh(asks, repeat)))
                counted[label] = {name: n - before[name] for name, n in peer.counters().items()}
        report(Answer(None, version, torch, peer.flags, ready, seconds, counted))
    except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever a peer raises is its row
        traceback.print_exc()
        flags = getattr(peer, "flags", job.options)
        report(Answer(one_line(error), version, torch, flags))
    finally:
        if peer is not None:
            peer.close()


def fresh(asks: list[Ask], repeat: int) -> list[Ask]:
    """The requests with pictures that no cache has seen."""
    return [
        ask if ask.picture is None
        else Ask(ask.prompt, ask.tokens, ask.adapter, ask.picture + 10_000 * repeat)
        for ask in asks
    ]  # fmt: skip


def answer(peer: Peer, asks: list[Ask]) -> float:
    """Seconds that requests take which are submitted at once.

    Raises:
        RuntimeError: A request got more or fewer tokens than it asked for.
    """
    prepared = peer.prepare(asks)
    start = time.perf_counter()
    counts = peer.run(prepared)
    seconds = time.perf_counter() - start
    for number, (ask, count) in enumerate(zip(asks, counts, strict=True)):
        if count != ask.tokens:
            raise RuntimeError(f"request {number} got {count} tokens, expected {ask.tokens}")
    return seconds


def version_of(package: str) -> str | None:
    """Version of an installed distribution; None if it is not one."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def one_line(error: BaseException) -> str:
    """The kind of an error and the first line of its text."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__


def main() -> None:
    """Read the job, and write the answer."""
    job, place = Path(sys.argv[1]), Path(sys.argv[2])

    def report(found: Answer) -> None:
        place.write_text(json.dumps(asdict(found), default=str))

    measure(Job.of_json(json.loads(job.read_text())), report)


if __name__ == "__main__":
    main()
