"""The trials of an oracle table: every subset of the domains, for several seeds."""

from __future__ import annotations

from itertools import combinations
from typing import TYPE_CHECKING

from valora_train.trials.store import Trial

if TYPE_CHECKING:
    from collections.abc import Sequence

HEAD_ONLY = "head_only"
JOINT = "joint"


def oracle_trials(domains: Sequence[str], seeds: Sequence[int], largest: int = 0) -> list[Trial]:
    """The trials whose results make an oracle table.

    Args:
        domains: Names of the domains.
        seeds: Seeds.
        largest: Number of domains of the largest subsets; 0 for all subsets.

    Returns:
        Each domain without LoRA, then each subset jointly in a fresh adapter, for every seed.
        Names are sorted, so that tasks with some domains in common share trials.
    """
    names = sorted(domains)
    sizes = range(1, min(largest or len(names), len(names)) + 1)
    return [
        *(Trial(HEAD_ONLY, (name,), seed) for seed in seeds for name in names),
        *(
            Trial(JOINT, subset, seed)
            for seed in seeds
            for size in sizes
            for subset in combinations(names, size)
        ),
    ]
