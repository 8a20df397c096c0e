"""Serves for some minutes with faults, checks every answer, and looks for leaks at the end.

First everything is asked alone: these are the right answers. Then clients ask at once, in all ways
that clients have, while faults are injected. Every answer must be the right one or a clear refusal.
In the end nothing may be left: no pages, no threads, no open files, no memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import re
import resource
import shutil
import signal
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import httpx
from safetensors.torch import load_file, save_file

from tests.e2e.valora_serve.serving import Process
from tests.fuzz.adapters import alike
from tests.fuzz.driver import Report, Watch, error_of
from tests.fuzz.media import drawing
from tests.support.http_helpers import data_url, encoded
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

SECRET = "an-admin-key-for-the-soak"
HEADERS = {"authorization": f"Bearer {SECRET}"}
GAP = 1e-3  # by how much a token must be likelier than the next one to be the same in any batch
CLIENTS = 12
ALWAYS, SOMETIMES = ("red", "green", "blue"), ("ash", "elm")  # adapters: loaded always, at times
DOMAINS = {
    "scene": DomainSpec("adapter-1", "classification", ["x", "y", "z"], prompt="Which one?"),
    "things": DomainSpec("adapter-2", "detection", ["thing"], prompt="Find them."),
}
MORE = {"signs": DomainSpec("adapter-1", "classification", ["stop", "go"], prompt="Which sign?")}
CHAT = "/v1/chat/completions"
KINDS = {"whole": 10, "stream": 8, "deadline": 3, "cancelled": 4, "gone": 4, "slow": 1}
HELD = ("pages that no model needs", "threads", "open files", "memory")


class Question(NamedTuple):
    """Something to ask, with one right answer; a domain's head is asked without text."""

    model: str | None
    text: str
    image: bytes | None
    tokens: int

    def body(self, base, **more):
        content = [{"type": "text", "text": self.text}]
        if self.image is not None:
            content.append({"type": "image_url", "image_url": {"url": data_url(self.image)}})
        return {"model": self.model or base, "messages": [{"role": "user", "content": content}],
                "max_tokens": self.tokens, "temperature": 0, **more}  # fmt: skip


def content_of(answer):
    """What matters of an answer: text and why it ended, or a head's results."""
    found = answer.json()
    if "results" in found:
        return [{k: v for k, v in one.items() if k != "seconds"} for one in found["results"]]
    choice = found["choices"][0]
    return choice["message"]["content"], choice["finish_reason"]


class Soak:
    """A server, its clients and its faults."""

    def __init__(self, folder, seed):
        self.folder, self.draw, self.report = folder, random.Random(seed), Report()
        self.store, self.right, self.server, self.stop = folder / "store", {}, None, False
        self.draining, self.model, self.served = False, "", set()
        self.base = str(save_llava(folder / "base", seed=5, side=16))
        targets = (LANGUAGE, MLP, EVERYTHING, LANGUAGE, EVERYTHING)
        for number, name in enumerate((*ALWAYS, *SOMETIMES)):
            make_adapter(
                self.store / name, self.base, seed=number, rank=1 + 2 * number, alpha=4 + number,
                targets=targets[number], strength=0.3,
            )  # fmt: skip
        # Adapters of a training that diverged, and one whose scaling overflows.
        for name, factor in (("huge", 1e30), ("wild", 1e4), ("nan", float("nan")), ("steep", 1)):
            shutil.copytree(self.store / "red", self.store / name)
            file = self.store / name / "adapter_model.safetensors"
            save_file({k: v * factor for k, v in load_file(file).items()}, file)
        config = self.store / "steep" / "adapter_config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | {"lora_alpha": 1e300}))
        self.bundle = make_bundle(folder / "pack", self.base, name="pack", domains=DOMAINS, seed=3)
        make_bundle(self.store / "more", self.base, name="more", domains=MORE, seed=4,
                    adapters={"adapter-1": {"rank": 4, "alpha": 8}})  # fmt: skip
        draw, self.questions = random.Random(1), []
        for model in (None, *ALWAYS, *SOMETIMES):
            for n in range(6):
                words = " ".join(draw.choices(("what", "is", "this", "thing"), k=1 + 3 * n))
                image = encoded(drawing(30 + n, 9 + n), "PNG") if n % 3 else None
                self.questions.append(Question(model, words, image, (2, 9, 30)[n % 3]))
        for domain in (*DOMAINS, *MORE):
            for n in range(5):
                image = encoded(drawing(20 + n, 31), "PNG")
                self.questions.append(Question(domain, "", image, 1))

    # The server

    def start(self, policy):
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
        self.url = self.server.url
        listed = self.get("/v1/models")["data"]
        self.model = next(card["id"] for card in listed if card["kind"] == "base")

    def get(self, path):
        answer = httpx.get(self.url + path, headers=HEADERS, timeout=30)
        return answer.raise_for_status().json()

    def names(self):
        return {card["id"] for card in self.get("/v1/models")["data"]}

    def post(self, path, body):
        return httpx.post(f"{self.url}/v1/{path}", json=body, headers=HEADERS, timeout=60)

    def change(self, kind, name, load):
        """Load or unload an adapter, or `signs`'s bundle; what is served must fit the answer."""
        before, verb = name in self.names(), "load" if load else "unload"
        if name == "signs":
            body = {"bundle_path": "more"} if load else {"bundle_name": "more"}
            answer = self.post(f"{verb}_bundle", body)
        else:
            body = {"lora_name": name} | ({"lora_path": name} if load else {})
            answer = self.post(f"{verb}_lora_adapter", body)
        self.report.add(kind, str(answer.status_code))
        wanted = load if answer.status_code == 200 else before
        if (name in self.names()) is not wanted:
            self.report.failed(f"{kind}: {verb} {name}: {answer.text[:200]}; served: {not wanted}")
        return answer.status_code

    def rest(self):
        """Wait until nothing runs and connections are closed; return what the process holds."""
        for name in self.names() & {*SOMETIMES, "wild", "doomed", "signs"}:
            self.change("rest", name, load=False)
        for _ in range(600):
            state = self.get("/v1/status")
            if not state["running"] and not state["waiting"]:
                break
            time.sleep(0.1)
        else:
            self.report.failed(f"requests are left after a minute: {state}")
        time.sleep(7)  # keep-alive connections end
        proc = Path("/proc") / str(self.server.process.pid)
        files = len(list((proc / "fd").iterdir()))  # before a connection is opened to ask
        state = self.get("/v1/status")
        memory = re.search(r"VmRSS:\s+(\d+)", (proc / "status").read_text())
        pages = state["pages_total"] - state["pages_free"] - state["pages_adapters"]
        return pages, len(list((proc / "task").iterdir())), files, int(memory[1]) << 10

    # Asking

    def learn(self):
        """Ask everything alone; return the answers that any batch must give."""
        for name in {*SOMETIMES, *ALWAYS, *MORE} - self.names():
            assert self.change("learn", name, load=True) == 200
        right = {}
        with httpx.Client(base_url=self.url, headers=HEADERS, timeout=60) as client:
            for question in self.questions:
                body = question.body(self.model, logprobs=True, top_logprobs=2)
                answer = client.post(CHAT, json=body) if question.text else client.post(
                    f"/v1/vision/{question.model}", files={"image": ("a.png", question.image)}
                )  # fmt: skip
                choice = answer.raise_for_status().json().get("choices", [{}])[0]
                gaps = [
                    token["top_logprobs"][0]["logprob"] - token["top_logprobs"][1]["logprob"]
                    for token in choice.get("logprobs", {}).get("content", ())
                ]
                if min(gaps, default=1.0) > GAP:
                    right[question] = content_of(answer)
        assert len(right) >= 30 and len({str(v) for v in right.values()}) >= 20
        return right

    def judge(self, kind, question, found):
        wanted = self.right[question]
        self.report.add(kind, "right" if alike(wanted, found) else "WRONG")
        if not alike(wanted, found):
            asked = f"{question.model} {question.text[:40]!r}"
            self.report.failed(f"{kind}: {asked}: expected {wanted!r}, got {found!r}"[:400])

    def refused(self, kind, status, text, allowed):
        """Judge an answer that is not 200."""
        try:
            clear = bool(error_of(text)) and "Traceback" not in text
        except (ValueError, KeyError, TypeError, AssertionError):
            clear = False
        self.report.add(kind, str(status))
        if not clear or status not in {*allowed, *([503] if self.draining else [])}:
            self.report.failed(f"{kind}: unexpected {status}: {text[:300]}")

    async def ask(self, client, kind):
        """Ask one question as a kind of client does."""
        question = self.draw.choice(list(self.right))
        allowed = {429}
        if question.model in {*SOMETIMES, *MORE}:
            allowed |= {404, 400, 409}
        if kind in ("stream", "gone", "slow"):
            if question.text:
                await self.stream(client, kind, question, allowed)
            return
        more, deadline = {}, self.draw.choice((0.001, 0.02, 0.2, 5.0))
        if kind == "deadline":
            more, allowed = {"valora": {"deadline": deadline}}, allowed | {504}
        if not question.text:
            answer = await client.post(
                f"{self.url}/v1/vision/{question.model}",
                files={"image": ("a.png", question.image)},
                data={"deadline": str(deadline)} if more else {},
            )  # fmt: skip
        elif kind == "cancelled":  # hangs up before the answer
            body = question.body(self.model, ignore_eos=True) | {"max_tokens": 400}
            with contextlib.suppress(httpx.TimeoutException):
                wait = self.draw.choice((0.01, 0.05, 0.3))
                await client.post(self.url + CHAT, json=body, timeout=wait)
            self.report.add(kind, "hung up")
            return
        else:
            answer = await client.post(self.url + CHAT, json=question.body(self.model, **more))
        if answer.status_code == 200:
            self.judge(kind, question, content_of(answer))
        else:
            self.refused(kind, answer.status_code, answer.text, allowed)

    async def stream(self, client, kind, question, allowed):
        """Read a stream at once, slowly, or up to a point."""
        leave = self.draw.randrange(4) if kind == "gone" else None
        text, finish, done, events = "", None, False, 0
        body = question.body(self.model, stream=True)
        async with client.stream("POST", self.url + CHAT, json=body) as response:
            if response.status_code != 200:
                said = (await response.aread()).decode()
                self.refused(kind, response.status_code, said, allowed)
                return
            async for line in response.aiter_lines():
                if line == "data: [DONE]":
                    done = True
                    break
                if not line.startswith("data: "):
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    self.report.add(kind, "error event")
                    if not self.draining:
                        self.report.failed(f"{kind}: {question.model}: {line[:300]}")
                    return
                for choice in event["choices"]:
                    text += choice["delta"].get("content") or ""
                    finish = choice["finish_reason"] or finish
                events += 1
                if events == leave:
                    break
                await asyncio.sleep(0.05 if kind == "slow" else 0)
        if done:
            self.judge(kind, question, (text, finish))
        elif kind != "gone" or not self.right[question][0].startswith(text):
            self.report.failed(f"{kind}: a stream ended after {text!r}")
        else:
            self.report.add(kind, "left")

    async def client(self, number):
        """A client: one request after the other, of all kinds."""
        draw = random.Random(number)
        while not self.stop:
            # A connection of its own each time: some must be closed in the middle.
            limits = httpx.Limits(keepalive_expiry=1)  # the server closes idle ones after 5 s
            async with httpx.AsyncClient(headers=HEADERS, timeout=90, limits=limits) as client:
                for kind in draw.choices(list(KINDS), list(KINDS.values()), k=draw.randrange(1, 6)):
                    if self.stop:
                        return
                    try:
                        await self.ask(client, kind)
                    except (httpx.TransportError, ConnectionError) as error:
                        self.report.add(kind, type(error).__name__)
                        if not self.draining:
                            self.report.failed(f"{kind}: connection lost: {error!r}")
                        await asyncio.sleep(0.1)
                    if kind == "cancelled":
                        break  # the server may close the connection

    # Faults

    def turn_over(self):
        """Load or unload something that is asked for; a busy one answers 409 and stays."""
        name = self.draw.choice((*SOMETIMES, *MORE))
        self.change("turn over", name, load=name not in self.names())

    def diverged(self):
        """Load adapters that no answer can be expected of."""
        for name in ("huge", "nan", "steep"):
            status = self.change("diverged", name, load=True)
            if not 400 <= status < 500:
                self.report.failed(f"diverged: {name} was answered {status}")
        if self.change("diverged", "wild", load=True) == 200:  # finite, as far as a probe can tell
            self.post("chat/completions", Question("wild", "what is", None, 5).body(self.model))
            self.change("diverged", "wild", load=False)

    def deleted(self):
        """Delete the folder of an adapter that is served; others must not notice."""
        shutil.copytree(self.store / "green", self.store / "doomed", dirs_exist_ok=True)
        self.change("deleted", "doomed", load=True)
        shutil.rmtree(self.store / "doomed")
        question = self.draw.choice([q for q in self.right if q.model == "green"])
        answer = self.post("chat/completions", question.body(self.model) | {"model": "doomed"})
        if answer.status_code == 200:
            self.judge("deleted", question, content_of(answer))
        else:
            self.refused("deleted", answer.status_code, answer.text, {400, 404, 409, 429, 500, 503})
        for _ in range(100):
            if self.change("deleted", "doomed", load=False) != 409:
                break
            time.sleep(0.1)

    def full_disk(self):
        """Fill the disk, as far as the server can tell: no file may grow beyond a few bytes."""
        pid = self.server.process.pid
        before = resource.prlimit(pid, resource.RLIMIT_FSIZE)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (16, before[1]))
        try:
            for _ in range(3):
                self.turn_over()
        finally:
            resource.prlimit(pid, resource.RLIMIT_FSIZE, before)
        self.turn_over()

    # The whole

    async def crowd(self, seconds, *, terminate=False):
        """Let clients ask and faults happen; SIGTERM at the end if wanted."""
        self.stop = self.draining = False
        clients = [asyncio.create_task(self.client(n)) for n in range(CLIENTS)]
        faults = [self.turn_over] * 5
        faults += [self.diverged, self.deleted, self.full_disk]
        end, plan = time.monotonic() + seconds, []
        while time.monotonic() < end:
            plan = plan or self.draw.sample(faults, len(faults))
            fault = plan.pop()
            try:
                await asyncio.to_thread(fault)
            except httpx.HTTPError as error:
                self.report.failed(f"{fault.__name__}: {error!r}")
            self.report.add("faults", fault.__name__)
            await asyncio.sleep(0.2)
        if terminate:
            self.served, self.draining = await asyncio.to_thread(self.names), True
            self.server.process.send_signal(signal.SIGTERM)
            self.report.add("faults", "SIGTERM under load")
            await asyncio.to_thread(self.check_end, 60)
        self.stop = True
        for task in await asyncio.gather(*clients, return_exceptions=True):
            if task is not None:
                self.report.failed(f"a client failed: {task!r}")

    def check_end(self, seconds):
        """End the server; nothing may have gone unhandled."""
        start = time.monotonic()
        status, took = self.server.end(), time.monotonic() - start
        if status or took > seconds:
            self.report.failed(f"the server ended with {status} after {took:.1f} s")
        patterns = "Task was destroyed|never retrieved|was never awaited|Exception in"
        if found := self.server.said(f".*({patterns}).*"):
            self.report.failed(f"log: {found[0]}")

    def run(self, minutes):
        seconds = 60 * minutes
        self.start("cost")
        self.right = self.learn()
        print(f"{len(self.right)} answers beyond doubt; faults from now on", flush=True)
        asyncio.run(self.crowd(0.4 * seconds, terminate=True))
        self.start("valora")
        if self.names() != self.served:
            self.report.failed(f"served before {self.served}, after the restart {self.names()}")
        watch = Watch(self.url, self.server.process.pid)
        asyncio.run(self.crowd(0.2 * seconds))
        before = self.rest()
        asyncio.run(self.crowd(0.4 * seconds))
        memory, health = watch.taken()
        watch.end()
        self.report.add("the server", "watched", 0, memory, health)
        if health > 30:
            self.report.failed(f"/health took {health:.1f} s")
        after = self.rest()
        # Workers of the server's pool start when they are first needed.
        slack = (0, WORKERS, 0, max(32 << 20, before[3] // 20))
        for name, one, two, more in zip(HELD, before, after, slack, strict=True):
            print(f"{name}, idle: {one}, in the end {two}")
            if two - one > more:
                self.report.failed(f"LEAK: {name}: {one}, in the end {two}")
        # Once more, alone, on a server that has seen it all.
        for question, found in self.learn().items():
            if not alike(self.right.get(question, found), found):
                self.report.failed(f"in the end {question.model} {question.text!r} is wrong")
        self.check_end(20)  # a task that is left would make it wait for the whole drain


def soak(minutes, seed):
    """Run it all; returns the report."""
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        running = Soak(Path(folder), seed)
        try:
            running.run(minutes)
        finally:
            if running.server is not None:
                running.server.end(signal.SIGKILL)
        return running.report
