"""The arrangements: the built-in ones, and those that other packages register."""

from __future__ import annotations

from functools import cache

from valora_kernels.arrangements.base import Arrangement
from valora_kernels.registry import Registry, UnknownNameError

ARRANGEMENTS: Registry[type[Arrangement]] = Registry(
    "valora.arrangements",
    "arrangement",
    {
        "shrink_expand": "valora_kernels.arrangements.shrink_expand:ShrinkExpand",
        "fused": "valora_kernels.arrangements.fused:Fused",
        "dense": "valora_kernels.arrangements.dense:Dense",
    },
)


@cache
def arrangement(name: str) -> Arrangement:
    """The arrangement of a name; the same instance every time.

    Raises:
        UnknownNameError: The name is not registered, or the class registered under it says that
            its name is another.
    """
    found = ARRANGEMENTS[name]
    if found.name != name:
        raise UnknownNameError(
            f"arrangement {name!r} is registered with a class whose name is {found.name!r}: "
            "register it under that name"
        )
    return found()
