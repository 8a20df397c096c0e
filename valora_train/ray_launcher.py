"""Jobs on a Ray cluster: `valora-train -m hydra/launcher=ray …`.

Hydra's own plug-in for Ray needs a cloudpickle that this environment's libraries have left behind,
and the AWS libraries, so that the launcher is written here, on Ray's own interface.
"""

from __future__ import annotations

import math
import os
import socket
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.singleton import Singleton
from hydra.core.utils import JobReturn, JobStatus, run_job, setup_globals
from hydra.plugins.launcher import Launcher
from omegaconf import open_dict

from valora_train.errors import SettingsError, SweepError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hydra.types import HydraContext, TaskFunction
    from omegaconf import DictConfig

TARGET = "hydra_plugins.valora.RayLauncher"
CARRIED = ("HF_", "HYDRA_", "MLFLOW_", "TRANSFORMERS_", "YOLO_", "_VALORA_")
"""Environment variables that a job takes to its machine begin so."""


@dataclass
class RaySettings:
    """Settings of `hydra/launcher=ray`.

    Attributes:
        address: Address of the cluster; null for ``RAY_ADDRESS``, else a cluster that runs on this
            machine, else a new one on this machine.
        num_cpus: Cores that a job takes.
        num_gpus: GPUs that a job takes; null for 1 if the cluster has any, otherwise 0.
        resources: Further resources that a job takes, by name.
    """

    _target_: str = TARGET
    address: str | None = None
    num_cpus: float = 1.0
    num_gpus: float | None = None
    resources: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Job:
    """A job of a sweep, as it is sent to another machine: what Hydra and the environment know."""

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
        """Run the job in this process."""
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
        return run_job(self.task, config, "hydra.sweep.dir", "hydra.sweep.subdir", self.context)


class RayLauncher(Launcher):
    """Runs each job as a task of Ray, in a process of its own that is not started again.

    Args:
        settings: See `RaySettings`.
    """

    def __init__(self, **settings: Any) -> None:
        self._settings = RaySettings(**{**settings, "resources": dict(settings["resources"])})

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        """Take what Hydra hands over before a sweep."""
        self._context, self._task, self._config = hydra_context, task_function, config

    def launch(
        self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> Sequence[JobReturn]:
        """Run jobs, as many at once as the cluster has room for.

        Args:
            job_overrides: The overrides of each job.
            initial_job_idx: Number of the first job.

        Raises:
            SettingsError: Ray is not installed, or no machine of the cluster has what a job takes.
            SweepError: The cluster cannot be joined.
        """
        try:
            import ray
        except ImportError as error:
            raise SettingsError(
                "hydra/launcher=ray needs Ray: pip install 'valora[cluster]'"
            ) from error
        if not ray.is_initialized():
            _join(ray, self._settings.address)
        run = ray.remote(**_options(ray, self._settings))(Job.run)
        tasks = [
            run.remote(Job(number, tuple(overrides), self._context, self._config, self._task))
            for number, overrides in enumerate(job_overrides, start=initial_job_idx)
        ]
        return [
            _outcome(ray, task, overrides)
            for task, overrides in zip(tasks, job_overrides, strict=True)
        ]


def _options(ray: Any, settings: RaySettings) -> dict[str, Any]:
    """Options of the tasks; checks that a machine has what they take."""
    machines = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    gpus = settings.num_gpus
    if gpus is None:
        gpus = 1.0 if any(machine.get("GPU") for machine in machines) else 0.0
    needed = {"CPU": settings.num_cpus, "GPU": gpus, **settings.resources}
    wanted = ", ".join(f"{value:g} {name}" for name, value in needed.items() if value)
    if not all(math.isfinite(value) and value >= 0 for value in needed.values()):
        raise SettingsError(
            f"hydra.launcher asks for {wanted} for a job: give numbers of at least 0"
        )
    if not any(
        all(machine.get(name, 0) >= value for name, value in needed.items()) for machine in machines
    ):
        raise SettingsError(
            f"no machine of the Ray cluster has {wanted} for a job: lower hydra.launcher."
            "num_cpus, num_gpus or resources, or start such a machine first"
        )
    # A process for each job: what one leaves behind (memory, threads) is not the next one's.
    # Not started again by Ray: a job that used up the memory would do so for ever.
    options = {"num_cpus": settings.num_cpus, "num_gpus": gpus, "resources": settings.resources}
    return {**options, "max_calls": 1, "max_retries": 0}


def _join(ray: Any, address: str | None) -> None:
    """Join a cluster, or start one on this machine."""
    where = address or os.environ.get("RAY_ADDRESS")
    host, _, port = (where or "").removeprefix("ray://").rpartition(":")
    try:
        if host and port.isdigit():  # Ray would try for minutes
            socket.create_connection((host, int(port)), timeout=10).close()
        ray.init(address=address, include_dashboard=False, logging_level="ERROR")
    except Exception as error:  # some of Ray's own are nothing more
        said = " ".join(str(error).split())
        if "ersion mismatch" in said:
            raise SweepError(
                f"the Ray cluster runs other versions than this environment ({said}): install the "
                "same Ray and Python on all machines"
            ) from error
        raise SweepError(
            f"the Ray cluster {where or 'on this machine'} cannot be joined ({said[:300]}): start "
            "it, or correct hydra.launcher.address"
        ) from error


def _outcome(ray: Any, task: Any, overrides: Sequence[str]) -> JobReturn:
    """Wait for a job; one whose process or machine is gone has failed."""
    try:
        found: JobReturn = ray.get(task)
    except ray.exceptions.OutOfMemoryError:
        lost = "its machine ran out of memory: let fewer jobs run on it (hydra.launcher.num_cpus)"
    except (ray.exceptions.WorkerCrashedError, ray.exceptions.NodeDiedError):
        lost = "its process was killed, or its machine is gone"
    except ray.exceptions.RayTaskError as error:
        lost = str(error.cause)
    except ray.exceptions.RayError as error:
        lost = f"Ray lost it ({type(error).__name__})"
    else:
        return found
    return JobReturn(list(overrides), status=JobStatus.FAILED, _return_value=SweepError(lost))
