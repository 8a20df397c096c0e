"""Fusion strategies by name: the built-in ones and those of other installed packages."""

from __future__ import annotations

from valora_data.registry import Registry
from valora_train.errors import SettingsError
from valora_train.fusion.strategies.base import Strategy

STRATEGIES: Registry[type[Strategy]] = Registry(
    "valora.strategies",
    "fusion strategy",
    {
        "paper": "valora_train.fusion.strategies.next_fit:NextFit",
        "first_fit": "valora_train.fusion.strategies.first_fit:FirstFit",
        "rehearsal": "valora_train.fusion.strategies.rehearsal:Rehearsal",
        "joint": "valora_train.fusion.strategies.joint:Joint",
        "affinity": "valora_train.fusion.strategies.affinity:Affinity",
    },
    SettingsError,
)


def make_strategy(name: str) -> Strategy:
    """The strategy that `fusion.strategy` names.

    Raises:
        SettingsError: If there is no strategy of this name, or it cannot be imported.
    """
    return STRATEGIES[name]()
