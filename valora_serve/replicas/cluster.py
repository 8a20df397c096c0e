"""The Ray cluster: starting or joining it, what it has room for, and the replicas on it."""

import asyncio
import contextlib
import logging
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from importlib.metadata import version as version_of
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

# Read when Ray is imported. Ray reports its use to its makers otherwise, starts by itself when a
# thread of Ray Serve calls it after the end, and has replicas yield to all else of the machine.
os.environ.update(RAY_USAGE_STATS_ENABLED="0", RAY_ENABLE_AUTO_CONNECT="0", RAY_worker_niceness="0")

import ray
from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy
from ray.serve.exceptions import RayServeException
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from valora_data.wording import plural
from valora_serve.engine.settings import EngineSettings
from valora_serve.errors import SettingsError
from valora_serve.replicas.board import PERIOD, Board
from valora_serve.replicas.replica import NAMESPACE, EngineReplica
from valora_serve.replicas.settings import ReplicaSettings
from valora_serve.server.loading.startup import Served
from valora_serve.server.loading.state_file import content_hash
from valora_serve.server.settings import ServerSettings

log = logging.getLogger(__name__)

DRAIN_EXTRA = 15.0  # seconds that a replica has to stop, once its requests had `drain_seconds`
REACH_SECONDS = 5.0  # time limit for connecting to a Ray cluster
LOGS = "/tmp/ray/session_latest/logs"
FRONT = (sys.executable, "-m", "valora_serve.replicas.front")


async def run(
    sockets: list[socket.socket], folders: Sequence[Path], server: ServerSettings,
    engine: EngineSettings, settings: ReplicaSettings, announce: Callable[[Served | None], None],
) -> None:  # fmt: skip
    """Start replicas and fronts, call `announce` once these answer, and watch them to the end."""
    address = settings.ray_address or os.environ.get("RAY_ADDRESS") or None
    # Not in another thread: the processes of a Ray of ours end with that thread.
    with join(address), contextlib.ExitStack() as stack:
        board = pin_board(settings.application, server)
        if address is not None:
            stack.callback(_delete, settings.application)
        count = settings.fronts or max(2, min(16, (os.cpu_count() or 1) // 4))
        each = replace(server, max_connections=server.max_connections * count)
        await deploy(settings, engine, each, folders)
        known = Path(stack.enter_context(TemporaryDirectory(prefix="valora-"))) / "known"
        held = max(server.max_body_bytes, server.max_held_bytes // count)
        plan = known, replace(server, max_held_bytes=held), settings, engine.slots
        announcing = partial(announce, await board.served.remote())
        await keep_fronts(count, sockets, plan, partial(_tell, board, known), announcing)


async def keep_fronts(
    count: int, sockets: list[socket.socket], plan: tuple[Any, ...],
    tell: Callable[[], Awaitable[None]], announce: Callable[[], None] | None,
) -> None:  # fmt: skip
    """Run fronts until SIGTERM or SIGINT; one that dies starts again. Once all answer, `announce`.

    `plan` has the arguments of `front.serve`: the file that `tell` writes, and those of a `Front`.
    """
    stop, numbers = asyncio.Event(), [one.fileno() for one in sockets]
    for ends_it in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(ends_it, stop.set)

    def start() -> Any:
        made: Any = subprocess.Popen(
            FRONT, stdin=subprocess.PIPE, pass_fds=numbers, start_new_session=True
        )
        pickle.dump((numbers, os.getpid(), *plan), made.stdin)
        made.stdin.close()
        return made

    running: list[Any] = []
    while not stop.is_set():
        await tell()
        for front in [one for one in running if one.poll() is not None]:
            if announce is not None:
                raise SettingsError("a front did not start: see what it has said above")
            log.warning("a front ended with status %s: it starts again", front.returncode)
            running.remove(front)
        running += [start() for _ in range(count - len(running))]
        if announce and all(plan[0].with_name(str(one.pid)).exists() for one in running):
            announce = announce()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), PERIOD)
    for one in sockets:
        one.close()
    for how in (signal.SIGTERM, signal.SIGKILL):
        for front in running:
            front.send_signal(how)
        with contextlib.suppress(subprocess.TimeoutExpired):
            for front in running:
                front.wait(plan[1].drain_seconds + DRAIN_EXTRA)


async def _tell(board: Any, known: Path) -> None:
    """Write what fronts know of the replicas, unless the board is silent or has just started."""
    try:
        reports = await asyncio.wait_for(board.reports.remote(), REACH_SECONDS)
        if reports or not known.exists():
            draft = known.with_suffix(".new")
            draft.write_bytes(pickle.dumps([one for one in reports if one.healthy]))
            draft.replace(known)
    except (TimeoutError, OSError, ray.exceptions.RayError) as error:
        log.warning("the board does not answer: %s", error)


def join(address: str | None) -> Any:
    """Join the cluster at HOST:PORT or ``auto``, or start one here; or a `SettingsError`."""
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    # Ray gives up after 30 s by default, less than a cold start on a slow disk takes.
    os.environ.setdefault("RAY_raylet_start_wait_time_s", "120")
    # Without `local`, Ray would join what RAY_ADDRESS names or what runs here.
    own = {"address": "local", "include_dashboard": False, "object_store_memory": 128 << 20}
    options: dict[str, Any] = own if address is None else {"address": address}
    try:
        if address not in (None, "auto"):  # Ray itself tries for minutes
            host, _, port = str(address).rpartition(":")
            socket.create_connection((host.strip("[]"), int(port)), REACH_SECONDS).close()
        return ray.init(**options, namespace=NAMESPACE, logging_level=logging.ERROR)
    except Exception as error:
        reason = " ".join(str(error).split()).rstrip(".:")[:300] or type(error).__name__
        raise SettingsError(
            f"Ray cannot be started on this machine ({reason}): see {LOGS}"
            if address is None
            else f"the Ray cluster at {address} cannot be joined ({reason}): name HOST:PORT of its "
            "head, started with `ray start --head`, or auto, on a machine of the cluster that has "
            "its versions of Ray and Python"
        ) from error


def pin_board(application: str, server: ServerSettings) -> Any:
    """Make the board of an application on this machine; SettingsError if a server has one."""
    file = str(Path(server.state_file).absolute()) if server.adapter_folder else None
    here = ray.get_runtime_context().get_node_id()
    made = ray.remote(Board).options(
        name=f"{application}-board", namespace=NAMESPACE, num_cpus=0,
        scheduling_strategy=NodeAffinitySchedulingStrategy(here, soft=True),
        max_restarts=-1, max_task_retries=3,
    )  # fmt: skip
    try:
        return made.remote(file)
    except ray.exceptions.ActorAlreadyExistsError as error:
        text = f"another server serves application {application} on this Ray cluster: stop it, or"
        raise SettingsError(f"{text} name another application") from error


def resources(settings: ReplicaSettings, engine: EngineSettings) -> dict[str, float]:
    """Return what Ray reserves for a replica; SettingsError if the cluster has less."""
    count, most = settings.replicas or 1, settings.max_replicas or settings.replicas or 1
    machines = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    has = {what: sum(one.get(what, 0.0) for one in machines) for what in ("CPU", "GPU")}
    kind, cpus = engine.device.partition(":")[0], settings.replica_cpus
    if kind == "cuda" or (kind == "auto" and has["GPU"]):
        what, each = "GPU", float(engine.tensor_parallel)  # all on one machine
        found = {"num_gpus": each, "num_cpus": cpus or 0.0}
    else:
        share = has["CPU"] / most  # whole cores, or a part of one
        what, each = "CPU", cpus or int(share) or max(0.01, int(share * 100) / 100)
        found = {"num_cpus": each}
    room = sum(int(one.get(what, 0.0) / each + 1e-6) for one in machines)
    if room < count:
        raise SettingsError(
            f"the Ray cluster has {has[what]:g} {what}s, enough for {room} of "
            f"{plural(count, 'replica')} with {each:g} each, on one machine: lower replicas or "
            "replica_cpus, or add machines"
        )
    return found


async def deploy(
    settings: ReplicaSettings, engine: EngineSettings, server: ServerSettings,
    folders: Sequence[Path],
) -> None:  # fmt: skip
    """Start the replicas, and wait until all have started; or a `SettingsError`."""
    quiet: Any = {"log_level": "WARNING", "enable_access_log": False}
    scaling = AutoscalingConfig(
        min_replicas=settings.replicas, max_replicas=settings.max_replicas or settings.replicas,
        target_ongoing_requests=settings.target_requests,
        upscale_delay_s=settings.scale_out_seconds, downscale_delay_s=settings.scale_in_seconds,
        look_back_period_s=min(30.0, max(2.0, settings.scale_out_seconds)), metrics_interval_s=1.0,
        policy=AutoscalingPolicy(policy_function="valora_serve.replicas.board:wanted"),
    )  # fmt: skip
    made = serve.deployment(
        autoscaling_config=scaling, ray_actor_options=resources(settings, engine),
        graceful_shutdown_timeout_s=server.drain_seconds + DRAIN_EXTRA,
        graceful_shutdown_wait_loop_s=0.2, max_constructor_retry_count=2,
        health_check_period_s=1.0, health_check_timeout_s=30.0, logging_config=quiet,
    )  # fmt: skip
    name, bundles = settings.application, {one: content_hash("bundle", one) for one in folders}
    here = name, version_of("valora"), ray.util.get_node_ip_address(), Path.cwd()
    application = made(EngineReplica).bind(*here, engine, server, bundles)
    # No proxies of Ray Serve: fronts and replicas speak HTTP.
    serve.start(proxy_location="Disabled", logging_config=quiet)
    running = asyncio.to_thread(serve.run, application, name=name, route_prefix=None)
    try:
        await asyncio.wait_for(running, settings.start_seconds)
    except (TimeoutError, RuntimeError) as error:
        said = f"not begun within {settings.start_seconds:g} s"
        if (found := serve.status().applications.get(name)) is not None:
            said = "\n".join([*(one.message for one in found.deployments.values()), found.message])
        raise SettingsError(_why(said)) from error


def _why(message: str) -> str:
    """Return the sentence of ours in a traceback of Ray Serve, or its own last line."""
    if ours := re.findall(r"^valora_[\w.]+: (.+)$", message, re.MULTILINE):
        return str(ours[-1])
    *_, reason = message, *re.findall(r"^[\w.]+: .+$", message, re.MULTILINE)
    return (
        f"the replicas did not start ({' '.join(reason.split())[-300:]}): see {LOGS}, free the "
        "GPUs and cores of the Ray cluster, or raise start_seconds"
    )


def _delete(application: str) -> None:
    try:
        serve.delete(application)
    except (ray.exceptions.RayError, RayServeException) as error:
        log.warning("the replicas were not stopped: %s", error)
