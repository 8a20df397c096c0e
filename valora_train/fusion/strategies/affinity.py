"""The strategy that plans all adapters at once, by what the attempts so far say of every group."""

from __future__ import annotations

from functools import lru_cache
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from valora_train.fusion.strategies.base import Proposal, Strategy
from valora_train.fusion.strategies.expectation import Expectation

if TYPE_CHECKING:
    from collections.abc import Sequence, Set

    from numpy.typing import NDArray

    from valora_train.fusion.strategies.base import View

    Masks = NDArray[np.int64]

MOST_EXACT = 10  # domains; more are tried jointly first, then groups are merged one by one
ADAPTER = 4.0  # an adapter less is worth a packing that is e⁻⁴ times as likely, and the attempts
HOPELESS = 0.03  # a domain that misses its bar by this share of it would miss it beside more, too
ATTEMPTS = 8  # for each domain; then the rest is packed as `rehearsal` does
MOST_STEPS = 10_000  # of looking for room for the domains of one adapter
NEVER = -1e9
DIGITS = 6  # of a chance: equal ones, which rounding would order by the processor, go by order


class Affinity(Strategy):
    """Looks for the packing that most likely keeps every requirement, and tries a group of it.

    What comes out changes the expectation of all other groups, and the packing is planned anew.
    Domains may leave an adapter for another one, so that adapters that others can take over are
    emptied.
    """

    rehearse = True

    def propose(self, view: View) -> Proposal | None:
        """The least certain group of the best packing that no adapter holds yet."""
        if len(view.history) >= ATTEMPTS * len(view.requirements):
            return super().propose(view)
        # What many domains lose to each other in sum cannot be guessed. One attempt says it of all,
        # and places those that lose little.
        if not view.history and not view.adapters and len(view.waiting) > MOST_EXACT:
            return Proposal(view.waiting)
        packing = best_packing(view)
        if not view.waiting and len(packing) >= len(view.adapters):
            return emptying(view)  # which no expectation of groups speaks against
        # If it fails, the packing changes, and nothing was trained in vain for the other groups.
        for group in sorted(packing, key=lambda group: packing[group]):
            if any(group.issubset(held) for held in view.adapters.values()):
                continue
            proposal = grouped(view, group)
            if not view.failed(proposal):
                return proposal
        return Proposal(view.waiting[:1]) if view.waiting else None


def grouped(view: View, group: frozenset[str]) -> Proposal:
    """Add the rest of a group to the largest adapter inside it, or train it from the start."""
    inside = [name for name, held in view.adapters.items() if group.issuperset(held)]
    adapter = max(inside, key=lambda name: len(view.adapters[name]), default=None)
    held = view.adapters[adapter] if adapter else ()
    order = chain(view.waiting, *view.adapters.values())
    return Proposal(tuple(name for name in order if name in group and name not in held), adapter)


def best_packing(view: View) -> dict[frozenset[str], float]:
    """The best groups of all domains, with the logarithm of the chance of each.

    Best is the largest sum of these, less `ADAPTER` for each group.
    """
    mine = {name for decision in view.history for name in decision.attempt.new}
    free = [*view.waiting, *(n for held in view.adapters.values() for n in held if n in mine)]
    # What an earlier fusion packed stays together.
    fixed = [tuple(n for n in held if n not in mine) for held in view.adapters.values()]
    packing = _Packing(free, list(filter(None, fixed)), view)
    names = packing.names
    return packing.exact() if len(names) <= MOST_EXACT else packing.merged()


class _Packing:
    """Finds the best groups of blocks.

    Args:
        free: Domains that may go anywhere.
        fixed: Domains that stay together; no two of these groups are put together.
        view: What is known.

    Attributes:
        names: All domains.
    """

    def __init__(self, free: Sequence[str], fixed: Sequence[tuple[str, ...]], view: View) -> None:
        self.names = names = [*free, *chain.from_iterable(fixed)]
        place = {name: at for at, name in enumerate(names)}
        self._fixed = [sum(1 << place[name] for name in block) for block in fixed]
        self._blocks = [*(1 << place[name] for name in free), *self._fixed]
        self._expectation = Expectation(names, view)
        self._held = [sum(1 << place[name] for name in held) for held in view.adapters.values()]
        # What is missed by more than chance can explain is missed in larger groups, too.
        self._hopeless = [
            sum(1 << place[name] for name in decision.accuracy)
            for decision in view.history
            if place.keys() >= decision.accuracy.keys()
            and len(decision.accuracy) > 1
            and any(
                not value >= view.floors[name] - HOPELESS * view.requirements[name].bar
                for name, value in decision.accuracy.items()
            )
        ]
        self._failed = {
            sum(1 << place[name] for name in decision.accuracy)
            for decision in view.history
            if place.keys() >= decision.accuracy.keys() and not view.keeps(decision.accuracy)
        }

    def _chances(
        self, groups: NDArray[np.int64], expected: NDArray[np.floating[Any]]
    ) -> NDArray[np.floating[Any]]:
        """Logarithms of the chances of groups, given what is expected of them.

        Args:
            groups: Groups as bit masks, (groups,).
            expected: What the model says, (groups,).
        """
        chances = expected.round(DIGITS)
        chances[np.isin(groups, list(self._failed))] = NEVER
        for mask in self._hopeless:
            chances[(groups & mask) == mask] = NEVER
        for held in self._held:  # what is held inside an adapter keeps what it has
            chances[(groups & ~held) == 0] = 0.0
        chances[np.isin(groups, self._blocks)] = 0.0  # a domain alone has no choice
        together = np.zeros(len(groups), dtype=int)
        for block in self._fixed:
            part = groups & block
            together += part != 0
            chances[(part != 0) & (part != block)] = NEVER
        chances[together > 1] = NEVER
        return chances

    def _named(self, mask: int) -> frozenset[str]:
        return frozenset(name for at, name in enumerate(self.names) if mask >> at & 1)

    def exact(self) -> dict[frozenset[str], float]:
        """The best of all packings, by dynamic programming."""
        masks = np.arange(1 << len(self.names))
        chances = self._chances(masks, self._expectation.log_chances_of_all())
        gains = chances - ADAPTER
        best = np.zeros(len(masks))
        for level, firsts, rests, starts in _levels(len(self.names)):
            best[level] = np.maximum.reduceat(gains[firsts] + best[rests], starts)
        packing, rest = {}, len(masks) - 1
        while rest:
            firsts = _first_groups(rest)
            group = int(firsts[(gains[firsts] + best[rest ^ firsts]).argmax()])
            packing[self._named(group)] = float(chances[group])
            rest ^= group
        return packing

    def merged(self) -> dict[frozenset[str], float]:
        """A good packing of many domains: the best two groups are merged, again and again."""
        groups = dict.fromkeys(self._blocks, 0.0)
        known: dict[int, float] = {}
        while len(groups) > 1:
            masks = list(groups)
            pairs = [(one, two) for at, one in enumerate(masks) for two in masks[at + 1 :]]
            fresh = list(dict.fromkeys(one | two for one, two in pairs if one | two not in known))
            places = [[at for at in range(len(self.names)) if mask >> at & 1] for mask in fresh]
            if fresh:
                expected = self._expectation.log_chances(places)
                found = self._chances(np.array(fresh), expected)
                known |= dict(zip(fresh, found.tolist(), strict=True))
            gain, one, two = max(
                (known[one | two] - groups[one] - groups[two], one, two) for one, two in pairs
            )
            if gain <= -ADAPTER:
                break
            del groups[one], groups[two]
            groups[one | two] = known[one | two]
        return {self._named(mask): chance for mask, chance in groups.items()}


@lru_cache(maxsize=1 << MOST_EXACT)
def _first_groups(mask: int) -> Masks:
    """The groups inside a mask that hold its first domain, the largest first."""
    rest = mask & (mask - 1)
    part, groups = rest, []
    while True:
        groups.append(mask ^ part)
        if not part:
            break
        part = (part - 1) & rest
    return np.array(groups, dtype=np.int64)


@lru_cache(maxsize=4)
def _levels(count: int) -> list[tuple[Masks, Masks, Masks, Masks]]:
    """All masks of one, two and more domains, which need only those before.

    Returns:
        For each number of domains: its masks; their groups that hold the first domain, one mask
        after the other; what is left of the mask without the group; where each mask's begin.
    """
    found = []
    for size in range(1, count + 1):
        level = [mask for mask in range(1 << count) if mask.bit_count() == size]
        firsts = [_first_groups(mask) for mask in level]
        rests = [mask ^ groups for mask, groups in zip(level, firsts, strict=True)]
        starts = np.arange(len(level)) << (size - 1)
        found.append((np.array(level), np.concatenate(firsts), np.concatenate(rests), starts))
    return found


def slack(view: View, adapter: str) -> float:
    """The least that any domain of an adapter reaches above what it must keep.

    It is as it was measured last; nothing for an adapter of an earlier fusion.
    """
    for decision in reversed(view.history):
        if decision.attempt.adapter == adapter and decision.kept:
            left = set(decision.kept) & set(view.adapters[adapter])
            return min(decision.accuracy[name] - view.floors[name] for name in left)
    return 0.0


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
