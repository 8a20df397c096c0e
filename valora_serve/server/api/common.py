"""What the routes' declarations and answers have in common."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from starlette.responses import Response

from valora_serve.server.api.schema import ErrorAnswer

if TYPE_CHECKING:
    from pydantic import BaseModel

_TEXTS = {
    400: "The request is wrong",
    401: "No known API key",
    403: "Not allowed",
    404: "No such model",
    408: "The request arrived too slowly",
    409: "In use",
    413: "The request is too large",
    415: "The content type is not read here",
    429: "Overloaded, or too many requests of this key",
    499: "The client went away",
    503: "Starting, shutting down, or failed",
    504: "The deadline passed",
}


def error_answers(*, event_stream: bool = False, ok: str = "") -> dict[int | str, dict[str, Any]]:
    """Declarations of the answers that any route under /v1 may give.

    Args:
        event_stream: The route can also stream.
        ok: What a 200 means.
    """
    declared: dict[int | str, dict[str, Any]] = {
        status: {"model": ErrorAnswer, "description": text} for status, text in _TEXTS.items()
    }
    if event_stream:
        # A schema here is one of a single event, as tools that check streams read it.
        stream = {
            "schema": {
                "type": "object",
                "properties": {"data": {"type": "string"}, "event": {"type": "string"}},
                "required": ["data"],
                "description": "server-sent events: a chunk as JSON, or [DONE]",
            }
        }
        declared[200] = {
            "description": ok or "The answer",
            "content": {"text/event-stream": stream},
        }
    return declared


def answer(body: BaseModel) -> Response:
    """A response of JSON."""
    return Response(body.model_dump_json(), media_type="application/json")
