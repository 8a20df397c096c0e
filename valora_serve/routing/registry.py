"""The routers by name; other packages add theirs with an entry point."""

from __future__ import annotations

from typing import TYPE_CHECKING

from valora_data.registry import Registry
from valora_serve.errors import SettingsError

if TYPE_CHECKING:
    from valora_serve.routing.base import Router, RouterSettings

_HERE = "valora_serve.routing"
ROUTERS: Registry[type[Router]] = Registry(
    "valora.routers",
    "router",
    {
        "affinity": f"{_HERE}.affinity:AffinityRouter",
        "random": f"{_HERE}.uniform:RandomRouter",
        "least": f"{_HERE}.least:LeastRouter",
    },
    SettingsError,
)


def make_router(name: str, settings: RouterSettings | None = None) -> Router:
    """Create a router by name.

    Args:
        name: One of `ROUTERS`.
        settings: Settings of the router; the defaults if None.

    Raises:
        SettingsError: No router has this name.
    """
    return ROUTERS[name](settings)
