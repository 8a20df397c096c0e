"""Serves for some minutes with faults, checks every answer, and looks for leaks at the end.

A real server process, a small random model, adapters and a bundle. First everything is asked alone:
these are the right answers. Then clients ask at once, in all ways that clients have, while faults
are injected: full disk, diverged adapters, deleted folders, SIGTERM and a restart in the middle.
Every answer must be the right one or a clear refusal. In the end nothing may be left: no pages, no
threads, no open files, no memory.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import json
import os
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from tests.e2e.valora_serve.serving import Process
from tests.support.lmm_checkpoints import save_llava
from tests.support.serve_helpers import (
    EVERYTHING,
    LANGUAGE,
    MLP,
    DomainSpec,
    make_adapter,
    make_bundle,
)
from valora_serve.server.app import WORKERS

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

SECRET = "an-admin-key-for-the-soak"
HEADERS = {"authorization": f"Bearer {SECRET}"}
GAP = 1e-3  # by how much a token must be likelier than the next one to be the same in any batch
CLIENTS = 12
ALWAYS = ("red", "green", "blue")  # adapters that are always loaded
SOMETIMES = ("ash", "elm")  # adapters that are loaded and unloaded all the time
DOMAINS = {
    "scene": DomainSpec("adapter-1", "classification", ["x", "y", "z"], prompt="Which one?"),
    "things": DomainSpec("adapter-2", "detection", ["thing"], prompt="Find them."),
}
MORE = {"signs": DomainSpec("adapter-1", "classification", ["stop", "go"], prompt="Which sign?")}


def noise(seed: int, width: int, height: int) -> bytes:
    """Return a PNG of random pixels."""
    pixels = np.random.default_rng(seed).integers(0, 255, (height, width, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


@dataclass(frozen=True)
class Question:
    """Something to ask, with one right answer.

    Attributes:
        model: Adapter or domain, None for the base model.
        text: Text of the prompt; empty for a domain with a head.
        image: PNG, None for none.
        tokens: Most tokens of the answer.
    """

    model: str | None
    text: str
    image: bytes | None
    tokens: int

    @property
    def vision(self) -> bool:
        """Whether the head of a domain answers."""
        return not self.text

    def body(self, base: str, **more: Any) -> dict[str, Any]:
        """Body of a chat completion."""
        content: list[dict[str, Any]] = []
        if self.image is not None:
            url = "data:image/png;base64," + base64.b64encode(self.image).decode()
            content.append({"type": "image_url", "image_url": {"url": url}})
        content.append({"type": "text", "text": self.text})
        return {
            "model": self.model or base, "messages": [{"role": "user", "content": content}],
            "max_tokens": self.tokens, "temperature": 0, **more,
        }  # fmt: skip


@dataclass
class Tally:
    """What happened.

    Attributes:
        outcomes: Number of requests by kind of client and outcome.
        faults: Number of faults by kind.
        wrong: What was wrong, one line each.
    """

    outcomes: Counter[tuple[str, str]] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def note(self, kind: str, outcome: str) -> None:
        """Count a request."""
        self.outcomes[kind, outcome] += 1

    def bad(self, what: str) -> None:
        """Record something that must not happen."""
        self.wrong.append(what[:400])
        print(f"WRONG: {what[:400]}", flush=True)


@dataclass(frozen=True)
class Footprint:
    """What a process holds.

    Attributes:
        pages: Pages of the unified memory in use by anything but the models that are loaded.
        threads: Number of threads.
        files: Number of open files and sockets.
        memory: Resident memory in bytes.
    """

    pages: int
    threads: int
    files: int
    memory: int


class Soak:
    """A server, its clients and its faults.

    Args:
        folder: An empty folder to work in.
        seed: Seed of what clients ask and of the faults.
    """

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.draw, self.tally = folder, random.Random(seed), Tally()
        self.store = folder / "store"
        self.base = str(save_llava(folder / "base", seed=5, side=16))
        targets = (LANGUAGE, MLP, EVERYTHING, LANGUAGE, EVERYTHING)
        for number, name in enumerate((*ALWAYS, *SOMETIMES)):
            make_adapter(
                self.store / name, self.base, seed=number, rank=1 + 2 * number, alpha=4 + number,
                targets=targets[number], strength=0.3,
            )  # fmt: skip
        self._make_diverged()
        self.bundle = make_bundle(folder / "pack", self.base, name="pack", domains=DOMAINS, seed=3)
        adapters = {"adapter-1": {"rank": 4, "alpha": 8}}
        make_bundle(
            self.store / "more", self.base, name="more", domains=MORE, adapters=adapters, seed=4
        )
        self.questions = self._make_questions()
        self.bodies = {
            "not JSON": b'{"model": "x", "messages": [' + b"\xff" * 99,
            "deep": b"[" * 100_000 + b"]" * 100_000,
            "many keys": json.dumps({f"k{n}": n for n in range(20_000)}).encode(),
            "wrong types": b'{"model": 7, "messages": {"role": []}, "max_tokens": "x"}',
            "huge number": b'{"messages": [], "max_tokens": 1' + b"0" * 5000 + b"}",
            "nobody": json.dumps(Question("nobody", "x", None, 2).body("")).encode(),
        }
        tall = io.BytesIO()
        Image.new("1", (1, 1_000_000)).save(tall, "PNG")
        self.tall = tall.getvalue()
        self.right: dict[Question, Any] = {}
        self.server: Process | None = None
        self.model = ""  # name of the base model
        self.draining = False
        self.stop = False

    def _make_diverged(self) -> None:
        """Adapters of a training that diverged, and one whose scaling overflows."""
        for name, factor in (("huge", 1e30), ("wild", 1e4), ("nan", float("nan"))):
            file = shutil.copytree(self.store / "red", self.store / name)
            file = file / "adapter_model.safetensors"
            save_file({k: v * factor for k, v in load_file(file).items()}, file)
        config = shutil.copytree(self.store / "red", self.store / "steep") / "adapter_config.json"
        facts = json.loads(config.read_text()) | {"lora_alpha": 1e300}
        config.write_text(json.dumps(facts))

    def _make_questions(self) -> list[Question]:
        draw, made = random.Random(1), []
        for model in (None, *ALWAYS, *SOMETIMES):
            for number in range(6):
                words = " ".join(
                    draw.choice(("what", "is", "this", "thing")) for _ in range(1 + 3 * number)
                )
                image = noise(20 + number, 30, 9 + number) if number % 3 else None
                made.append(Question(model, words, image, (2, 9, 30)[number % 3]))
        for domain in (*DOMAINS, *MORE):
            made += [Question(domain, "", noise(50 + n, 20 + n, 31), 1) for n in range(5)]
        return made

    # ------------------------------------------------------------------ the server

    def start(self, policy: str) -> None:
        """Start the server and wait until it is ready."""
        self.server = Process(
            self.bundle, "--base", self.base, "--no-golden", "--allow-runtime-loading",
            "--adapter-folder", self.store, "--api-key", SECRET,
            "--state-file", self.folder / "state" / "served.json", "--policy", policy,
            "--max-requests", 8, "--max-tokens", 96, "--chunk", 40, "--max-adapters", 3,
            "--slots", 4, "--block-size", 8, "--pages", 260, "--max-waiting", 64,
            "--image-cache-bytes", 1 << 14, "--drain-seconds", 30, "--dtype", "float32",
            "--device", "cpu", "--send-seconds", 15, "--body-seconds", 15,
            cwd=self.folder,
        ).ready(240)  # fmt: skip
        listed = self.get("/v1/models")["data"]
        self.model = next(card["id"] for card in listed if card["kind"] == "base")

    @property
    def url(self) -> str:
        """Address of the server."""
        assert self.server is not None
        return self.server.url

    def get(self, path: str) -> Any:
        """Return the JSON of a path."""
        answer = httpx.get(self.url + path, headers=HEADERS, timeout=30)
        answer.raise_for_status()
        return answer.json()

    def names(self) -> set[str]:
        """Names that are served."""
        return {card["id"] for card in self.get("/v1/models")["data"]}

    def post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        """Ask an admin's question."""
        return httpx.post(f"{self.url}/v1/{path}", json=body, headers=HEADERS, timeout=60)

    def load(self, name: str) -> httpx.Response:
        """Load an adapter."""
        return self.post("load_lora_adapter", {"lora_name": name, "lora_path": name})

    def unload(self, name: str) -> httpx.Response:
        """Unload an adapter."""
        return self.post("unload_lora_adapter", {"lora_name": name})

    def footprint(self) -> Footprint:
        """Measure the process; nothing runs."""
        assert self.server is not None
        proc = Path("/proc") / str(self.server.process.pid)
        status = (proc / "status").read_text()
        found = re.search(r"VmRSS:\s+(\d+)", status)
        files = len(list((proc / "fd").iterdir()))  # before a connection is opened to ask
        state = self.get("/v1/status")
        return Footprint(
            state["pages_total"] - state["pages_free"] - state["pages_adapters"],
            len(list((proc / "task").iterdir())),
            files,
            int(found[1]) << 10 if found else 0,
        )

    def rest(self, seconds: float = 60) -> None:
        """Wait until nothing runs, connections are closed, and only what stays is loaded."""
        for name in (*SOMETIMES, "wild", "doomed"):
            if name in self.names():
                self.unload(name)
        if "signs" in self.names():
            self.post("unload_bundle", {"bundle_name": "more"})
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            state = self.get("/v1/status")
            if not state["running"] and not state["waiting"]:
                break
            time.sleep(0.1)
        else:
            self.tally.bad(f"requests are left after {seconds} s: {state}")
        time.sleep(7)  # keep-alive connections end

    # ------------------------------------------------------------------ asking

    def learn(self) -> None:
        """Ask everything alone."""
        served = self.names()
        for name in {*ALWAYS, *SOMETIMES} - served:
            self.load(name).raise_for_status()
        if "signs" not in served:
            self.post("load_bundle", {"bundle_path": "more"}).raise_for_status()
        with httpx.Client(headers=HEADERS, timeout=60) as client:
            for question in self.questions:
                if question.vision:
                    answer = client.post(
                        f"{self.url}/v1/vision/{question.model}",
                        files={"image": ("a.png", question.image, "image/png")},
                    )
                    answer.raise_for_status()
                    self.right[question] = answer.json()["results"]
                    continue
                body = question.body(self.model, logprobs=True, top_logprobs=2)
                answer = client.post(f"{self.url}/v1/chat/completions", json=body)
                answer.raise_for_status()
                choice = answer.json()["choices"][0]
                tokens = choice["logprobs"]["content"]
                gaps = [
                    t["top_logprobs"][0]["logprob"] - t["top_logprobs"][1]["logprob"]
                    for t in tokens
                ]
                if min(gaps, default=1.0) > GAP:
                    self.right[question] = (choice["message"]["content"], choice["finish_reason"])
        texts = {str(v) for v in self.right.values()}
        if len(self.right) < 30 or len(texts) < 20:
            raise RuntimeError(f"only {len(self.right)} answers, {len(texts)} of them different")

    def judge(self, kind: str, question: Question, found: Any) -> None:
        """Compare an answer with the right one."""
        wanted = self.right[question]
        if same(found, wanted):
            self.tally.note(kind, "right")
        else:
            self.tally.note(kind, "WRONG")
            self.tally.bad(
                f"{kind}: {question.model} {question.text[:40]!r}: expected {wanted!r}, "
                f"got {found!r}"
            )

    def refused(self, kind: str, status: int, text: str, allowed: set[int]) -> None:
        """Judge an answer that is not 200."""
        if self.draining:
            allowed = allowed | {503}
        try:
            said = json.loads(text)["error"]
            clear = bool(said["message"]) and "Traceback" not in text
        except (ValueError, KeyError, TypeError):
            clear = False
        self.tally.note(kind, f"{status}")
        if status not in allowed or not clear:
            self.tally.note(kind, "WRONG")
            self.tally.bad(f"{kind}: unexpected {status}: {text[:300]}")

    def pick(self) -> tuple[Question, set[int]]:
        """Draw a question, and the statuses that may refuse it."""
        question = self.draw.choice(list(self.right))
        allowed = {429}
        if question.model in {*SOMETIMES, *MORE}:
            allowed |= {404, 400, 409}
        return question, allowed

    async def whole(self, client: httpx.AsyncClient, kind: str = "whole", **more: Any) -> None:
        """Ask without streaming."""
        question, allowed = self.pick()
        if "valora" in more:
            allowed |= {504}
        if question.vision:
            answer = await client.post(
                f"{self.url}/v1/vision/{question.model}",
                files={"image": ("a.png", question.image, "image/png")},
                data={"deadline": str(more["valora"]["deadline"])} if "valora" in more else {},
            )
        else:
            body = question.body(self.model, **more)
            answer = await client.post(f"{self.url}/v1/chat/completions", json=body)
        if answer.status_code != 200:
            self.refused(kind, answer.status_code, answer.text, allowed)
        elif question.vision:
            self.judge(kind, question, answer.json()["results"])
        else:
            choice = answer.json()["choices"][0]
            self.judge(kind, question, (choice["message"]["content"], choice["finish_reason"]))

    async def deadline(self, client: httpx.AsyncClient) -> None:
        """Ask with little time."""
        seconds = self.draw.choice((0.001, 0.02, 0.2, 5.0))
        await self.whole(client, "deadline", valora={"deadline": seconds})

    async def stream(self, client: httpx.AsyncClient, kind: str = "stream") -> None:
        """Read a stream: at once, slowly, or up to a point."""
        question, allowed = self.pick()
        if question.vision:
            return
        body = question.body(self.model, stream=True)
        leave = self.draw.randrange(4) if kind == "gone" else None
        text, finish, done = "", None, False
        async with client.stream("POST", f"{self.url}/v1/chat/completions", json=body) as response:
            if response.status_code != 200:
                raw = (await response.aread()).decode()
                self.refused(kind, response.status_code, raw, allowed)
                return
            events = 0
            async for line in response.aiter_lines():
                if not line.startswith("data: "):
                    continue
                if line == "data: [DONE]":
                    done = True
                    break
                event = json.loads(line[6:])
                if "error" in event:
                    if not self.draining:
                        self.tally.bad(f"{kind}: {question.model}: an error event: {line[:300]}")
                    self.tally.note(kind, "error event")
                    return
                for choice in event["choices"]:
                    text += choice["delta"].get("content") or ""
                    finish = choice["finish_reason"] or finish
                events += 1
                if events == leave:
                    break
                if kind == "slow":
                    await asyncio.sleep(0.05)
        if kind == "gone" and not done:
            wanted = self.right[question][0]
            self.tally.note(kind, "left")
            if not wanted.startswith(text):
                self.tally.bad(f"gone: {text!r} does not start {wanted!r}")
        elif not done:
            self.tally.bad(f"{kind}: a stream ended without [DONE] and without an error")
        else:
            self.judge(kind, question, (text, finish))

    async def gone(self, client: httpx.AsyncClient) -> None:
        """Leave in the middle of a stream."""
        await self.stream(client, "gone")

    async def slow(self, client: httpx.AsyncClient) -> None:
        """Read a stream slowly."""
        await self.stream(client, "slow")

    async def cancelled(self, client: httpx.AsyncClient) -> None:
        """Hang up before the answer."""
        question, _ = self.pick()
        if question.vision:
            return
        body = question.body(self.model, ignore_eos=True) | {"max_tokens": 400}
        try:
            await client.post(
                f"{self.url}/v1/chat/completions", json=body,
                timeout=self.draw.choice((0.01, 0.05, 0.3)),
            )  # fmt: skip
            self.tally.note("cancelled", "answered")
        except httpx.TimeoutException:
            self.tally.note("cancelled", "hung up")

    async def hostile(self, client: httpx.AsyncClient) -> None:
        """Send what nobody should: it must be refused, and clearly."""
        draw = self.draw
        good = noise(draw.randrange(99), 40, 30)
        cut = draw.randrange(1, len(good))
        flipped = bytearray(good)
        for _ in range(9):
            flipped[draw.randrange(24, len(flipped))] ^= 1 << draw.randrange(8)
        images = {"cut": good[:cut], "flipped": bytes(flipped), "tall": self.tall,
                  "noise": draw.randbytes(3000), "empty": b""}  # fmt: skip
        name = draw.choice((*self.bodies, *images))
        if name in images:
            sent = self._send_image(client, images[name])
        else:
            sent = self._send_raw(client, self.bodies[name])
        answer = await sent
        allowed = {200} if name in ("cut", "flipped") else set()  # some decode all the same
        if answer.status_code == 200 and allowed:
            self.tally.note("hostile", "200")
        else:
            self.refused("hostile", answer.status_code, answer.text, set(range(400, 500)))

    def _send_raw(
        self, client: httpx.AsyncClient, content: bytes
    ) -> Coroutine[Any, Any, httpx.Response]:
        kind = {"content-type": "application/json"}
        return client.post(f"{self.url}/v1/chat/completions", content=content, headers=kind)

    def _send_image(
        self, client: httpx.AsyncClient, image: bytes
    ) -> Coroutine[Any, Any, httpx.Response]:
        return client.post(
            f"{self.url}/v1/vision/scene", files={"image": ("a.png", image, "image/png")}
        )

    async def trickle(self, _client: httpx.AsyncClient) -> None:
        """Send a request so slowly that the server gives up, or hang up in the middle of it."""
        host, port = self.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer "
            + SECRET.encode()
            + b"\r\ncontent-type: application/json\r\ncontent-length: 5000\r\n\r\n"
        )  # fmt: skip
        try:
            for _ in range(self.draw.choice((2, 200))):
                writer.write(b" ")
                await writer.drain()
                await asyncio.sleep(0.1)
                if self.stop or reader.at_eof():
                    break
        except ConnectionError:
            pass
        writer.close()
        self.tally.note("trickle", "hung up")

    async def client(self, number: int) -> None:
        """A client: one request after the other, of all kinds."""
        kinds: list[tuple[int, Callable[[httpx.AsyncClient], Coroutine[Any, Any, None]]]] = [
            (10, self.whole), (8, self.stream), (3, self.deadline), (4, self.cancelled),
            (4, self.gone), (1, self.slow),
            (5, self.hostile), (1, self.trickle),
        ]  # fmt: skip
        choices = [kind for weight, kind in kinds for _ in range(weight)]
        draw = random.Random(number)
        while not self.stop:
            # A connection of its own each time: some must be closed in the middle.
            limits = httpx.Limits(keepalive_expiry=1)  # the server closes idle ones after 5 s
            async with httpx.AsyncClient(headers=HEADERS, timeout=90, limits=limits) as client:
                for _ in range(draw.randrange(1, 6)):
                    if self.stop:
                        return
                    kind = draw.choice(choices)
                    try:
                        await kind(client)
                    except (httpx.TransportError, ConnectionError) as error:
                        name = getattr(kind, "__name__", "")
                        self.tally.note(name, type(error).__name__)
                        # A body that was refused half-read may cut the connection.
                        if not self.draining and name not in ("hostile", "trickle"):
                            self.tally.bad(f"{name}: connection lost: {error!r}")
                        await asyncio.sleep(0.1)
                    if kind in (self.hostile, self.cancelled):
                        break  # the server may close the connection

    # ------------------------------------------------------------------ faults

    def turn_over(self) -> None:
        """Load or unload something that is asked for."""
        name = self.draw.choice((*SOMETIMES, "more"))
        served = self.names()
        if name == "more":
            there = "signs" in served
            answer = (
                self.post("unload_bundle", {"bundle_name": "more"})
                if there
                else self.post("load_bundle", {"bundle_path": "more"})
            )
            name = "signs"
        else:
            there = name in served
            answer = self.unload(name) if there else self.load(name)
        # A busy one answers 409 and stays.
        self._agree("turn over", name, answer, there, loads=not there)

    def _agree(
        self, kind: str, name: str, answer: httpx.Response, before: bool, *, loads: bool
    ) -> None:
        """Check that what is served is what the answer says."""
        now = name in self.names()
        wanted = loads if answer.status_code == 200 else before
        self.tally.note(kind, str(answer.status_code))
        if now is not wanted:
            self.tally.bad(
                f"{kind}: {name} was answered {answer.status_code} {answer.text[:200]}, and is "
                f"{'' if now else 'not '}served"
            )

    def diverged(self) -> None:
        """Load adapters that no answer can be expected of."""
        for name in ("huge", "nan", "steep"):
            answer = self.load(name)
            self._agree("diverged", name, answer, before=False, loads=False)
            if not 400 <= answer.status_code < 500:
                self.tally.bad(f"diverged: {name} was answered {answer.status_code} {answer.text}")
        if self.load("wild").status_code == 200:  # finite, as far as a probe can tell
            body = Question("wild", "what is", None, 5).body(self.model)
            answer = self.post("chat/completions", body)
            self.tally.note("diverged", f"asked: {answer.status_code}")
            self.unload("wild")

    def deleted(self) -> None:
        """Delete the folder of an adapter that is served; others must not notice."""
        folder = self.store / "doomed"
        shutil.copytree(self.store / "green", folder, dirs_exist_ok=True)
        self._agree("deleted", "doomed", self.load("doomed"), before=False, loads=True)
        shutil.rmtree(folder)
        choices = [q for q in self.right if q.model == "green"]
        question = self.draw.choice(choices)
        body = question.body(self.model) | {"model": "doomed"}
        answer = self.post("chat/completions", body)
        if answer.status_code == 200:
            choice = answer.json()["choices"][0]
            self.judge("deleted", question, (choice["message"]["content"], choice["finish_reason"]))
        else:
            self.refused("deleted", answer.status_code, answer.text, {400, 404, 409, 429, 500, 503})
        for _ in range(100):
            answer = self.unload("doomed")
            if answer.status_code != 409:
                break
            time.sleep(0.1)
        self._agree("deleted", "doomed", answer, before=True, loads=False)

    def full_disk(self) -> None:
        """Fill the disk, as far as the server can tell: no file may grow beyond a few bytes."""
        assert self.server is not None
        pid = self.server.process.pid
        before = resource.prlimit(pid, resource.RLIMIT_FSIZE)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (16, before[1]))
        try:
            for _ in range(3):
                self.turn_over()
        finally:
            resource.prlimit(pid, resource.RLIMIT_FSIZE, before)
        self.turn_over()

    def folder_in_the_way(self) -> None:
        """Something stands where the state file is written."""
        state = self.folder / "state"
        aside = self.folder / "state-aside"
        state.rename(aside)
        state.write_text("in the way")
        try:
            for _ in range(2):
                self.turn_over()
        finally:
            state.unlink()
            aside.rename(state)
        self.turn_over()

    async def faults(self, until: float) -> None:
        """Inject faults until a time of `time.monotonic`."""
        kinds = [
            *[("load or unload", self.turn_over)] * 5, ("diverged adapter", self.diverged),
            ("deleted folder", self.deleted), ("full disk", self.full_disk),
            ("state folder gone", self.folder_in_the_way),
        ]  # fmt: skip
        plan: list[tuple[str, Callable[[], None]]] = []
        while time.monotonic() < until:
            if not plan:
                plan = self.draw.sample(kinds, len(kinds))
            name, fault = plan.pop()
            try:
                await asyncio.to_thread(fault)
            except httpx.HTTPError as error:
                self.tally.bad(f"{name}: {error!r}")
            self.tally.faults[name] += 1
            await asyncio.sleep(0.2)

    async def pulse(self) -> None:
        """Ask for /health all the time, and note the longest wait."""
        async with httpx.AsyncClient(timeout=30) as client:
            while not self.stop:
                start = time.monotonic()
                try:
                    answer = await client.get(f"{self.url}/health")
                    if answer.status_code != 200 and not self.draining:
                        self.tally.bad(f"/health answered {answer.status_code}")
                except httpx.TransportError as error:
                    if not self.draining:
                        self.tally.bad(f"/health: {error!r}")
                self.slowest = max(self.slowest, time.monotonic() - start)
                await asyncio.sleep(0.1)

    slowest = 0.0

    # ------------------------------------------------------------------ the whole

    async def crowd(self, seconds: float, *, terminate: bool) -> None:
        """Let clients ask and faults happen; SIGTERM at the end if wanted."""
        self.stop = self.draining = False
        assert self.server is not None
        clients = [asyncio.create_task(self.client(n)) for n in range(CLIENTS)]
        pulse = asyncio.create_task(self.pulse())
        await self.faults(time.monotonic() + seconds)
        if terminate:
            self.draining = True
            served = await asyncio.to_thread(self.names)
            self.server.process.send_signal(signal.SIGTERM)
            self.tally.faults["SIGTERM under load"] += 1
            status = await asyncio.to_thread(self.server.process.wait, 60)
            if status:
                self.tally.bad(f"the server ended with {status} after SIGTERM")
            self.served = served
        self.stop = True
        for task in await asyncio.gather(*clients, pulse, return_exceptions=True):
            if isinstance(task, BaseException):
                self.tally.bad(f"a client failed: {task!r}")

    served: set[str] = set()  # noqa: RUF012

    def run(self, minutes: float) -> bool:
        """Do it all; return whether everything was right."""
        seconds = 60 * minutes
        print(f"{len(self.questions)} questions; asking them alone", flush=True)
        self.start("cost")
        self.learn()
        print(f"{len(self.right)} answers beyond doubt; faults from now on", flush=True)
        asyncio.run(self.crowd(0.4 * seconds, terminate=True))
        self._check_log()
        self.start("valora")
        if self.names() != self.served:
            self.tally.bad(f"served before {self.served}, after the restart {self.names()}")
        asyncio.run(self.crowd(0.2 * seconds, terminate=False))
        self.rest()
        before = self.footprint()
        asyncio.run(self.crowd(0.4 * seconds, terminate=False))
        self.rest()
        after = self.footprint()
        # Once more, alone, on a server that has seen it all.
        self.right, learnt = {}, self.right
        self.learn()
        for question, wanted in learnt.items():
            if not same(self.right.get(question, wanted), wanted):
                self.tally.bad(f"in the end {question.model} {question.text!r} is answered wrongly")
        assert self.server is not None
        start = time.monotonic()
        status, took = self.server.end(), time.monotonic() - start
        if status or took > 20:  # a task that is left would make it wait for the whole drain
            self.tally.bad(f"the idle server ended with {status} after {took:.1f} s")
        self._check_log()
        return self._report(before, after)

    def _check_log(self) -> None:
        """Nothing may have gone unhandled."""
        assert self.server is not None
        text = self.server.log.read_text(errors="replace")
        for pattern in (
            "Task was destroyed",
            "never retrieved",
            "was never awaited",
            "Exception in",
        ):
            if found := re.search(rf".*{pattern}.*", text):
                self.tally.bad(f"log: {found[0]}")

    def _report(self, before: Footprint, after: Footprint) -> bool:
        outcomes = self.tally.outcomes
        print("\n| client | outcomes |\n|---|---|")
        for kind in sorted({kind for kind, _ in outcomes}):
            told = sorted((o, n) for (k, o), n in outcomes.items() if k == kind)
            print(f"| {kind} | {', '.join(f'{o}: {n}' for o, n in told)} |")
        print("\n| fault | times |\n|---|---|")
        for name, count in sorted(self.tally.faults.items()):
            print(f"| {name} | {count} |")
        leaks = {
            "pages": after.pages - before.pages > 0,
            # Workers of the server's pool start when they are first needed.
            "threads": after.threads - before.threads > WORKERS,
            "files": after.files - before.files > 0,
            "memory": after.memory - before.memory > max(32 << 20, before.memory // 20),
        }
        print("\n| held by the idle server | before | after |\n|---|---|---|")
        print(f"| pages that no model needs | {before.pages} | {after.pages} |")
        print(f"| threads | {before.threads} | {after.threads} |")
        print(f"| open files | {before.files} | {after.files} |")
        print(f"| memory, MB | {before.memory / 1e6:.0f} | {after.memory / 1e6:.0f} |")
        answered = sum(n for (_, outcome), n in outcomes.items() if outcome == "right")
        print(
            f"\n{outcomes.total()} requests, {answered} answers checked and right, "
            f"{len(self.tally.wrong)} wrong; /health took {self.slowest * 1e3:.0f} ms at most"
        )
        for name in (name for name, found in leaks.items() if found):
            print(f"LEAK: {name}")
        for line in self.tally.wrong[:20]:
            print(f"WRONG: {line}")
        return not self.tally.wrong and not any(leaks.values())


def same(found: Any, wanted: Any) -> bool:
    """Return whether two answers are equal, numbers to 1e-3; ids and times may differ."""
    if isinstance(wanted, dict):
        if not isinstance(found, dict) or found.keys() != wanted.keys():
            return False
        return all(
            same(found[k], wanted[k]) for k in wanted if k not in ("id", "created", "seconds")
        )
    if isinstance(wanted, list | tuple):
        return (
            isinstance(found, list | tuple)
            and len(found) == len(wanted)
            and all(map(same, found, wanted))
        )
    if isinstance(wanted, float) and isinstance(found, int | float):
        return abs(found - wanted) <= 1e-3 * max(1.0, abs(wanted))
    return bool(found == wanted)


def main(arguments: list[str]) -> int:
    """Run the soak; see ``--help``."""
    parser = argparse.ArgumentParser("python -m tests.fuzz soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=3.0, help="how long clients ask, in all")
    parser.add_argument("--seed", type=int, default=0, help="seed of the questions and faults")
    parser.add_argument("--keep", action="store_true", help="keep the folder with the logs")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    soak = None
    try:
        soak = Soak(folder, options.seed)
        good = soak.run(options.minutes)
    finally:
        if soak is not None and soak.server is not None:
            soak.server.end(signal.SIGKILL)
        if options.keep:
            print(f"kept {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)
    return 0 if good else 1


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    sys.exit(main(sys.argv[1:]))
