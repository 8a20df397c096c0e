"""The attempts that a fusion may take: at best, as expected and at worst. Imports no torch.

The plan of the fusion itself is asked what to try, and is told made-up accuracies, so that every
strategy is counted as it decides.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

from valora_train.fusion.packing import make_plan
from valora_train.fusion.requirement import Requirement

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from valora_train.fusion.decision import Attempt
    from valora_train.fusion.parent import Parent
    from valora_train.settings import FusionSettings

SHARED_SUCCESS = 0.75
"""Share of the domains that are taken to keep what they must when they share an adapter."""
DRAWS = 50
"""Courses that are drawn for the expected case."""
MOST_ATTEMPTS = 5_000


@dataclass(frozen=True)
class Course:
    """The attempts of one fusion, from the first to the last.

    Attributes:
        attempts: The attempts.
        adapters: Number of adapters at the end.
    """

    attempts: tuple[Attempt, ...]
    adapters: int


@dataclass(frozen=True)
class Courses:
    """What a fusion may take.

    Attributes:
        best: Every attempt is committed.
        expected: Courses in which `SHARED_SUCCESS` of the domains keep what they must when they
            join others; what a fusion takes on average over them is expected.
        worst: No domain can share an adapter with another one.
    """

    best: Course
    expected: tuple[Course, ...]
    worst: Course


def possible_courses(
    settings: FusionSettings, domains: Sequence[str], seed: int, parent: Parent | None = None
) -> Courses:
    """Return the courses of a fusion in which every domain needs LoRA and is within reach.

    Args:
        settings: Strategy and order.
        domains: The domains, in the order of the configuration.
        seed: Seed of a random order.
        parent: The fusion to extend, if any.
    """

    def course(shares: Callable[[], bool]) -> Course:
        requirements = {name: Requirement(0.5) for name in domains}
        without = {name: {"val": 0.0, "test": 0.0} for name in domains}
        plan = make_plan(settings, requirements, without, seed, parent)
        made: list[Attempt] = []
        while (attempt := plan.next()) is not None and len(made) < MOST_ATTEMPTS:
            made.append(attempt)
            reached = dict.fromkeys(attempt.domains, 1.0)
            if len(attempt.domains) > 1:
                reached |= {name: 0.0 for name in attempt.new if not shares()}
            plan.tell(reached)
        return Course(tuple(made), len(plan.packing))

    draws = []
    for number in range(DRAWS):
        chance = random.Random(number)
        draws.append(course(lambda chance=chance: chance.random() < SHARED_SUCCESS))  # type: ignore[misc]
    return Courses(course(lambda: True), tuple(draws), course(lambda: False))
