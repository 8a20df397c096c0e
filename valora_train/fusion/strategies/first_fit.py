"""The strategy that looks for room in every adapter."""

from __future__ import annotations

from typing import TYPE_CHECKING

from valora_train.fusion.strategies.base import Probes, Strategy

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from valora_train.fusion.decision import AttemptDecision


class FirstFit(Strategy):
    """Tries every open adapter, oldest first, and trains it on the new domain alone."""

    def candidates(
        self,
        domain: str,
        adapters: Mapping[str, tuple[str, ...]],
        history: Sequence[AttemptDecision],
        probes: Probes,
    ) -> Sequence[str]:
        """Every open adapter, oldest first."""
        return list(adapters)
