"""Runs the fuzzers and the soak: ``python -m tests.fuzz [PART] [--cases N] [--seed N] …``.

A fuzzer is a module with `running(folder)`: a context manager that starts a server and gives its
URL, its process, and a function that makes a case of a random generator and the case's number: its
kinds, what was done, and a function that sends it, returns its outcomes and raises if a property
does not hold. Meanwhile another process watches the server's memory and its `/health`.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import importlib
import json
import multiprocessing
import os
import random
import secrets
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import psutil

NICE = 10  # what senders' priority is lower by than that of the server and of who asks /health
UNWELL = 60.0  # seconds that a failed /health counts as
CASES = {"routes": 200, "media": 5000, "adapters": 500}


class Report:
    """What was tried, and what came of it: seconds, and MB of memory above idle, by kind."""

    def __init__(self):
        self.rows, self.failures = {}, []
        self._lock = threading.Lock()

    def add(self, kind, outcomes, seconds=0.0, memory=0.0, health=0.0):
        """Count a case."""
        with self._lock:
            new = SimpleNamespace(outcomes=Counter(), slowest=0.0, memory=0.0, health=0.0)
            row = self.rows.setdefault(kind, new)
            row.outcomes.update([outcomes] if isinstance(outcomes, str) else outcomes)
            row.slowest, row.memory = max(row.slowest, seconds), max(row.memory, memory)
            row.health = max(row.health, health)

    def failed(self, text):
        """Keep a failure, with what reproduces it."""
        self.failures.append(text)
        print(f"FAILED: {text}", file=sys.stderr, flush=True)

    def __str__(self):
        lines = ["| kind | outcomes | slowest, s | memory, MB | `/health`, s |", "|---" * 5 + "|"]
        for kind, row in self.rows.items():
            told = ", ".join(f"{name}: {n}" for name, n in sorted(row.outcomes.items()))
            numbers = f"{row.slowest:.2f} | {row.memory:.0f} | {row.health:.3f}"
            lines.append(f"| {kind} | {told} | {numbers} |")
        return "\n".join([*lines, f"\n{len(self.failures)} failures", *self.failures[:20]])


class Watch:
    """A process that samples a server's memory every 10 ms, and asks for its health every 50 ms."""

    def __init__(self, url, pid):
        context = multiprocessing.get_context("spawn")
        self._values = context.Array("d", 4)  # memory, most of it, slowest /health, times asked
        self._over = context.Event()
        arguments = (url, pid, self._values, self._over)
        self._process = context.Process(target=_watch, args=arguments, daemon=True)
        self._process.start()
        while not self._values[3]:
            time.sleep(0.05)
        self._idle = self._values[0]
        self.taken()

    def taken(self):
        """Most MB above idle, and seconds of the slowest /health, since the last call."""
        found = (self._values[1] - self._idle) / 2**20, self._values[2]
        self._values[1], self._values[2] = 0.0, 0.0
        return found

    def end(self):
        self._over.set()
        self._process.join(35)


def _watch(url, pid, values, over):
    parent, server = os.getppid(), psutil.Process(pid)
    threading.Thread(target=_watch_health, args=(url, values, over)).start()
    while not over.wait(0.01) and os.getppid() == parent:
        values[0] = _own_memory(server)
        values[1] = max(values[1], values[0])
    over.set()


def _watch_health(url, values, over):
    while not over.wait(0.05):
        began, took = time.perf_counter(), UNWELL
        with contextlib.suppress(OSError, http.client.HTTPException):
            link = http.client.HTTPConnection(*address(url), timeout=30)
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


def address(url):
    """Host and port of a URL."""
    host, port = url.removeprefix("http://").split(":")
    return host, int(port)


def together(work):
    """Run functions at the same time in threads of lower priority; returns what they return."""
    own = os.getpriority(os.PRIO_PROCESS, os.getpid()) + NICE  # the server has that of this process
    behind = lambda: os.setpriority(os.PRIO_PROCESS, 0, own)  # noqa: E731 - of this thread
    with ThreadPoolExecutor(len(work), initializer=behind) as pool:
        return [future.result() for future in [pool.submit(one) for one in work]]


@contextlib.contextmanager
def served(*arguments, cwd):
    """A ``valora-serve`` that must end with status 0 and without a traceback in its log."""
    from tests.e2e.valora_serve.serving import Process  # imports torch

    process = Process(*arguments, cwd=cwd).ready(300)
    try:
        yield process
    finally:
        status = process.end(seconds=120)
    log = process.log.read_text()
    assert "Traceback" not in log, log[log.index("Traceback") :][:3000]
    assert status == 0, f"the server ended with status {status}"


def error_of(text, most=2000):
    """The error of an answer in OpenAI's format: one sentence for people, and not endless."""
    error = json.loads(text)["error"]
    said = error["message"]
    wrong = "Traceback" in said or " object at 0x" in said or "\n" in said
    assert not wrong and 10 < len(said) < most, f"no sentence for people: {said[:500]}"
    return error


def fuzz(part, cases, seed=0, only=(), minutes=0.0, **limits):
    """Run a fuzzer's cases; returns the report. `limits` replace those of the module."""
    module, report, watch = importlib.import_module(f"tests.fuzz.{part}"), Report(), None
    start, most = time.monotonic(), module.LIMITS | limits
    try:
        with (
            tempfile.TemporaryDirectory(prefix="fuzz-") as folder,
            module.running(Path(folder)) as (url, pid, make),
        ):
            watch = Watch(url, pid)
            for number in only or range(cases):
                if minutes and time.monotonic() - start > 60 * minutes:
                    break
                kinds, what, send = make(random.Random(f"{seed}/{number}"), number)
                what = f"{', '.join(kinds)}, case {number}: {what}"
                again = f"again: python -m tests.fuzz {part} --seed {seed} --only {number}"
                _one(report, kinds, f"{what}: %s\n  {again}", send, watch, most)
                if report.rows[kinds[0]].health >= UNWELL:
                    break  # the server has ended
    except KeyboardInterrupt:
        print("stopped early", file=sys.stderr)
    except Exception as error:  # noqa: BLE001 - the server's status and log are checked at its end
        report.failed(f"{type(error).__name__}: {error}")
    finally:
        if watch:
            watch.end()
    return report


def _one(report, kinds, failure, send, watch, most):
    watch.taken()
    began = time.monotonic()
    try:
        [outcomes] = together([send])
    except Exception as error:  # noqa: BLE001 - whatever it is, the property does not hold
        outcomes = "failed"
        report.failed(failure % f"{type(error).__name__}: {error}")
    found = (time.monotonic() - began, *watch.taken())
    for kind in kinds:
        report.add(kind, outcomes, *found)
    for name, value in zip(("seconds", "memory", "health"), found, strict=True):
        if value > most.get(name, float("inf")):
            report.failed(failure % f"{name} {value:.2f}")


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
    failed = False
    for part in [chosen.part] if chosen.part else CASES:
        if part == "soak":
            report = importlib.import_module("tests.fuzz.soak").soak(chosen.minutes or 3.0, seed)
        else:
            cases = CASES[part] if chosen.cases is None else chosen.cases
            report = fuzz(part, cases, seed, chosen.only, chosen.minutes)
        print(f"\n{part}\n{report}", flush=True)
        failed |= bool(report.failures)
    return int(failed)
