"""Requests to every route: made from the OpenAPI schema, and hostile ones written by hand.

``python -m tests.fuzz routes --cases 20000`` starts ``valora-serve`` with the tiny model and a
random bundle in a process of its own. Another process asks ``/health`` twenty times a second
meanwhile, on a new connection each time, and keeps the slowest answer, from the beginning of the
connection to its end. Whoever sends requests runs at a lower priority than these two, so that the
answer tells of the server and not of a lack of cores. The property: no 5xx but 503 and 504, every
error in OpenAI's format, nothing undeclared, and the server ends with status 0.

Hostile bodies come first, then the requests made from the schema, in batches that several processes
share. What was counted is printed at the end, and also after SIGTERM, Ctrl-C or ``--minutes``.
"""

from __future__ import annotations

import argparse
import base64
import json
import math
import multiprocessing
import os
import queue
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import psutil
import requests

ROOT = Path(__file__).parents[2]
SECRET = "an-admin-key-for-the-fuzzing"
HEADERS = {"authorization": f"Bearer {SECRET}"}
JSON = {"content-type": "application/json"}
FORM = {"content-type": "multipart/form-data; boundary=b"}
LIMIT_SECONDS = 0.2
DEADLINE_SECONDS = 60
"""Deadline of the server's requests: what is asked at random may take minutes on a CPU."""
NICE = 10
"""What the senders' priority is lower by than that of the server and of who asks /health."""
BATCH, SEEDS = 200, 1_000_003
CHAT, COMPLETIONS, VISION = "/v1/chat/completions", "/v1/completions", "/v1/vision/scene"
RESPONSES, EMBEDDINGS = "/v1/responses", "/v1/embeddings"
MODELS = ("tiny", "scene", "traffic", "sample/adapter-1")
PATHS = (CHAT, COMPLETIONS, VISION, "/v1/load_lora_adapter", "/v1/unload_bundle")


def hostile(rng: random.Random) -> dict[str, tuple[str, dict[str, str], bytes]]:
    """Bodies that cost a careless server much: path, headers and content by name."""
    many = rng.randrange(200_000, 2_000_000)
    keys = b"{" + b",".join(b'"k%d":1' % n for n in range(many)) + b"}"
    image = base64.b64encode(rng.randbytes(15_000_000))
    user = [{"role": "user", "content": "a"}]
    path = rng.choice(PATHS)
    part = b'--b\r\ncontent-disposition: form-data; name="image"; filename="x"\r\n\r\nx\r\n'

    def turn(content: bytes) -> bytes:
        return b'{"messages":[{"role":"user","content":' + content + b'}],"max_tokens":1}'

    def picture(url: bytes) -> bytes:
        return turn(b'[{"type":"image_url","image_url":{"url":"' + url + b'"}}]')

    bodies = {
        "unknown keys": (path, keys),
        "one key, repeated": (path, b"{" + b'"k":1,' * many + b'"k":1}'),
        "long keys": (path, b"{" + b",".join(b'"%09000d":1' % n for n in range(5000)) + b"}"),
        "nested lists": (path, b"[" * many),
        "nested objects": (path, b'{"a":' * many),
        "closed lists": (path, b"]" * many),
        "tokens": (COMPLETIONS, b'{"prompt":[' + b"1," * many + b"1]}"),
        "fewer tokens": (COMPLETIONS, b'{"prompt":[' + b"1," * 190_000 + b"1]}"),
        "token lists": (COMPLETIONS, b'{"prompt":[' + b"[1]," * 900 + b"[1]]}"),
        "texts": (COMPLETIONS, b'{"prompt":[' + b'"a",' * 900 + b'"a"]}'),
        "stop texts": (COMPLETIONS, json.dumps(
            {"prompt": "a" * 390_000, "stop": ["a" * n for n in range(1, 17)], "n": 16}).encode()),
        "a huge integer": (path, b'{"n":' + b"9" * (10 * many) + b"}"),
        "a long fraction": (path, b'{"temperature":0.' + b"1" * (10 * many) + b"}"),
        "large integers": (COMPLETIONS, b'{"prompt":[' + (b"9" * 99 + b",") * 15_000 + b"1]}"),
        "escapes": (CHAT, turn(b'"' + rb"\u0000" * many + b'"')),
        "escaped quotes": (CHAT, turn(b'"' + rb"\"" * many + b'"')),
        "quotes": (CHAT, turn(b'"' * many)),
        "foreign characters": (CHAT, turn(('"' + "\u20ac" * many + '"').encode())),
        "white space": (CHAT, turn(b" " * (10 * many))),
        "one character": (CHAT, turn(b'"' + b"a" * 399_000 + b'"')),
        "spaces": (COMPLETIONS, json.dumps({"prompt": " " * 399_000}).encode()),
        "marks": (COMPLETIONS, json.dumps({"prompt": "a\u0301" * 199_000}).encode()),
        "messages": (CHAT, b'{"messages":[' + b'{"role":"user","content":"a"},' * 9_000 + b"1]}"),
        "turns": (CHAT, json.dumps({"messages": user * 2400}).encode()),
        "wrong parts": (CHAT, turn(b"[" + b'{"type":"x"},' * 4_000 + b"1]")),
        "unknown keys within": (CHAT, turn(b'[{"type":"text",' + keys[1:40_000] + b'":1}]')),
        "a large schema": (CHAT, json.dumps({"messages": user, "response_format": {
            "type": "json_schema",
            "json_schema": {"schema": {"enum": [f"v{n}" for n in range(19_000)]}}}}).encode()),
        "log probabilities": (CHAT, json.dumps({
            "messages": user, "n": 16, "max_tokens": 64, "ignore_eos": True, "logprobs": True,
            "top_logprobs": 20}).encode()),
        "a logit bias": (CHAT, json.dumps(
            {"messages": user, "logit_bias": {str(n): 1 for n in range(4000)}}).encode()),
        "log probabilities, streamed": (CHAT, json.dumps({
            "messages": user, "n": 16, "max_tokens": 32, "ignore_eos": True, "logprobs": True,
            "top_logprobs": 20, "stream": True}).encode()),
        "log probabilities of completions": (COMPLETIONS, json.dumps({
            "prompt": ["a"] * 4, "n": 8, "max_tokens": 32, "ignore_eos": True,
            "logprobs": 20}).encode()),
        "log probabilities of a prompt": (COMPLETIONS, json.dumps({
            "prompt": "a b c d " * 200, "max_tokens": 0, "echo": True, "logprobs": 20}).encode()),
        "log probabilities of a response": (RESPONSES, json.dumps({
            "input": "a", "max_output_tokens": 400, "top_logprobs": 20,
            "include": ["message.output_text.logprobs"]}).encode()),
        "embeddings": (EMBEDDINGS, json.dumps({"input": ["a b c"] * 300}).encode()),
        "a large image": (CHAT, picture(b"data:image/png;base64," + image)),
        "a large video": (CHAT, turn(
            b'[{"type":"video_url","video_url":{"url":"data:video/mp4;base64,'
            + base64.b64encode(rng.randbytes(24_000_000)) + b'"}}]')),
        "many frames": (CHAT, turn(
            b'[{"type":"frames","frames":["data:image/jpeg;base64,'
            + b'","data:image/jpeg;base64,'.join([image[:100_000]] * 64) + b'"]}]')),
        "turns of a response": (RESPONSES, json.dumps({"input": user * 2400}).encode()),
        "a long url": (CHAT, picture(b"http://" + b"a/" * many)),
        "a surrogate": (CHAT, turn(rb'"\ud800"')),
        "bytes": (path, rng.randbytes(many)),
        "UTF-16": (path, ("{" * many).encode("utf-16")),
        "too large": (path, b" " * (70 * 2**20)),
    }  # fmt: skip
    forms = {
        "parts of a form": part * 20_000 + b"--b--",
        "boundaries": part[:-3] + b"\r\n--bx" * many,
        "a large video as a form": part.replace(b'"image"', b'"video"')[:-3]
        + rng.randbytes(60_000_000)
        + b"\r\n--b--",
        "a large file": part[:-3] + rng.randbytes(15_000_000) + b"\r\n--b--",
        "headers of a part": b"--b\r\n" + b"a: b\r\n" * many,
        "a part without end": part[:-3] + b"\r\n" * many,
    }
    long = {"content-type": f"multipart/form-data; boundary={'b' * 9000}"}
    url_form = {"content-type": "application/x-www-form-urlencoded"}
    made = {name: (place, JSON, body) for name, (place, body) in bodies.items()}
    made |= {name: (VISION, FORM, body) for name, body in forms.items()}
    made["a long boundary"] = (VISION, long, b"--" + b"b" * many)
    made["a form in JSON's place"] = (path, url_form, b"a=1&" * many)
    made["compressed"] = (path, JSON | {"content-encoding": "gzip"}, rng.randbytes(many))
    return made


def raw(rng: random.Random) -> dict[str, bytes]:
    """Requests that HTTP clients do not send."""
    post = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer "
    post += SECRET.encode() + b"\r\ncontent-type: application/json\r\n"
    chunked = post + b"transfer-encoding: chunked\r\n\r\n"
    end = b" HTTP/1.1\r\nhost: localhost\r\n\r\n"
    get = b"GET /health HTTP/1.1\r\nhost: localhost\r\n"
    return {
        "chunks of one byte": chunked + b"1\r\na\r\n" * 500_000,
        "chunk extensions": chunked + b"1;" + b"a=b;" * 1_000_000,
        "trailers": chunked + b"0\r\n" + b"a: b\r\n" * 500_000,
        "pipelined requests": (get + b"\r\n") * 100_000,
        "headers": get + b"a: b\r\n" * 10_000 + b"\r\n",
        "a long path": b"GET /" + b"%41" * 20_000 + end,
        "a long query": b"GET /health?" + b"a=b&" * 15_000 + end,
        "two keys": post + b"authorization: Bearer x\r\ncontent-length: 2\r\n\r\n{}",
        "two lengths": post + b"content-length: 2\r\ncontent-length: 3\r\n\r\n{}",
        "noise": rng.randbytes(100_000),
    }


class Report:
    """What was tried and what came of it."""

    def __init__(self) -> None:
        self.tried: Counter[str] = Counter()
        self.outcomes: dict[str, Counter[str]] = {}
        self.slowest: dict[str, float] = {}
        self.health: dict[str, float] = {}
        self.failures: list[str] = []
        self._lock = threading.Lock()

    def add(self, kind: str, outcome: str, seconds: float) -> None:
        """Count a request; outcomes of HTTP are status codes."""
        with self._lock:
            self.tried[kind] += 1
            self.outcomes.setdefault(kind, Counter())[outcome] += 1
            self.slowest[kind] = max(self.slowest.get(kind, 0.0), seconds)

    def failed(self, text: str) -> None:
        """Keep a failure, with what reproduces it."""
        with self._lock:
            self.failures.append(text)
        print(f"FAILED: {text}", file=sys.stderr, flush=True)

    def taken(self) -> dict[str, Any]:
        """Everything so far, as `merge` takes it; this report is empty then."""
        with self._lock:
            found = {
                "outcomes": self.outcomes, "slowest": self.slowest, "failures": self.failures
            }  # fmt: skip
            self.tried, self.outcomes, self.slowest, self.failures = Counter(), {}, {}, []
        return found

    def merge(self, found: dict[str, Any]) -> int:
        """Add what another process has counted; returns the number of requests."""
        with self._lock:
            count = 0
            for kind, outcomes in found["outcomes"].items():
                count += outcomes.total()
                self.tried[kind] += outcomes.total()
                self.outcomes.setdefault(kind, Counter()).update(outcomes)
                self.slowest[kind] = max(self.slowest.get(kind, 0.0), found["slowest"][kind])
            self.failures += found["failures"]
        return count

    def table(self) -> str:
        """A Markdown table."""
        lines = ["| kind | requests | answers | slowest | `/health` |", "|" + " --- |" * 5]
        for kind, count in self.tried.items():
            said = ", ".join(f"{status}: {n}" for status, n in sorted(self.outcomes[kind].items()))
            health = f"{self.health[kind]:.3f} s" if kind in self.health else ""
            lines.append(f"| {kind} | {count} | {said} | {self.slowest[kind]:.2f} s | {health} |")
        return "\n".join(lines)


def watch(url: str, slowest: Any, asked: Any, stop: Any) -> None:
    """Ask ``/health`` on a new connection every time, and keep the slowest answer."""
    host, port = url.removeprefix("http://").split(":")
    request = f"GET /health HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n\r\n".encode()
    while not stop.is_set():
        began = time.perf_counter()
        try:
            with socket.create_connection((host, int(port)), timeout=30) as sock:
                sock.sendall(request)
                answer = b""
                while piece := sock.recv(4096):
                    answer += piece
            good = b" 200 " in answer[:20]
        except OSError:
            good = False
        seconds = time.perf_counter() - began if good else 60.0
        slowest.value = max(slowest.value, seconds)
        asked.value += 1
        time.sleep(0.05)


def start(folder: Path) -> tuple[subprocess.Popen[bytes], str]:
    """Start ``valora-serve`` with a random bundle; returns the process and its URL."""
    from tests.support.serve_helpers import make_bundle

    make_bundle(folder / "bundle", "tiny")
    (folder / "store").mkdir()
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    roots = os.pathsep.join(str(ROOT / part) for part in ("", "data", "kernels", "teachers"))
    settings = {"PYTHONPATH": roots, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1",
                "VALORA_COST_FOLDER": str(folder / "costs"), "VALORA_PROFILE": "false"}  # fmt: skip
    arguments = [
        sys.executable, "-m", "valora_serve.cli", str(folder / "bundle"), "--no-golden",
        "--port", str(port), "--api-key", SECRET, "--allow-runtime-loading", "--adapter-folder",
        str(folder / "store"), "--state-file", str(folder / "served.json"), "--log-level", "error",
        "--answer-tokens", "16", "--deadline", str(DEADLINE_SECONDS),
    ]  # fmt: skip
    with (folder / "log.txt").open("wb") as log:
        process = subprocess.Popen(
            arguments, cwd=folder, env=os.environ | settings, stdout=log, stderr=log
        )
    url = f"http://127.0.0.1:{port}"
    end = time.monotonic() + 300
    while time.monotonic() < end and process.poll() is None:
        try:
            if httpx.get(f"{url}/ready", timeout=5).status_code == 200:
                return process, url
        except httpx.TransportError:
            time.sleep(0.2)
    raise RuntimeError((folder / "log.txt").read_text())


def send_hostile(
    url: str,
    rng: random.Random,
    rounds: int,
    at_once: int,
    mixtures: int,
    report: Report,
    watcher: _Watch,
) -> None:
    """Send every hostile body `at_once` times at the same time, every raw request, and mixtures."""

    def attacked(name: str, work: Sequence[Callable[[], None]]) -> None:
        watcher.taken()
        began = time.monotonic()
        together(work)
        slowest = watcher.taken()
        report.health[name] = max(report.health.get(name, 0.0), slowest)
        print(
            f"{name}: {time.monotonic() - began:.1f} s, /health {slowest:.3f} s",
            file=sys.stderr, flush=True,
        )  # fmt: skip

    made: dict[str, Callable[[], None]] = {}
    for _ in range(rounds):
        made = {
            name: partial(_post, url, name, *body, report) for name, body in hostile(rng).items()
        } | {name: partial(_talk, url, name, data, report) for name, data in raw(rng).items()}
        for name, work in made.items():
            attacked(name, [work] * at_once)
    for _ in range(mixtures if made else 0):
        attacked("mixtures", [made[name] for name in rng.choices(sorted(made), k=at_once)])


def _post(
    url: str, name: str, path: str, headers: dict[str, str], content: bytes, report: Report
) -> None:
    """Send a hostile body."""
    began = time.perf_counter()
    try:
        answer = httpx.post(
            url + path, content=content, headers=HEADERS | headers, timeout=120, trust_env=False
        )
    except httpx.TransportError as error:
        report.add(name, "hung up", time.perf_counter() - began)
        if len(content) < 2**20:
            report.failed(f"{name}: {error!r} from {path}")
        return
    report.add(name, str(answer.status_code), time.perf_counter() - began)
    check(answer, f"{name} to {path}", report)


def _talk(url: str, name: str, data: bytes, report: Report) -> None:
    """Send bytes that may be no request."""
    began = time.perf_counter()
    try:
        with socket.create_connection(address(url), timeout=10) as sock:
            threading.Thread(target=_send, args=(sock, data), daemon=True).start()
            answer = sock.recv(65536)
    except OSError:
        answer = b""
    status = answer[9:12].decode("ascii", "replace") if answer else "hung up"
    report.add(name, status, time.perf_counter() - began)
    if status.startswith("5"):
        report.failed(f"{name}: status {status}")


def _send(sock: socket.socket, data: bytes) -> None:
    try:
        sock.sendall(data)
    except OSError:
        return


def address(url: str) -> tuple[str, int]:
    """Host and port of a URL."""
    host, port = url.removeprefix("http://").split(":")
    return host, int(port)


def together(work: Sequence[Callable[[], None]]) -> None:
    """Run functions at the same time, each in a thread of its own."""

    def run(one: Callable[[], None]) -> None:
        os.setpriority(os.PRIO_PROCESS, 0, NICE)  # of this thread, on Linux
        one()

    threads = [threading.Thread(target=run, args=(one,), daemon=True) for one in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def check(answer: httpx.Response, what: str, report: Report) -> None:
    """The property of every answer."""
    if answer.status_code >= 500 and answer.status_code not in (503, 504):
        report.failed(f"{what}: status {answer.status_code}: {answer.text[:300]}")
    elif answer.status_code >= 400:
        try:
            message = answer.json()["error"]["message"]
            assert isinstance(message, str) and 0 < len(message) < 2000
        except (ValueError, KeyError, TypeError, AssertionError):
            text = answer.text[:300]
            report.failed(f"{what}: status {answer.status_code} without a message: {text}")


def plans(url: str, cases: int) -> list[tuple[str, str, str, int]]:
    """Method, path, mode and number of cases of every batch of requests made from the schema."""
    from schemathesis import GenerationMode

    found = []
    for operation in operations(url):
        for mode in GenerationMode:
            if mode is GenerationMode.POSITIVE or operation.body or operation.path_parameters:
                # Routes without any input need no thousands of requests.
                weight = 10 if operation.body else 1
                found.append((operation.method.upper(), operation.path, mode.value, weight))
    weights = sum(weight for *_, weight in found)
    batches = []
    for method, path, mode, weight in found:
        count = max(2, math.ceil(cases * weight / weights))
        batches += [
            (method, path, mode, min(BATCH, count - done)) for done in range(0, count, BATCH)
        ]
    return batches


def operations(url: str) -> list[Any]:
    """Operations of the server's OpenAPI schema."""
    import schemathesis

    found = httpx.get(f"{url}/openapi.json", timeout=60, trust_env=False).json()
    schema = schemathesis.openapi.from_dict(found)
    return [item.ok() for item in schema.get_all_operations()]


def send_batches(url: str, seed: int, todo: Any, done: Any) -> None:
    """Send batches of requests that schemathesis makes, in a process of their own.

    Args:
        url: URL of the server.
        seed: Random seed; each batch has one of its own.
        todo: Queue of batches, each with its number; None ends the process.
        done: Queue of `Report.taken` and, at the end, None.
    """
    os.nice(NICE)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    session = requests.Session()
    session.trust_env = False
    report = Report()
    known = {(one.method.upper(), one.path): one for one in operations(url)}
    while (item := todo.get()) is not None:
        number, (method, path, mode, count) = item
        try:
            made(
                url, known[method, path], mode, count, seed + SEEDS * number, session,
                lambda *told: _told(report, done, *told),
            )  # fmt: skip
        except Exception as error:  # noqa: BLE001 - reported with what reproduces it
            report.failed(
                f"{method} {path} ({mode}): {error}\n"
                f"(again: --seed {seed} --cases as before --batch {number})"
            )
        done.put(report.taken())
    done.put(None)


def _told(report: Report, done: Any, kind: str, outcome: str, seconds: float) -> None:
    report.add(kind, outcome, seconds)
    if sum(report.tried.values()) >= 20:
        done.put(report.taken())


def made(
    url: str,
    operation: Any,
    mode: str,
    count: int,
    seed: int,
    session: requests.Session,
    tell: Callable[[str, str, float], None],
) -> None:
    """Send requests that schemathesis makes from the OpenAPI schema, right or wrong ones.

    Raises:
        Exception: An answer does not have the property.
    """
    import hypothesis
    from schemathesis import GenerationMode
    from schemathesis.specs.openapi.checks import (
        content_type_conformance,
        response_headers_conformance,
        response_schema_conformance,
        status_code_conformance,
    )

    checks = [
        status_code_conformance, content_type_conformance, response_headers_conformance,
        response_schema_conformance,
    ]  # fmt: skip
    name = f"{operation.method.upper()} {operation.path} ({mode})"
    positive = mode == GenerationMode.POSITIVE.value

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=count, deadline=None, database=None, print_blob=True,
        suppress_health_check=list(hypothesis.HealthCheck),
        phases=[hypothesis.Phase.generate],
    )  # fmt: skip
    @hypothesis.given(case=operation.as_strategy(generation_mode=GenerationMode(mode)))
    def ask(case) -> None:
        steer(case, MODELS, "scene", positive=positive)
        began = time.perf_counter()
        answer = case.call(base_url=url, headers=HEADERS, timeout=120, session=session)
        tell(name, str(answer.status_code), time.perf_counter() - began)
        assert answer.status_code < 500 or answer.status_code in (503, 504), answer.text
        case.validate_response(answer, checks=checks)

    ask()  # type: ignore[call-arg]


def steer(case: Any, models: Sequence[str], domain: str, *, positive: bool) -> None:
    """Let half of the requests name what is served, and half of the right ones hold little.

    Otherwise hardly any would get past the first check. The choice depends on the request alone.
    """
    body, rng = case.body, random.Random(str(case.body))
    if isinstance(body, dict):
        if positive and rng.random() < 0.5:
            needed = {"messages", "input", "prompt", "images"} & body.keys()
            kept = set(rng.sample(sorted(body.keys() - needed), min(2, len(body) - len(needed))))
            for field in body.keys() - needed - kept:
                del body[field]
            for turn in body.get("messages") or ():
                if isinstance(turn, dict) and turn.get("content") is None:
                    turn["content"] = "a red star"  # generators like null, which few turns may be
        if "model" in body and rng.random() < 0.5:
            body["model"] = rng.choice(models)
    if "domain" in (case.path_parameters or {}) and rng.random() < 0.5:
        case.path_parameters["domain"] = domain


def send_made(
    url: str, cases: int, seed: int, processes: int, only: int | None, report: Report
) -> None:
    """Send requests made from the OpenAPI schema, from several processes at once."""
    context = multiprocessing.get_context("spawn")
    batches = list(enumerate(plans(url, cases)))
    if only is not None:
        batches = batches[only : only + 1]
    todo, done = context.Queue(), context.Queue()
    workers = [
        context.Process(target=send_batches, args=(url, seed, todo, done), daemon=True)
        for _ in range(min(processes, len(batches)))
    ]
    for batch in [*batches, *[None] * len(workers)]:
        todo.put(batch)
    for worker in workers:
        worker.start()
    wanted = sum(count for _, (*_, count) in batches)
    sent, left, said = 0, len(workers), time.monotonic()
    try:
        while left:
            try:
                found = done.get(timeout=5)
            except queue.Empty:
                if not any(worker.is_alive() for worker in workers):
                    report.failed("a process that sends requests has ended: see above")
                    return
                continue
            if found is None:
                left -= 1
                continue
            sent += report.merge(found)
            if time.monotonic() - said > 10:
                said = time.monotonic()
                print(f"{sent} of {wanted} requests", file=sys.stderr, flush=True)
    finally:
        for worker in workers:
            if left:
                worker.terminate()
            worker.join(10)


class _StoppedError(Exception):
    """A signal or the time limit ends the run before its last request."""


def _stop(number: int, _: Any) -> None:
    raise _StoppedError(signal.Signals(number).name)


class _Watch:
    """A process that asks `/health` all the time."""

    def __init__(self, url: str) -> None:
        context = multiprocessing.get_context("spawn")
        self.slowest, self.asked = context.Value("d", 0.0), context.Value("l", 0)
        self._stop = context.Event()
        arguments = (url, self.slowest, self.asked, self._stop)
        self._process = context.Process(target=watch, args=arguments, daemon=True)
        self._process.start()

    def taken(self) -> float:
        """Seconds of the slowest answer since the last call."""
        time.sleep(0.1)  # what has been asked is answered
        found, self.slowest.value = float(self.slowest.value), 0.0
        return found

    def end(self) -> None:
        """End the process."""
        self._stop.set()
        self._process.join(35)


def main(arguments: list[str]) -> int:
    """Run the fuzzing; returns 1 if a property failed."""
    parser = argparse.ArgumentParser("make fuzz ARGS='routes …'", description=__doc__)
    parser.add_argument("--cases", type=int, default=20_000, help="requests made from the schema")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=3, help="rounds of the hostile bodies")
    parser.add_argument("--at-once", type=int, default=8, help="the same hostile body at a time")
    parser.add_argument("--mixtures", type=int, default=20, help="mixtures of hostile bodies")
    parser.add_argument(
        "--processes", type=int, default=os.cpu_count() or 1,
        help="processes that send requests made from the schema; by default one for each core",
    )  # fmt: skip
    parser.add_argument("--batch", type=int, help="only this batch of requests made from it")
    parser.add_argument("--minutes", type=float, default=0.0, help="time limit; 0 for none")
    parser.add_argument(
        "--health-seconds", type=float, default=LIMIT_SECONDS, help="slowest answer of /health"
    )
    parser.add_argument(
        "--idle-seconds", type=float, default=10.0, help="how long /health is asked alone, at first"
    )
    chosen = parser.parse_args(arguments)
    report = Report()
    slowest: dict[str, float] = {}
    stopped = ""
    handled = {number: signal.signal(number, _stop) for number in (signal.SIGTERM, signal.SIGALRM)}
    signal.setitimer(signal.ITIMER_REAL, 60 * chosen.minutes)
    with tempfile.TemporaryDirectory() as place:
        process, url = start(Path(place))
        server = psutil.Process(process.pid)
        idle = peak = server.memory_info().rss
        watcher = _Watch(url)
        part = "idle"
        try:
            while not watcher.asked.value:
                time.sleep(0.1)
            watcher.taken()
            # What the machine takes by itself.
            time.sleep(chosen.idle_seconds if chosen.batch is None else 0)
            slowest[part], part = watcher.taken(), "hostile"
            if chosen.batch is None:
                send_hostile(
                    url, random.Random(chosen.seed), chosen.rounds, chosen.at_once,
                    chosen.mixtures, report, watcher,
                )  # fmt: skip
            slowest[part], part = max(report.health.values(), default=0.0), "made"
            send_made(url, chosen.cases, chosen.seed, chosen.processes, chosen.batch, report)
        except (_StoppedError, KeyboardInterrupt) as error:
            stopped = f"; stopped early ({error or 'SIGINT'})"
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            for number in handled:
                signal.signal(number, signal.SIG_IGN)  # what follows takes seconds
            if part == "hostile":
                slowest[part] = max([*report.health.values(), watcher.taken()])
            else:
                slowest[part] = max(slowest.get(part, 0.0), watcher.taken())
            watcher.end()
            peak = max(peak, _peak(process.pid))
            process.send_signal(signal.SIGTERM)
            status = process.wait(120)
            log = (Path(place) / "log.txt").read_text()
            for number, handler in handled.items():
                signal.signal(number, handler)
    if status != 0:
        report.failed(f"the server ended with status {status}")
    if "Traceback" in log:
        report.failed(f"the server logged a traceback:\n{log[log.index('Traceback') :][:3000]}")
    for part, seconds in slowest.items():
        if part != "idle" and seconds > chosen.health_seconds:
            report.failed(f"/health took {seconds:.3f} s ({part})")
    print(report.table())
    print(
        f"\n{sum(report.tried.values())} requests; slowest /health of {watcher.asked.value}: "
        + ", ".join(f"{seconds:.3f} s ({part})" for part, seconds in slowest.items())
        + f"; peak memory {(peak - idle) / 2**20:.0f} MB above idle; load "
        f"{os.getloadavg()[0]:.1f} on {os.cpu_count()} cores; "
        f"{len(report.failures)} failures{stopped}"
    )
    for failure in report.failures:
        print(f"\nfailed: {failure}")
    return int(bool(report.failures))


def _peak(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
    return 0
