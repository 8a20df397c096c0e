"""Middleware of every HTTP request: its id, access log, metrics, and the errors that are left."""

import asyncio
import contextlib
import time
from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from valora_serve.errors import DrainingError, ServeError
from valora_serve.server.errors import DRAINED, error_answer
from valora_serve.server.settings import ServerSettings
from valora_serve.server.telemetry import logs
from valora_serve.server.telemetry.metrics import Metrics

LOGGED_PATH = 200  # characters of a path that the access log shows
_METHODS = {"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"}
SECURE = [(b"x-content-type-options", b"nosniff"), (b"referrer-policy", b"no-referrer")]


class StalledClientError(Exception):
    """The client does not read its response any more."""


class Middleware:
    """ASGI middleware around the whole application."""

    def __init__(
        self, app: ASGIApp, settings: ServerSettings, metrics: Metrics | None = None
    ) -> None:
        self._app, self._settings, self._metrics = app, settings, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle an ASGI request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, status = time.perf_counter(), 0
        root: str = self._settings.root_path or scope.get("root_path", "")
        # A proxy may have taken the root path off, or not.
        path = scope["path"] if f"{scope['path']}/".startswith(f"{root}/") else root + scope["path"]
        sent = Headers(scope=scope).get("x-request-id", "")
        identity = sent if logs.SOUND_ID.fullmatch(sent) else logs.new_id()
        token = logs.request_id.set(identity)
        stack = contextlib.ExitStack()  # what the request holds until its response is sent
        # A replica has given the facts' place, as its front logs the request.
        facts: dict[str, Any] = scope.get("state", {}).get("facts", {})
        # HEAD is answered as GET, and the connection leaves the body out.
        method = "GET" if scope["method"] == "HEAD" else scope["method"]
        state = {**scope.get("state", {}), "facts": facts, "stack": stack}
        inner = {**scope, "root_path": root, "path": path, "method": method, "state": state}

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                extra = [(b"x-request-id", identity.encode()), *SECURE]
                message["headers"] = [*message.get("headers", ()), *extra]
            try:
                async with asyncio.timeout(self._settings.send_seconds):
                    await send(message)
            except TimeoutError as error:
                raise StalledClientError from error

        async def failed(error: ServeError) -> None:
            if self._metrics is not None:
                self._metrics.failed(error.code)
            if not status:
                await error_answer(error)(inner, receive, sending)

        try:
            await self._app(inner, receive, sending)
        except StalledClientError:
            logs.LOG.warning("the client does not read its response: its request is cancelled")
        except (ServeError, asyncio.CancelledError) as error:
            # A front's, or by uvicorn, which cancels what runs after the drain.
            await failed(error if isinstance(error, ServeError) else DrainingError(DRAINED))
        except Exception:  # noqa: BLE001 - logged; the response does not show it
            logs.LOG.exception("%s %s failed", scope["method"], path[:LOGGED_PATH])
            await failed(ServeError("The server failed: see its log"))
        finally:
            stack.close()
            seconds = time.perf_counter() - began
            pattern = getattr(inner.get("route"), "path_format", None) or "other"
            shown = scope["method"] if scope["method"] in _METHODS else "other"
            if self._metrics is not None:
                self._metrics.http(pattern, shown, status or 499, seconds)
            logs.ACCESS.info("request", extra={"facts": {
                "method": scope["method"], "path": path[:LOGGED_PATH], "status": status or 499,
                "seconds": round(seconds, 4), "client": (scope.get("client") or ("",))[0], **facts,
            }})  # fmt: skip
            logs.request_id.reset(token)
