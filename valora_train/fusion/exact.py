"""The fewest adapters, proved: exactly from an oracle table, as a lower bound from failed groups.

`exact_packing` solves the exact set partition by dynamic programming over groups; an adapter may be
trained with a domain that helps those that it holds, and is held elsewhere. `lower_bound` needs no
table: it proves from groups that were shown infeasible (pairs, triples or larger ones) that no
packing takes fewer adapters, provided that a domain more never helps the others; groups of which
the opposite is known prove nothing.
"""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from valora_train.fusion.oracle import OracleTable
    from valora_train.fusion.requirement import Requirement


@dataclass(frozen=True)
class Optimum:
    """A packing that takes the fewest adapters.

    Attributes:
        packing: The domains of each adapter.
        trained: The domains that each of these adapters is trained with: those that it holds, and,
            only where these miss their bars otherwise, others that it does not serve.
        head_only: Domains that take no adapter.
        unreachable: Domains that miss their bar even alone.
        slack: The least that any packed domain reaches above what it must keep; infinite without
            adapters.
    """

    packing: tuple[tuple[str, ...], ...]
    trained: tuple[tuple[str, ...], ...]
    head_only: tuple[str, ...]
    unreachable: tuple[str, ...]
    slack: float


def exact_packing(
    table: OracleTable,
    requirements: Mapping[str, Requirement],
    seed: int,
    *,
    head_only: bool = True,
) -> Optimum:
    """The fewest adapters in which every domain keeps what it must, by the validation split.

    The rules are those of `FusionPlan`: a domain that keeps its bar without LoRA takes no adapter
    (unless `head_only` is false). One that misses it even alone must keep what it reached alone,
    less the margin; if that is no more than without LoRA, it takes no adapter either. An adapter
    may be trained with further domains that it does not hold then, where that saves an adapter.
    Nothing is assumed about how accuracies change from group to group. Among the packings with the
    fewest adapters, one with the largest `slack` is chosen.

    Args:
        table: A complete oracle table.
        requirements: What each domain must reach; may name some of the table's domains.
        seed: One of the table's seeds.
        head_only: Whether domains may take no adapter.
    """
    alone = {name: table.reached(seed, (name,))[name].val for name in requirements}
    without = {name: one.val for name, one in table.head_only(seed).items()}
    enough = [
        name
        for name, requirement in requirements.items()
        if head_only and name in without and requirement.met_by(without[name])
    ]
    unreachable = [
        name
        for name, requirement in requirements.items()
        if name not in enough and not requirement.met_by(alone[name])
    ]
    # Training that diverges even alone leaves nothing to keep.
    useless = [
        name
        for name in unreachable
        if math.isnan(alone[name])
        or (head_only and name in without and not alone[name] > without[name])
    ]
    spared = [name for name in requirements if name in enough or name in useless]
    names = [name for name in requirements if name not in spared]
    floors = {
        name: requirements[name].kept_from(
            alone[name] if name in unreachable else None, without.get(name) if head_only else None
        )
        for name in names
    }

    trainings = _Trainings(
        [*names, *useless],  # these may help others
        lambda group: {
            name: one.val - floors[name] if name in floors else math.nan
            for name, one in table.reached(seed, group).items()
        },
    )
    packing, least = fewest_groups(names, trainings.alone)
    helped, helped_least = fewest_groups(names, lambda group: trainings.best(group)[0])
    if len(helped) < len(packing):
        packing, least = helped, helped_least
    trained = tuple(trainings.best(group)[1] for group in packing)
    return Optimum(packing, trained, tuple(spared), tuple(unreachable), least)


class _Trainings:
    """The best way to train an adapter that holds a group.

    Args:
        names: All domains that an adapter may be trained with.
        spare: By how much each domain of a group that is trained together is above what it must
            keep; NaN for a domain that no adapter holds.
    """

    def __init__(
        self, names: Sequence[str], spare: Callable[[tuple[str, ...]], Mapping[str, float]]
    ) -> None:
        self._names = names
        self._place = {name: bit for bit, name in enumerate(names)}
        self._spare = {mask: spare(self._group(mask)) for mask in range(1, 1 << len(names))}

    def _group(self, mask: int) -> tuple[str, ...]:
        return tuple(self._names[bit] for bit in _bits(mask))

    def alone(self, group: tuple[str, ...]) -> float | None:
        """The least that a domain of the group has to spare, trained with no other."""
        return self._least(group, self._mask(group))

    def best(self, group: tuple[str, ...]) -> tuple[float | None, tuple[str, ...]]:
        """The least that a domain of the group has to spare, and the domains to train with.

        That is the group itself if all of its domains keep their bars so; otherwise the larger
        group in which they have most to spare. None if there is none.
        """
        held = self._mask(group)
        least = self._least(group, held)
        if least is not None:
            return least, group
        others = (1 << len(self._names)) - 1 & ~held
        best: tuple[float | None, tuple[str, ...]] = (None, group)
        more = others
        while more:
            least = self._least(group, held | more)
            if least is not None and (best[0] is None or least > best[0]):
                best = least, self._group(held | more)
            more = (more - 1) & others
        return best

    def _mask(self, group: tuple[str, ...]) -> int:
        return sum(1 << self._place[name] for name in group)

    def _least(self, group: tuple[str, ...], trained: int) -> float | None:
        spare = self._spare[trained]
        found = [spare[name] for name in group]
        return min(found) if all(one >= 0 for one in found) else None


def fewest_groups(
    names: Sequence[str], slack: Callable[[tuple[str, ...]], float | None]
) -> tuple[tuple[tuple[str, ...], ...], float]:
    """Partition names into the fewest feasible groups.

    Args:
        names: The names, at most about a dozen: time grows as 3 to their number.
        slack: Says by how much a group is feasible; None for infeasible groups. Every name alone
            must be feasible.

    Returns:
        The groups, each in the order of `names`, and the least slack among them, which is the
        largest that the fewest groups allow.

    Raises:
        ValueError: If there is no such partition.
    """
    count = len(names)
    # Feasible groups by their first name, as bit masks with their slack.
    by_first: list[list[tuple[int, float]]] = [[] for _ in names]
    for mask in range(1, 1 << count):
        group = tuple(name for bit, name in enumerate(names) if mask >> bit & 1)
        found = slack(group)
        if found is not None:
            by_first[(mask & -mask).bit_length() - 1].append((mask, found))
    best: dict[int, tuple[int, float, int]] = {0: (0, math.inf, 0)}

    def solve(mask: int) -> tuple[int, float, int]:
        """Fewest groups of `mask`, their least slack (negated ties last), and the first group."""
        if mask not in best:
            found = (count + 1, -math.inf, 0)
            for group, spare in by_first[(mask & -mask).bit_length() - 1]:
                if group & ~mask:
                    continue
                groups, least, _ = solve(mask ^ group)
                candidate = (groups + 1, min(least, spare), group)
                if (candidate[0], -candidate[1]) < (found[0], -found[1]):
                    found = candidate
            best[mask] = found
        return best[mask]

    groups, least, _ = solve((1 << count) - 1)
    if groups > count:
        raise ValueError("expected every name alone to be feasible")
    packing, mask = [], (1 << count) - 1
    while mask:
        first = best[mask][2]
        packing.append(tuple(name for bit, name in enumerate(names) if first >> bit & 1))
        mask ^= first
    return tuple(packing), least


@dataclass(frozen=True)
class Bound:
    """A lower bound on the number of adapters.

    Attributes:
        adapters: No packing takes fewer adapters.
        proof: Why, in one sentence for people.
        exact: Whether a packing into this many groups breaks none of the known conflicts, so that
            these conflicts cannot prove more.
    """

    adapters: int
    proof: str
    exact: bool


def lower_bound(
    domains: Sequence[str],
    infeasible: Iterable[Iterable[str]],
    feasible: Iterable[Iterable[str]] = (),
    effort: int = 200_000,
) -> Bound:
    """Prove from groups that failed how many adapters are needed at least.

    A packing may contain none of the infeasible groups, nor any larger group around one, if a
    domain more never helps the others. Where a larger group is known whose domains all keep their
    bars, it did help (or noise decided), and the smaller one proves nothing. The bound is the
    largest of: a clique of domains that fail in pairs; the sum over domains of 1 / (largest group
    that the domain may be in); and one more than the largest number of adapters for which a
    complete search finds no packing.

    Args:
        domains: The domains that need an adapter.
        infeasible: Groups of at least two domains that were shown infeasible.
        feasible: Groups whose domains all keep their bars.
        effort: Most steps of the search; when they are spent, what is proved so far is returned.
    """
    place = {name: bit for bit, name in enumerate(domains)}

    def masks(groups: Iterable[Iterable[str]]) -> set[int]:
        return {
            sum(1 << place[name] for name in group)
            for group in map(set, groups)
            if len(group) >= 2 and group <= set(place)
        }

    kept = masks(feasible)
    valid = [one for one in masks(infeasible) if not any(one & group == one for group in kept)]
    conflicts = _Conflicts(len(domains), valid, effort)
    if not domains:
        return Bound(0, "no domain needs an adapter", exact=True)
    clique = conflicts.clique()
    names = ", ".join(name for bit, name in enumerate(domains) if clique >> bit & 1)
    bound = max(clique.bit_count(), 1)
    proof = f"no two of {names} can share an adapter" if bound > 1 else "a domain needs an adapter"
    if (by_size := conflicts.by_size()) > bound:
        bound = by_size
        proof = f"groups that break no known conflict are too small for fewer than {bound} adapters"
    while bound < len(domains):
        found = conflicts.fits(bound)
        if found is None:
            return Bound(bound, f"{proof} (search ended after {effort:,} steps)", exact=False)
        if found:
            break
        bound += 1
        proof = f"a complete search finds no packing into {bound - 1} that breaks no known conflict"
    return Bound(bound, proof, exact=True)


class _SpentError(Exception):
    """The steps of a search are spent."""


class _Conflicts:
    """Groups, as bit masks, that may be part of no adapter."""

    def __init__(self, count: int, masks: Sequence[int], effort: int) -> None:
        # A group around another one says nothing more.
        smallest: list[int] = []
        for mask in sorted(masks, key=int.bit_count):
            if not any(mask & small == small for small in smallest):
                smallest.append(mask)
        self._count, self._effort = count, effort
        self._of = [[m for m in smallest if m >> bit & 1] for bit in range(count)]
        self._pairs = [
            sum({m ^ (1 << bit) for m in of if m.bit_count() == 2})
            for bit, of in enumerate(self._of)
        ]
        self._steps = 0

    def _step(self) -> None:
        self._steps += 1
        if self._steps > self._effort:
            raise _SpentError

    def _allowed(self, group: int, bit: int) -> bool:
        """Whether a domain may join a group that breaks no conflict."""
        if self._pairs[bit] & group:
            return False
        larger = group | 1 << bit
        return not any(mask & larger == mask for mask in self._of[bit])

    def clique(self) -> int:
        """The largest set of domains that fail in pairs, or the largest that was found in time."""
        self._steps, best = 0, 0

        def extend(chosen: int, rest: int) -> None:
            nonlocal best
            self._step()
            if chosen.bit_count() > best.bit_count():
                best = chosen
            while rest and chosen.bit_count() + rest.bit_count() > best.bit_count():
                bit = max(_bits(rest), key=lambda bit: (self._pairs[bit] & rest).bit_count())
                rest ^= 1 << bit
                extend(chosen | 1 << bit, rest & self._pairs[bit])

        with suppress(_SpentError):
            extend(0, (1 << self._count) - 1)
        return best

    def by_size(self) -> int:
        """Bound by the sum of 1 / (largest group around each domain), which is ≤ 1 per adapter."""
        total = sum(1 / self._largest_with(bit) for bit in range(self._count))
        return math.ceil(total - 1e-9)

    def _largest_with(self, first: int) -> int:
        """Size of the largest group around a domain; more than that if the steps are spent."""
        self._steps, best = self._effort - self._effort // self._count, 1
        rest = [
            bit for bit in range(self._count) if bit != first and self._allowed(1 << first, bit)
        ]

        def extend(group: int, rest: list[int]) -> None:
            nonlocal best
            self._step()
            best = max(best, group.bit_count())
            for at, bit in enumerate(rest):
                if group.bit_count() + len(rest) - at <= best:
                    return
                larger = group | 1 << bit
                extend(larger, [one for one in rest[at + 1 :] if self._allowed(larger, one)])

        try:
            extend(1 << first, rest)
        except _SpentError:
            return 1 + len(rest)
        return best

    def fits(self, adapters: int) -> bool | None:
        """Whether a packing into so many groups breaks no conflict; None if the steps are spent."""
        self._steps = 0
        groups = [0] * adapters

        def place(rest: int) -> bool:
            self._step()
            if not rest:
                return True
            used = sum(1 for group in groups if group)
            hardest, ways = -1, list[int]()
            for bit in _bits(rest):  # the domain with the fewest groups left, then most conflicts
                found = [
                    at
                    for at in range(min(used + 1, adapters))  # empty groups are alike
                    if self._allowed(groups[at], bit)
                ]
                key = (len(found), -len(self._of[bit]))
                if hardest < 0 or key < (len(ways), -len(self._of[hardest])):
                    hardest, ways = bit, found
                if not found:
                    return False
            for at in ways:
                groups[at] |= 1 << hardest
                if place(rest ^ (1 << hardest)):
                    return True
                groups[at] ^= 1 << hardest
            return False

        try:
            return place((1 << self._count) - 1)
        except _SpentError:
            return None


def _bits(mask: int) -> list[int]:
    return [bit for bit in range(mask.bit_length()) if mask >> bit & 1]
