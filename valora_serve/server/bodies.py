"""Routes that check access before a request's body is read, and read and validate JSON bodies."""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from functools import cache
from typing import Any

import pydantic_core
from fastapi.routing import APIRoute
from pydantic import TypeAdapter, ValidationError
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from valora_serve import errors
from valora_serve.server.access.guard import JSON, Rules
from valora_serve.server.errors import invalid
from valora_serve.server.gather import until_disconnect
from valora_serve.server.settings import ServerSettings

LARGE_BYTES = 2**16
"""Larger bodies are parsed in a thread, between which the event loop has its turns."""
MAX_MARKS = 300_000
"""Most quotes, commas and brackets besides those of a prompt: pydantic takes 0.1 s for them."""
MAX_ERRORS = 1_000  # invalid fields from which on none is named: pydantic makes an object for each
_BODIES = {"POST", "PUT", "PATCH"}
_adapter = cache(TypeAdapter)


class Route(APIRoute):
    """A route that checks its `Rules`, and whose JSON body pydantic parses and validates at once.

    FastAPI itself would parse it with `json.loads` on the event loop, whatever its size.
    """

    @property
    def rules(self) -> Rules:
        """Those of its function; one that declares none needs a key."""
        return getattr(self.endpoint, "valora_rules", Rules())

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """FastAPI's handler, which gets the validated body."""
        handle, rules = super().get_route_handler(), self.rules
        if self.body_field is not None and not rules.content_types:
            rules = replace(rules, content_types=(JSON,))
        declared: Any = Any
        if self.body_field is not None and not self._embed_body_fields:
            declared = self.body_field.field_info.annotation
        _adapter(declared)  # made now, not at the first request

        async def checked(request: Request) -> Response:
            context = request.app.state.context
            request.state.facts |= context.guard.check(rules, request.scope, request.headers)
            if not self.methods or self.methods.isdisjoint(_BODIES):
                return await handle(request)
            body = await context.bodies.read(request, rules)
            if self.body_field is None:
                request._body = body
            else:
                parsing = context.bodies.parsed(body, declared)
                del body  # it is freed as soon as it is parsed
                request._body, request._json = b" ", await parsing
            return await until_disconnect(request.receive, handle(request))

        return checked


class Bodies:
    """Reads bodies within the server's limits on their size and time."""

    def __init__(self, settings: ServerSettings) -> None:
        self._settings = settings
        self._held = 0  # bytes of the bodies of all requests in progress

    async def read(self, request: Request, rules: Rules) -> bytes:
        """Read a body, which counts as held until the request's end."""
        settings = self._settings
        kind = _content_type(request, rules)
        max_bytes, remedy = settings.max_body_bytes, "send less at once"
        if kind == JSON and max_bytes > settings.max_json_bytes:
            max_bytes = settings.max_json_bytes
            remedy = "send less at once, or a large video as a form to /v1/vision"
        max_bytes = min(max_bytes, rules.max_body_bytes or max_bytes)
        too_large = errors.TooLargeError(f"The request is larger than {max_bytes} bytes: {remedy}")
        length = request.headers.get("content-length", "")
        if length.isdecimal() and int(length[:20]) > max_bytes:
            raise too_large
        pieces: list[bytes] = []
        size = 0

        def release() -> None:
            self._held -= size

        request.state.stack.callback(release)
        try:
            async with asyncio.timeout(settings.body_seconds):
                async for piece in request.stream():
                    size, self._held = size + len(piece), self._held + len(piece)
                    if size > max_bytes:
                        raise too_large
                    if self._held > settings.max_held_bytes:
                        said = "Other requests fill the memory: try again in 1 s"
                        raise errors.OverloadedError(said)
                    pieces.append(piece)
        except TimeoutError as error:
            raise errors.SlowClientError(
                f"The request did not arrive within {settings.body_seconds:g} s: send it faster"
            ) from error
        except ClientDisconnect as error:
            raise errors.CancelledRequestError("The client went away") from error
        return b"".join(pieces)

    async def parsed(self, body: bytes, kind: Any) -> Any:
        """Parse and validate a body of a type."""
        if len(body) > LARGE_BYTES:
            return await asyncio.to_thread(self._parsed, body, kind)
        return self._parsed(body, kind)

    def _parsed(self, body: bytes, kind: Any) -> Any:
        if not body:
            raise errors.FieldError("The body is missing: add it", None)
        max_bytes = MAX_MARKS + self._settings.max_prompt_chars
        if len(body) > max_bytes and sum(map(body.count, (b'"', b",", b"[", b"{"))) > max_bytes:
            raise errors.RequestError(
                f"The JSON has more than {max_bytes} quotes, commas and brackets: send less at once"
            )
        body = body.removeprefix(b"\xef\xbb\xbf")  # which some clients write before UTF-8
        try:
            return _adapter(kind).validate_json(body)
        except ValidationError as error:
            if error.error_count() > MAX_ERRORS:
                said = f"The body has {error.error_count()} invalid fields: see /docs"
                raise errors.FieldError(said, None) from None
            found = error.errors(include_url=False, include_input=False, include_context=False)
            no_json = found[0]["type"] == "json_invalid"
            raise invalid(found, None if no_json else pydantic_core.from_json(body)) from None


def _content_type(request: Request, rules: Rules) -> str:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if rules.content_types and kind not in rules.content_types:
        has = f"The content type is {kind[:100]!a}" if kind else "The request has no content type"
        raise errors.ContentTypeError(
            f"{has}, and this path reads {' or '.join(rules.content_types)}: send it with "
            f"-H 'content-type: {rules.content_types[0]}'"
        )
    if request.headers.get("content-encoding", "identity").strip().lower() != "identity":
        raise errors.ContentTypeError("The body has a content-encoding: send it uncompressed")
    return kind
