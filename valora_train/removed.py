"""Settings that earlier versions had, each with what to do instead."""

from __future__ import annotations

import re

from valora_train.errors import SettingsError

SUCCESSORS = {
    r"command=estimate": "start the run, which says after some steps how long attempts take",
    r"(?:command=baselines|baselines(?:\.\w+)?(?==))": (
        "run python -m tests.bench.valora_train.bench_context_ways in a checkout (docs/context.md)"
    ),
    r"tracking(\.also)?(?==)": "MLflow has every run, and other trackers can copy it from there",
    r"hydra/sweeper=grid": "leave it out",
    r"hydra/sweeper=optuna": "let a search of your own read what jobs return (docs/factory.md)",
    r"command=(?:oracle|compare)|(?:oracle|compare)(?:\.(?!processes=)\w+)?(?==)": (
        "run python -m tests.bench.valora_train.bench_oracle (or bench_compare) in a checkout "
        "(docs/oracle.md)"
    ),
    r"oracle\.processes(?==)": "set fusion.processes",
    r"experiment=shelf": "task=shelf is the same",
    r"fusion\.oracle(?==)": "bench_oracle says which groups are the fewest (docs/oracle.md)",
    r"fusion\.strategy=(?:best_fit|exact|(?:repack|grow)(?::\S*)?)": (
        "fusion.strategy=affinity, which moves domains, too, finds the fewest adapters more often"
    ),
    # Arguments are sorted: `.` comes before `/`.
    r"hydra\.launcher\.n_jobs=\S+(?=.* hydra/launcher=submitit_local)": (
        "submitit starts all jobs at once, hydra/launcher=joblib as many as n_jobs says"
    ),
}
"""What to do instead, by a pattern of settings."""


def refuse_removed(*given: str) -> None:
    """Refuse a setting, or a value of one, that an earlier version had.

    Args:
        given: Settings, such as ``fusion.strategy=joint``.

    Raises:
        SettingsError: It was removed; the message names its successor.
    """
    text = " ".join(sorted(given))
    for pattern, successor in SUCCESSORS.items():
        if found := re.search(rf"(?:^|\s)[+~]*({pattern})(?:[\s=]|$)", text):
            raise SettingsError(f"{found[1]} was removed: {successor}")
