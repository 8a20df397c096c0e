"""Runs the fuzzers and the soak: ``python -m tests.fuzz [PART] [--cases N] [--seed N] …``.

A fuzzer is a module with `running(folder)`: a context manager that starts a server and gives its
process, and a function that makes a case of a random generator and the case's number: its kind,
what was done, and a function that sends it, returns its outcomes and raises if a property does not
hold. Meanwhile another process watches the server's memory and its `/health`.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import importlib
import json
import math
import multiprocessing
import os
import random
import secrets
import signal
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil

NICE = 10  # what senders' priority is lower by than that of the server and of who asks /health
UNWELL = 60.0  # seconds that a failed /health counts as
CASES = {"routes": 200, "media": 5000, "adapters": 500}
KEY = "an-admin-key-of-32-characters-ok"
HEADERS = {"authorization": f"Bearer {KEY}"}


class Report:
    """Outcomes by kind of case; the most seconds, MB above idle and seconds of `/health`."""

    def __init__(self):
        self.outcomes, self.most, self.failures = defaultdict(Counter), {}, []

    def add(self, kind, outcomes, found):
        """Count a case."""
        self.outcomes[kind].update([outcomes] if isinstance(outcomes, str) else outcomes)
        self.most[kind] = [*map(max, self.most.get(kind, found), found)]

    def failed(self, text):
        """Keep a failure, with what reproduces it."""
        self.failures.append(text)
        print(f"FAILED: {text}", file=sys.stderr, flush=True)

    def __str__(self):
        lines = ["| kind | outcomes | slowest, s | memory, MB | `/health`, s |", "|---" * 5 + "|"]
        for kind, outcomes in self.outcomes.items():
            told = ", ".join(f"{name}: {n}" for name, n in sorted(outcomes.items()))
            lines.append(
                "| {} | {} | {:.2f} | {:.0f} | {:.3f} |".format(kind, told, *self.most[kind])
            )
        return "\n".join([*lines, f"\n{len(self.failures)} failures", *self.failures[:20]])


@contextlib.contextmanager
def watched(server):
    """Gives what says the most MB above idle, and the slowest /health, since it was last asked.

    Another process samples the server's memory every 10 ms, and asks for its health every 50 ms.
    """
    context = multiprocessing.get_context("spawn")
    values = context.Array("d", 4)  # memory, most of it, slowest /health, times asked
    over = context.Event()
    arguments = (server.port, server.process.pid, values, over)
    process = context.Process(target=_watch, args=arguments, daemon=True)
    process.start()
    while not values[3]:
        time.sleep(0.05)
    idle = values[0]

    def taken():
        found = {"memory": (values[1] - idle) / 2**20, "health": values[2]}
        values[1], values[2] = idle, 0.0
        return found

    try:
        yield taken
    finally:
        over.set()
        process.join(35)


def _watch(port, pid, values, over):
    parent, server = os.getppid(), psutil.Process(pid)
    threading.Thread(target=_watch_health, args=(port, values, over)).start()
    while not over.wait(0.01) and os.getppid() == parent:
        values[0] = _own_memory(server)
        values[1] = max(values[1], values[0])
    over.set()


def _watch_health(port, values, over):
    while not over.wait(0.05):
        began, took = time.perf_counter(), UNWELL
        with contextlib.suppress(OSError, http.client.HTTPException):
            link = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
            link.request("GET", "/health", headers={"connection": "close"})
            if link.getresponse().status == 200:
                took = time.perf_counter() - began
        values[2] = max(values[2], took)
        values[3] += 1


def _own_memory(server):
    """Bytes of a process and all below it that nobody else has."""
    total, found = 0, [server]
    for one in found:
        with contextlib.suppress(psutil.Error):
            # One that was just forked still shares its parent's memory.
            own = one.cmdline()
            found += [c for c in one.children() if c.cmdline() != own and c.pid != os.getpid()]
            memory = one.memory_info()
            total += memory.rss - memory.shared
    return total


def together(work):
    """Run functions at the same time in threads of lower priority; returns what they return."""
    own = os.getpriority(os.PRIO_PROCESS, os.getpid()) + NICE  # the server has that of this process
    behind = lambda: os.setpriority(os.PRIO_PROCESS, 0, own)  # noqa: E731 - of this thread
    with ThreadPoolExecutor(len(work), initializer=behind) as pool:
        return [future.result() for future in [pool.submit(one) for one in work]]


@contextlib.contextmanager
def served(*arguments, cwd, seconds=120, unwanted="Traceback"):
    """A ``valora-serve`` that must end in time, with status 0 and nothing unwanted in its log."""
    from tests.e2e.valora_serve.serving import Process  # imports torch

    process = Process(*arguments, cwd=cwd).ready(300)
    try:
        yield process
    finally:
        try:
            status = process.end(seconds=seconds)
        finally:
            process.end(signal.SIGKILL)
    check_log(process, unwanted)
    assert status == 0, f"the server ended with status {status}"


def check_log(process, unwanted="Traceback"):
    """Nothing of a pattern may be in the log so far."""
    found = process.said(rf"(?s)({unwanted}).*")
    assert not found, f"log: {found[0][:3000]}"


def alike(a, b):
    """Whether values are equal, numbers within what the order of sums changes."""
    if isinstance(a, float) and isinstance(b, int | float):
        return abs(a - b) <= 1e-3 * max(1.0, abs(a))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(alike(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(alike, a, b))
    return a == b


def error_of(text, most=2000):
    """The error of an answer in OpenAI's format: one sentence for people, and not endless."""
    error = json.loads(text)["error"]
    said = error["message"]
    wrong = "Traceback" in said or " object at 0x" in said or "\n" in said
    assert not wrong and 10 < len(said) < most, f"no sentence for people: {said[:500]}"
    return error


def fuzz(part, cases, seed=0, only=(), minutes=0.0, **limits):
    """Run a fuzzer's cases; returns the report. `limits` replace those of the module."""
    module, report = importlib.import_module(f"tests.fuzz.{part}"), Report()
    most = module.LIMITS | limits
    try:
        with (
            tempfile.TemporaryDirectory(prefix="fuzz-") as folder,
            module.running(Path(folder)) as (server, make),
            watched(server) as taken,
        ):
            start = time.monotonic()
            for number in only or range(cases):
                if minutes and time.monotonic() - start > 60 * minutes:
                    break
                kind, what, send = make(random.Random(f"{seed}/{number}"), number)
                taken()
                began, outcomes, wrong = time.monotonic(), "failed", []
                try:
                    [outcomes] = together([send])
                except Exception as error:  # noqa: BLE001 - whatever it is, it should not be
                    wrong.append(f"{type(error).__name__}: {error}")
                found = {"seconds": time.monotonic() - began, **taken()}
                report.add(kind, outcomes, [*found.values()])
                wrong += [f"{n} {v:.2f}" for n, v in found.items() if v > most.get(n, math.inf)]
                for text in wrong:
                    again = f"again: python -m tests.fuzz {part} --seed {seed} --only {number}"
                    report.failed(f"{kind}, {what}: {text}\n  {again}")
                if found["health"] >= UNWELL:
                    break  # the server has ended
    except KeyboardInterrupt:
        print("stopped early", file=sys.stderr)
    except Exception as error:  # noqa: BLE001 - the server's status and log are checked at its end
        report.failed(f"{type(error).__name__}: {error}")
    return report


def main(arguments):
    """Run a part, every fuzzer without one; returns 1 if a property does not hold."""
    parser = argparse.ArgumentParser("python -m tests.fuzz", description=__doc__)
    parser.add_argument("part", nargs="?", choices=[*CASES, "soak"])
    parser.add_argument("--cases", type=int, help="number of cases")
    parser.add_argument("--seed", type=int, help="seed of the cases; by default a new one")
    parser.add_argument("--only", type=int, nargs="*", default=(), help="numbers of the cases")
    parser.add_argument("--minutes", type=float, default=0.0, help="start no case after these")
    chosen = parser.parse_args(arguments)
    seed = secrets.randbelow(2**31) if chosen.seed is None else chosen.seed
    os.environ.setdefault("TRITON_INTERPRET", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    print(f"seed {seed}", flush=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what was counted is printed
    reports = []
    for part in [chosen.part] if chosen.part else CASES:
        minutes = chosen.minutes or (3.0 if part == "soak" else 0.0)
        cases = chosen.cases or CASES.get(part, 10**6)
        reports.append(fuzz(part, cases, seed, chosen.only, minutes))
        print(f"\n{part}\n{reports[-1]}", flush=True)
    return int(any(report.failures for report in reports))
