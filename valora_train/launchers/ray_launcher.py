"""Jobs on a Ray cluster: `valora-train -m hydra/launcher=ray …`.

Hydra's own plug-in for Ray needs a cloudpickle that this environment's libraries have left behind,
and the AWS libraries, so that the launcher is written here, on Ray's own interface.
"""

from __future__ import annotations

import math
import os
import socket
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from valora_train.errors import SettingsError, SweepError
from valora_train.launchers.base import Job, JobLauncher, failed

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hydra.core.utils import JobReturn

TARGET = "hydra_plugins.valora.RayLauncher"


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


class RayLauncher(JobLauncher):
    """Runs each job as a task of Ray, in a process of its own that is not started again.

    Args:
        address: Address of the cluster.
        num_cpus: Cores that a job takes.
        num_gpus: GPUs that a job takes.
        resources: Further resources that a job takes.
    """

    def __init__(
        self,
        address: str | None,
        num_cpus: float,
        num_gpus: float | None,
        resources: Mapping[str, float],
    ) -> None:
        self._address = address
        self._cpus, self._gpus, self._resources = num_cpus, num_gpus, dict(resources)

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
        ray = _ray()
        if not ray.is_initialized():
            _join(ray, self._address)
        options = self._options(ray)
        run = ray.remote(**options)(Job.run)
        tasks = [run.remote(job) for job in self.jobs(job_overrides, initial_job_idx)]
        return [
            _outcome(ray, task, overrides)
            for task, overrides in zip(tasks, job_overrides, strict=True)
        ]

    def _options(self, ray: Any) -> dict[str, Any]:
        """Options of the tasks; checks that a machine has what they take."""
        machines = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        gpus = self._gpus
        if gpus is None:
            gpus = 1.0 if any(machine.get("GPU") for machine in machines) else 0.0
        needed = {"CPU": self._cpus, "GPU": gpus, **self._resources}
        for name, value in needed.items():
            if not (math.isfinite(value) and value >= 0):
                raise SettingsError(
                    f"hydra.launcher asks for {value:g} {name} for a job: give a number of at "
                    "least 0"
                )
        if not any(
            all(machine.get(name, 0) >= value for name, value in needed.items())
            for machine in machines
        ):
            wanted = ", ".join(f"{value:g} {name}" for name, value in needed.items() if value)
            raise SettingsError(
                f"no machine of the Ray cluster has {wanted} for a job: lower hydra.launcher."
                "num_cpus, num_gpus or resources, or start such a machine first"
            )
        # A process for each job: what one leaves behind (memory, threads) is not the next one's.
        # Not started again by Ray: a job that used up the memory would do so for ever.
        return {
            "num_cpus": self._cpus,
            "num_gpus": gpus,
            "resources": self._resources,
            "max_calls": 1,
            "max_retries": 0,
        }


def _ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise SettingsError(
            "hydra/launcher=ray needs Ray: pip install 'valora[cluster]'"
        ) from error
    return ray


def _join(ray: Any, address: str | None) -> None:
    """Join a cluster, or start one on this machine.

    Raises:
        SweepError: The cluster does not answer, or runs another version of Ray or Python.
    """
    where = address or os.environ.get("RAY_ADDRESS")
    try:
        _reach(where)
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


def _reach(address: str | None) -> None:
    """Connect to an address, as Ray would try for minutes.

    Raises:
        OSError: Nothing answers there.
    """
    host, _, port = (address or "").removeprefix("ray://").rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host, int(port)), timeout=10).close()


def _outcome(ray: Any, task: Any, overrides: Sequence[str]) -> JobReturn:
    """Wait for a job; one whose process or machine is gone has failed."""
    try:
        found: JobReturn = ray.get(task)
    except ray.exceptions.OutOfMemoryError:
        return failed(overrides, "its machine ran out of memory: let fewer jobs run on a machine "
                      "(hydra.launcher.num_cpus)")  # fmt: skip
    except (ray.exceptions.WorkerCrashedError, ray.exceptions.NodeDiedError):
        return failed(overrides, "its process was killed, or its machine is gone")
    except ray.exceptions.RayTaskError as error:
        return failed(overrides, str(error.cause))
    except ray.exceptions.RayError as error:
        return failed(overrides, f"Ray lost it ({type(error).__name__})")
    return found
