"""What a route declares about access: who may send requests, and how large they may be."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any, TypeVar

from fastapi.routing import APIRoute
from starlette.routing import Match

from valora_serve.errors import ForbiddenError
from valora_serve.server.bodies import DEFAULT_LIMITS, JsonLimits

if TYPE_CHECKING:
    from starlette.routing import BaseRoute
    from starlette.types import Scope

    from valora_serve.errors import ServeError

    F = TypeVar("F", bound=Callable[..., Any])

_RULES = "valora_rules"
_WITH_BODY = {"POST", "PUT", "PATCH"}
JSON = "application/json"
NO_BODY_BYTES = 64 * 1024
"""Largest body of a request to a route that reads none."""


class Access(StrEnum):
    """Who may send requests to a route.

    Attributes:
        OPEN: Everybody.
        KEYED: Holders of an API key, within their rate limit; everybody if the server has no keys.
        ADMIN: Holders of an API key with the role admin; nobody if the server has no keys.
    """

    OPEN = "open"
    KEYED = "keyed"
    ADMIN = "admin"


@dataclass(frozen=True, slots=True)
class Rules:
    """What is checked before a request's body is read.

    Attributes:
        access: Callers that may send requests.
        max_body_bytes: Largest request body in bytes; None for the server's general limit.
        disabled: Reason why every request is refused; None if the route is enabled.
        refusal: Error of these refusals.
        content_types: Content types of bodies that the route reads; by default JSON if it declares
            a body. Others get status 415. Empty for any.
        json: Most that a JSON body may hold.
        any_host: Whether the route answers under any host name, as probes of a cluster ask.
        tells_all: Whether the route tells of all models. Once keys are limited to some models, it
            asks for a key without limits. Other routes tell of those that the key may see.
    """

    access: Access = Access.KEYED
    max_body_bytes: int | None = None
    disabled: str | None = None
    refusal: type[ServeError] = ForbiddenError
    content_types: tuple[str, ...] = ()
    json: JsonLimits = DEFAULT_LIMITS
    any_host: bool = False
    tells_all: bool = False


def allow(access: Access, **rules: Any) -> Callable[[F], F]:
    """Decorator of a route's function: declares its `Rules`, whose fields are the arguments."""

    def mark(function: F) -> F:
        vars(function)[_RULES] = Rules(access, **rules)
        return function

    return mark


class RouteTable:
    """Rules of all routes, in the order in which the application tries them."""

    def __init__(self) -> None:
        self._routes: list[tuple[BaseRoute, Rules]] = []

    def add(self, routes: Iterable[BaseRoute], rules: Rules | None = None) -> None:
        """Add routes.

        Args:
            routes: The routes.
            rules: Rules of all of them; if None, those that each has declared with `allow`. A
                route without a declaration needs a key.
        """
        for route in routes:
            declared = rules or vars(getattr(route, "endpoint", self)).get(_RULES, Rules())
            if isinstance(route, APIRoute) and route.body_field is not None:
                declared = replace(declared, content_types=declared.content_types or (JSON,))
            if declared.max_body_bytes is None and not _WITH_BODY & _methods(route):
                declared = replace(declared, max_body_bytes=NO_BODY_BYTES)
            self._routes.append((route, declared))

    def __iter__(self) -> Iterator[tuple[BaseRoute, Rules]]:
        return iter(self._routes)

    def rules(self, scope: Scope) -> Rules:
        """Rules of the route that will answer a request; a path without a route needs a key."""
        other_method: Rules | None = None
        for route, rules in self._routes:
            match, _ = route.matches(scope)
            if match is Match.FULL:
                return rules
            if match is Match.PARTIAL and other_method is None:
                other_method = replace(rules, max_body_bytes=NO_BODY_BYTES, content_types=())
        return other_method or Rules(max_body_bytes=NO_BODY_BYTES)

    def methods(self, scope: Scope) -> set[str]:
        """Methods that a path takes; empty if there is no such path."""
        found: set[str] = set()
        for route, _ in self._routes:
            if route.matches(scope)[0] is not Match.NONE:
                found |= _methods(route)
        return found


def _methods(route: BaseRoute) -> set[str]:
    """Methods of a route; HEAD is answered wherever GET is, and OPTIONS everywhere."""
    methods = set(getattr(route, "methods", None) or {"GET"})
    return methods | ({"HEAD"} if "GET" in methods else set()) | {"OPTIONS"}
