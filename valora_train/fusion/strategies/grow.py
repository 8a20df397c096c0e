"""The strategy that raises an adapter's rank before it opens another adapter."""

from __future__ import annotations

from valora_train.fusion.strategies.base import BuildsOn, Proposal, View

LARGEST = 256


class Grow(BuildsOn):
    """Packs with another strategy (`grow:NAME`); where it opens one more adapter, one grows first.

    The adapter in which the domains came closest to what all must keep gets twice its rank, which
    leaves what it computes as it is, and the attempt is repeated. Bytes count: an adapter grows
    only by as much as a new one would take.
    """

    def propose(self, view: View) -> Proposal | None:
        """What the inner strategy proposes, or the same in an adapter that grows."""
        proposal = self.inner.propose(view)
        if proposal is None or proposal.adapter is not None or not view.adapters:
            return proposal
        larger = [
            Proposal(proposal.new, name, 2 * rank)
            for name, rank in view.ranks.items()
            if rank <= view.rank and 2 * rank <= LARGEST
        ]
        near = {
            grown: _missing(view, grown)
            for grown in larger
            if view.tries(Proposal(grown.new, grown.adapter)) and not view.failed(grown)
        }
        return min(near, key=lambda grown: near[grown], default=proposal)


def _missing(view: View, grown: Proposal) -> float:
    """By how much the domains missed what they must keep, before the adapter grew."""
    accuracy = view.tries(Proposal(grown.new, grown.adapter))[-1].accuracy
    return sum(max(view.floors[name] - value, 0.0) for name, value in accuracy.items())
