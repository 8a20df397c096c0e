"""Sweeps: `valora-train -m …` tries all combinations of the values given."""

from __future__ import annotations

import hashlib
import os
from concurrent.futures import BrokenExecutor
from typing import TYPE_CHECKING, Any

from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus, filter_overrides
from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper

from valora_train import ray_launcher
from valora_train.errors import SweepError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hydra.types import HydraContext, TaskFunction
    from omegaconf import DictConfig

GRID = "hydra_plugins.valora.GridSweeper"
"""Name of the sweeper in Hydra's configuration; it takes plug-ins from that package only."""
SWEEP = "_VALORA_SWEEP"
"""Environment variable that names the sweep; the processes of a launcher inherit it. (Names that
begin with VALORA_ are options of valora-serve.)"""


class GridSweeper(Sweeper):
    """Tries all combinations; when all jobs have ended it tells which of them failed.

    Args:
        max_batch_size: Most jobs that are handed to the launcher at a time; null for all.
        params: Overrides of every sweep.
    """

    def __init__(self, max_batch_size: int | None, params: dict[str, str] | None) -> None:
        # Hydra runs the module once more when it looks for plug-ins: not before that.
        from hydra._internal.core_plugins.basic_sweeper import BasicSweeper

        self._basic = BasicSweeper(max_batch_size, params)

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        """Take what Hydra hands over before a sweep."""
        self._basic.setup(hydra_context=hydra_context, task_function=task_function, config=config)
        assert self._basic.launcher is not None
        self._basic.launcher = AllJobs(self._basic.launcher)

    def sweep(self, arguments: list[str]) -> Any:
        """Run the jobs.

        Args:
            arguments: The overrides of the command line.

        Raises:
            SweepError: Jobs failed.
        """
        return self._basic.sweep(arguments)


class AllJobs(Launcher):
    """Launches jobs and, when all of them have ended, tells which of them failed.

    Args:
        launcher: The launcher.
    """

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        """Take what Hydra hands over before a sweep."""
        self._launcher.setup(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def launch(
        self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> Sequence[JobReturn]:
        """Run jobs.

        Args:
            job_overrides: The overrides of each job.
            initial_job_idx: Number of the first job.

        Raises:
            SweepError: Jobs failed, or the process of one was killed.
        """
        try:
            returned = self._launcher.launch(job_overrides, initial_job_idx=initial_job_idx)
        except BrokenExecutor as error:  # joblib
            raise SweepError(
                "the process of a job was killed, as happens when the memory is used up, and the "
                "other jobs were ended: lower hydra.launcher.n_jobs and run the same command again "
                "to continue"
            ) from error
        except RuntimeError as error:
            if type(error).__module__.partition(".")[0] != "submitit":
                raise
            raise SweepError(
                f"a job ended without a result ({_first_line(error)}): see its log in "
                "hydra.launcher.submitit_folder and run the same command again to continue"
            ) from error
        common = set.intersection(*(set(given) for given in job_overrides))
        told = [
            f"job {initial_job_idx + index}"
            f"{_differing(given, common)}: {_first_line(job._return_value)}"
            for index, (job, given) in enumerate(zip(returned, job_overrides, strict=True))
            if job.status is not JobStatus.COMPLETED
        ]
        if told:
            others = len(returned) - len(told)
            rest = f", {others} {'is' if others == 1 else 'are'} done" if others else ""
            raise SweepError(
                f"{len(told)} of {len(returned)} jobs failed{rest}; correct this and run the same "
                f"command again to continue: {'; '.join(told)}"
            )
        return returned


def _differing(overrides: Sequence[str], common: set[str]) -> str:
    """In brackets, the overrides that not all jobs have."""
    own = [one.lstrip("+") for one in filter_overrides(overrides) if one not in common]
    return f" ({' '.join(own)})" if own else ""


def _first_line(error: object) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__


def register(arguments: Sequence[str]) -> None:
    """Tell Hydra of our sweeper and our launcher, and name the sweep of this command.

    Args:
        arguments: The command line; the same one continues the same sweep.
    """
    os.environ[SWEEP] = hashlib.sha256("\0".join(arguments).encode()).hexdigest()[:16]
    plugins, store = Plugins.instance(), ConfigStore.instance()
    for plugin, target in (
        (GridSweeper, GRID),
        (ray_launcher.RayLauncher, ray_launcher.TARGET),
    ):
        plugins.register(plugin)
        plugins.class_name_to_class[target] = plugin
    # The plug-in's settings would be taken for the schema of ours of that name, in conf/.
    store.repo.get("hydra", {}).get("launcher", {}).pop("submitit_local.yaml", None)
    node = ray_launcher.RaySettings
    store.store(group="hydra/launcher", name="ray", node=node, provider="valora")
