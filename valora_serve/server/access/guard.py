"""Who is asking, and whether they ask too often; decided by path, closed unless listed as open."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from valora_serve.errors import ForbiddenError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from starlette.types import Scope

    from valora_serve.server.access.admission import RateLimiter
    from valora_serve.server.access.keys import KeyRing
    from valora_serve.server.settings import ServerSettings

OPEN = {"/", "/health", "/ready", "/version", "/docs", "/openapi.json"}
OPEN_BELOW = "/console/"
ADMIN = {
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
    "/v1/load_bundle",
    "/v1/unload_bundle",
}


class Guard:
    """Checks keys and rates.

    Args:
        settings: What is let in.
        keys: The keys.
        rates: The callers' rates.
    """

    def __init__(self, settings: ServerSettings, keys: KeyRing, rates: RateLimiter) -> None:
        self._loading = settings.allow_runtime_loading
        self._open = OPEN if settings.protect_metrics else OPEN | {"/metrics"}
        self._keys = keys
        self._rates = rates

    def check(self, scope: Scope, headers: Mapping[bytes, str]) -> dict[str, Any]:
        """Let a request in, or not.

        Args:
            scope: The request's ASGI scope.
            headers: Its headers, names in lower case.

        Returns:
            What the log shall say of the caller.

        Raises:
            UnauthorizedError: No known key.
            ForbiddenError: The key may not do this, or nobody may.
            RateLimitError: The caller has to wait.
        """
        path = scope["path"]
        if path in self._open or path.startswith(OPEN_BELOW):
            return {}
        admin = path in ADMIN
        if admin and not self._loading:
            raise ForbiddenError(
                "This server loads nothing at run time: start it with --allow-runtime-loading"
            )
        key = self._keys.check(headers.get(b"authorization"), admin=admin)
        address = scope["client"][0] if scope.get("client") else ""
        self._rates.take(f"key {key.name}" if key else f"address {address}", time.monotonic())
        return {"key": key.name} if key else {}
