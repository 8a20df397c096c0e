"""Lets requests in before their body is read: by keys, rates, and the hosts that they name.

Without keys, whoever reaches the server may use it, and a web page in a user's browser reaches
what the user reaches. A page of another site is told by its Origin, and one that points its own
name to this machine's address (DNS rebinding) by its Host.
"""

import contextlib
import ipaddress
import re
import socket
import time
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeVar

from starlette.datastructures import Headers
from starlette.types import Scope

from valora_serve.errors import ForbiddenError, RequestError
from valora_serve.server.access.admission import RateLimiter
from valora_serve.server.access.keys import Key, KeyRing
from valora_serve.server.settings import ServerSettings
from valora_serve.server.telemetry import spans

F = TypeVar("F", bound=Callable[..., Any])
JSON = "application/json"
caller: ContextVar[str | None] = ContextVar("caller", default=None)
"""Name of the API key of the request that is being handled; None without one."""
caller_key: ContextVar[Key | None] = ContextVar("caller_key", default=None)
"""That key."""

_HOST = re.compile(r"(\[[0-9A-Fa-f:.%]+\]|[^:\[\]/?#@\s]+)(?::\d{0,5})?")
_SAFE = {"GET", "HEAD", "OPTIONS"}


class Access(StrEnum):
    """Who may send requests to a route."""

    OPEN = "open"
    KEYED = "keyed"
    ADMIN = "admin"


@dataclass(frozen=True, slots=True)
class Rules:
    """What is checked before a request's body is read."""

    access: Access = Access.KEYED
    max_body_bytes: int | None = None  # None for the server's general limit
    disabled: str | None = None  # why every request is refused
    # Of bodies that the route reads, by default JSON if it declares a body; others get a 415.
    content_types: tuple[str, ...] = ()
    any_host: bool = False  # whether it answers under any host name, as probes of a cluster ask
    # Whether the route tells of all models, also those that a limited key may not see: once there
    # are such keys, it asks for one without limits.
    tells_all: bool = False


def allow(access: Access, **rules: Any) -> Callable[[F], F]:
    """Decorator of a route's function: declares its `Rules`, whose fields are the arguments."""

    def mark(function: F) -> F:
        vars(function)["valora_rules"] = Rules(access, **rules)
        return function

    return mark


class Guard:
    """Lets requests in by the rules of their route."""

    def __init__(self, settings: ServerSettings) -> None:
        self._keys, self.rates = KeyRing(settings), RateLimiter(settings.rate, settings.burst)
        self._sites = Sites(settings.host, settings.allowed_hosts, settings.allowed_origins)

    def check(self, rules: Rules, scope: Scope, headers: Headers) -> dict[str, Any]:
        """Check a request."""
        if not self._keys:
            self._sites.check(scope, headers, any_host=rules.any_host)
        if rules.disabled is not None:
            raise ForbiddenError(rules.disabled)
        caller.set(None)
        caller_key.set(None)
        spans.headers.set(headers)
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
            own = ipaddress.IPv6Address(address)
            address = str(own.ipv4_mapped or ipaddress.IPv6Network((int(own), 64), strict=False))
        if scope.get("state", {}).get("counts", True):  # by one of several replicas
            self.rates.take(f"key {key.name}" if key else f"address {address}", time.monotonic())
        if key and key.models and rules.tells_all:
            raise ForbiddenError(
                f"Key {key.name} may not see all models, of which this tells: use a key without "
                "patterns of models"
            )
        caller.set(key.name if key else None)
        caller_key.set(key)
        return {"key": key.name} if key else {}


class Sites:
    """Checks the host and the origin that requests name."""

    def __init__(self, bound: str, hosts: Iterable[str], origins: Iterable[str]) -> None:
        self._hosts = {"localhost", socket.gethostname().lower(), bound.lower()}
        self._hosts |= {host.lower().rstrip(".") for host in hosts}
        self._origins = {origin.lower().rstrip("/") for origin in origins}
        own = _address(bound)
        self._public = bound.lower() != "localhost" and not (own and own.is_loopback)

    def check(self, scope: Scope, headers: Headers, *, any_host: bool) -> None:
        """Check a request."""
        named = headers.get("host", "")
        if not any_host and not (scope.get("http_version") == "1.0" and not named):
            self._check_host(named, scope)
        if scope["method"] not in _SAFE:
            self._check_origin(headers, named)

    def _check_host(self, named: str, scope: Scope) -> None:
        found = _HOST.fullmatch(named)
        if found is None:
            raise RequestError("The Host header names no host: send the server's name or address")
        host = found[1].lower().rstrip(".")
        if "*" in self._hosts or host in self._hosts or self._is_own_address(host, scope):
            return
        raise ForbiddenError(
            f"The host {host[:100]!a} is not known to be this server's: ask under localhost, name "
            "it in allowed_hosts, or use API keys"
        )

    def _is_own_address(self, host: str, scope: Scope) -> bool:
        """Whether the host is an address that may be this server's; rebinding needs a name."""
        if (address := _address(host)) is None:
            return False
        server = scope.get("server") or ("",)
        return self._public or address.is_loopback or str(address) == server[0]

    def _check_origin(self, headers: Headers, named: str) -> None:
        origin = headers.get("origin")
        allowed = {*self._origins, f"http://{named}".lower(), f"https://{named}".lower()}
        if "*" in allowed or (origin or "").lower() in allowed:
            return
        fetched = headers.get("sec-fetch-site", "none").lower()
        if origin is not None or fetched in ("cross-site", "same-site"):
            raise ForbiddenError(
                f"Pages of {(origin or 'another site')[:100]!a} may not send requests here: name "
                "the origin in allowed_origins, or use API keys"
            )


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host.strip("[]").partition("%")[0])
    return None
