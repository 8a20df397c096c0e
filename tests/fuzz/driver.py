"""Runs the fuzzers and the soak: ``python -m tests.fuzz [PART] [--cases N] [--seed N] …``.

A fuzzer is a module with `running(folder)`: a context manager that starts a server and gives its
process, and a function that makes a case of a random generator and the case's number: its kind,
what was done, and a function that sends it, returns its outcomes and raises if a property does not
hold.
"""

import argparse
import contextlib
import http.client
import importlib
import json
import math
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


class Report:
    """Outcomes by kind of case; the most seconds, MB above idle and seconds of `/health`."""

    def __init__(self):
        self.outcomes, self.most, self.failures = defaultdict(Counter), {}, []

    def add(self, kind, outcomes, found):
        """Count a case."""
        self.outcomes[kind].update([outcomes] if isinstance(outcomes, str) else outcomes)
        self.most[kind] = [*map(max, self.most.get(kind, found), found)]

    def __str__(self):
        most = "at most {:.2f} s, {:.0f} MB, {:.3f} s of /health"
        lines = [
            f"{kind}: {dict(outcomes)}; {most.format(*self.most[kind])}"
            for kind, outcomes in self.outcomes.items()
        ]
        return "\n".join([*lines, f"{len(self.failures)} failures", *self.failures[:20]])


@contextlib.contextmanager
def watched(server):
    """Gives what says the most MB above idle, and the slowest /health, since it was last asked.

    Threads sample the server's memory every 10 ms, and ask for its health every 50 ms.
    """
    process, over = psutil.Process(server.process.pid), threading.Event()
    idle, memory, health = _own_memory(process), [], []

    def watch(pause, found, measure, *given):
        while not over.wait(pause):
            found.append(measure(*given))

    def taken():
        most = (max(memory, default=idle) - idle) / 2**20, max(health, default=0.0)
        memory.clear()
        health.clear()
        return {"memory": most[0], "health": most[1]}

    with ThreadPoolExecutor(2) as pool:
        pool.submit(watch, 0.01, memory, _own_memory, process)
        pool.submit(watch, 0.05, health, _health, server.port)
        try:
            yield taken
        finally:
            over.set()


def _health(port):
    """Seconds until the server says that it is well."""
    began = time.perf_counter()
    with contextlib.suppress(OSError, http.client.HTTPException):
        link = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        link.request("GET", "/health", headers={"connection": "close"})
        if link.getresponse().status == 200:
            return time.perf_counter() - began
    return UNWELL


def _own_memory(server):
    """Bytes of a process and all below it that nobody else has."""
    total, found = 0, [server]
    for one in found:
        with contextlib.suppress(psutil.Error):
            # One that was just forked still shares its parent's memory.
            own = one.cmdline()
            found += [c for c in one.children() if c.cmdline() != own]
            memory = one.memory_info()
            total += memory.rss - memory.shared
    return total


def together(work):
    """Run functions at the same time in threads of lower priority; returns what they return."""
    own = os.getpriority(os.PRIO_PROCESS, os.getpid()) + NICE  # the server has that of this process
    behind = {"initializer": os.setpriority, "initargs": (os.PRIO_PROCESS, 0, own)}
    with ThreadPoolExecutor(len(work), **behind) as pool:
        return [future.result() for future in [pool.submit(one) for one in work]]


@contextlib.contextmanager
def served(*arguments, cwd, seconds=120, unwanted="Traceback"):
    """A ``valora-serve`` that must end in time, with status 0 and nothing unwanted in its log."""
    from tests.e2e.valora_serve.serving import Process, whole  # imports torch

    process = Process(*arguments, cwd=cwd, start=whole).ready(300)
    try:
        yield process
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


def fuzz(part, cases, seed=0, only=(), minutes=math.inf, **limits):
    """Run a fuzzer's cases; returns the report. `limits` replace those of the module."""
    module, report = importlib.import_module(f"tests.fuzz.{part}"), Report()
    limits = module.LIMITS | limits
    again = f"\n  again: python -m tests.fuzz {part} --seed {seed} --only"
    try:
        with (
            tempfile.TemporaryDirectory(prefix="fuzz-") as folder,
            module.running(Path(folder)) as (server, make),
            watched(server) as taken,
        ):
            end, found = time.monotonic() + 60 * minutes, {"health": 0.0}
            for number in only or range(cases):
                if time.monotonic() > end or found["health"] >= UNWELL:
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
                wrong += [f"{n} {v:.2f}" for n, v in found.items() if v > limits.get(n, math.inf)]
                if wrong:
                    report.failures.append(f"{kind}, {what}: {', '.join(wrong)}{again} {number}")
                    print(f"FAILED: {report.failures[-1]}", file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        print("stopped early", file=sys.stderr)
    except Exception as error:  # noqa: BLE001 - the server's status and log are checked at its end
        report.failures.append(f"{type(error).__name__}: {error}")
    return report


def main():
    """Run a part, every fuzzer without one; returns 1 if a property does not hold."""
    parser = argparse.ArgumentParser("python -m tests.fuzz", description=__doc__)
    parser.add_argument("part", nargs="?", choices=[*CASES, "soak"])
    parser.add_argument("--cases", type=int, help="number of cases")
    parser.add_argument("--seed", type=int, help="seed of the cases; by default a new one")
    parser.add_argument("--only", type=int, nargs="*", default=(), help="numbers of the cases")
    parser.add_argument("--minutes", type=float, help="start no case after these")
    chosen = parser.parse_args()
    seed = secrets.randbelow(2**31) if chosen.seed is None else chosen.seed
    os.environ.setdefault("TRITON_INTERPRET", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    print(f"seed {seed}", flush=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what was counted is printed
    failures = 0
    for part in [chosen.part] if chosen.part else CASES:
        minutes = chosen.minutes or (3.0 if part == "soak" else math.inf)
        report = fuzz(part, chosen.cases or CASES.get(part, 10**6), seed, chosen.only, minutes)
        print(f"\n{part}\n{report}", flush=True)
        failures += len(report.failures)
    return int(failures > 0)
