"""Strategies on made-up shelves of many domains, whose oracle table nobody could train.

`python -m tests.bench.valora_train.bench_strategies` plays each strategy on shelves with accuracies
that are drawn: every domain loses a little to every other one beside it, and some pairs cannot
share. Prints adapters, attempts, and steps of training (with `train` of `task=shelf`), one figure
for each draw.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import numpy as np

from valora_train.fusion.plan import FusionPlan
from valora_train.fusion.requirement import Requirement
from valora_train.fusion.strategies.registry import make_strategy

STRATEGIES = ("affinity", "joint", "rehearsal")
STEPS, STEPS_PER_HELD = 450, 40
REQUIRED, MARGIN = 0.95, 0.01
NOISE = 0.006
"""Standard deviation of an accuracy between two trainings."""


@dataclass(frozen=True)
class Shelf:
    """How domains lose to each other."""

    title: str
    loss: tuple[float, float]  # mean and deviation of what a domain loses to each other one
    apart: float  # share of the ordered pairs of which one loses 0.02 to 0.06 to the other


SHELVES = (
    Shelf("all fit", (0.0, 0.0003), 0.0),
    Shelf("1 % of pairs apart", (0.0006, 0.0008), 0.01),
    Shelf("3 % of pairs apart", (0.0006, 0.0008), 0.03),
)


def play(strategy: str, shelf: Shelf, count: int, seed: int) -> tuple[int, int, int]:
    """Adapters, attempts and steps of a fusion."""
    draw = np.random.default_rng(seed)
    loss = np.abs(draw.normal(*shelf.loss, (count, count)))
    apart = draw.random((count, count)) < shelf.apart
    loss[apart] += draw.uniform(0.02, 0.06, int(apart.sum()))
    names = {f"domain-{at:02}": at for at in range(count)}
    plan = FusionPlan(dict.fromkeys(names, Requirement(REQUIRED, MARGIN)), make_strategy(strategy))
    steps = 0
    while (attempt := plan.next()) is not None:
        group = [names[name] for name in attempt.domains]
        lost = {name: sum(loss[names[name], other] for other in group if other != names[name])
                for name in attempt.domains}  # fmt: skip
        plan.tell({name: float(1 - lost[name] + draw.normal(0, NOISE)) for name in lost})
        steps += STEPS * len(attempt.new) + STEPS_PER_HELD * len(attempt.held)
    return len(plan.packing), len(plan.decisions), steps


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--domains", type=int, default=37)
    parser.add_argument("--draws", type=int, default=3)
    given = parser.parse_args()
    print("| shelf | strategy | adapters | attempts | thousand steps |\n|---|---|---|---|---|")
    for shelf in SHELVES:
        for strategy in STRATEGIES:
            found = [play(strategy, shelf, given.domains, seed) for seed in range(given.draws)]
            adapters, attempts, steps = zip(*found, strict=True)
            cells = [
                ", ".join(map(str, column))
                for column in (adapters, attempts, [round(one / 1000) for one in steps])
            ]
            print("| " + " | ".join([shelf.title, strategy, *cells]) + " |", flush=True)


if __name__ == "__main__":
    main()
