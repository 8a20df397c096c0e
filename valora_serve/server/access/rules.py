"""What a route declares about access: who may send requests, and how large they may be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeVar

from valora_serve.errors import ForbiddenError, ServeError

F = TypeVar("F", bound=Callable[..., Any])
JSON = "application/json"


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
    refusal: type[ServeError] = ForbiddenError  # of these requests
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


def rules_of(function: Any) -> Rules:
    """Rules of a route's function; one that declares none needs a key."""
    found: Rules = getattr(function, "valora_rules", Rules())
    return found
