"""The strategy that empties an adapter after another strategy has packed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from valora_train.fusion.strategies.base import BuildsOn, Proposal, View, slack

if TYPE_CHECKING:
    from collections.abc import Sequence, Set

MOST_STEPS = 10_000
"""Of looking for room for the domains of one adapter."""


class Repack(BuildsOn):
    """Packs with another strategy (`repack:NAME`), then empties adapters, the emptiest first.

    The domains of an adapter move into the others one by one; every move that is committed keeps
    all bars, so that nothing has to be undone if the adapter cannot be emptied in the end. It is
    left alone if its domains have nowhere to go together: a group around one that failed is not
    tried, and no domain moves twice. What an earlier fusion has packed stays where it is.
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
    failed = [
        decision.accuracy.keys()
        for decision in view.history
        if not view.keeps(decision.accuracy) and len(decision.accuracy) > 1
    ]
    for home in sorted(homes, key=lambda name: len(view.adapters[name])):
        moves = [_moves(view, domain, home, failed) for domain in view.adapters[home]]
        if not all(moves):
            continue
        for found in sorted(moves, key=len):
            for proposal in found:
                if _leads_on(view, home, proposal, failed):
                    return proposal
    return None


def _leads_on(view: View, home: str, move: Proposal, failed: Sequence[Set[str]]) -> bool:
    """Whether the other domains of an adapter have room, too, once one has moved.

    Otherwise the moves before the last one, which is known to fail, would be trained for nothing.
    """
    groups = {name: frozenset(held) for name, held in view.adapters.items() if name != home}
    assert move.adapter is not None
    groups[move.adapter] |= {*move.new}
    rest = [name for name in view.adapters[home] if name not in move.new]
    return _have_room(rest, list(groups.values()), failed, [MOST_STEPS])


def _have_room(
    domains: Sequence[str],
    groups: Sequence[frozenset[str]],
    failed: Sequence[Set[str]],
    left: list[int],
) -> bool:
    """Whether groups can take domains, such that none is around one that failed.

    Args:
        domains: The domains.
        groups: The groups.
        failed: Groups that failed.
        left: Number of steps to go on looking; then there may be room.
    """
    if not domains:
        return True
    for at, group in enumerate(groups):
        left[0] -= 1
        if left[0] < 0:
            return True
        grown = group | {domains[0]}
        if any(part <= grown for part in failed):
            continue
        if _have_room(domains[1:], [*groups[:at], grown, *groups[at + 1 :]], failed, left):
            return True
    return False


def _moves(view: View, domain: str, home: str, failed: Sequence[Set[str]]) -> list[Proposal]:
    """Moves of a domain that are not known to fail, the adapter with the most slack first."""
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
