"""A front: a process with the public port that passes requests to replicas, and answers back.

`python -m valora_serve.replicas.front` reads from stdin what `cluster.Fronts` writes.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
import os
import pickle
import re
import signal
import socket
import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import aiohttp
from starlette.requests import Request
from yarl import URL

from valora_data.errors import ValoraError
from valora_serve.errors import CancelledRequestError, StoppedError
from valora_serve.replicas.board import Report
from valora_serve.routing.base import ReplicaState, note_sent
from valora_serve.routing.routers import ROUTERS
from valora_serve.server.access.guard import Rules
from valora_serve.server.access.keys import KeyRing
from valora_serve.server.app import make_server
from valora_serve.server.bodies import LARGE_BYTES, Bodies
from valora_serve.server.errors import error_answer, error_body
from valora_serve.server.gather import until_disconnect
from valora_serve.server.middleware import SECURE, Middleware
from valora_serve.server.telemetry import logs
from valora_serve.server.telemetry.metrics import STATES

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

    from valora_serve.replicas.settings import ReplicaSettings
    from valora_serve.server.settings import ServerSettings

MODEL = b"x-valora-model"  # names the model, so that the body is not searched for it
FRONT = b"x-valora-front"  # with a replica's secret, and the connection of the client
IDENTITY = b"x-request-id"
FACTS = b"x-valora-facts"  # of answers: what the log says of the request
LOAD = b"x-valora-load"  # of answers: requests under way at the replica
ATTEMPTS = 2  # how often a request is sent, as long as none of its answer has come
NONE = "No replica answers now: ask again in a moment"
JOIN_SECONDS = 8.0  # for a replica's part of a page of all; Prometheus waits 10
IDLE_SECONDS = 10.0  # less than the 15 after which a replica closes a connection
_HOP = {
    b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"transfer-encoding",
    b"upgrade", b"expect", _LENGTH := b"content-length", FRONT, MODEL, IDENTITY,
}  # fmt: skip
"""Headers that are not passed on: those of one connection, and ours."""
_OWN = {b"date", FACTS, LOAD, *(name for name, _ in SECURE)}  # of answers, which are written here
_NO_CONNECTION = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)
_NAMED = re.compile(rb'(?<!\\)"(model|domains)"\s*:\s*\[?\s*("(?:[^"\\]|\\.){0,512}")')
_VISION = re.compile(r"/v1/vision/([^/]+)")
Join = Callable[[Mapping[str, bytes]], bytes]  # makes one page of those of replicas, by name


class Front:
    """ASGI application that chooses a replica for each request, and passes bytes on."""

    def __init__(
        self, settings: ServerSettings, replicas: ReplicaSettings, slots: int, fronts: int
    ) -> None:
        held = max(settings.max_body_bytes, settings.max_held_bytes // fronts)
        self._settings = dataclasses.replace(settings, max_held_bytes=held)
        self._bodies, self._keys = Bodies(self._settings), KeyRing(settings)
        self._router = ROUTERS[replicas.router](replicas.router_settings)
        self._replicas: dict[str, Report] = {}
        self._load: Counter[str] = Counter()  # requests by replica, with those sent since it told
        self._told: set[str] = set()  # replicas whose answers told it since the last update
        self._recent: defaultdict[str, dict[str, None]] = defaultdict(dict)
        self._slots = slots  # adapters of a replica's device, and so of `_recent`

    def update(self, replicas: Sequence[Report]) -> None:
        """Take what the board knows now."""
        self._replicas = {one.replica: one for one in replicas}
        # Reports are old beside answers: fronts that see the same old loads sway together.
        newer = {name: self._load[name] for name in self._told}
        self._load = Counter({one.replica: newer.get(one.replica, one.load) for one in replicas})
        self._told.clear()
        for gone in self._recent.keys() - self._replicas.keys():
            del self._recent[gone]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle an ASGI request."""
        if scope["type"] == "lifespan":
            await self._live(receive, send)
            return
        try:
            await self._handle(Request(scope, receive), send)
        except CancelledRequestError:
            pass
        except ValoraError as error:
            await error_answer(error)(scope, receive, send)

    async def _live(self, receive: Receive, send: Send) -> None:
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_SECONDS),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=5),
            auto_decompress=False, cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
        ) as self._client:  # fmt: skip
            for name in ("startup", "shutdown"):
                await receive()
                await send({"type": f"lifespan.{name}.complete"})

    async def _handle(self, request: Request, send: Send) -> None:
        length = request.headers.get("content-length", "0")
        if "transfer-encoding" in request.headers or int(length[:20] or 0) > LARGE_BYTES:
            self._keys.check(request.headers.get("authorization"))  # before it takes memory
        body = await self._bodies.read(request, Rules())
        path = request.scope["path"].removeprefix(request.scope["root_path"])
        if (join := joining(f"{request.method} {path}")) is not None:
            await until_disconnect(request.receive, self._ask_all(request, body, join, send))
            return
        lost, ranked = 0, self._ranked(named(request, body))
        for one in 2 * ranked:
            self._load[one.replica] += 1
            try:
                passing = self._pass(one, request, body, send)
                await until_disconnect(request.receive, passing)
            except _NO_CONNECTION:  # nothing was sent
                self._replicas.pop(one.replica, None)  # until the next update
            except (aiohttp.ClientError, ConnectionError) as error:
                logs.LOG.warning("replica %s lost a request: %r", one.replica, error)
                lost += 1
            else:
                return
            finally:
                self._load[one.replica] -= 1
            if lost == ATTEMPTS:
                raise StoppedError("Two replicas died one after the other with this: ask again")
        raise StoppedError(NONE)

    def _ranked(self, model: str | None) -> list[Report]:
        """The replicas for a model, the best first."""
        known = list(self._replicas.values())
        adapter = known[0].adapters.get(model, model) if known and model else None
        load, recent = self._load, self._recent
        states = [
            ReplicaState(name, max(0, load[name]), one.stats.adapters_resident, recent[name])
            for name, one in self._replicas.items()
        ]
        ranked = self._router.rank(adapter, states)
        for best in ranked[:1]:
            note_sent(recent[best], adapter, self._slots)
        return [self._replicas[name] for name in ranked]

    def _ask(self, one: Report, request: Request, body: bytes, *, counts: bool = True) -> Any:
        """Send a request, which counts for rate limits or not; gives what aiohttp does."""
        scope = request.scope
        told = {name: scope.get(name) for name in ("client", "server", "scheme")}
        told["state"] = {"counts": counts, "facts": {}}
        headers = [pair for pair in request.headers.items() if pair[0].encode() not in _HOP]
        headers.append((FRONT.decode(), f"{one.secret} {json.dumps(told)}"))
        headers.append((IDENTITY.decode(), str(logs.request_id.get())))
        target = b"?".join(filter(None, (scope["raw_path"], scope["query_string"])))
        url = URL(one.url + target.decode("latin-1"), encoded=True)
        data = body if body or scope["method"] in ("POST", "PUT", "PATCH") else None
        return self._client.request(
            scope["method"], url, headers=headers, data=data, allow_redirects=False
        )

    async def _pass(self, one: Report, request: Request, body: bytes, send: Send) -> None:
        """Have a replica answer, and pass the answer on as it comes."""
        answer = None
        try:
            async with self._ask(one, request, body) as answer:
                if told := answer.headers.get(LOAD.decode()):
                    self._load[one.replica] = int(told)
                    self._told.add(one.replica)
                await send(_start(answer, request))
                async for piece in answer.content.iter_any():
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
                await send({"type": "http.response.body"})
        except (aiohttp.ClientError, ConnectionError) as error:
            if answer is None:
                raise
            logs.LOG.warning("replica %s died while it answered: %s", one.replica, error)
            if "event-stream" not in answer.headers.get("content-type", ""):
                return  # uvicorn closes the connection, as the answer is not complete
            died = StoppedError(
                "The replica that answered has died, after a part of the answer was sent: ask again"
            )
            event = json.dumps({"error": error_body(died)}).encode()
            last = b"\n\ndata: " + event + b"\n\ndata: [DONE]\n\n"
            await send({"type": "http.response.body", "body": last})

    async def _ask_all(self, request: Request, body: bytes, join: Join, send: Send) -> None:
        """Answer with what all replicas say, as one, or with what one of them refuses with."""
        first = next(iter(self._replicas), None)
        seconds = JOIN_SECONDS if request.method == "GET" else None

        async def said(one: Report) -> tuple[str, Any, bytes] | None:
            with contextlib.suppress(aiohttp.ClientError, OSError):
                counts = one.replica == first
                asking = self._ask(one, request, body, counts=counts)
                async with asyncio.timeout(seconds), asking as answer:
                    return one.replica, answer, await answer.read()
            return None

        asked = await asyncio.gather(*map(said, self._replicas.values()))
        answers = [one for one in asked if one is not None]
        if not answers:
            raise StoppedError(NONE)
        # What one of them does not know, another one may.
        order = {404: 2, 200: 1}
        _, answer, page = min(answers, key=lambda one: order.get(one[1].status, 0))
        if answer.status == 200:
            good = {name: page for name, answer, page in answers if answer.status == 200}
            page = await asyncio.to_thread(join, good)
        start = _start(answer, request)
        headers = [pair for pair in start["headers"] if pair[0].lower() != _LENGTH]
        await send({**start, "headers": [*headers, (_LENGTH, b"%d" % len(page))]})
        await send({"type": "http.response.body", "body": page})


def _start(answer: Any, request: Request) -> dict[str, Any]:
    """The start of a replica's answer, as its client gets it; the log is told of the request."""
    request.state.facts |= json.loads(answer.headers.get(FACTS.decode(), "{}"))
    headers = [
        (name, value) for name, value in answer.raw_headers
        if (key := name.lower()) not in _OWN and (key not in _HOP or key == _LENGTH)
    ]  # fmt: skip
    return {"type": "http.response.start", "status": answer.status, "headers": headers}


def named(request: Request, body: bytes) -> str | None:
    """The name of the model that a request asks, as far as it can be had without parsing it."""
    if (given := request.headers.get(MODEL.decode())) is not None:
        return given
    if (found := _VISION.search(request.scope["path"])) is not None:
        return found[1]
    values: dict[bytes, bytes] = {}
    for one in _NAMED.finditer(body) if body[:64].lstrip()[:1] == b"{" else ():
        values.setdefault(one[1], one[2])
        if one[1] == b"model":
            break
    with contextlib.suppress(ValueError):
        return cast("str", json.loads(values.get(b"model", values.get(b"domains", b"null"))))
    return None


def joining(asked: str) -> Join | None:
    """How all replicas' answers to a method and path become one, as each knows or has a part."""
    if asked.startswith("GET /v1/models/") or asked == "POST /v1/unload_lora_adapter":
        return lambda pages: next(iter(pages.values()))
    return {"GET /metrics": merge, "GET /v1/models": listed}.get(asked)


def listed(pages: Mapping[str, bytes]) -> bytes:
    """Lists of models as one: each replica loads adapters on request for itself."""
    cards = [card for page in pages.values() for card in json.loads(page)["data"]]
    cards.sort(key=lambda card: STATES.index(card["state"] or "disk"))
    found = {card["id"]: card for card in cards}  # in the best state that it has anywhere
    return json.dumps({"object": "list", "data": list(found.values())}).encode()


def merge(pages: Mapping[str, bytes]) -> bytes:
    """Pages of metrics, by replica, as one, in which every sample has its replica as a label."""
    families: defaultdict[str, dict[str, None]] = defaultdict(dict)
    for name, page in pages.items():
        # `valora_replicas` is the same on every page. Labels may end with a comma.
        own = rf'\1{{replica="{name}",\2}} '
        text = re.sub(r"(?m)^(?!valora_replicas )(\w+)(?:\{(.*)\})? ", own, page.decode())
        for family in re.split("(?m)^# HELP ", text)[1:]:
            what, kind, *samples = family.splitlines()
            families[f"# HELP {what}\n{kind}"] |= dict.fromkeys(samples)
    lines = (line for head, samples in families.items() for line in (head, *samples))
    return "".join(f"{line}\n" for line in lines).encode()


def main() -> None:
    """Serve the sockets that the first message names, and follow the messages after it."""
    source = sys.stdin.buffer
    descriptors, settings, replicas, slots, fronts = pickle.load(source)
    logs.set_up(settings.log_level, settings.log_format)
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    front = Front(settings, replicas, slots, fronts)
    front.update(pickle.load(source))
    server = make_server(cast("Any", Middleware(front, settings)), settings)

    def follow(loop: asyncio.AbstractEventLoop) -> None:
        try:
            while True:
                loop.call_soon_threadsafe(front.update, pickle.load(source))
        except (EOFError, OSError):  # the server has ended
            server.should_exit = True

    async def serve() -> None:
        threading.Thread(target=follow, args=[asyncio.get_running_loop()], daemon=True).start()
        serving = asyncio.create_task(server.serve([socket.socket(fileno=n) for n in descriptors]))
        while not (server.started or serving.done()):
            await asyncio.sleep(0.01)
        os.write(1, b"ready\n")
        await serving

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # uvicorn raises those that it has handled again
    asyncio.run(serve())
    os._exit(0)  # the thread still reads


if __name__ == "__main__":
    main()
