"""The Ray cluster: starting or joining it, what it has room for, and the replicas on it."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import re
import socket
import time
from functools import partial
from typing import TYPE_CHECKING, Any

# Read when Ray is imported. Ray reports its use to its makers otherwise, and starts by itself when
# a thread of Ray Serve calls it after the end; how the load is counted must be as fast as it is.
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"
os.environ.setdefault("RAY_SERVE_HANDLE_AUTOSCALING_METRIC_PUSH_INTERVAL_S", "1")

import ray
from ray import serve
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from ray.serve.exceptions import RayServeException
from ray.serve.schema import ApplicationStatus, LoggingConfig

from valora_data.contract.files import expanded
from valora_data.wording import agreeing, plural
from valora_serve.errors import SettingsError
from valora_serve.replicas.board import Board
from valora_serve.replicas.client import ReplicatedEngine
from valora_serve.replicas.replica import EngineReplica
from valora_serve.server.api.system import own_version

if TYPE_CHECKING:
    from valora_serve.engine.settings import EngineSettings
    from valora_serve.replicas.settings import ReplicaSettings
    from valora_serve.server.settings import ServerSettings

log = logging.getLogger(__name__)

NAMESPACE = "valora"  # Ray namespace of the boards
DEPLOYMENT = "EngineReplica"  # name of the deployment of the replicas
OBJECT_BYTES = 2 << 30
"""Memory of a Ray that is started here for objects, which are images on their way."""
MOST_ONGOING = 100_000
"""Requests that a replica takes at a time: its engine has the queue, so that its policy sees it."""
HEALTH_SECONDS = 1.0, 30.0
"""Period of health checks, which find a replica that died, and their time limit."""
DRAIN_EXTRA = 15.0  # seconds that a replica has to stop, once its requests had `drain_seconds`
REACH_SECONDS = 5.0  # time limit for connecting to a Ray cluster


async def start_replicas(
    settings: ReplicaSettings, engine: EngineSettings, server: ServerSettings
) -> ReplicatedEngine:
    """Start or join Ray, and start the replicas, without adapters; or a `SettingsError`."""
    address = settings.ray_address or os.environ.get("RAY_ADDRESS") or None
    # Not in another thread: the processes of a Ray that is started here end with that thread.
    join(address)
    name = settings.application
    stop = ray.shutdown
    try:
        board = await asyncio.to_thread(pin_board, name)
        if not await board.is_used.remote():
            stop = partial(_release, name, started=address is None)
            reserved = await asyncio.to_thread(resources, settings, engine)
            made = replicas(settings, engine, server, reserved)
            client = ReplicatedEngine(await asyncio.to_thread(_deploy, made, settings), board, stop)
            await client.start()
            return client
    except BaseException:
        await asyncio.to_thread(stop)
        raise
    await asyncio.to_thread(stop)
    raise SettingsError(
        f"another server serves application {name} on this Ray cluster: stop it, or name another "
        "application"
    )


def join(address: str | None) -> None:
    """Join the cluster at HOST:PORT or ``auto``, or start one here; or a `SettingsError`."""
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    options: dict[str, Any] = {"namespace": NAMESPACE, "logging_level": logging.ERROR}
    if address is None:
        # `local`: without an address, Ray would join what RAY_ADDRESS names or what runs here.
        options |= {"address": "local", "include_dashboard": False}
        options |= {"object_store_memory": OBJECT_BYTES}
        # Ray gives up after 30 s by default, less than a cold start on a slow disk takes.
        os.environ.setdefault("RAY_raylet_start_wait_time_s", "120")
        where = "on this machine"
    else:
        where = f"at {address}"
        options["address"] = address
        try:
            _check_address(address)
        except OSError as error:
            raise SettingsError(_NONE.format(where=f"{where} ({error})")) from error
    try:
        ray.init(**options)
    except ConnectionError as error:
        raise SettingsError(_NONE.format(where=where)) from error
    except Exception as error:
        raise SettingsError(_not_joined(where, error)) from error


_NONE = (
    "no Ray cluster answers {where}: start one with `ray start --head`, or leave ray_address and "
    "RAY_ADDRESS out to start Ray on this machine"
)


def _check_address(address: str) -> None:
    """Refuse an address that no cluster has; OSError if nothing listens, where Ray tries on."""
    if address == "auto":
        return
    host, colon, port = address.rpartition(":")
    if "://" in address or not colon or not port.isdigit():
        raise SettingsError(
            f"ray_address {address} is no address of a Ray cluster: name HOST:PORT of its head "
            "(6379 is Ray's port), or auto for the cluster of this machine"
        )
    try:
        socket.create_connection((host.strip("[]"), int(port)), REACH_SECONDS).close()
    except OverflowError as error:
        raise OSError(error) from error


def _not_joined(where: str, error: Exception) -> str:
    reason = " ".join(str(error).split()).rstrip(".:")[:300] or type(error).__name__
    if where == "on this machine":
        return f"Ray cannot be started {where} ({reason}): see /tmp/ray/session_latest/logs"
    return (
        f"the Ray cluster {where} cannot be joined ({reason}): run valora-serve on a machine of "
        "the cluster, with its versions of Ray and Python, and its token if it asks for one"
    )


def resources(settings: ReplicaSettings, engine: EngineSettings) -> dict[str, float]:
    """Return what Ray reserves for a replica; SettingsError if the cluster has less."""
    count = settings.replicas or 1
    machines = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    cores = sum(one.get("CPU", 0.0) for one in machines)
    gpus = int(sum(one.get("GPU", 0.0) for one in machines))
    kind = engine.device.partition(":")[0]
    if kind == "cuda" or (kind == "auto" and gpus):
        each = engine.tensor_parallel  # all on one machine
        room = sum(int(one.get("GPU", 0.0)) // each for one in machines)
        if room < count:
            of = "" if each == 1 else f" of {each} GPUs on one machine each"
            raise SettingsError(
                f"{plural(count, 'replica')}{of} {agreeing(count, 'needs|need')} "
                f"{plural(count * each, 'GPU')}, and the Ray cluster has {gpus}, enough for "
                f"{room}: lower replicas, or add machines"
            )
        return {"num_gpus": each, "num_cpus": settings.replica_cpus or _share(cores, count, 1.0)}
    most = settings.max_replicas or count
    each_cores = settings.replica_cpus or _share(cores, most, cores)
    room = sum(int(one.get("CPU", 0.0) / each_cores + 1e-6) for one in machines)
    if room < count:
        raise SettingsError(
            f"{plural(count, 'replica')} of {each_cores:g} CPU cores "
            f"{agreeing(count, 'needs|need')} {count * each_cores:g}, "
            f"and the Ray cluster has {cores:g}, enough for {room}: lower replicas or replica_cpus"
        )
    return {"num_cpus": each_cores}


def _share(cores: float, count: int, most: float) -> float:
    """Return the cores of each of `count` replicas: whole ones, or a part of one."""
    share = min(cores / count, most)
    return float(int(share)) if share >= 1 else max(0.01, int(share * 100) / 100)


def pin_board(application: str) -> Any:
    """Return a handle to the board of an application, which is made if there is none."""
    made = ray.remote(Board).options(
        name=f"{application}-board",
        namespace=NAMESPACE,
        lifetime="detached",  # a server that starts again takes its replicas over
        get_if_exists=True,
        num_cpus=0,
        max_restarts=-1,
        max_task_retries=3,
    )
    return made.remote()


def replicas(
    settings: ReplicaSettings,
    engine: EngineSettings,
    server: ServerSettings,
    reserved: dict[str, float],
) -> Any:
    """Return the deployment of the replicas, for each of which Ray reserves `reserved`."""
    count: dict[str, Any] = {"num_replicas": settings.replicas}
    if settings.max_replicas is not None:
        count = {
            "autoscaling_config": AutoscalingConfig(
                min_replicas=settings.replicas,
                max_replicas=settings.max_replicas,
                target_ongoing_requests=settings.target_requests,
                upscale_delay_s=settings.scale_out_seconds,
                downscale_delay_s=settings.scale_in_seconds,
                look_back_period_s=min(30.0, max(2.0, settings.scale_out_seconds)),
                metrics_interval_s=1.0,
            )
        }
    options = {
        "ray_actor_options": reserved,
        "max_ongoing_requests": MOST_ONGOING,
        "graceful_shutdown_timeout_s": server.drain_seconds + DRAIN_EXTRA,
        "graceful_shutdown_wait_loop_s": 0.2,
        "health_check_period_s": HEALTH_SECONDS[0],
        "health_check_timeout_s": HEALTH_SECONDS[1],
        "max_constructor_retry_count": 2,
        "logging_config": LoggingConfig(log_level="WARNING", enable_access_log=False),
        "request_router_config": RequestRouterConfig(
            request_router_class="valora_serve.replicas.request_router:AdapterRequestRouter",
            request_router_kwargs={
                "router": settings.router,
                "settings": dataclasses.asdict(settings.router_settings),
                "slots": engine.slots,
            },
            request_routing_stats_period_s=1.0,
        ),
    }
    # Folders mean the same in every process of the machine.
    base = expanded(engine.base)
    changed: dict[str, Any] = {"base": str(base.resolve()) if base.is_dir() else engine.base}
    for name in ("cost_folder", "tiling_folder", "decision_trace"):
        if (path := getattr(engine, name)) is not None:
            changed[name] = str(expanded(path).absolute())
    return serve.deployment(name=DEPLOYMENT, **count, **options)(EngineReplica).bind(
        dataclasses.replace(engine, **changed),
        own_version(),
        (f"{settings.application}-board", NAMESPACE),
        (server.log_level, server.log_format),
    )


def _deploy(application: Any, settings: ReplicaSettings) -> Any:
    """Run what `replicas` returned; return Ray Serve's handle once all replicas have started."""
    name = settings.application
    # No proxies of Ray Serve: the HTTP server is ours.
    serve.start(proxy_location="Disabled", logging_config=LoggingConfig(log_level="WARNING"))
    serve.run_many(
        [serve.RunTarget(application, name=name, route_prefix=None)],
        wait_for_ingress_deployment_creation=False,
        wait_for_applications_running=False,
    )
    end = time.monotonic() + settings.start_seconds
    while True:
        found = serve.status().applications.get(name)
        if found is not None and found.status == ApplicationStatus.RUNNING:
            return serve.get_app_handle(name)
        messages = [] if found is None else [one.message for one in found.deployments.values()]
        failed = {ApplicationStatus.DEPLOY_FAILED, ApplicationStatus.UNHEALTHY}
        if found is not None and found.status in failed:
            raise SettingsError(_why("\n".join([*messages, found.message])))
        if time.monotonic() > end:
            said = " ".join(" ".join(messages).split())[:300]
            raise SettingsError(
                f"the replicas did not start within {settings.start_seconds:g} s"
                + (f" ({said})" if said else "")
                + ": free the GPUs and cores of the Ray cluster, or raise start_seconds"
            )
        time.sleep(0.1)


def _why(message: str) -> str:
    """Return the sentence of ours in a traceback of Ray Serve, or its last line."""
    ours = re.findall(r"^valora_\w+(?:\.\w+)*Error: (.+)$", message, re.MULTILINE)
    if ours:
        return str(ours[-1])
    lines = [line.strip() for line in message.splitlines() if re.match(r"\w[\w.]*: ", line)]
    reason = lines[-1] if lines else " ".join(message.split())[-300:]
    return f"the replicas did not start ({reason[:300]}): see /tmp/ray/session_latest/logs"


def _release(application: str, *, started: bool) -> None:
    if not ray.is_initialized():
        return
    if not started:
        try:
            serve.delete(application)
            ray.kill(ray.get_actor(f"{application}-board", namespace=NAMESPACE))
        except (ray.exceptions.RayError, RayServeException, ValueError) as error:
            log.warning("the replicas were not stopped: %s", error)
    ray.shutdown()
