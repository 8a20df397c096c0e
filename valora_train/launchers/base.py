"""What launchers share: outcomes of jobs, and what a job needs on another machine."""

from __future__ import annotations

import os
import socket
from concurrent.futures import BrokenExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.singleton import Singleton
from hydra.core.utils import JobReturn, JobStatus, filter_overrides, run_job, setup_globals
from hydra.plugins.launcher import Launcher
from omegaconf import open_dict

from valora_train.errors import SettingsError, SweepError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hydra.types import HydraContext, TaskFunction
    from omegaconf import DictConfig

CARRIED = ("HF_", "HYDRA_", "MLFLOW_", "TRANSFORMERS_", "YOLO_", "_VALORA_")
"""Environment variables that a job takes to its machine begin so."""


@dataclass(frozen=True)
class Job:
    """A job of a sweep, as it is sent to another process or machine.

    Attributes:
        number: Number of the job.
        overrides: Its overrides.
        context: Hydra's context.
        config: Hydra's configuration of the sweep.
        task: The function to call.
        folder: Working directory of the sweep.
        environment: Variables to set (`CARRIED`).
        singletons: State of Hydra.
        known: What Hydra can choose from besides files, such as our launchers.
    """

    number: int
    overrides: tuple[str, ...]
    context: HydraContext
    config: DictConfig
    task: TaskFunction
    folder: str = field(default_factory=os.getcwd)
    environment: Mapping[str, str] = field(
        default_factory=lambda: {k: v for k, v in os.environ.items() if k.startswith(CARRIED)}
    )
    singletons: Mapping[Any, Any] = field(default_factory=Singleton.get_state)
    known: dict[str, Any] = field(default_factory=lambda: ConfigStore.instance().repo)

    def run(self) -> JobReturn:
        """Run the job in this process.

        Raises:
            SettingsError: This machine has no such working directory.
        """
        if not Path(self.folder).is_dir():
            raise SettingsError(
                f"machine {socket.gethostname()} has no folder {self.folder}: start the sweep in a "
                "folder that all machines share under the same name"
            )
        os.chdir(self.folder)
        os.environ.update(self.environment)
        Singleton.set_state(self.singletons)
        # Hydra has just looked for plug-ins, whose settings may have taken the place of ours.
        ConfigStore.instance().repo = self.known
        setup_globals()
        config = self.context.config_loader.load_sweep_config(self.config, list(self.overrides))
        with open_dict(config):
            config.hydra.job.id = f"{config.hydra.job.name}_{self.number}"
            config.hydra.job.num = self.number
        HydraConfig.instance().set_config(config)
        return run_job(
            hydra_context=self.context,
            task_function=self.task,
            config=config,
            job_dir_key="hydra.sweep.dir",
            job_subdir_key="hydra.sweep.subdir",
        )


class JobLauncher(Launcher):
    """A launcher that sends each job to a process of its own, as a `Job`."""

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        """Take what Hydra hands over before a sweep."""
        self._context, self._task, self._config = hydra_context, task_function, config

    def jobs(
        self, job_overrides: Sequence[Sequence[str]], first: int, task: TaskFunction | None = None
    ) -> list[Job]:
        """Return the jobs of a sweep.

        Args:
            job_overrides: The overrides of each job.
            first: Number of the first job.
            task: What to call in place of Hydra's function.
        """
        return [
            Job(number, tuple(overrides), self._context, self._config, task or self._task)
            for number, overrides in enumerate(job_overrides, start=first)
        ]


def failed(overrides: Sequence[str], message: str) -> JobReturn:
    """Return the outcome of a job that has none of its own, as its process is gone."""
    return JobReturn(
        overrides=list(overrides),
        status=JobStatus.FAILED,
        _return_value=SweepError(message),
    )


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
    own = [one for one in filter_overrides(overrides) if one not in common]
    return f" ({' '.join(own)})" if own else ""


def _first_line(error: object) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__
