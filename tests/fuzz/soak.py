"""Clients ask at once, in all their ways, while faults are injected: these are the cases.

Every answer must be the one that was given alone, or a clear refusal. In the end nothing may be
left: no pages, threads, open files or memory.
"""

import contextlib
import json
import random
import resource
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import httpx
import psutil

from tests.e2e.valora_serve.serving import processes_of
from tests.fuzz import adapters
from tests.fuzz.driver import alike, error_of, together
from tests.fuzz.tenants import ALWAYS, MORE, SOMETIMES, Tenants, content_of
from valora_serve.server.app import WORKERS

LIMITS = {"health": 30.0}
LITTLE = (
    "--no-golden", "--max-requests", 8, "--max-tokens", 96, "--chunk", 40, "--max-adapters", 3,
    "--slots", 4, "--block-size", 8, "--pages", 260, "--max-waiting", 64,
    "--image-cache-bytes", 1 << 14, "--send-seconds", 15, "--body-seconds", 15,
)  # fmt: skip
GAP = 1e-3  # by how much a token must be likelier than the next one to be the same in any batch
CLIENTS = 12
KINDS = {"whole": 10, "stream": 8, "cancelled": 4, "gone": 4, "slow": 1}
HELD = ("pages that no model needs", "threads", "open files", "memory")
UNHANDLED = "Task was destroyed|never retrieved|was never awaited|Exception in"


class Soak(Tenants):
    """Tenants that ask at once, and faults; what came of each since the last fault."""

    def __init__(self, folder):
        super().__init__(folder)
        self.draw, self.right, self.stop, self.draining = random.Random(2), {}, False, False
        self.outcomes, self.wrong = [], []

    def count(self, kind, outcome, wrong=None):
        """Count what came of something, and keep it if it should not be."""
        self.outcomes.append(f"{kind} {outcome}")
        if wrong:
            self.wrong.append(f"{kind} {outcome}: {wrong}"[:500])

    def taken(self):
        """What came of everything since the last call; raises if something is wrong."""
        found, wrong = self.outcomes, self.wrong
        self.outcomes, self.wrong = [], []
        assert not wrong, "; ".join(wrong)
        return found

    def turn(self, name, load):
        """Load or unload an adapter or a bundle; what is served must fit the answer."""
        before = name in self.server.names()
        answer = self.change(name, load)
        fits = (name in self.server.names()) is (load if answer.status_code == 200 else before)
        self.count("change", answer.status_code, None if fits else f"{name}: {answer.text}")
        return answer.status_code

    def processes(self):
        """Process ids of the server and of its engine."""
        server = self.server.process.pid
        [engine] = processes_of(server, "process")
        return server, engine

    def status(self):
        with self.client() as client:
            return client.get("/v1/status").json()

    def rest(self):
        """Wait until nothing runs and connections are closed; return what both processes hold."""
        for name in self.server.names() & {*SOMETIMES, MORE[0]}:
            self.turn(name, load=False)
        end = time.monotonic() + 60
        while (state := self.status())["running"] or state["waiting"]:
            assert time.monotonic() < end, f"requests are left after a minute: {state}"
            time.sleep(0.1)
        time.sleep(7)  # keep-alive connections end
        both = [psutil.Process(pid) for pid in self.processes()]
        files = sum(one.num_fds() for one in both)  # before a connection is opened to ask
        state = self.status()
        pages = state["pages_total"] - state["pages_free"] - state["pages_adapters"]
        memory = sum(one.memory_info().rss for one in both)
        return pages, sum(one.num_threads() for one in both), files, memory

    def learn(self):
        """Ask everything alone; return the answers that any batch must give."""
        for name in {*ALWAYS, *SOMETIMES, MORE[0]} - self.server.names():
            assert self.turn(name, load=True) == 200
        right = {}
        for question in self.questions:
            found, gaps = self.ask(question), []
            if question.text:
                *found, likely = found
                tops = [token["top_logprobs"] for token in likely["content"]]
                gaps = [first["logprob"] - second["logprob"] for first, second in tops]
            if min(gaps, default=1.0) > GAP:
                right[question] = found
        assert len(right) >= 30 and len({str(v) for v in right.values()}) >= 20
        return right

    def judge(self, kind, question, found):
        wanted = self.right[question]
        wrong = f"{question.model} {question.text!r}: expected {wanted!r}, got {found!r}"
        self.count(kind, "answered", None if alike(wanted, found) else wrong)

    def judge_answer(self, kind, question, answer, allowed):
        """Judge an answer: the right one, or a clear refusal of a status that may be."""
        if (status := answer.status_code) == 200:
            found = content_of(answer)
            self.judge(kind, question, found[:2] if question.text else found)
        else:
            clear = status in allowed or (status == 503 and self.draining)
            self.count(kind, status, None if clear and error_of(answer.text) else answer.text)

    def ask_as(self, client, kind):
        """Ask one question as a kind of client does."""
        question, allowed = self.draw.choice(list(self.right)), {429}
        if question.model in {*SOMETIMES, *MORE}:
            allowed |= {404, 400, 409}
        if not question.text or kind == "whole":
            path, body = question.request()
            self.judge_answer(kind, question, client.post(path, **body), allowed)
        elif kind == "cancelled":  # hangs up before the answer
            path, body = question.request(ignore_eos=True, max_tokens=400)
            with contextlib.suppress(httpx.TimeoutException):
                client.post(path, **body, timeout=self.draw.choice((0.01, 0.05, 0.3)))
            self.count(kind, "hung up")
        else:
            path, body = question.request(stream=True)
            with client.stream("POST", path, **body) as response:
                if response.status_code == 200:
                    self.read(kind, question, response.iter_lines())
                else:
                    response.read()
                    self.judge_answer(kind, question, response, allowed)

    def read(self, kind, question, lines):
        """Read a stream at once, slowly, or up to a point."""
        leave = self.draw.randrange(4) if kind == "gone" else None
        text, finish, events = "", None, 0
        for line in lines:
            if line == "data: [DONE]":
                self.judge(kind, question, (text, finish))
                return
            if not line.startswith("data: "):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                self.count(kind, "error event", None if self.draining else line)
                return
            for choice in event["choices"]:
                text += choice["delta"].get("content") or ""
                finish = choice["finish_reason"] or finish
            events += 1
            if events == leave:
                break
            time.sleep(0.05 if kind == "slow" else 0)
        fits = kind == "gone" and self.right[question][0].startswith(text)
        self.count(kind, "left", None if fits else f"a stream ended after {text!r}")

    def keep_asking(self, number):
        """A client: one request after the other, of all kinds, each on a connection of its own."""
        draw = random.Random(number)
        while not self.stop:
            [kind] = draw.choices(list(KINDS), list(KINDS.values()))
            try:
                with self.client() as client:
                    self.ask_as(client, kind)
            except (httpx.TransportError, ConnectionError) as error:
                self.count(kind, type(error).__name__, not self.draining and repr(error))
                time.sleep(0.1)

    def turn_over(self, rng):
        """Load or unload something that is asked for; a busy one answers 409 and stays."""
        name = rng.choice((*SOMETIMES, MORE[0]))
        self.turn(name, load=name not in self.server.names())

    def diverged(self, rng):
        """Load what no answer can be expected of."""
        _, what, load = adapters.make_case(self, rng, bundles=0)  # clients ask that one
        try:
            self.count("diverged", load())
        except AssertionError as error:
            self.count("diverged", what, error)

    def full_disk(self, rng):
        """Fill the disk, as far as the server can tell: no file may grow beyond a few bytes."""
        before = resource.prlimit(self.server.process.pid, resource.RLIMIT_FSIZE)
        for pid in self.processes():
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (16, before[1]))
        try:
            for _ in range(3):
                self.turn_over(rng)
        finally:
            for pid in self.processes():
                resource.prlimit(pid, resource.RLIMIT_FSIZE, before)
        self.turn_over(rng)

    def case(self, rng, number):
        """A fault, while clients ask."""
        fault = (self.diverged, self.turn_over, self.full_disk, self.turn_over)[number % 4]

        def send():
            fault(rng)
            time.sleep(0.2)
            return self.taken()

        return fault.__name__, "under load", send

    @contextlib.contextmanager
    def crowd(self):
        """Clients that ask all the time; begins with every fault."""
        self.stop = self.draining = False
        clients = [partial(self.keep_asking, number) for number in range(CLIENTS)]
        with ThreadPoolExecutor(1) as pool:
            asking = pool.submit(together, clients)
            try:
                for number in range(6):
                    self.case(self.draw, number)[2]()
                yield
            finally:
                self.stop = True
            asking.result()
        self.taken()


@contextlib.contextmanager
def running(folder):
    """A server that is ended under load and started again, with clients that ask."""
    soak = Soak(folder)
    with soak.served("cost", *LITTLE, seconds=60, unwanted=UNHANDLED) as server:
        soak.right = soak.learn()
        with soak.crowd():
            names, soak.draining = soak.server.names(), True
            server.end()
    # A task that is left would make it wait for the whole drain.
    with soak.served("valora", *LITTLE, seconds=20, unwanted=UNHANDLED) as server:
        assert soak.server.names() == names, f"served before {names}, now {soak.server.names()}"
        with soak.crowd():
            pass
        before = soak.rest()
        with soak.crowd():
            yield server, soak.case
        # Workers of the server's pool start when they are first needed.
        slack = (0, WORKERS, 0, max(32 << 20, before[3] // 20))
        for name, one, two, more in zip(HELD, before, soak.rest(), slack, strict=True):
            assert two - one <= more, f"LEAK: {name}: {one}, in the end {two}"
        # Once more, alone, on a server that has seen it all.
        for question, found in soak.learn().items():
            if question in soak.right:
                soak.judge("in the end", question, found)
        soak.taken()
