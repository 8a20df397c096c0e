"""The routers by name; other packages add theirs with an entry point."""

from __future__ import annotations

from typing import TYPE_CHECKING

from valora_data.registry import Registry
from valora_serve.errors import SettingsError

if TYPE_CHECKING:
    from valora_serve.routing.base import Router, RouterSettings

ROUTERS: Registry[type[Router]] = Registry(
    "valora.routers",
    "router",
    {
        "affinity": "valora_serve.routing.routers:AffinityRouter",
        "random": "valora_serve.routing.routers:RandomRouter",
        "least": "valora_serve.routing.routers:LeastRouter",
    },
    SettingsError,
)


def make_router(name: str, settings: RouterSettings | None = None) -> Router:
    """Create a router by name; raises SettingsError if there is none."""
    return ROUTERS[name](settings)
