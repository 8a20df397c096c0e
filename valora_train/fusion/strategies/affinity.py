"""The strategy that plans all adapters at once, by what the attempts so far say of every group.

What a domain reaches is modelled as Gaussian: something alone, less what it loses to every domain
beside it, a sum of parts that are shared by all, of the loser, of the other, and of the pair. Every
measured accuracy says something of all parts, and so of groups that were never tried.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence, Set
from functools import lru_cache
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from valora_train.fusion.strategies.base import Proposal, Strategy, View

Array = NDArray[np.floating[Any]]
Masks = NDArray[np.int64]  # groups of domains as bit masks

MAX_EXACT = 10  # domains; more are tried jointly first, then groups are merged one by one
ADAPTER = 4.0  # an adapter less is worth a packing that is e⁻⁴ times as likely, and the attempts
HOPELESS = 0.03  # who misses its target by this share of it would miss it beside more, too
ATTEMPTS = 8  # for each domain; then the rest is packed as `rehearsal` does
MAX_STEPS = 10_000  # of looking for room for the domains of one adapter
NEVER = -1e9
DIGITS = 6  # of a chance: equal ones, which rounding would order by the processor, go by order
# Before anything was measured, as shares of a domain's target: mean and standard deviation.
ALONE = (1.03, 0.05)
LOST = (0.012, 0.010)  # to each domain beside it
OWN, OTHERS, PAIR = 0.010, 0.010, 0.025  # deviations of one that loses, of one lost to, of a pair
NOISE = 0.006
FARTHEST = 0.08  # more than this from what it must keep, an accuracy says no more


class Affinity(Strategy):
    """Tries a group of the packing that most likely keeps all, plans anew, empties adapters."""

    rehearse = True

    def propose(self, view: View) -> Proposal | None:
        """The least certain group of the best packing that no adapter holds yet."""
        if len(view.history) >= ATTEMPTS * len(view.requirements):
            return super().propose(view)
        # What many domains lose to each other in sum cannot be guessed. One attempt says it of all,
        # and places those that lose little.
        if not view.history and not view.adapters and len(view.waiting) > MAX_EXACT:
            return Proposal(view.waiting)
        packing = best_packing(view)
        if not view.waiting and len(packing) >= len(view.adapters):
            return emptying(view)  # which no expectation of groups speaks against
        # If it fails, the packing changes, and nothing was trained in vain for the other groups.
        for group in sorted(packing, key=lambda group: packing[group]):
            if any(group.issubset(held) for held in view.adapters.values()):
                continue
            if not view.failed(proposal := _grouped(view, group)):
                return proposal
        return Proposal(view.waiting[:1]) if view.waiting else None


def _grouped(view: View, group: frozenset[str]) -> Proposal:
    """Add the rest of a group to the largest adapter inside it, or train it from the start."""
    inside = [name for name, held in view.adapters.items() if group.issuperset(held)]
    adapter = max(inside, key=lambda name: len(view.adapters[name]), default=None)
    held = view.adapters[adapter] if adapter else ()
    order = chain(view.waiting, *view.adapters.values())
    return Proposal(tuple(name for name in order if name in group and name not in held), adapter)


def best_packing(view: View) -> dict[frozenset[str], float]:
    """The groups with the largest sum of log-chances, less `ADAPTER` for each, and these."""
    mine = {name for decision in view.history for name in decision.attempt.new}
    free = [*view.waiting, *(n for held in view.adapters.values() for n in held if n in mine)]
    # What an earlier fusion packed stays together.
    fixed = [tuple(n for n in held if n not in mine) for held in view.adapters.values()]
    fixed = list(filter(None, fixed))
    names = [*free, *chain.from_iterable(fixed)]
    chances = _Chances(names, fixed, view)
    found = _exact(chances) if len(names) <= MAX_EXACT else _merged(chances, len(free))
    return {
        frozenset(name for at, name in enumerate(names) if mask >> at & 1): chance
        for mask, chance in found.items()
    }


class _Chances:
    """Logarithms of chances that groups (masks of `names`) keep all; `fixed` stay apart."""

    def __init__(self, names: Sequence[str], fixed: Sequence[tuple[str, ...]], view: View) -> None:
        self.count = len(names)
        self._place = {name: at for at, name in enumerate(names)}
        self.fixed = [self._mask(block) for block in fixed]
        self._held = [self._mask(held) for held in view.adapters.values()]
        tried = [one for one in view.history if self._place.keys() >= one.accuracy.keys()]
        self._failed = [self._mask(d.accuracy) for d in tried if not view.keeps(d.accuracy)]
        # What is missed by more than chance can explain is missed in larger groups, too.
        self._hopeless = [
            self._mask(decision.accuracy)
            for decision in tried
            if len(decision.accuracy) > 1
            and any(
                not value >= view.floors[name] - HOPELESS * view.requirements[name].target
                for name, value in decision.accuracy.items()
            )
        ]
        targets = np.array([view.requirements[name].target for name in names])
        self._floors = np.array([view.floors[name] for name in names]) / targets
        sizes = (self.count, 1, self.count, self.count, self.count**2)  # as in `_features`
        self._means = np.repeat((ALONE[0], LOST[0], 0.0, 0.0, 0.0), sizes)
        self._deviations = np.repeat((ALONE[1], LOST[1], OWN, OTHERS, PAIR), sizes)
        points, values = [], []
        for decision in view.history:
            group = tuple(self._place[name] for name in decision.accuracy if name in self._place)
            for at in group:
                accuracy = decision.accuracy[names[at]]
                value = 0.0 if math.isnan(accuracy) else accuracy / targets[at]
                low, high = self._floors[at] - FARTHEST, self._floors[at] + FARTHEST
                points.append((at, group))
                values.append(min(max(value, low), high))
        known = _features(self.count, tuple(points))
        self._known = known * self._deviations
        covariance = self._known @ self._known.T + NOISE**2 * np.eye(len(points))
        self._factor = np.linalg.cholesky(covariance)
        self._residual = _solve(self._factor, np.array(values) - known @ self._means)

    def _mask(self, names: Iterable[str]) -> int:
        return sum(1 << self._place[name] for name in names)

    def of(self, groups: Masks) -> Array:
        """The logarithms of the chances of groups."""
        chances = self._expected(groups).round(DIGITS)
        chances[np.isin(groups, self._failed)] = NEVER
        for mask in self._hopeless:
            chances[(groups & mask) == mask] = NEVER
        for held in self._held:  # what is held inside an adapter keeps what it has
            chances[(groups & ~held) == 0] = 0.0
        chances[np.isin(groups, [*(1 << at for at in range(self.count)), *self.fixed])] = 0.0
        together = np.zeros(len(groups), dtype=int)
        for block in self.fixed:
            part = groups & block
            together += part != 0
            chances[(part != 0) & (part != block)] = NEVER
        chances[together > 1] = NEVER
        return chances

    def _expected(self, groups: Masks) -> Array:
        """The chances by the model: a product over the domains of each group."""
        ats = range(self.count)
        places = [tuple(at for at in ats if mask >> at & 1) for mask in groups.tolist()]
        features = _features(self.count, tuple((at, group) for group in places for at in group))
        mean, scaled = features @ self._means, features * self._deviations
        variance = (scaled**2).sum(axis=1)
        if len(self._known):
            cross = _solve(self._factor, self._known @ scaled.T)
            mean = mean + cross.T @ self._residual
            variance = variance - (cross**2).sum(axis=0)
        deviation = np.sqrt(np.maximum(variance, 0.0) + NOISE**2)
        z = (mean - self._floors[list(chain.from_iterable(places))]) / deviation
        each = -np.logaddexp(0.0, -1.702 * z)  # the normal distribution's, within 0.01
        row = np.repeat(np.arange(len(groups)), [len(group) for group in places])
        return np.bincount(row, each, len(groups)).astype(np.float64)


def _solve(factor: Array, right: Array) -> Array:
    return np.linalg.solve(factor, right) if len(factor) else right


@lru_cache(maxsize=4)
def _features(count: int, rows: tuple[tuple[int, tuple[int, ...]], ...]) -> Array:
    """One row for each domain in its group: alone, shared, own, others', and pairs' parts."""
    alone, beside = np.zeros((len(rows), count)), np.zeros((len(rows), count))
    line, places = np.arange(len(rows)), np.array([at for at, _ in rows], dtype=int)
    alone[line, places] = 1.0
    for row, (_, group) in enumerate(rows):
        beside[row, list(group)] = 1.0
    beside[line, places] = 0.0
    many = beside.sum(axis=1, keepdims=True)
    pairs = (alone[:, :, None] * beside[:, None, :]).reshape(len(rows), count * count)
    return np.concatenate([alone, -many, -alone * many, -beside, -pairs], axis=1)


def _exact(chances: _Chances) -> dict[int, float]:
    """The best of all packings, by dynamic programming."""
    found = chances.of(np.arange(1 << chances.count)).tolist()
    best, choice = [0.0] * len(found), [0] * len(found)
    for mask in range(1, len(found)):
        rest = part = mask & (mask - 1)  # without the first domain, whose group is chosen
        best[mask] = -math.inf
        while True:
            value = found[mask ^ part] - ADAPTER + best[part]
            if value > best[mask]:
                best[mask], choice[mask] = value, mask ^ part
            if not part:
                break
            part = (part - 1) & rest
    packing, rest = {}, len(found) - 1
    while rest:
        packing[choice[rest]] = found[choice[rest]]
        rest ^= choice[rest]
    return packing


def _merged(chances: _Chances, free: int) -> dict[int, float]:
    """A good packing of many domains: the best two groups are merged, again and again."""
    groups = dict.fromkeys([*(1 << at for at in range(free)), *chances.fixed], 0.0)
    known: dict[int, float] = {}
    while len(groups) > 1:
        masks = list(groups)
        pairs = [(one, two) for at, one in enumerate(masks) for two in masks[at + 1 :]]
        fresh = list(dict.fromkeys(one | two for one, two in pairs if one | two not in known))
        if fresh:
            known |= dict(zip(fresh, chances.of(np.array(fresh)).tolist(), strict=True))
        gain, one, two = max(
            (known[one | two] - groups[one] - groups[two], one, two) for one, two in pairs
        )
        if gain <= -ADAPTER:
            break
        del groups[one], groups[two]
        groups[one | two] = known[one | two]
    return groups


def slack(view: View, adapter: str) -> float:
    """The least that any domain of an adapter had to spare last; 0 for an earlier fusion's."""
    for decision in reversed(view.history):
        if decision.attempt.adapter == adapter and decision.kept:
            left = set(decision.kept) & set(view.adapters[adapter])
            return min(decision.accuracy[name] - view.floors[name] for name in left)
    return 0.0


def emptying(view: View) -> Proposal | None:
    """The next move of a domain out of the emptiest adapter that can be emptied, if any."""
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
        moves.sort(key=len)
        for proposal in chain.from_iterable(moves if all(moves) else ()):
            # Otherwise the moves before one that is known to fail would be trained for nothing.
            groups = [
                frozenset(held) | frozenset(proposal.new if name == proposal.adapter else ())
                for name, held in view.adapters.items()
                if name != home
            ]
            rest = [name for name in view.adapters[home] if name not in proposal.new]
            if _have_room(rest, groups, failed, [MAX_STEPS]):
                return proposal
    return None


def _have_room(
    domains: Sequence[str],
    groups: Sequence[frozenset[str]],
    failed: Sequence[Set[str]],
    left: list[int],
) -> bool:
    """Whether groups can take domains, none around one that failed; maybe, after `left` steps."""
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
