"""What a route declares about access: who may send requests, and how large they may be."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.routing import Match

if TYPE_CHECKING:
    from starlette.routing import BaseRoute
    from starlette.types import Scope

    F = TypeVar("F", bound=Callable[..., Any])

_RULES = "valora_rules"


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
        disabled: Reason why every request is refused with status 403; None if the route is enabled.
    """

    access: Access = Access.KEYED
    max_body_bytes: int | None = None
    disabled: str | None = None


def allow(
    access: Access, *, max_body_bytes: int | None = None, disabled: str | None = None
) -> Callable[[F], F]:
    """Decorator of a route's function: declares its `Rules`, whose fields are the arguments."""

    def mark(function: F) -> F:
        vars(function)[_RULES] = Rules(access, max_body_bytes, disabled)
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
            declared = vars(getattr(route, "endpoint", self)).get(_RULES, Rules())
            self._routes.append((route, rules or declared))

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
                other_method = rules
        return other_method or Rules()
