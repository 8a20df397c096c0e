"""Middleware of every HTTP request: id, access, size and time limits, access log, errors."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import re
import time
from typing import TYPE_CHECKING, Any, TypeVar

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from valora_data.errors import ValoraError
from valora_serve.errors import (
    CancelledRequestError,
    ContentTypeError,
    OverloadedError,
    RequestError,
    ServeError,
    SlowClientError,
    TooLargeError,
    UnknownModelError,
)
from valora_serve.server.access.rules import JSON, Access
from valora_serve.server.bodies import JsonScan
from valora_serve.server.sentences import refusal
from valora_serve.server.telemetry import logs

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterable, Mapping

    from fastapi import FastAPI
    from starlette.requests import Request
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from valora_serve.server.access.guard import Guard
    from valora_serve.server.access.rules import RouteTable, Rules
    from valora_serve.server.drain import Drain
    from valora_serve.server.settings import ServerSettings
    from valora_serve.server.telemetry.metrics import Metrics

T = TypeVar("T")
DISCARD_SECONDS = 5.0
"""Time for the rest of a request that is refused during the drain."""
LARGE_BODY = 2**20  # bytes; from there on, joining the pieces leaves Python's lock to others
SMALL_PIECE = 8192  # bytes of a body that are counted at once; larger pieces wait for their turn
LONGEST_URL = 8192
LOGGED_PATH = 200  # characters of a path that the access log shows
_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_METHODS = {"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"}
_SINGLE = {
    b"authorization", b"content-encoding", b"content-length", b"content-type", b"host", b"origin",
    b"transfer-encoding", b"x-request-id",
}  # fmt: skip
_FOLDERS = re.compile(r"(?<![\w:/.~-])/(?!v1/|console/)(?:[^\s/:,;'\"()]+/)+(?=[^\s/:,;'\"()])")
_QUOTING = (RequestError, UnknownModelError)
_CHARSET = re.compile(r";\s*charset\s*=\s*\"?([^\s;\"]*)", re.IGNORECASE)
_SECURE = [
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
]


class StalledClientError(Exception):
    """The client does not read its response any more."""


class Envelope:
    """ASGI middleware around the whole application.

    The key is checked before the body is read, and the body is read before the application is
    called, so that clients without a key and slow clients cost nothing but a connection. JSON is
    checked against the limits of its route while it arrives.

    Args:
        app: The application.
        settings: Limits on size and time.
        routes: Rules of every route.
        guard: Checks keys and rates.
        metrics: Counts requests and errors.
        drain: Refuses new requests while the server shuts down.
    """

    def __init__(
        self,
        app: ASGIApp,
        settings: ServerSettings,
        routes: RouteTable,
        guard: Guard,
        metrics: Metrics,
        drain: Drain,
    ) -> None:
        self._app = app
        self._settings = settings
        self._routes = routes
        self._guard = guard
        self._metrics = metrics
        self._drain = drain
        self._held = 0  # bytes of the bodies of all requests in progress
        self._turn = asyncio.Lock()  # held by whoever counts a piece of a body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle an ASGI request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        root: str = self._settings.root_path or scope.get("root_path", "")
        # A proxy may have taken the root path off, or not.
        path = scope["path"] if f"{scope['path']}/".startswith(f"{root}/") else root + scope["path"]
        scope = {**scope, "root_path": root, "path": path}
        began = time.perf_counter()
        headers = {name.lower(): value.decode("latin-1") for name, value in scope["headers"]}
        identity = logs.accepted_id(headers.get(b"x-request-id"))
        token = logs.request_id.set(identity)
        stack = contextlib.ExitStack()  # what the request holds until its response is sent
        scope.setdefault("state", {}).update(facts={}, stack=stack)
        # HEAD is answered as GET, and the connection leaves the body out.
        inner = {**scope, "method": "GET"} if scope["method"] == "HEAD" else scope
        status = 0

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                extra = [(b"x-request-id", identity.encode()), *_SECURE]
                # A client that has not been told to continue may leave out the body.
                if self._drain.begun or (b"expect" in headers and status >= 400):
                    extra.append((b"connection", b"close"))
                message["headers"] = [*message.get("headers", ()), *extra]
            try:
                async with asyncio.timeout(self._settings.send_seconds):
                    await send(message)
            except TimeoutError as error:
                raise StalledClientError from error

        async def failed(error: ServeError) -> None:
            self._metrics.failed(error.code)
            if not status:
                await error_answer(error)(scope, receive, sending)

        try:
            await self._answer(inner, headers, receive, sending)
        except ServeError as error:
            await failed(error)
        except StalledClientError:
            logs.LOG.warning("the client does not read its response: its request is cancelled")
        except asyncio.CancelledError:
            if not self._drain.over:
                raise
            await failed(self._drain.ended())
        except Exception:  # noqa: BLE001 - logged; the response does not show it
            logs.LOG.exception("%s %s failed", scope["method"], scope["path"][:LOGGED_PATH])
            await failed(ServeError("The server failed: see its log"))
        finally:
            stack.close()
            self._count(scope, inner.get("route"), status or 499, time.perf_counter() - began)
            logs.request_id.reset(token)

    async def _answer(
        self, scope: Scope, headers: Mapping[bytes, str], receive: Receive, send: Send
    ) -> None:
        _check_single(scope["headers"])
        if len(scope["path"]) + len(scope["query_string"]) > LONGEST_URL:
            raise RequestError(f"The URL is longer than {LONGEST_URL} characters: shorten it")
        if moved := _moved(scope):
            self._guard.check(self._routes.rules({**scope, "path": moved[0]}), scope, headers)
            await Response(status_code=307, headers={"Location": moved[1]})(scope, receive, send)
        elif scope["method"] == "OPTIONS" and (methods := self._routes.methods(scope)):
            allowed = {"Allow": ", ".join(sorted(methods))}
            await Response(status_code=204, headers=allowed)(scope, receive, send)
        else:
            replayed = await self._let_in(scope, headers, receive)
            await self._app(scope, replayed, send)

    def _count(self, scope: Scope, route: Any, status: int, seconds: float) -> None:
        """Count and log a request that has ended."""
        path = getattr(route, "path", None) or "other"
        self._metrics.http(path, _method(scope), status, seconds)
        logs.access({
            "method": scope["method"], "path": scope["path"][:LOGGED_PATH], "status": status,
            "seconds": round(seconds, 4), "client": (scope.get("client") or ("",))[0],
            **scope["state"]["facts"],
        })  # fmt: skip

    async def _let_in(
        self, scope: Scope, headers: Mapping[bytes, str], receive: Receive
    ) -> Receive:
        """Check a request and read its body; the `receive` that the application gets."""
        rules = self._routes.rules(scope)
        facts, stack = scope["state"]["facts"], scope["state"]["stack"]
        facts |= self._guard.check(rules, scope, headers)
        if rules.access is not Access.OPEN:
            if scope["method"] != "GET" and self._drain.begun:
                await _discard(receive)
                self._drain.check()
            stack.enter_context(self._drain.running())
            receive = self._drain.watched(receive)
        scan = JsonScan(rules.json) if _is_json(headers.get(b"content-type", "")) else None
        body = await self._body(headers, receive, rules, stack, scan)
        if body:
            _check_type(rules, headers)
        return _replayed(body, receive)

    async def _body(
        self,
        headers: Mapping[bytes, str],
        receive: Receive,
        rules: Rules,
        stack: contextlib.ExitStack,
        scan: JsonScan | None,
    ) -> bytes:
        """Read the body within the limits of the route; it counts as held until the end."""
        general = self._settings.max_body_bytes
        most = min(general, general if rules.max_body_bytes is None else rules.max_body_bytes)
        remedy = "send less at once"
        if scan is not None and most > self._settings.max_json_bytes:
            most = self._settings.max_json_bytes
            remedy = "send less at once, or a large video as a form to /v1/vision"
        seconds = self._settings.body_seconds
        too_large = TooLargeError(f"The request is larger than {most} bytes: {remedy}")
        length = headers.get(b"content-length", "0")
        if length.isdecimal() and int(length[:20]) > most:
            raise too_large
        pieces: list[bytes] = []
        size = 0

        def release() -> None:
            self._held -= size

        stack.callback(release)
        try:
            async with asyncio.timeout(seconds):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise CancelledRequestError("The client went away")
                    piece = message.get("body", b"")
                    size += len(piece)
                    self._held += len(piece)
                    if size > most:
                        raise too_large
                    if self._held > self._settings.max_held_bytes:
                        raise OverloadedError("Other requests fill the memory: try again in 1 s")
                    if scan is not None and len(piece) <= SMALL_PIECE:
                        scan.feed(piece)
                    elif scan is not None:
                        # One in a turn of the event loop, however many clients send.
                        async with self._turn:
                            scan.feed(piece)
                            await asyncio.sleep(0)
                    pieces.append(piece)
                    if not message.get("more_body", False):
                        # A thread, as the system has to find memory for it, which takes long.
                        if size > LARGE_BODY:
                            return await asyncio.to_thread(b"".join, pieces)
                        return b"".join(pieces)
        except TimeoutError as error:
            raise SlowClientError(
                f"The request did not arrive within {seconds:g} s: send it faster"
            ) from error


def _moved(scope: Scope) -> tuple[str, str] | None:
    """The path that is meant by one with a slash at its end, and its URL; None for others.

    Answered in place, it would go past a proxy's rules; the proxy may use another scheme or prefix.
    """
    root, path, raw = scope["root_path"], scope["path"], scope.get("raw_path", b"").decode("ascii")
    query = f"?{scope['query_string'].decode('latin-1')}".removesuffix("?")
    if path == root:  # of the console, whose links are relative
        return f"{root}/", f"{root}/{query}"
    if raw.endswith("/") and path != f"{root}/":
        return path[:-1], f"../{raw[:-1].rpartition('/')[2]}{query}"
    return None


async def _discard(receive: Receive) -> None:
    """Read what is left of a request, for some seconds, and forget it.

    The answer closes the connection. Closed with bytes unread, it would be reset, and the client
    would lose the answer.
    """
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(DISCARD_SECONDS):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect" or not message.get("more_body", False):
                    return


def _check_single(headers: Iterable[tuple[bytes, bytes]]) -> None:
    """Refuse a header that is sent twice although it has one value: which one counts is unclear."""
    seen = set()
    for name, _ in headers:
        if name in seen and name in _SINGLE:
            raise RequestError(f"The request has several {name.decode()} headers: send one")
        seen.add(name)


def _is_json(content_type: str) -> bool:
    return content_type.partition(";")[0].strip().lower() == JSON


def _check_type(rules: Rules, headers: Mapping[bytes, str]) -> None:
    """Check that the route reads the body's content type, charset and encoding.

    Raises:
        ContentTypeError: It does not.
    """
    encoding = headers.get(b"content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        raise ContentTypeError(
            f"The body's content-encoding is {encoding[:50]!a}: send it uncompressed"
        )
    if not rules.content_types:
        return
    sent = headers.get(b"content-type", "")
    kind = sent.partition(";")[0].strip().lower()
    if kind not in rules.content_types:
        has = f"The content type is {kind[:100]!a}" if kind else "The request has no content type"
        raise ContentTypeError(
            f"{has}, and this path reads {' or '.join(rules.content_types)}: send it with "
            f"-H 'content-type: {rules.content_types[0]}'"
        )
    charset = _CHARSET.search(sent)
    if kind == JSON and charset and charset[1].lower() not in ("utf-8", "utf8", "us-ascii"):
        raise ContentTypeError(f"The charset is {charset[1][:50]!a}: send JSON in UTF-8")


def _replayed(body: bytes, receive: Receive) -> Receive:
    """A `receive` that returns the body, which has been read already, first, and frees it."""
    left: list[bytes] = [body]

    async def replay() -> Message:
        if not left:
            return await receive()
        return {"type": "http.request", "body": left.pop(), "more_body": False}

    return replay


def _method(scope: Scope) -> str:
    """The method as a metric label; unknown ones share a label, so that labels are bounded."""
    return scope["method"] if scope["method"] in _METHODS else "other"


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine, and cancel it if the client disconnects.

    Raises:
        CancelledRequestError: The client disconnected; `work` was cancelled and has ended.
        DrainingError: The server shuts down, and the time of running requests is over; `work` was
            cancelled and has ended.
    """
    doing = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({doing, gone}, return_when=asyncio.FIRST_COMPLETED)
        if doing.done():
            return doing.result()
        gone.result()  # raises if the server shuts down
        raise CancelledRequestError("The client went away")
    finally:
        for task in (doing, gone):
            task.cancel()
        await asyncio.gather(doing, gone, return_exceptions=True)
        # An error refers to this frame, which must not refer to it: see `gather.gathered`.
        del doing, gone


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def error_body(error: ValoraError) -> dict[str, Any]:
    """An error in OpenAI's format; files are named without the folders of this machine.

    Errors of a request quote what it sent, such as paths in its JSON schema, and name no files.
    """
    status = getattr(error, "status", 400)
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {
        "message": str(error) if isinstance(error, _QUOTING) else _FOLDERS.sub("", str(error)),
        "type": kind,
        "param": getattr(error, "param", None), "code": getattr(error, "code", None),
    }  # fmt: skip


def error_answer(error: ValoraError) -> JSONResponse:
    """Response of an error, in OpenAI's format."""
    headers = {}
    if (wait := getattr(error, "retry_after", None)) is not None:
        headers["Retry-After"] = str(max(1, math.ceil(wait)))
    status = getattr(error, "status", 400)
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if status in (408, 413):
        headers["Connection"] = "close"  # the rest of the body is not read
    return AsciiJson({"error": error_body(error)}, status, headers)


class AsciiJson(JSONResponse):
    """JSON response in ASCII, so that it can hold any text, lone surrogates included."""

    def render(self, content: Any) -> bytes:
        """Encode the content as JSON in ASCII."""
        return json.dumps(content, allow_nan=False, separators=(",", ":")).encode("ascii")


def handle_errors(app: FastAPI, metrics: Metrics) -> None:
    """Register handlers that answer all errors in OpenAI's format."""

    async def ours(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, ValoraError)
        metrics.failed(getattr(error, "code", "invalid_request"))
        if getattr(error, "status", 400) >= 500:
            logs.LOG.warning("%s", error)
        return error_answer(error)

    async def invalid(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        metrics.failed("invalid_request")
        return error_answer(_refusal(error))

    async def http(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        metrics.failed(f"http_{error.status_code}")
        said = str(error.detail)
        if error.status_code == 404:
            said = "There is nothing at this path: /docs lists the paths of this server"
        elif error.status_code == 405:
            allowed = (error.headers or {}).get("Allow", "another method")
            said = f"{_method(request.scope)} is not possible at this path: use {allowed}"
        body = {"message": said, "type": "invalid_request_error", "param": None,
                "code": None}  # fmt: skip
        return AsciiJson({"error": body}, error.status_code, error.headers)

    app.add_exception_handler(ValoraError, ours)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, http)


def _refusal(error: RequestValidationError) -> ServeError:
    """The error of a request that FastAPI has found invalid, in one sentence."""
    errors = list(error.errors())
    if errors[0]["loc"][0] == "body":
        inner = [{**item, "loc": item["loc"][1:]} for item in errors]
        return refusal(inner, error.body)
    first = errors[0]  # of the path or the query
    where, *name = first["loc"]
    inner = [{**first, "loc": tuple(name)}]
    return refusal(inner, {name[0]: first.get("input")} if name else None, f"The {where}")
