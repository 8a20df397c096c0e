"""Sweeps (`-m`): one job for each combination, also on Ray by an interface of our own."""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.core.singleton import Singleton
from hydra.core.utils import JobReturn, JobStatus, run_job, setup_globals
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, open_dict

from valora_data.errors import ValoraError
from valora_train.errors import SettingsError

# Environment variable that names the sweep (names that begin with VALORA_ are of valora-serve).
SWEEP = "_VALORA_SWEEP"
TARGET = "hydra_plugins.valora.RayLauncher"  # Hydra takes plug-ins from that package only
# Environment variables that a job takes to its machine begin so.
CARRIED = ("HF_", "HYDRA_", "MLFLOW_", "TRANSFORMERS_", "YOLO_", "_VALORA_")


def register(arguments: Sequence[str]) -> None:
    """Tell Hydra of the launcher, and name the sweep of a command line by its hash."""
    os.environ[SWEEP] = hashlib.sha256("\0".join(arguments).encode()).hexdigest()[:16]
    plugins, store = Plugins.instance(), ConfigStore.instance()
    plugins.register(RayLauncher)
    plugins.class_name_to_class[TARGET] = RayLauncher
    # The plug-in's settings would be taken for the schema of ours of that name, in conf/.
    store.repo.get("hydra", {}).get("launcher", {}).pop("submitit_local.yaml", None)
    store.store(group="hydra/launcher", name="ray", node=RaySettings, provider="valora")


@dataclass
class RaySettings:
    """Settings of `hydra/launcher=ray`."""

    _target_: str = TARGET
    # Null for RAY_ADDRESS, else a cluster that runs on this machine, else a new one there.
    address: str | None = None
    num_cpus: float = 1.0  # that a job takes
    num_gpus: float | None = None  # null for 1 if the cluster has any, otherwise 0
    resources: dict[str, float] = field(default_factory=dict)  # further ones, by name


class Job:
    """A job of a sweep, as it is sent to another machine: what Hydra and the environment know."""

    def __init__(
        self,
        number: int,
        overrides: list[str],
        hydra: tuple[HydraContext, DictConfig, TaskFunction],
    ) -> None:
        self.number, self.overrides, self.hydra = number, overrides, hydra
        self.folder = os.getcwd()  # noqa: PTH109 (as the user names it)
        self.environment = {k: v for k, v in os.environ.items() if k.startswith(CARRIED)}
        self.singletons = Singleton.get_state()
        self.known = ConfigStore.instance().repo

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
        context, config, task = self.hydra
        config = context.config_loader.load_sweep_config(config, self.overrides)
        with open_dict(config):
            config.hydra.job.id = f"{config.hydra.job.name}_{self.number}"
            config.hydra.job.num = self.number
        HydraConfig.instance().set_config(config)
        return run_job(task, config, "hydra.sweep.dir", "hydra.sweep.subdir", context)


class RayLauncher(Launcher):
    """Runs each job as a task of Ray; takes the settings of `RaySettings`."""

    def __init__(self, **settings: Any) -> None:
        self._settings = RaySettings(**{**settings, "resources": dict(settings["resources"])})

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        """Take what Hydra hands over before a sweep."""
        self._hydra = hydra_context, config, task_function

    def launch(
        self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> Sequence[JobReturn]:
        """Run jobs, as many at once as the cluster has room for."""
        try:
            import ray
        except ImportError as error:
            raise SettingsError(
                "hydra/launcher=ray needs Ray: pip install 'valora[cluster]'"
            ) from error
        if not ray.is_initialized():
            _join(ray, self._settings.address)
        run = ray.remote(**_options(ray, self._settings))(Job.run)
        numbered = enumerate(job_overrides, start=initial_job_idx)
        jobs = [Job(number, list(overrides), self._hydra) for number, overrides in numbered]
        return [_outcome(ray, job, task) for job, task in [(job, run.remote(job)) for job in jobs]]


def _join(ray: Any, address: str | None) -> None:
    """Join a cluster, or start one on this machine."""
    where = address or os.environ.get("RAY_ADDRESS", "")
    host, _, port = where.removeprefix("ray://").rpartition(":")
    try:
        if host and port.isdigit():  # Ray would try for minutes
            socket.create_connection((host, int(port)), timeout=10).close()
        ray.init(address=address, include_dashboard=False, logging_level="ERROR")
    except Exception as error:  # some of Ray's own are nothing more
        said = " ".join(str(error).split())[:300]
        raise ValoraError(
            f"the Ray cluster {where or 'on this machine'} cannot be joined ({said}): start it, "
            "with the Ray and Python of this environment, or correct hydra.launcher.address"
        ) from error


def _options(ray: Any, settings: RaySettings) -> dict[str, Any]:
    """Options of the tasks; Ray would wait for ever for a machine that has what they take."""
    machines = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    gpus = settings.num_gpus
    if gpus is None:
        gpus = 1.0 if any(machine.get("GPU") for machine in machines) else 0.0
    needed = {"CPU": settings.num_cpus, "GPU": gpus, **settings.resources}
    if not any(all(0 <= needed[key] <= one.get(key, 0) for key in needed) for one in machines):
        wanted = ", ".join(f"{value:g} {name}" for name, value in needed.items() if value)
        raise SettingsError(
            f"no machine of the Ray cluster has {wanted} for a job: correct hydra.launcher."
            "num_cpus, num_gpus or resources, or start such a machine first"
        )
    options = {"num_cpus": settings.num_cpus, "num_gpus": gpus, "resources": settings.resources}
    # A process for each job: what one leaves behind (memory, threads) is not the next one's.
    # Not started again by Ray: a job that used up the memory would do so for ever.
    return {**options, "max_calls": 1, "max_retries": 0}


def _outcome(ray: Any, job: Job, task: Any) -> JobReturn:
    """Wait for a job; one whose process or machine is gone has failed."""
    try:
        found: JobReturn = ray.get(task)
    except ray.exceptions.RayError as error:
        said = str(getattr(error, "cause", error)).strip().partition("\n")[0]
        lost = ValoraError(f"job {job.number} failed: {said}; run the same command again")
        return JobReturn(job.overrides, status=JobStatus.FAILED, _return_value=lost)
    return found
