"""The trials of an oracle table: every subset of the domains, for several seeds."""

from __future__ import annotations

from itertools import combinations
from math import comb
from typing import TYPE_CHECKING

from valora_train.errors import SettingsError
from valora_train.fusion.oracle import MOST_DOMAINS
from valora_train.trials.store import Trial

if TYPE_CHECKING:
    from collections.abc import Sequence

HEAD_ONLY = "head_only"
JOINT = "joint"
MOST_GROUPS = 100_000
"""Groups of an oracle that leaves larger ones out: of 37 domains, those of up to four."""


def check_groups(count: int, largest: int, only: str, size: str) -> None:
    """Check that the groups of an oracle can be trained, before they are listed.

    Args:
        count: Number of domains.
        largest: Number of domains of the largest groups; 0 for all groups.
        only: Name of the setting that chooses domains.
        size: The setting that leaves all but pairs out.

    Raises:
        SettingsError: If there are too many.
    """
    largest = min(largest or count, count)
    groups = sum(comb(count, n) for n in range(1, largest + 1))
    if count > MOST_DOMAINS and (largest == count or groups > MOST_GROUPS):
        raise SettingsError(
            f"an oracle of {count} domains takes {groups:,} trainings a seed: choose at most "
            f"{MOST_DOMAINS} domains ({only}), or only small groups ({size})"
        )


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
