"""Fusion strategies by name: the built-in ones and those of other installed packages."""

from __future__ import annotations

from valora_data.registry import Registry
from valora_train.errors import SettingsError
from valora_train.fusion.strategies.base import Strategy

_BASE = "valora_train.fusion.strategies.base"
STRATEGIES: Registry[type[Strategy]] = Registry(
    "valora.strategies",
    "fusion strategy",
    {
        "paper": f"{_BASE}:NextFit",
        "first_fit": f"{_BASE}:FirstFit",
        "rehearsal": f"{_BASE}:Rehearsal",
        "joint": f"{_BASE}:Joint",
        "affinity": "valora_train.fusion.strategies.affinity:Affinity",
    },
    SettingsError,
)


def make_strategy(name: str) -> Strategy:
    """The strategy that `fusion.strategy` names."""
    return STRATEGIES[name]()
