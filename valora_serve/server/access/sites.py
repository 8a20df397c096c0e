"""Hosts and origins of requests to a server without API keys.

Without keys, whoever reaches the server may use it, and a web page in a user's browser reaches
what the user reaches. A page of another site is told by its Origin, and one that points its own
name to this machine's address (DNS rebinding) by its Host.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Iterable
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import Scope

from valora_serve.errors import ForbiddenError, RequestError

_HOST = re.compile(r"(\[[0-9A-Fa-f:.%]+\]|[^:\[\]/?#@\s]+)(?::\d{0,5})?")
_SAFE = {"GET", "HEAD", "OPTIONS"}


class Sites:
    """Checks the host and the origin that requests name."""

    def __init__(self, bound: str, hosts: Iterable[str], origins: Iterable[str]) -> None:
        self._hosts = {"localhost", socket.gethostname().lower(), bound.lower()}
        self._hosts |= {host.lower().rstrip(".") for host in hosts}
        self._origins = {origin.lower().rstrip("/") for origin in origins}
        self._public = not _is_loopback(bound)

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
        try:
            address = ipaddress.ip_address(host.strip("[]").partition("%")[0])
        except ValueError:
            return False
        server = scope.get("server") or ("",)
        return self._public or address.is_loopback or str(address) == server[0]

    def _check_origin(self, headers: Headers, named: str) -> None:
        origin = headers.get("origin")
        site = headers.get("sec-fetch-site", "none").lower()
        if "*" in self._origins or (origin or "").lower() in self._origins:
            return
        if origin is None:
            foreign = site in ("cross-site", "same-site")
        else:
            foreign = _netloc(origin) != named.lower()
        if foreign:
            raise ForbiddenError(
                f"Pages of {(origin or 'another site')[:100]!a} may not send requests here: name "
                "the origin in allowed_origins, or use API keys"
            )


def _netloc(origin: str) -> str | None:
    try:
        parts = urlsplit(origin)
    except ValueError:
        return None
    return parts.netloc.lower() if parts.scheme in ("http", "https") else None


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"
