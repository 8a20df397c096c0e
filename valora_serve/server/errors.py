"""HTTP responses of errors, in OpenAI's format."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from valora_data.errors import ValoraError
from valora_serve.errors import FieldError, RequestError, UnknownModelError
from valora_serve.server.telemetry import logs
from valora_serve.server.telemetry.metrics import Metrics

DRAINED = "The server shut down before the answer was complete: ask again"
LONGEST_NAME, LONGEST_PATH, LONGEST_TEXT = 60, 200, 300
_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_TAG = re.compile(r"(?s)Input tag .* does not match any of the expected tags|Unable to .*")
_FOLDERS = re.compile(r"(?<![\w:/.~-])/(?!v1/|console/)(?:[^\s/:,;'\"()]+/)+(?=[^\s/:,;'\"()])")


def error_body(error: ValoraError) -> dict[str, Any]:
    """An error in OpenAI's format; files are named without the folders of this machine.

    Errors of a request quote what it sent, such as paths in its JSON schema, and name no files.
    """
    said, status = str(error), getattr(error, "status", 400)
    if not isinstance(error, RequestError | UnknownModelError):
        said = _FOLDERS.sub("", said)
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    named = {name: getattr(error, name, None) for name in ("param", "code")}
    return {"message": said, "type": kind, **named}


def error_answer(error: ValoraError) -> Response:
    """Response of an error."""
    status = getattr(error, "status", 400)
    headers = {}
    if (wait := getattr(error, "retry_after", None)) is not None:
        headers["Retry-After"] = str(max(1, math.ceil(wait)))
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if status in (408, 413):
        headers["Connection"] = "close"  # the rest of the body is not read
    return _answer(error_body(error), status, headers)


def _answer(body: dict[str, Any], status: int, headers: Mapping[str, str] | None) -> Response:
    return Response(json.dumps({"error": body}), status, headers, "application/json")


def invalid(
    errors: Sequence[Mapping[str, Any]], sent: Any = None, root: str = "The body"
) -> FieldError:
    """The error of an invalid request, in pydantic's words.

    Of a union's alternatives, the one whose validation got furthest was probably meant.
    """
    placed = [(_path(error, sent), _TAG.sub("Say what it is", error["msg"])) for error in errors]
    path, _ = max(placed, key=lambda item: len(item[0]))
    said = " or ".join(dict.fromkeys(text for other, text in placed if other == path))
    name = ".".join(part[:LONGEST_NAME] for part in path)[:LONGEST_PATH]
    return FieldError(f"{name or root}: {said[:LONGEST_TEXT]}", name or None)


def _path(error: Mapping[str, Any], value: Any) -> list[str]:
    """Path of a field, without pydantic's names of a union's alternatives."""
    path = []
    for part in error["loc"]:
        in_list = isinstance(value, list) and isinstance(part, int) and part < len(value)
        if in_list or (isinstance(value, dict) and part in value):
            value = value[part]
            path.append(str(part))
    if error["type"] == "missing":
        path.append(str(error["loc"][-1]))
    return [*path, "type"] if error["type"].startswith("union_tag") else path


def handle_errors(app: FastAPI, metrics: Metrics) -> None:
    """Register handlers that answer all errors in OpenAI's format."""

    async def ours(_: Request, error: Exception) -> Response:
        assert isinstance(error, ValoraError)
        metrics.failed(getattr(error, "code", "invalid_request"))
        if getattr(error, "status", 400) >= 500:
            logs.LOG.warning("%s", error)
        return error_answer(error)

    async def of_fastapi(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        first = error.errors()[0]  # of the path or the query
        where, *name = first["loc"]
        sent = error.body if where == "body" else dict.fromkeys(name)
        return await ours(request, invalid([{**first, "loc": name}], sent, f"The {where}"))

    async def http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        metrics.failed(f"http_{error.status_code}")
        status, said = error.status_code, str(error.detail)
        if status == 404 and f"{request.url.path}/".startswith("/v2/"):  # for one release
            status, said = 410, "/v2 is no longer served: send images to /v1/vision/{domain}"
        elif status == 404:
            said = "There is nothing at this path: /docs lists the paths of this server"
        elif status == 405:
            said = f"This path takes no {request.method[:20]}: /docs lists the methods of each path"
        body = {"message": said, "type": "invalid_request_error", "param": None, "code": None}
        return _answer(body, status, error.headers)

    app.add_exception_handler(ValoraError, ours)
    app.add_exception_handler(RequestValidationError, of_fastapi)
    app.add_exception_handler(HTTPException, http)
