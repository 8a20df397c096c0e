"""Checks API keys and rate limits before a request's body is read."""

from __future__ import annotations

import contextlib
import ipaddress
import time
from contextvars import ContextVar
from typing import Any

from starlette.datastructures import Headers
from starlette.types import Scope

from valora_serve.errors import ForbiddenError
from valora_serve.server.access.admission import RateLimiter
from valora_serve.server.access.keys import Key, KeyRing
from valora_serve.server.access.rules import Access, Rules
from valora_serve.server.access.sites import Sites

caller: ContextVar[str | None] = ContextVar("caller", default=None)
"""Name of the API key of the request that is being handled; None without one."""
caller_key: ContextVar[Key | None] = ContextVar("caller_key", default=None)
"""That key."""


class Guard:
    """Lets requests in by the rules of their route."""

    def __init__(self, keys: KeyRing, rates: RateLimiter, sites: Sites | None = None) -> None:
        self._keys = keys
        self.rates = rates
        self._sites = sites

    def check(self, rules: Rules, scope: Scope, headers: Headers) -> dict[str, Any]:
        """Check a request."""
        if self._sites is not None and not self._keys:
            self._sites.check(scope, headers, any_host=rules.any_host)
        if rules.disabled is not None:
            raise rules.refusal(rules.disabled)
        caller.set(None)
        caller_key.set(None)
        if rules.access is Access.OPEN and not (rules.tells_all and self._keys.limited):
            return {}
        admin = rules.access is Access.ADMIN
        if admin and not self._keys:
            raise ForbiddenError(
                "This takes an admin key, and the server has no keys: make one with `valora-serve "
                "key` and name keys_file"
            )
        key = self._keys.check(headers.get("authorization"), admin=admin)
        address = scope["client"][0] if scope.get("client") else ""
        with contextlib.suppress(ValueError):  # of IPv6 the /64, all of which a client may use
            address = str(ipaddress.IPv6Network(f"{address}/64", strict=False))
        self.rates.take(f"key {key.name}" if key else f"address {address}", time.monotonic())
        if key and key.models and rules.tells_all:
            raise ForbiddenError(
                f"Key {key.name} may not see all models, of which this tells: use a key without "
                "patterns of models"
            )
        caller.set(key.name if key else None)
        caller_key.set(key)
        return {"key": key.name} if key else {}
