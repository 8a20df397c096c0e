"""Sweeps in MLflow: the jobs of one `-m` command below a parent run with a table of them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import fmean
from typing import Any

from filelock import FileLock
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf, read_write

from valora_train.errors import without_passwords
from valora_train.settings import Settings
from valora_train.stage import read_json, write_json
from valora_train.sweeps import SWEEP

JOBS = "sweeps"  # folder, beside those of the stages, of what the jobs of each sweep returned
STUDY = "valora.study"  # tag of the parent run: what is compared, and a hash of it


class WithoutPasswords(Callback):
    """Hands the jobs of a sweep a store with a password in their environment, not in a file."""

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        """Move the store out of what Hydra writes to `multirun.yaml`."""
        store, others = OmegaConf.select(config, "paths.tracking"), []
        for override in config.hydra.overrides.task:
            key, _, value = override.lstrip("+").partition("=")
            if key == "paths.tracking":
                store = value.strip("'\"")
            else:
                others.append(override)
        if store and store != without_passwords(store):
            os.environ["MLFLOW_TRACKING_URI"] = store
            with read_write(config), read_write(config.hydra):
                config.paths.tracking, config.hydra.overrides.task = None, others
                config.hydra.job.override_dirname = ""


def figures_of(fused: Path) -> dict[str, Any]:
    """What a job returns: figures of its fusion, by validation, so that test stays unseen."""
    result = read_json(fused / "fusion.json")
    domains = result["domains"].values()
    margins = [one["accuracy"]["val"] - one["required"] for one in domains]
    return {
        "worst_margin": min(margins),
        "accuracy": fmean(one["accuracy"]["val"] for one in domains),
        "adapters": len(result["packing"]),
        "attempts": len(result["attempts"]),
        "met": sum(margin >= 0 for margin in margins),
        "minutes": sum(result["seconds"]) / 60,
        "run": result["mlflow_run_id"],
    }


def record_job(
    settings: Settings, number: int, overrides: Sequence[str], figures: Mapping[str, Any]
) -> None:
    """Add a job to the table of its sweep, and put its run below the sweep's."""
    sweep = os.environ.get(SWEEP)
    if sweep is None or not figures:
        return
    import mlflow

    from valora_train.reporting import tracking

    task = settings.task.name
    file = Path(settings.paths.work) / JOBS / f"{sweep}-{task}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(file.with_suffix(".lock")):
        jobs: dict[str, Any] = {}
        with suppress(OSError, ValueError, TypeError):  # there is none, or it is damaged
            jobs |= read_json(file)
        given = dict(without_passwords(one).lstrip("+").partition("=")[::2] for one in overrides)
        jobs[str(number)] = {"overrides": given, "figures": dict(figures)}
        write_json(file, jobs)
        tracking.connect(settings.paths, f"valora/{task}")
        tags = {STUDY: f"sweep {sweep}"}
        with tracking.storing():
            known = tracking.search(f"tags.`{STUDY}` = '{tags[STUDY]}'")
        columns, rows = sweep_table(jobs)
        tags[tracking.NOTE] = f"{len(rows)} jobs; the table `jobs.json` compares them."
        earlier = known[0].info.run_id if known else None
        with tracking.open_run(f"sweep · {task}", tags, earlier) as run, tracking.storing():
            tracking.log_table(columns, rows, "jobs.json")
            if tracking.find_run(figures["run"]):
                mlflow.MlflowClient().set_tag(figures["run"], tracking.PARENT, run)


def sweep_table(jobs: Mapping[str, Mapping[str, Any]]) -> tuple[list[str], list[list[Any]]]:
    """Columns and rows of the jobs: settings in which they differ, and figures."""
    numbers = sorted(jobs, key=int)
    given = [jobs[number]["overrides"] for number in numbers]
    figures = [jobs[number]["figures"] for number in numbers]
    names = dict.fromkeys(name for row in given for name in row)
    differ = [name for name in names if len({row.get(name) for row in given}) > 1]
    kept = [key for key in figures[0] if key != "run"]
    rows = [
        [int(number), *(row.get(name, "") for name in differ)]
        + [round(one[key], 4) if isinstance(one[key], float) else one[key] for key in kept]
        for number, row, one in zip(numbers, given, figures, strict=True)
    ]
    return ["job", *differ, *kept], rows
