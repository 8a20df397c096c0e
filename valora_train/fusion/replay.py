"""Plays fusions on an oracle table: thousands of packings in seconds, without training.

What an attempt reaches is read from the table: the accuracies of the group that the adapter would
then hold, trained together from scratch. That approximates attempts that go on from an adapter,
and a domain that was left out of an attempt with several new ones is taken to leave no trace.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING

from valora_train.fusion.decision import Verdict
from valora_train.fusion.exact import exact_packing
from valora_train.fusion.plan import FusionPlan, order_domains
from valora_train.fusion.requirement import Requirement, dedicated_requirement
from valora_train.fusion.strategies.base import Probe

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from valora_train.fusion.decision import AttemptDecision
    from valora_train.fusion.oracle import Measured, OracleTable
    from valora_train.fusion.strategies.base import Strategy
    from valora_train.settings import FusionSettings


@dataclass(frozen=True)
class Replay:
    """A fusion that was played on an oracle table.

    Attributes:
        packing: Adapters with their domains.
        trained: The domains that each adapter was last trained with: its own and those that were
            left out, or moved away since.
        head_only: Domains that take no adapter.
        unreachable: Domains that miss their bar even alone.
        decisions: All decisions.
    """

    packing: dict[str, tuple[str, ...]]
    trained: dict[str, tuple[str, ...]]
    head_only: tuple[str, ...]
    unreachable: tuple[str, ...]
    decisions: tuple[AttemptDecision, ...]

    @property
    def adapters(self) -> int:
        """Number of adapters."""
        return len(self.packing)

    @property
    def attempts(self) -> int:
        """Number of attempts."""
        return len(self.decisions)


def replay(
    strategy: Strategy,
    table: OracleTable,
    requirements: Mapping[str, Requirement],
    seed: int,
    *,
    head_only: bool = True,
    order: str = "given",
) -> Replay:
    """Pack domains with a strategy, with accuracies from a table.

    Args:
        strategy: Proposes the attempts.
        table: A complete oracle table.
        requirements: What each domain must reach; may name some of the table's domains.
        seed: One of the table's seeds.
        head_only: Whether domains may take no adapter.
        order: Order of the domains, as `fusion.order`.
    """
    without = table.head_only(seed)
    probes = {
        name: Probe(requirement.required, without[name].val)
        for name, requirement in requirements.items()
    }
    names = order_domains(list(requirements), order, seed, probes)
    plan = FusionPlan(
        {name: requirements[name] for name in names}, strategy, probes=probes, head_only=head_only
    )
    while (attempt := plan.next()) is not None:
        reached = table.reached(seed, attempt.domains)
        plan.tell({name: reached[name].val for name in attempt.domains})
    kept = {done.attempt.adapter: done.attempt.domains for done in plan.decisions if done.kept}
    return Replay(
        plan.packing,
        {adapter: kept[adapter] for adapter in plan.packing},
        tuple(plan.head_only),
        tuple(plan.unreachable),
        tuple(plan.decisions),
    )


def served(
    table: OracleTable,
    packing: Iterable[Sequence[str]],
    trained: Iterable[Sequence[str]],
    seed: int,
) -> dict[str, Measured]:
    """What every domain of a table reaches with a packing.

    Args:
        table: A complete oracle table.
        packing: The domains of each adapter; all others take none.
        trained: The domains that each adapter was trained with.
        seed: One of the table's seeds.
    """
    found = dict(table.head_only(seed))
    for group, together in zip(packing, trained, strict=True):
        reached = table.reached(seed, together)
        found |= {name: reached[name] for name in group}
    return found


def share_requirements(
    table: OracleTable, share: float, seed: int, margin: float = 0.0
) -> dict[str, Requirement]:
    """Require of every domain a share of what it reaches in an adapter of its own.

    Args:
        table: A complete oracle table.
        share: The share, in (0, 1].
        seed: One of the table's seeds.
        margin: Asked for on top on validation, but no more than the adapter reaches.
    """
    alone = {name: table.reached(seed, [name])[name] for name in table.domains}
    return {
        name: Requirement(0.0, 0.0, table.largest[name])  # a share of nothing
        if math.isnan(reached.val)
        else dedicated_requirement(reached.val, reached.test, share, margin)
        for name, reached in alone.items()
    }


def asked_of(
    table: OracleTable, contracts: Mapping[str, Requirement], fusion: FusionSettings
) -> dict[int, dict[str, Requirement]]:
    """What a fusion with each of a table's seeds asks of the domains.

    Args:
        table: A complete oracle table.
        contracts: What each domain must reach by its contract.
        fusion: Whether that is a share of what each reaches in an adapter of its own
            (`of_dedicated`) instead, and the margin.
    """
    share = fusion.of_dedicated
    return {
        seed: dict(contracts)
        if share is None
        else share_requirements(table, share, seed, fusion.margin)
        for seed in table.seeds
    }


def random_requirements(
    table: OracleTable, count: int, seed: int
) -> Iterator[dict[str, Requirement]]:
    """Draw requirements of all domains of a table.

    Each domain's bar is drawn uniformly between the least that it reaches in any group and the
    least that it reaches alone, on validation over all seeds: every domain can be met alone, and
    each may decide whether a group is feasible. What is drawn is the bar itself, without a margin.

    Args:
        table: A complete oracle table.
        count: Number of draws.
        seed: Seed of the draws.
    """
    draw = random.Random(seed)
    bounds = {}
    for name in table.domains:
        reached = {
            (one, group): table.reached(one, group)[name].val
            for one in table.seeds
            for group in table.groups()
            if name in group
        }
        found = [value for value in reached.values() if not math.isnan(value)]
        alone = [value for (_, group), value in reached.items() if len(group) == 1]
        bounds[name] = (min(found, default=0.0), min(alone))
    for _ in range(count):
        yield {
            name: Requirement(draw.uniform(*bounds[name]), 0.0, table.largest[name])
            for name in table.domains
        }


@dataclass(frozen=True)
class Comparison:
    """A strategy against the optimum, over many requirements.

    Attributes:
        at_optimum: Share of the requirements for which it needs as few adapters as the optimum.
        most_above: The most adapters by which it exceeds the optimum.
        adapters: Mean number of adapters.
        optimum: Mean number of adapters of the optimum.
        attempts: Mean number of attempts.
        most_attempts: The most attempts of one fusion.
        rolled_back: Mean number of attempts that were rolled back.
    """

    at_optimum: float
    most_above: int
    adapters: float
    optimum: float
    attempts: float
    most_attempts: int
    rolled_back: float


def compare(
    table: OracleTable,
    strategies: Mapping[str, Strategy],
    requirements: Sequence[Mapping[str, Requirement]],
    *,
    head_only: bool = True,
    order: str = "given",
) -> dict[str, Comparison]:
    """Play strategies against the optimum.

    Args:
        table: A complete oracle table.
        strategies: The strategies, by name.
        requirements: The requirements to play; the seeds of the table take turns.
        head_only: Whether domains may take no adapter.
        order: Order of the domains, as `fusion.order`.

    Returns:
        The comparison of each strategy, by name.
    """
    seeds = [table.seeds[turn % len(table.seeds)] for turn in range(len(requirements))]
    best = [
        len(exact_packing(table, asked, seed, head_only=head_only).packing)
        for asked, seed in zip(requirements, seeds, strict=True)
    ]
    found = {}
    for name, strategy in strategies.items():
        played = [
            replay(strategy, table, asked, seed, head_only=head_only, order=order)
            for asked, seed in zip(requirements, seeds, strict=True)
        ]
        above = [one.adapters - least for one, least in zip(played, best, strict=True)]
        rolled_back = [
            sum(decision.verdict is Verdict.ROLLED_BACK for decision in one.decisions)
            for one in played
        ]
        found[name] = Comparison(
            at_optimum=fmean(not extra for extra in above),
            most_above=max(above),
            adapters=fmean(one.adapters for one in played),
            optimum=fmean(best),
            attempts=fmean(one.attempts for one in played),
            most_attempts=max(one.attempts for one in played),
            rolled_back=fmean(rolled_back),
        )
    return found
