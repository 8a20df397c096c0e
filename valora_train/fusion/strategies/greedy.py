"""Strategies that place the waiting domains as they come: one after the other, or all at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from valora_train.fusion.strategies.base import Probes, Proposal, Strategy, View, shared_again

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from valora_train.fusion.decision import AttemptDecision


class FirstFit(Strategy):
    """Tries every open adapter, oldest first, and trains it on the new domain alone."""


class Rehearsal(FirstFit):
    """Tries every open adapter, oldest first; training mixes in samples of the domains it holds."""

    rehearse = True


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


class Joint(Strategy):
    """Trains all waiting domains together into a new adapter.

    Those that miss their bar are left out and packed together next. Where none keeps its bar, the
    half that came closest is tried.
    """

    def propose(self, view: View) -> Proposal | None:
        """All waiting domains, or as many of them as did not fail together."""
        if not view.waiting:
            return shared_again(view)
        group = view.waiting
        while len(group) > 1 and (tries := view.tries(Proposal(group))):
            reached = tries[-1].accuracy
            # NaN, of training that diverged, comes last.
            closest = sorted(group, key=lambda name: -(reached[name] - view.floors[name] or 0.0))
            half = closest[: len(group) // 2]
            group = tuple(name for name in group if name in half)
        return Proposal(group)
