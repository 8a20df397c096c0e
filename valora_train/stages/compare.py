"""Stage `compare`: ways to serve the domains of a task, trained and measured side by side.

Output: `comparison.json` (every way and seed), `comparison.md` (the table) and `pareto.png`. Each
training is kept in `trials/` (see `valora_train.stages.oracle`) and not repeated.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from valora_train.reporting.comparison import COLUMNS, comparison_rows, pareto_picture
from valora_train.reporting.text import markdown_table
from valora_train.settings import as_dict
from valora_train.stage import Stage, intact, read_json, write_json
from valora_train.stages.oracle import made_of, run_with_progress, take_over
from valora_train.trials.comparison import (
    Contender,
    contenders,
    first_trials,
    run_comparison,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from valora_train.reporting.progress import Display
    from valora_train.settings import Settings
    from valora_train.trials.inputs import TrialInputs

COMPARISON = "comparison.json"
TABLE = "comparison.md"
PICTURE = "pareto.png"


def compare_stage(settings: Settings, inputs: TrialInputs) -> Stage:
    """The stage that compares ways to serve the domains."""
    values = as_dict(settings.compare) | {
        "order": settings.fusion.order,
        "head_only": settings.fusion.head_only,
        "names": list(inputs.domains),
        "made_of": made_of(inputs),
    }
    return Stage(f"compare-{settings.task.name}", 1, values, {}, resumable=True)


def build_comparison(
    settings: Settings, inputs: TrialInputs, folder: Path, display: Display
) -> None:
    """Train what is missing, and write the comparison into the stage's folder."""
    first = first_trials(list(inputs.domains), settings.compare)
    take_over(settings, inputs, first, "compare", display)
    results = run_comparison(
        inputs, lambda trials: run_with_progress(settings, inputs, trials, "compare", display)
    )
    found = contenders(results)
    rows = markdown_table(COLUMNS, comparison_rows(found))
    (folder / TABLE).write_text("\n".join(rows) + "\n", encoding="utf-8")
    pareto_picture(found, settings.task.name).savefig(folder / PICTURE)
    write_json(folder / COMPARISON, [asdict(one) for one in found])


def read_comparison(folder: Path) -> Sequence[Contender]:
    """The contenders of a finished stage."""
    return [Contender(**row) for row in read_json(intact(folder / COMPARISON))]
