"""The strategy that trains all waiting domains at once."""

from __future__ import annotations

from valora_train.fusion.strategies.base import Proposal, Strategy, View, shared_again


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
