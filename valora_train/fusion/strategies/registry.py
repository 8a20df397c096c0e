"""Fusion strategies by name: the built-in ones and those of other installed packages."""

from __future__ import annotations

from typing import TYPE_CHECKING

from valora_data.registry import Registry
from valora_train.errors import SettingsError
from valora_train.fusion.strategies.base import Options, Strategy

if TYPE_CHECKING:
    from valora_train.fusion.oracle import OracleTable

STRATEGIES: Registry[type[Strategy]] = Registry(
    "valora.strategies",
    "fusion strategy",
    {
        "paper": "valora_train.fusion.strategies.next_fit:NextFit",
        "first_fit": "valora_train.fusion.strategies.first_fit:FirstFit",
        "rehearsal": "valora_train.fusion.strategies.rehearsal:Rehearsal",
        "best_fit": "valora_train.fusion.strategies.best_fit:BestFit",
        "joint": "valora_train.fusion.strategies.joint:Joint",
        "affinity": "valora_train.fusion.strategies.affinity:Affinity",
        "repack": "valora_train.fusion.strategies.repack:Repack",
        "grow": "valora_train.fusion.strategies.grow:Grow",
        "exact": "valora_train.fusion.strategies.exact:Exact",
    },
    SettingsError,
)


def make_strategy(name: str, oracle: OracleTable | None = None, seed: int = 0) -> Strategy:
    """The strategy that `fusion.strategy` names.

    Args:
        name: Name of a strategy; one that builds on another may name it after a colon, such as
            ``repack:best_fit``.
        oracle: The oracle table of the domains (`fusion.oracle`), for strategies that need one.
        seed: Seed of the fusion.

    Raises:
        SettingsError: If there is no strategy of this name, it cannot be imported, or it lacks what
            it needs.
    """
    outer, colon, inner = name.partition(":")
    strategy = STRATEGIES[outer]
    if colon and not strategy.builds_on:
        raise SettingsError(
            f"fusion strategy {outer} builds on no other: remove {colon}{inner} from "
            f"fusion.strategy={name}"
        )

    def make_inner(default: str) -> Strategy:
        return make_strategy(inner or default, oracle, seed)

    return strategy.create(Options(make_inner, oracle, seed))
