"""Jobs as processes of submitit on this machine: `valora-train -m hydra/launcher=submitit_local …`.

It takes the place of the launcher of that name in Hydra's plug-in for submitit, which starts all
jobs at once, gives up at the first that is lost while the others go on, ends jobs after an hour and
hides the GPUs. `hydra/launcher=submitit_slurm` is the plug-in's own.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from valora_data.cpu import usable_cores
from valora_train.errors import SettingsError
from valora_train.launchers.base import Job, JobLauncher, failed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hydra.core.utils import JobReturn
    from hydra.types import TaskFunction
    from omegaconf import DictConfig

TARGET = "hydra_plugins.valora.SubmititLauncher"
WEEK = 7 * 24 * 60  # minutes


@dataclass
class SubmititSettings:
    """Settings of `hydra/launcher=submitit_local`.

    Attributes:
        n_jobs: Jobs at once; -1 for as many as there are cores.
        timeout_min: Minutes after which a job is ended.
        submitit_folder: Folder of the jobs' logs; ``%j`` stands for a job's id.
    """

    _target_: str = TARGET
    n_jobs: int = -1
    timeout_min: int = WEEK
    submitit_folder: str = "${hydra.sweep.dir}/.submitit/%j"


class SubmititLauncher(JobLauncher):
    """Runs each job in a process that submitit starts and watches.

    Args:
        n_jobs: Jobs at once.
        timeout_min: Minutes after which a job is ended.
        submitit_folder: Folder of the jobs' logs.
    """

    def __init__(self, n_jobs: int, timeout_min: int, submitit_folder: str) -> None:
        self._at_once = n_jobs
        self._minutes, self._folder = timeout_min, submitit_folder

    def launch(
        self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> Sequence[JobReturn]:
        """Run jobs.

        Args:
            job_overrides: The overrides of each job.
            initial_job_idx: Number of the first job.

        Raises:
            SettingsError: `n_jobs` is out of range, or submitit is not installed.
        """
        if self._at_once < 1 and self._at_once != -1:
            raise SettingsError(
                f"hydra.launcher.n_jobs is {self._at_once}: choose at least 1, or -1 for all cores"
            )
        submitit = _submitit()
        most = self._at_once if self._at_once > 0 else usable_cores()
        pool = ThreadPoolExecutor(min(most, len(job_overrides)))
        try:
            task = partial(_run, os.environ.get("CUDA_VISIBLE_DEVICES"), self._task)
            jobs = self.jobs(job_overrides, initial_job_idx, task)
            running = [pool.submit(self._launch, submitit, job) for job in jobs]
            return [one.result() for one in running]
        finally:
            # After Ctrl-C the processes of the jobs are ended by whoever handles it.
            pool.shutdown(wait=False, cancel_futures=True)

    def _launch(self, submitit: Any, sent: Job) -> JobReturn:
        """Run one job, in a thread that waits for its process."""
        executor = submitit.LocalExecutor(folder=self._folder)
        executor.update_parameters(timeout_min=self._minutes)
        job = executor.submit(sent.run)
        try:
            found: JobReturn = job.result()
        except submitit.core.utils.FailedJobError as error:  # before the task began
            return failed(sent.overrides, str(error).strip().splitlines()[-1])
        except submitit.core.utils.UncompletedJobError:
            log = job.paths.stderr
            return failed(sent.overrides, f"its process was killed or took too long (log: {log})")
        return found


def _run(gpus: str | None, task: TaskFunction, config: DictConfig) -> Any:
    """Run a job's function with the GPUs of the sweep, which submitit has hidden."""
    if gpus is None:
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    else:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus
    return task(config)


def _submitit() -> Any:
    try:
        import submitit
    except ImportError as error:
        raise SettingsError(
            "hydra/launcher=submitit_local needs submitit: pip install 'valora[cluster]'"
        ) from error
    return submitit
