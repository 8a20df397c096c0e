"""Settings that earlier versions had, each with what to do instead."""

from __future__ import annotations

import re

from valora_train.errors import SettingsError

SUCCESSORS = {
    r"command=estimate": "start the run, which says after some steps how long attempts take",
    r"(?:command=baselines|baselines(?:\.\w+)?(?==))": (
        "run python -m tests.bench.valora_train.bench_context_ways in a checkout "
        "(docs/explanation/contexts.md)"
    ),
    r"tracking(\.also)?(?==)": "MLflow has every run, and other trackers can copy it from there",
    r"hydra/sweeper=grid": "leave it out",
    r"hydra/sweeper=optuna": (
        "let a search of your own read what jobs return (docs/how-to/sweep.md)"
    ),
    r"command=(?:oracle|compare)|(?:oracle|compare)(?:\.(?!processes=)\w+)?(?==)": (
        "run python -m tests.bench.valora_train.bench_oracle (or bench_compare) in a checkout "
        "(docs/explanation/fusion.md)"
    ),
    r"oracle\.processes(?==)": "set fusion.processes",
    r"experiment=shelf": "task=shelf is the same",
    r"experiment=mixed": "task=mixed is the same",
    r"domains\.[^.\s]+\.relative(?==)": (
        "leave it out; of_teacher=SHARE with required=null is a share alone"
    ),
    r"fusion\.oracle(?==)": (
        "bench_oracle says which groups are the fewest (docs/explanation/fusion.md)"
    ),
    r"fusion\.strategy=(?:best_fit|exact|(?:repack|grow)(?::\S*)?)": (
        "fusion.strategy=affinity, which moves domains, too, finds the fewest adapters more often"
    ),
    r"(?:domain(?:@\S+=|/)|\S+\.kind=)(?:refcoco|swift|qwen2\.5-vl|qwen3-vl|vqa)": (
        "write a metadata.jsonl with the answers of each image (docs/how-to/own-data.md)"
    ),
    r"domains\.[^.\s]+\.source\.annotations(?==)": (
        "write a metadata.jsonl (docs/how-to/own-data.md)"
    ),
    r"(?:domain(?:@\S+=|/)|\S+\.kind=)fiftyone": "export as COCO or YOLO (docs/how-to/own-data.md)",
    r"domain/\w+(?:@\S+)?=(?:surface|sign_(?:count|facts)|change|drawn_album|weather|person_action|"
    r"camera_motion|place_content|(?:digit|pattern|size|weather)_\w+)": (
        "take another built-in domain (docs/reference/tasks.md), or an album of your own"
    ),
    # Arguments are sorted: `.` comes before `/`.
    r"hydra\.launcher\.n_jobs=\S+(?=.* hydra/launcher=submitit_local)": (
        "submitit starts all jobs at once, hydra/launcher=joblib as many as n_jobs says"
    ),
}
"""What to do instead, by a pattern of settings."""


def removed(*given: str) -> str | None:
    """A sentence on the first setting (``experiment=shelf``) that an earlier version had."""
    text = " ".join(sorted(given))
    for pattern, successor in SUCCESSORS.items():
        if found := re.search(rf"(?:^|\s)[+~]*({pattern})(?:[\s=]|$)", text):
            return f"{found[1]} was removed: {successor}"
    return None


def refuse_removed(*given: str) -> None:
    """Refuse settings that an earlier version had."""
    if text := removed(*given):
        raise SettingsError(text)
