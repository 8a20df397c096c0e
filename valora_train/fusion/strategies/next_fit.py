"""The strategy that the paper prints."""

from __future__ import annotations

from typing import TYPE_CHECKING

from valora_train.fusion.strategies.base import Probes, Strategy

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from valora_train.fusion.decision import AttemptDecision


class NextFit(Strategy):
    """Tries only the latest adapter and trains it on the new domain alone (VaLoRA §4.2.1)."""

    def candidates(
        self,
        domain: str,
        adapters: Mapping[str, tuple[str, ...]],
        history: Sequence[AttemptDecision],
        probes: Probes,
    ) -> Sequence[str]:
        """The latest adapter, if there is one."""
        return list(adapters)[-1:]
