"""Declarations and responses that all endpoints share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from starlette.responses import Response

from valora_serve.server.api.schema import ErrorAnswer

if TYPE_CHECKING:
    from pydantic import BaseModel

_TEXTS = {
    400: "The request is invalid",
    401: "The API key is missing or unknown",
    403: "The API key may not do this",
    404: "There is no such model",
    408: "The request arrived too slowly",
    409: "The adapter or bundle is in use",
    413: "The request is too large",
    415: "The content type is not supported",
    422: "The adapter is quarantined, or computed NaN or infinity for this request",
    429: "The server is overloaded, or the key exceeded its rate limit",
    499: "The client disconnected",
    503: "The server is starting, shutting down, or has failed",
    504: "The deadline passed",
    507: "A load or unload could not be recorded; nothing was changed",
}


def error_answers(*, event_stream: bool = False) -> dict[int | str, dict[str, Any]]:
    """OpenAPI declarations of the error responses that any route under /v1 may give."""
    # The model once: FastAPI builds a validator wherever it is named, 27 ms for all routes.
    content = {"application/json": {"schema": {"$ref": "#/components/schemas/ErrorAnswer"}}}
    declared: dict[int | str, dict[str, Any]] = {
        status: {"description": text, "content": content} for status, text in _TEXTS.items()
    }
    declared[400] = {"model": ErrorAnswer, "description": _TEXTS[400]}
    if event_stream:
        # The schema is that of a single event, as tools that check streams expect.
        stream = {
            "schema": {
                "type": "object",
                "properties": {"data": {"type": "string"}, "event": {"type": "string"}},
                "required": ["data"],
                "description": "server-sent events: a chunk as JSON, or [DONE]",
            }
        }
        declared[200] = {"description": "The answer", "content": {"text/event-stream": stream}}
    return declared


def answer(body: BaseModel | bytes) -> Response:
    """JSON response of a model, or of JSON."""
    content = body if isinstance(body, bytes) else body.model_dump_json()
    return Response(content, media_type="application/json")
