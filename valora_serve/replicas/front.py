"""A front: a process with the public port, started by `keep_fronts`, that asks the replicas."""

import asyncio
import contextlib
import json
import logging
import os
import pickle
import re
import socket
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import aiohttp
from starlette.requests import Request
from starlette.types import Receive, Scope, Send
from yarl import URL

from valora_serve.errors import StoppedError
from valora_serve.replicas.board import PERIOD, Report
from valora_serve.replicas.settings import ReplicaSettings
from valora_serve.routing import ROUTERS, ReplicaState
from valora_serve.server.access.guard import Rules
from valora_serve.server.access.keys import KeyRing
from valora_serve.server.api.common import end_stream
from valora_serve.server.app import make_server
from valora_serve.server.bodies import LARGE_BYTES, Bodies
from valora_serve.server.gather import until_disconnect
from valora_serve.server.middleware import SECURE, Middleware
from valora_serve.server.settings import ServerSettings
from valora_serve.server.telemetry import logs
from valora_serve.server.telemetry.metrics import STATES

MODEL = "x-valora-model"  # names the model, so that the body is not searched for it
FRONT = "x-valora-front"  # a replica's secret, the client's connection; back: load, facts to log
IDENTITY = "x-request-id"
LENGTH = "content-length"
NONE = "No replica answers now: ask again in a moment"
JOIN_SECONDS = 8.0  # for a replica's part of a page of all; Prometheus waits 10
# Headers that are not passed on, in either direction: those of one connection, and ours.
_OWN = {
    "connection", "keep-alive", "proxy-connection", "te", "trailer", "transfer-encoding", "upgrade",
    "expect", "date", LENGTH, FRONT, MODEL, IDENTITY, *(key.decode() for key, _ in SECURE),
}  # fmt: skip
_NAMED = re.compile(rb'(?<!\\)"(?:model|domains)"\s*+:[\s\[]*+("(?:[^"\\]|\\.){0,512}")')
_VISION = re.compile(r"/v1/vision/(.+)")
# Requests that all replicas are asked, as each knows or has a part.
_OF_ALL = re.compile(r"GET /metrics|GET /v1/models(/.*)?|POST /v1/unload_lora_adapter")


@dataclass(slots=True, eq=False, kw_only=True)
class Replica(ReplicaState):
    """What a front knows of a replica; its load counts what was sent since it was told."""

    report: Report
    told: bool = False  # whether an answer has told the load since the last update


class Front:
    """ASGI application that chooses a replica for each request, and passes bytes on."""

    def __init__(self, settings: ServerSettings, replicas: ReplicaSettings, slots: int) -> None:
        self._bodies, self._keys = Bodies(settings), KeyRing(settings)
        self._router = ROUTERS[replicas.router](replicas.router_settings)
        self._replicas: dict[str, Replica] = {}
        self._slots = slots  # adapters on a replica's device
        self._client = aiohttp.ClientSession(
            # Replicas close idle connections after 15 s.
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=10.0),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=5),
            auto_decompress=False, cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
        )  # fmt: skip

    def update(self, reports: Sequence[Report]) -> None:
        """Take what the board knows now."""
        known, self._replicas = self._replicas, {}
        for report in reports:
            name = report.replica
            one = self._replicas[name] = known.get(name) or Replica(name, 0, report=report)
            # Reports are old beside answers: fronts that see the same old loads sway together.
            one.load = one.load if one.told else report.load
            one.report, one.resident, one.told = report, report.stats.adapters_resident, False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle an HTTP request; `ServeError`s are for the middleware."""
        request = Request(scope, receive)
        length = request.headers.get(LENGTH, "0")
        if "transfer-encoding" in request.headers or int(length[:20] or 0) > LARGE_BYTES:
            self._keys.check(request.headers.get("authorization"))  # before it takes memory
        body = await self._bodies.read(request, Rules())
        path = scope["path"].removeprefix(scope["root_path"])
        if _OF_ALL.fullmatch(asked := f"{request.method} {path}"):
            return await until_disconnect(receive, self._ask_all(request, body, asked, send))
        lost, ranked = 0, self._ranked(named(request, body))
        for one in 2 * ranked:
            one.load += 1
            try:
                return await until_disconnect(receive, self._pass(one, request, body, send))
            except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError):
                self._replicas.pop(one.id, None)  # nothing was sent; until the next update
            except (aiohttp.ClientError, ConnectionError) as error:
                logs.LOG.warning("replica %s lost a request: %r", one.id, error)
                lost += 1
            finally:
                one.load = max(0, one.load - 1)  # a report may not have counted it
            if lost == 2:  # it is sent once more, as none of its answer has come
                raise StoppedError("Two replicas died one after the other with this: ask again")
        raise StoppedError(NONE)

    def _ranked(self, model: str | None) -> list[Replica]:
        """The replicas for a model, the best first."""
        known = list(self._replicas.values())
        adapter = known[0].report.adapters.get(model, model) if known and model else None
        ranked = [self._replicas[name] for name in self._router.rank(adapter, known)]
        for best in ranked[:1]:
            best.note_sent(adapter, self._slots)
        return ranked

    def _ask(self, one: Replica, request: Request, body: bytes, *, counts: bool = True) -> Any:
        """Send a request, which counts for rate limits or not; gives what aiohttp does."""
        scope = request.scope
        told = {name: scope.get(name) for name in ("client", "server", "scheme")}
        told["state"] = {"counts": counts, "facts": {}}
        headers = [pair for pair in request.headers.items() if pair[0] not in _OWN]
        headers.append((FRONT, f"{one.report.secret} {json.dumps(told)}"))
        headers.append((IDENTITY, str(logs.request_id.get())))
        # Never without the slash: behind a port, `@host` would name another host.
        target = b"/%b?%b" % (scope["raw_path"].removeprefix(b"/"), scope["query_string"])
        url = URL(one.report.url + target.decode("latin-1"), encoded=True)
        return self._client.request(
            scope["method"], url, headers=headers, data=body or None, allow_redirects=False
        )

    async def _pass(self, one: Replica, request: Request, body: bytes, send: Send) -> None:
        """Have a replica answer, and pass the answer on as it comes."""
        answer = None
        try:
            async with self._ask(one, request, body) as answer:
                await send(_start(one, answer, request, answer.headers.get(LENGTH)))
                async for piece in answer.content.iter_any():
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
                await send({"type": "http.response.body"})
        except (aiohttp.ClientError, ConnectionError) as error:
            if answer is None:
                raise
            logs.LOG.warning("replica %s died while it answered: %s", one.id, error)
            if "event-stream" not in answer.headers.get("content-type", ""):
                return  # uvicorn closes the connection, as the answer is not complete
            await send({"type": "http.response.body", "body": b"\n\n", "more_body": True})
            text = "The replica that answered has died, after a part of the answer was sent"
            await end_stream(send, StoppedError(f"{text}: ask again"))

    async def _ask_all(self, request: Request, body: bytes, asked: str, send: Send) -> None:
        """Answer with what all replicas say, as one, or with what one of them refuses with."""
        seconds = JOIN_SECONDS if request.method == "GET" else None
        said: dict[Replica, tuple[Any, bytes]] = {}

        async def ask(number: int, one: Replica) -> None:
            with contextlib.suppress(aiohttp.ClientError, OSError):
                asking = self._ask(one, request, body, counts=not number)
                async with asyncio.timeout(seconds), asking as answer:
                    said[one] = answer, await answer.read()

        await asyncio.gather(*(ask(*each) for each in enumerate(self._replicas.values())))
        if not said:
            raise StoppedError(NONE)
        # What one of them does not know, another one may.
        order = {404: 2, 200: 1}
        first = min(said, key=lambda one: order.get(said[one][0].status, 0))
        answer, page = said[first]
        join = {"GET /metrics": merge, "GET /v1/models": listed}.get(asked)
        if join is not None and answer.status == 200:
            good = {one.id: page for one, (found, page) in said.items() if found.status == 200}
            page = await asyncio.to_thread(join, good)
        await send(_start(first, answer, request, str(len(page))))
        await send({"type": "http.response.body", "body": page})


def _start(one: Replica, answer: Any, request: Request, length: str | None) -> dict[str, Any]:
    """The start of a replica's answer, as its client gets it; takes what is told beside it."""
    if (told := answer.headers.get(FRONT)) is not None:
        one.load, facts = json.loads(told)
        request.state.facts |= facts
        one.told = True
    headers = [pair for pair in answer.raw_headers if pair[0].decode().lower() not in _OWN]
    headers += [(LENGTH.encode(), length.encode())] if length else []
    return {"type": "http.response.start", "status": answer.status, "headers": headers}


def named(request: Request, body: bytes) -> str | None:
    """The name of the model that a request asks, as far as it can be had without parsing it."""
    if (given := request.headers.get(MODEL)) is not None:
        return given
    if (domain := _VISION.search(request.scope["path"])) is not None:
        return domain[1]
    if body[:64].lstrip()[:1] == b"{" and (found := _NAMED.search(body)):
        with contextlib.suppress(ValueError):
            return cast("str", json.loads(found[1]))
    return None


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


class _Shared(socket.socket):
    """A socket on which other processes accept, too, each as many as the backlog at a time."""

    def listen(self, _: int = 0) -> None:
        super().listen(2048)


async def serve() -> None:
    """Serve as stdin says, and follow a file with what is known of the replicas."""
    numbers, parent, known, settings, *more = pickle.load(sys.stdin.buffer)
    logs.set_up(settings.log_level, settings.log_format)
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    front = Front(settings, *more)
    server = make_server(cast("Any", Middleware(front, settings)), settings)
    server.config.lifespan, server.config.backlog = "off", 1
    front.update(pickle.loads(known.read_bytes()))
    serving = asyncio.create_task(server.serve([_Shared(fileno=n) for n in numbers]))
    while os.getppid() == parent and (await asyncio.wait([serving], timeout=PERIOD))[1]:
        with contextlib.suppress(FileNotFoundError):  # the server ends
            front.update(pickle.loads(known.read_bytes()))
            if server.started:
                known.with_name(str(os.getpid())).touch()
    server.should_exit = True
    await serving  # after SIGTERM, uvicorn raises it again


if __name__ == "__main__":
    asyncio.run(serve())
