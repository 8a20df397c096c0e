"""Server-sent events; the request is cancelled when the client disconnects."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import TYPE_CHECKING, Any, NamedTuple

from starlette.responses import Response

from valora_serve.errors import CancelledRequestError, DrainingError, ServeError
from valora_serve.server.errors import DRAINED, error_body
from valora_serve.server.gather import until_disconnect
from valora_serve.server.telemetry import logs

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from starlette.types import Receive, Scope, Send


class EventJson(NamedTuple):
    """An event as JSON.

    Attributes:
        text: The JSON.
        type: The event's type, None if it has none.
    """

    text: str
    type: str | None


class EventStream(Response):
    """Streamed response.

    Nothing is sent before the first event, so that an error before it gets its own status code.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[dict[str, Any] | EventJson, None]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._begun = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events."""
        # A client that disconnected gets no response.
        with contextlib.suppress(CancelledRequestError):
            try:
                await until_disconnect(receive, self._stream(send))
            except asyncio.CancelledError:  # as uvicorn does with what runs after the drain
                if not self._begun:
                    raise
                await _end(send, DrainingError(DRAINED))

    async def _stream(self, send: Send) -> None:
        async with contextlib.aclosing(self._events) as events:
            first = await anext(events)
            self._begun = True
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await send(_body(first))
            failed = None
            try:
                async for event in events:
                    await send(_body(event))
            except ServeError as error:
                failed = error
        await _end(send, failed)


async def _end(send: Send, error: ServeError | None) -> None:
    """End a stream, with an event of the error if there is one."""
    if error is not None:
        logs.LOG.warning("%s", error)
        await send(_body({"error": error_body(error)}))
    await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})


def event_json(event: dict[str, Any]) -> EventJson:
    """An event as JSON."""
    return EventJson(json.dumps(event, separators=(",", ":"), allow_nan=False), event.get("type"))


def _body(event: dict[str, Any] | EventJson) -> dict[str, Any]:
    line, kind = event if isinstance(event, EventJson) else event_json(event)
    name = "" if kind is None else f"event: {kind}\n"
    body = f"{name}data: {line}\n\n".encode()
    return {"type": "http.response.body", "body": body, "more_body": True}
