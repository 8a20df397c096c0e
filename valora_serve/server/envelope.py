"""Middleware of every HTTP request: id, access, size and time limits, access log, errors."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import time
from typing import TYPE_CHECKING, Any, TypeVar

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from valora_data.errors import ValoraError
from valora_serve.errors import (
    CancelledRequestError,
    OverloadedError,
    RequestError,
    ServeError,
    SlowClientError,
    TooLargeError,
)
from valora_serve.server.telemetry import logs

if TYPE_CHECKING:
    from collections.abc import Coroutine, Mapping

    from fastapi import FastAPI
    from starlette.requests import Request
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from valora_serve.server.access.guard import Guard
    from valora_serve.server.access.rules import RouteTable
    from valora_serve.server.settings import ServerSettings
    from valora_serve.server.telemetry.metrics import Metrics

T = TypeVar("T")
MOST_CONTAINERS, MOST_ITEMS = 200_000, 2_000_000  # parsing takes about a second
_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_METHODS = {"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"}
_SECURE = [
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
]


class StalledClientError(Exception):
    """The client does not read its response any more."""


class Envelope:
    """ASGI middleware around the whole application.

    The key is checked before the body is read, and the body is read before the application is
    called, so that clients without a key and slow clients cost nothing but a connection.

    Args:
        app: The application.
        settings: Limits on size and time.
        routes: Rules of every route.
        guard: Checks keys and rates.
        metrics: Counts requests and errors.
    """

    def __init__(
        self,
        app: ASGIApp,
        settings: ServerSettings,
        routes: RouteTable,
        guard: Guard,
        metrics: Metrics,
    ) -> None:
        self._app = app
        self._settings = settings
        self._routes = routes
        self._guard = guard
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle an ASGI request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.perf_counter()
        headers = {name.lower(): value.decode("latin-1") for name, value in scope["headers"]}
        identity = logs.accepted_id(headers.get(b"x-request-id"))
        token = logs.request_id.set(identity)
        facts: dict[str, Any] = {}
        stack = contextlib.ExitStack()  # what the request holds until its response is sent
        scope.setdefault("state", {}).update(facts=facts, stack=stack)
        status = 0

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                extra = [(b"x-request-id", identity.encode()), *_SECURE]
                message["headers"] = [*message.get("headers", ()), *extra]
            try:
                async with asyncio.timeout(self._settings.send_seconds):
                    await send(message)
            except TimeoutError as error:
                raise StalledClientError from error

        try:
            rules = self._routes.rules(scope)
            facts |= self._guard.check(rules, scope, headers)
            body = await self._body(headers, receive, rules.max_body_bytes)
            if not headers.get(b"content-type", "").startswith("multipart/"):
                _check_parts(body)
            await self._app(scope, _replayed(body, receive), sending)
        except ServeError as error:
            self._metrics.failed(error.code)
            await error_answer(error)(scope, receive, sending)
        except StalledClientError:
            logs.LOG.warning("the client does not read its response: its request is cancelled")
        except Exception:  # noqa: BLE001 - logged; the response does not show it
            logs.LOG.exception("%s %s failed", scope["method"], scope["path"])
            self._metrics.failed(ServeError.code)
            if not status:
                failure = ServeError("The server failed: see its log")
                await error_answer(failure)(scope, receive, sending)
        finally:
            stack.close()
            seconds = time.perf_counter() - began
            route = scope.get("route")
            path = getattr(route, "path", None) or "other"
            self._metrics.http(path, _method(scope), status or 499, seconds)
            logs.access({
                "method": scope["method"], "path": scope["path"], "status": status or 499,
                "seconds": round(seconds, 4), **facts,
            })  # fmt: skip
            logs.request_id.reset(token)

    async def _body(
        self, headers: Mapping[bytes, str], receive: Receive, limit: int | None
    ) -> bytes:
        most = self._settings.max_body_bytes if limit is None else limit
        seconds = self._settings.body_seconds
        too_large = TooLargeError(f"The request is larger than {most} bytes: send less at once")
        length = headers.get(b"content-length", "0")
        if length.isdecimal() and int(length[:20]) > most:
            raise too_large
        body = bytearray()
        try:
            async with asyncio.timeout(seconds):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise CancelledRequestError("The client went away")
                    body += message.get("body", b"")
                    if len(body) > most:
                        raise too_large
                    if not message.get("more_body", False):
                        return bytes(body)
        except TimeoutError as error:
            raise SlowClientError(
                f"The request did not arrive within {seconds:g} s: send it faster"
            ) from error


def _check_parts(body: bytes) -> None:
    """Refuse JSON of so many objects or items that parsing it would block all other requests.

    An image is a single string, so that no reasonable request has so many.
    """
    containers = body.count(b"[") + body.count(b"{")
    if containers > MOST_CONTAINERS or body.count(b",") > MOST_ITEMS:
        raise RequestError(
            f"The JSON has more than {MOST_CONTAINERS} objects and lists or {MOST_ITEMS} items: "
            "send less at once"
        )


def _replayed(body: bytes, receive: Receive) -> Receive:
    """A `receive` that returns the body, which has been read already, first."""
    given = False

    async def replay() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay


def _method(scope: Scope) -> str:
    """The method as a metric label; unknown ones share a label, so that labels are bounded."""
    return scope["method"] if scope["method"] in _METHODS else "other"


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine, and cancel it if the client disconnects.

    Raises:
        CancelledRequestError: The client disconnected; `work` was cancelled and has ended.
    """
    doing = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({doing, gone}, return_when=asyncio.FIRST_COMPLETED)
        if doing.done():
            return doing.result()
        raise CancelledRequestError("The client went away")
    finally:
        for task in (doing, gone):
            task.cancel()
        await asyncio.gather(doing, gone, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def error_body(error: ValoraError) -> dict[str, Any]:
    """An error in OpenAI's format."""
    status = getattr(error, "status", 400)
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {
        "message": str(error), "type": kind, "param": None, "code": getattr(error, "code", None)
    }  # fmt: skip


def error_answer(error: ValoraError) -> JSONResponse:
    """Response of an error, in OpenAI's format."""
    headers = {}
    if isinstance(error, OverloadedError):
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after)))
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

    async def ours(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, ValoraError)
        metrics.failed(getattr(error, "code", "invalid_request"))
        if getattr(error, "status", 400) >= 500:
            logs.LOG.warning("%s", error)
        return error_answer(error)

    async def invalid(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        metrics.failed("invalid_request")
        # Of a union's alternatives, the one whose validation got furthest was probably meant.
        first = max(error.errors(), key=lambda item: len(item["loc"]))
        place = ".".join(str(part) for part in first["loc"] if part != "body")[:200]
        said = f"{place}: {first['msg']}" if place else str(first["msg"])
        body = {"message": said, "type": "invalid_request_error", "param": place or None,
                "code": "invalid_request"}  # fmt: skip
        return AsciiJson({"error": body}, 400)

    async def http(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        metrics.failed(f"http_{error.status_code}")
        body = {"message": str(error.detail), "type": "invalid_request_error", "param": None,
                "code": None}  # fmt: skip
        return AsciiJson({"error": body}, error.status_code, error.headers)

    app.add_exception_handler(ValoraError, ours)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, http)
