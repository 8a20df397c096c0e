"""Sweeps in MLflow: the jobs of one `-m` command below a parent run with a table of them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from valora_train.errors import without_passwords
from valora_train.reporting.mlflow_store import store_lock
from valora_train.reporting.study import StudyRun
from valora_train.reporting.tracking import find_run
from valora_train.stage import read_json, write_json
from valora_train.sweeps import SWEEP

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from valora_train.settings import Settings

JOBS = "sweeps"
"""Folder, beside those of the stages, of what the jobs of each sweep returned."""


def figures_of(fused: Path) -> dict[str, Any]:
    """What a job returns: figures of its fusion, by validation, so that test stays unseen.

    Args:
        fused: Output of stage `fuse`.

    Returns:
        `worst_margin` (the least accuracy minus requirement of any domain), `accuracy` (the mean
        of all domains), `adapters`, `attempts`, `met` (domains at their requirement), `minutes`,
        and `run` (id of the MLflow run).
    """
    result = read_json(fused / "fusion.json")
    domains = result["domains"].values()
    reached = [one["accuracy"]["val"] for one in domains]
    margins = [one["accuracy"]["val"] - one["required"] for one in domains]
    return {
        "worst_margin": min(margins),
        "accuracy": fmean(reached),
        "adapters": len(result["packing"]),
        "attempts": len(result["attempts"]),
        "met": sum(margin >= 0 for margin in margins),
        "minutes": sum(result["seconds"]) / 60,
        "run": result["mlflow_run_id"],
    }


def record_job(
    settings: Settings, number: int, overrides: Sequence[str], figures: Mapping[str, Any]
) -> None:
    """Add a job to the table of its sweep, and put its run below the sweep's.

    Args:
        settings: Settings of the job.
        number: Number of the job, from 0.
        overrides: Its overrides.
        figures: What `figures_of` found.
    """
    sweep = os.environ.get(SWEEP)
    if sweep is None or not figures:
        return
    task = settings.task.name
    file = Path(settings.paths.work) / JOBS / f"{sweep}-{task}.json"
    with store_lock(settings.paths.work):
        file.parent.mkdir(parents=True, exist_ok=True)
        jobs = _read(file)
        given = dict(without_passwords(one).lstrip("+").partition("=")[::2] for one in overrides)
        jobs[str(number)] = {"overrides": given, "figures": dict(figures)}
        write_json(file, jobs)
        uri = settings.paths.tracking
        with StudyRun(uri, f"valora/{task}", f"sweep {sweep}", f"sweep · {task}", {}) as run:
            columns, rows = sweep_table(jobs)
            run.log_table(columns, rows, "jobs")
            run.note(f"{len(rows)} jobs; the table `jobs.json` compares them.")
            child = figures.get("run")
            if child and find_run(uri, child) is not None:
                run.adopt(child)


def _read(file: Path) -> dict[str, Any]:
    """What is known of the jobs; a damaged file is begun anew."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        return found if isinstance(found, dict) else {}
    except (OSError, ValueError):
        return {}


def sweep_table(jobs: Mapping[str, Mapping[str, Any]]) -> tuple[list[str], list[list[Any]]]:
    """Columns and rows of the jobs: settings in which they differ, and figures."""
    order = sorted(jobs, key=int)
    given = [jobs[number]["overrides"] for number in order]
    names = dict.fromkeys(name for row in given for name in row)
    differ = [name for name in names if len({row.get(name) for row in given}) > 1]
    figures = [key for key in jobs[order[0]]["figures"] if key != "run"]
    rows = [
        [
            int(number),
            *(jobs[number]["overrides"].get(name, "") for name in differ),
            *(_short(jobs[number]["figures"].get(key)) for key in figures),
        ]
        for number in order
    ]
    return ["job", *differ, *figures], rows


def _short(value: Any) -> Any:
    return round(value, 4) if isinstance(value, float) else value
