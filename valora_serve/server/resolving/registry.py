"""The resolvers by the scheme of their location; other packages add theirs with an entry point."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from valora_data.registry import Registry
from valora_serve.errors import SettingsError
from valora_serve.server.resolving.base import Resolver

_HERE = "valora_serve.server.resolving"
_ANY = "fsspec"
RESOLVERS: Registry[Callable[[str, str], Resolver]] = Registry(
    "valora.resolvers",
    "resolver",
    {
        "file": f"{_HERE}.folder:FolderResolver",
        "hf": f"{_HERE}.hub:HubResolver",
        _ANY: f"{_HERE}.remote:FsspecResolver",
    },
    SettingsError,
)


def make_resolvers(sources: Iterable[str]) -> list[Resolver]:
    """Make the resolver of each location; a scheme that nobody has registered is one of fsspec."""
    made = []
    for source in sources:
        if not source.strip():
            raise SettingsError("adapter_sources has an empty entry: name a folder or a URL")
        scheme, separator, location = source.partition("://")
        if not separator:
            scheme, location = "file", source
        kind = scheme if scheme in RESOLVERS and scheme != _ANY else _ANY
        made.append(RESOLVERS[kind](scheme, location))
    return made
