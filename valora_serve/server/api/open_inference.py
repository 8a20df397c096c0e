"""``/v2``: the Open Inference Protocol, which is no longer served; for one release it says so."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi import APIRouter

from valora_serve.errors import GoneError
from valora_serve.server.access.rules import Access, allow

if TYPE_CHECKING:
    from valora_serve.server.context import ServerContext

METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE"]
GONE = (
    "The Open Inference Protocol is no longer served: send images to /v1/vision/{domain}, and ask "
    "/v1/models/{domain} and /ready whether a domain answers"
)


def router(_: ServerContext) -> APIRouter:
    """Routes that are refused, with any method, before a body is read."""
    routes = APIRouter()

    @routes.api_route("/v2", methods=METHODS, include_in_schema=False)
    @routes.api_route("/v2/{path:path}", methods=METHODS, include_in_schema=False)
    @allow(Access.OPEN, any_host=True, disabled=GONE, refusal=GoneError)
    async def gone() -> None:
        raise GoneError(GONE)

    return routes
