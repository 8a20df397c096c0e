"""What a route declares about access: who may send requests, and how large they may be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, TypeVar

from valora_serve.errors import ForbiddenError

if TYPE_CHECKING:
    from valora_serve.errors import ServeError

    F = TypeVar("F", bound=Callable[..., Any])

JSON = "application/json"


class Access(StrEnum):
    """Who may send requests to a route."""

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
        content_types: Content types of bodies that the route reads, by default JSON if it declares
            a body, and any if not. Others get status 415.
        any_host: Whether the route answers under any host name, as probes of a cluster ask.
        tells_all: Whether the route tells of all models. Once keys are limited to some models, it
            asks for a key without limits. Other routes tell of those that the key may see.
    """

    access: Access = Access.KEYED
    max_body_bytes: int | None = None
    disabled: str | None = None
    refusal: type[ServeError] = ForbiddenError
    content_types: tuple[str, ...] = ()
    any_host: bool = False
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
