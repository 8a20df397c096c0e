"""Oracle tables: what every domain reaches in every group, and the packing that takes the fewest.

A table holds, for each seed and each group of a task's domains, the accuracy of every domain of the
group in an adapter that is trained on all of them. `oracles/` has those of the built-in tasks.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

from valora_train.fusion.plan import FusionPlan, order_domains
from valora_train.fusion.requirement import Requirement, dedicated_requirement
from valora_train.fusion.strategies.base import Probe, Strategy

ORACLES = Path(__file__).parent / "oracles"


class Measured(NamedTuple):
    """Accuracy of a domain on the validation and on the test split; NaN if training diverged."""

    val: float
    test: float


@dataclass
class OracleTable:
    """Accuracies of the domains of a task in every group of them, by seed."""

    task: str
    domains: list[str]
    largest: dict[str, float]  # value of each domain's metric
    teacher: dict[str, Measured] = field(default_factory=dict)
    head_only: dict[int, dict[str, Measured]] = field(default_factory=dict)
    groups: dict[int, dict[frozenset[str], dict[str, Measured]]] = field(default_factory=dict)

    @property
    def seeds(self) -> list[int]:
        """Seeds that the table is made for."""
        return list(self.groups)

    def names(self) -> Iterator[tuple[str, ...]]:
        """Every group, the small ones first."""
        for size in range(1, len(self.domains) + 1):
            yield from combinations(self.domains, size)

    def reached(self, seed: int, group: Collection[str]) -> dict[str, Measured]:
        """What the domains of a group reach together."""
        return self.groups[seed][frozenset(group)]

    def alone(self, seed: int, name: str) -> Measured:
        """What a domain reaches in an adapter of its own."""
        return self.reached(seed, [name])[name]

    @classmethod
    def read(cls, file: Path) -> OracleTable:
        """Read a table."""
        value = json.loads(file.read_text(encoding="utf-8"))
        return cls(
            value["task"], value["domains"], value["largest"], _measured(value["teacher"]),
            {int(seed): _measured(found) for seed, found in value["head_only"].items()},
            {
                int(seed): {frozenset(name.split(",")): _measured(one) for name, one in of.items()}
                for seed, of in value["groups"].items()
            },
        )  # fmt: skip

    def write(self, file: Path, **facts: Any) -> None:
        """Write the table with further facts, such as what was trained on which machine."""
        groups = {
            seed: {",".join(name): self.reached(seed, name) for name in self.names()}
            for seed in self.seeds
        }
        file.write_text(json.dumps(facts | vars(self) | {"groups": groups}, indent=1) + "\n")


def _measured(found: Mapping[str, Sequence[float]]) -> dict[str, Measured]:
    return {name: Measured(*pair) for name, pair in found.items()}


# --- the fewest adapters --------------------------------------------------------------------------


@dataclass(frozen=True)
class Packed:
    """A packing, by a strategy or the best one.

    Attributes:
        packing: The domains of each adapter; all others take none.
        trained: The domains that each of these adapters is trained with: its own, and others that
            help them or have left it.
        unreachable: Domains that miss their target even alone.
        attempts: Number of attempts, of which `rolled_back` were rolled back.
    """

    packing: list[tuple[str, ...]]
    trained: list[tuple[str, ...]]
    unreachable: tuple[str, ...] = ()
    attempts: int = 0
    rolled_back: int = 0


def exact_packing(
    table: OracleTable, asked: Mapping[str, Requirement], seed: int, head_only: bool = True
) -> Packed:
    """The fewest adapters in which every domain keeps what it must, by the validation split.

    The rules are those of `FusionPlan`. An adapter may be trained with further domains that it does
    not hold then, where that saves an adapter. Nothing is assumed about how accuracies change from
    group to group. Among the packings with the fewest adapters, one is chosen in which the domain
    that is closest to its target has most to spare.
    """
    floors, missed, useless = floors_of(table, asked, seed, head_only)
    names = [*floors, *useless]  # these take no adapter, and may help
    held, everything = (1 << len(floors)) - 1, (1 << len(names)) - 1
    spare: dict[int, dict[str, float]] = {}
    for mask in range(1, everything + 1):
        reached = table.reached(seed, _named(names, mask))
        spare[mask] = {n: one.val - floors[n] for n, one in reached.items() if n in floors}

    def least(group: int, trained: int) -> float:
        found = [spare[trained][name] for name in _named(names, group)]
        return min(found) if all(one >= 0 for one in found) else -math.inf

    by_itself = {group: (least(group, group), group) for group in range(1, held + 1)}
    helped = dict(by_itself)
    for group in range(1, held + 1):
        more = others = everything & ~group
        while more and by_itself[group][0] < 0:
            helped[group] = max(helped[group], (least(group, group | more), group | more))
            more = (more - 1) & others
    groups = min(_fewest(held, by_itself), _fewest(held, helped), key=len)
    of = by_itself if all(by_itself[group][0] >= 0 for group in groups) else helped
    return Packed(
        [_named(names, group) for group in groups],
        [_named(names, of[group][1]) for group in groups],
        missed,
    )


def floors_of(
    table: OracleTable, asked: Mapping[str, Requirement], seed: int, head_only: bool = True
) -> tuple[dict[str, float], tuple[str, ...], list[str]]:
    """What domains that need an adapter must keep on validation, as `FusionPlan` decides it.

    Returns:
        That; the domains that miss their target even alone; those that gain nothing by LoRA.
    """
    without = {name: found.val for name, found in table.head_only[seed].items()}
    alone = {name: table.alone(seed, name).val for name in asked}
    rest = [name for name in asked if not (head_only and asked[name].met_by(without[name]))]
    missed = tuple(name for name in rest if not asked[name].met_by(alone[name]))
    useless = [
        name
        for name in missed
        if math.isnan(alone[name]) or (head_only and alone[name] <= without[name])
    ]
    floors = {
        name: asked[name].kept_from(
            alone[name] if name in missed else None, without[name] if head_only else None
        )
        for name in rest
        if name not in useless
    }
    return floors, missed, useless


def _named(names: Sequence[str], mask: int) -> tuple[str, ...]:
    return tuple(name for bit, name in enumerate(names) if mask >> bit & 1)


def _fewest(everything: int, spare: Mapping[int, tuple[float, int]]) -> list[int]:
    """Partition a mask into the fewest groups that have something to spare, by dynamic programming.

    Args:
        everything: The mask.
        spare: What each group has to spare, negative if it misses something.
    """
    best = {0: (0, -math.inf, 0)}  # number of groups, what they have to spare (negated), the first
    for mask in range(1, everything + 1):
        found = (everything.bit_length() + 1, math.inf, 0)
        part = mask
        while part:
            if part & mask & -mask and spare[part][0] >= 0:
                count, least, _ = best[mask ^ part]
                found = min(found, (count + 1, max(least, -spare[part][0]), part))
            part = (part - 1) & mask
        best[mask] = found
    groups = []
    while everything:
        groups.append(best[everything][2])
        everything ^= groups[-1]
    return groups


def lower_bound(
    domains: Sequence[str], failed: Sequence[Collection[str]], kept: Sequence[Collection[str]] = ()
) -> int:
    """The fewest adapters that hold no group that failed, by a complete search.

    That bounds any packing, provided that a domain more never helps the others: a group that failed
    proves nothing where a larger one is known whose domains all keep their bars.
    """
    conflicts = [set(one) for one in failed if not any(set(one) <= set(more) for more in kept)]

    def fit(rest: Sequence[str], groups: list[set[str]]) -> bool:
        if not rest:
            return True
        for at, group in enumerate(groups):
            grown = group | {rest[0]}
            if any(one <= grown for one in conflicts):
                continue
            if fit(rest[1:], [*groups[:at], grown, *groups[at + 1 :]]):
                return True
            if not group:  # empty adapters are alike
                break
        return False

    order = sorted(domains, key=lambda name: -sum(name in one for one in conflicts))
    return next(count for count in range(len(order) + 1) if fit(order, [set()] * count))


# --- strategies -----------------------------------------------------------------------------------


def replay(
    strategy: Strategy,
    table: OracleTable,
    asked: Mapping[str, Requirement],
    seed: int,
    head_only: bool = True,
    order: str = "given",
) -> Packed:
    """Pack domains with a strategy, with accuracies from a table instead of training.

    An attempt reaches what the table says of the group that the adapter would then hold, trained
    together from scratch: that approximates attempts that go on from an adapter.
    """
    without = table.head_only[seed]
    probes = {name: Probe(one.required, without[name].val) for name, one in asked.items()}
    names = order_domains(list(asked), order, seed, probes)
    plan = FusionPlan(
        {name: asked[name] for name in names}, strategy, probes=probes, head_only=head_only
    )
    while (attempt := plan.next()) is not None:
        reached = table.reached(seed, attempt.domains)
        plan.tell({name: reached[name].val for name in attempt.domains})
    trained = {one.attempt.adapter: one.attempt.domains for one in plan.decisions if one.kept}
    return Packed(
        list(plan.packing.values()),
        [trained[adapter] for adapter in plan.packing],
        tuple(plan.unreachable),
        len(plan.decisions),
        sum(one.verdict == "rolled back" for one in plan.decisions),
    )


def served(table: OracleTable, packed: Packed, seed: int) -> dict[str, Measured]:
    """What every domain of a table reaches with a packing."""
    found = dict(table.head_only[seed])
    for group, trained in zip(packed.packing, packed.trained, strict=True):
        reached = table.reached(seed, trained)
        found |= {name: reached[name] for name in group}
    return found


def share_requirements(
    table: OracleTable, share: float, seed: int, margin: float = 0.0
) -> dict[str, Requirement]:
    """Ask of every domain a share of what it reaches in an adapter of its own."""
    alone = {name: table.alone(seed, name) for name in table.domains}
    return {
        name: Requirement(0.0, 0.0, table.largest[name])  # a share of nothing
        if math.isnan(one.val)
        else dedicated_requirement(one.val, one.test, share, margin)
        for name, one in alone.items()
    }


def random_requirements(
    table: OracleTable, count: int, seed: int
) -> Iterator[dict[str, Requirement]]:
    """Draw requirements of all domains of a table.

    Each bar is drawn between the least that the domain reaches in any group and the least that it
    reaches alone, over all seeds: all can be met alone, and each may decide whether a group fits.
    """
    draw = random.Random(seed)
    bounds = {}
    for name in table.domains:
        groups = [group for group in table.names() if name in group]
        found = [table.reached(s, group)[name].val for s in table.seeds for group in groups]
        alone = min(table.alone(s, name).val for s in table.seeds)
        bounds[name] = min((one for one in found if not math.isnan(one)), default=0.0), alone
    for _ in range(count):
        yield {
            name: Requirement(draw.uniform(*bounds[name]), 0.0, table.largest[name])
            for name in table.domains
        }
