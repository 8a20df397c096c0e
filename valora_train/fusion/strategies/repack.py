"""The strategy that empties an adapter after another strategy has packed."""

from __future__ import annotations

from valora_train.fusion.strategies.base import BuildsOn, Proposal, View, slack


class Repack(BuildsOn):
    """Packs with another strategy (`repack:NAME`), then empties adapters, the emptiest first.

    The domains of an adapter move into the others one by one; every move that is committed keeps
    all bars, so that nothing has to be undone if the adapter cannot be emptied in the end. It is
    left alone if one of its domains has nowhere to go: a group around one that failed is not tried,
    and no domain moves twice. What an earlier fusion has packed stays where it is.
    """

    def propose(self, view: View) -> Proposal | None:
        """What the inner strategy proposes; when it has packed all, the next move."""
        if (proposal := self.inner.propose(view)) is not None:
            return proposal
        return emptying(view)


def emptying(view: View) -> Proposal | None:
    """The next move of a domain out of the emptiest adapter that can be emptied; None if none can.

    Args:
        view: What is known; domains may be waiting, and then nothing moves.
    """
    if view.waiting or len(view.adapters) < 2:
        return None
    mine = {name for decision in view.history for name in decision.attempt.new}
    homes = [name for name, held in view.adapters.items() if mine.issuperset(held)]
    for home in sorted(homes, key=lambda name: len(view.adapters[name])):
        moves = [_moves(view, domain, home) for domain in view.adapters[home]]
        if all(moves):
            return min(moves, key=len)[0]
    return None


def _moves(view: View, domain: str, home: str) -> list[Proposal]:
    """Moves of a domain that are not known to fail, the adapter with the most slack first."""
    failed = [
        decision.accuracy.keys()
        for decision in view.history
        if not view.keeps(decision.accuracy) and len(decision.accuracy) > 1
    ]
    moved = {
        name
        for decision in view.history
        for name in decision.attempt.moved
        if name in decision.kept and name not in view.alone
    }
    # A flagged domain may move again, but nothing is packed again as it was before.
    formed = [set(decision.kept) for decision in view.history if decision.kept]
    others = [name for name in view.adapters if name != home and domain not in moved]
    return [
        Proposal((domain,), other)
        for other in sorted(others, key=lambda name: -slack(view, name))
        if (group := {domain, *view.adapters[other]}) not in formed
        and not any(part <= group for part in failed)
        and not view.failed(Proposal((domain,), other))
    ]
