"""Fusion strategies by name: the built-in ones and those of other installed packages."""

from __future__ import annotations

from valora_data.registry import Registry
from valora_train.errors import SettingsError
from valora_train.fusion.strategies.base import Strategy

_GREEDY = "valora_train.fusion.strategies.greedy"
STRATEGIES: Registry[type[Strategy]] = Registry(
    "valora.strategies",
    "fusion strategy",
    {
        "paper": f"{_GREEDY}:NextFit",
        "first_fit": f"{_GREEDY}:FirstFit",
        "rehearsal": f"{_GREEDY}:Rehearsal",
        "joint": f"{_GREEDY}:Joint",
        "affinity": "valora_train.fusion.strategies.affinity:Affinity",
    },
    SettingsError,
)


def make_strategy(name: str) -> Strategy:
    """The strategy that `fusion.strategy` names."""
    return STRATEGIES[name]()
