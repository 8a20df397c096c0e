"""The Ray cluster: starting or joining it, what it has room for, and the replicas on it."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

# Read when Ray is imported. Ray reports its use to its makers otherwise, and starts by itself when
# a thread of Ray Serve calls it after the end.
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"

import ray
from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy
from ray.serve.exceptions import RayServeException
from ray.serve.schema import ApplicationStatus, LoggingConfig
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from valora_data.contract.files import expanded
from valora_data.wording import agreeing, plural
from valora_serve.errors import SettingsError
from valora_serve.replicas.board import PERIOD, Board
from valora_serve.replicas.replica import NAMESPACE, EngineReplica
from valora_serve.server.api.system import own_version
from valora_serve.server.listen import bind
from valora_serve.server.loading.state_file import content_hash

if TYPE_CHECKING:
    from valora_serve.engine.settings import EngineSettings
    from valora_serve.replicas.settings import ReplicaSettings
    from valora_serve.server.loading.startup import Served
    from valora_serve.server.settings import ServerSettings

log = logging.getLogger(__name__)
Sockets = list[socket.socket]

DEPLOYMENT = "EngineReplica"  # name of the deployment of the replicas
OBJECT_BYTES = 128 << 20  # memory of a Ray that is started here for objects, which are few
HEALTH_SECONDS = 1.0, 30.0  # period of health checks, which find who died, and their time limit
DRAIN_EXTRA = 15.0  # seconds that a replica has to stop, once its requests had `drain_seconds`
REACH_SECONDS = 5.0  # time limit for connecting to a Ray cluster


async def run(
    sockets: Sockets,
    folders: Sequence[Path],
    server: ServerSettings,
    engine: EngineSettings,
    settings: ReplicaSettings,
    announce: Callable[[Served | None], None],
) -> None:
    """Start replicas and fronts, call `announce` once these answer, and watch them to the end."""
    address = settings.ray_address or os.environ.get("RAY_ADDRESS") or None
    join(address)  # not in another thread: the processes of a Ray of ours end with that thread
    name, stop = settings.application, ray.shutdown
    try:
        board = await asyncio.to_thread(pin_board, name, server)
        if await board.is_used.remote():
            raise SettingsError(
                f"another server serves application {name} on this Ray cluster: stop it, or name "
                "another application"
            )
        stop = partial(_release, name, started=address is None)
        count = settings.fronts or max(2, min(16, (os.cpu_count() or 1) // 4))
        made = await asyncio.to_thread(replicas, settings, engine, server, folders, count)
        deploying = asyncio.create_task(asyncio.to_thread(_deploy, made, settings))
        while not deploying.done():
            await board.look.remote()  # so that no other server takes the application
            await asyncio.wait({deploying}, timeout=PERIOD)
        deploying.result()
        bound = shared(sockets, server, count)
        await Fronts(board, bound, (server, settings, engine.slots, count)).run(announce)
    finally:
        await asyncio.to_thread(stop)


def shared(sockets: Sockets, server: ServerSettings, count: int) -> list[Sockets]:
    """Sockets for each of `count` processes, between which the kernel spreads connections."""
    if server.unix_socket:
        return [sockets] * count
    for one in sockets:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, True)
    same = dataclasses.replace(server, port=sockets[0].getsockname()[1])
    return [sockets, *(bind(same, shared=True) for _ in range(count - 1))]


class Fronts:
    """The processes with the public port; one that dies gets its sockets, and their queue, anew."""

    def __init__(self, board: Any, sockets: list[Sockets], plan: tuple[Any, ...]) -> None:
        self._board, self._sockets, self._plan = board, sockets, plan
        self._running: list[asyncio.subprocess.Process] = []
        self._known = pickle.dumps([])

    async def run(self, announce: Callable[[Served | None], None]) -> None:
        """Keep them running, and tell them of the replicas, until SIGTERM or SIGINT comes."""
        stop = asyncio.Event()
        for ends_it in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(ends_it, stop.set)
        await self._look()
        self._running = list(await asyncio.gather(*map(self._start, self._sockets)))
        if not all([await one.stdout.readline() for one in self._running if one.stdout]):
            raise SettingsError("a front did not start: see what it has said above")
        announce(await self._board.served.remote())
        while not stop.is_set():
            await self._look()
            for number, one in enumerate(self._running):
                if one.returncode is not None:
                    log.warning("a front ended with status %s: it starts again", one.returncode)
                    self._running[number] = await self._start(self._sockets[number])
                elif one.stdin is not None:
                    one.stdin.write(self._known)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), PERIOD)
        for socket_ in {one for some in self._sockets for one in some}:
            socket_.close()
        for how in (signal.SIGTERM, signal.SIGKILL):
            for one in self._running:
                with contextlib.suppress(ProcessLookupError):
                    one.send_signal(how)
            ends = [asyncio.create_task(one.wait()) for one in self._running]
            await asyncio.wait(ends, timeout=self._plan[0].drain_seconds + DRAIN_EXTRA)

    async def _start(self, sockets: Sockets) -> asyncio.subprocess.Process:
        numbers = [one.fileno() for one in sockets]
        made = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "valora_serve.replicas.front",
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=numbers,
        )  # fmt: skip
        assert made.stdin is not None
        made.stdin.write(pickle.dumps((numbers, *self._plan)) + self._known)
        return made

    async def _look(self) -> None:
        """Ask the board for the replicas; while it does not answer, fronts keep what they know."""
        try:
            reports = await asyncio.wait_for(self._board.look.remote(), REACH_SECONDS)
        except (TimeoutError, ray.exceptions.RayError) as error:
            log.warning("the board does not answer: %s", error)
            return
        if reports:  # a board that has just started anew hears of them soon
            self._known = pickle.dumps([one for one in reports if one.healthy])


def join(address: str | None) -> None:
    """Join the cluster at HOST:PORT or ``auto``, or start one here; or a `SettingsError`."""
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    # `local`: without an address, Ray would join what RAY_ADDRESS names or what runs here.
    here = {"address": "local", "include_dashboard": False, "object_store_memory": OBJECT_BYTES}
    # Ray gives up after 30 s by default, less than a cold start on a slow disk takes.
    os.environ.setdefault("RAY_raylet_start_wait_time_s", "120")
    try:
        if address not in (None, "auto"):
            _reach(str(address))
        ray.init(
            **(here if address is None else {"address": address}),
            namespace=NAMESPACE, logging_level=logging.ERROR,
        )  # fmt: skip
    except SettingsError:
        raise
    except Exception as error:
        reason = _line(error).rstrip(".:")[:300] or type(error).__name__
        versions = re.findall(r"Ray: (\S+) Python: (\S+)", reason)
        if address is None:
            said = (
                f"Ray cannot be started on this machine ({reason}): see "
                "/tmp/ray/session_latest/logs"
            )
        elif isinstance(error, OSError):  # such as a ConnectionError
            said = (
                f"no Ray cluster answers at {address}: start one with `ray start --head`, or leave "
                "ray_address and RAY_ADDRESS out to start Ray on this machine"
            )
        elif len(versions) == 2:
            (theirs, python), (ours, own) = versions
            said = (
                f"the Ray cluster at {address} has Ray {theirs} and Python {python}, and this "
                f"server Ray {ours} and Python {own}: install the same versions on all machines"
            )
        else:
            said = (
                f"the Ray cluster at {address} cannot be joined ({reason}): run valora-serve on a "
                "machine of the cluster, with its versions of Ray and Python, and its token if it "
                "asks for one"
            )
        raise SettingsError(said) from error


def _reach(address: str) -> None:
    """Refuse an address that no cluster has; OSError if nothing listens, where Ray tries on."""
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


def resources(settings: ReplicaSettings, engine: EngineSettings) -> dict[str, float]:
    """Return what Ray reserves for a replica; SettingsError if the cluster has less."""
    count = settings.replicas or 1
    machines = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    cores, gpus = (sum(one.get(what, 0.0) for one in machines) for what in ("CPU", "GPU"))
    kind = engine.device.partition(":")[0]
    if kind == "cuda" or (kind == "auto" and gpus):
        each = engine.tensor_parallel  # all on one machine
        found = {"num_gpus": each, "num_cpus": settings.replica_cpus or _share(cores / count, 1.0)}
        of = "" if each == 1 else f" of {each} GPUs on one machine each"
        needs, has, what = plural(count * each, "GPU"), gpus, "GPU"
        remedy = "lower replicas, or add machines"
    else:
        share = settings.replica_cpus or _share(cores / (settings.max_replicas or count), cores)
        found = {"num_cpus": share}
        of, needs, has, what = f" of {share:g} CPU cores", f"{count * share:g}", cores, "CPU"
        remedy = "lower replicas or replica_cpus"
    size = found.get("num_gpus", found["num_cpus"])
    room = sum(int(one.get(what, 0.0) / size + 1e-6) for one in machines)
    if room < count:
        raise SettingsError(
            f"{plural(count, 'replica')}{of} {agreeing(count, 'needs|need')} {needs}, and the Ray "
            f"cluster has {has:g}, enough for {room}: {remedy}"
        )
    return found


def _share(cores: float, most: float) -> float:
    """Whole cores, or a part of one."""
    share = min(cores, most)
    return float(int(share)) if share >= 1 else max(0.01, int(share * 100) / 100)


def pin_board(application: str, server: ServerSettings) -> Any:
    """Return a handle to the board of an application, made on this machine if there is none."""
    file = str(Path(server.state_file).absolute()) if server.adapter_folder else None
    here = ray.get_runtime_context().get_node_id()
    made = ray.remote(Board).options(
        name=f"{application}-board", namespace=NAMESPACE, get_if_exists=True, num_cpus=0,
        lifetime="detached",  # a server that starts again takes its replicas over
        scheduling_strategy=NodeAffinitySchedulingStrategy(here, soft=True),
        max_restarts=-1, max_task_retries=3,
    )  # fmt: skip
    return made.remote(file)


def replicas(
    settings: ReplicaSettings,
    engine: EngineSettings,
    server: ServerSettings,
    folders: Sequence[Path],
    fronts: int,
) -> Any:
    """Return the deployment of the replicas; SettingsError if the cluster has too little."""
    count: dict[str, Any] = {"num_replicas": settings.replicas}
    if settings.max_replicas is not None:
        count = {"autoscaling_config": AutoscalingConfig(
            min_replicas=settings.replicas, max_replicas=settings.max_replicas,
            target_ongoing_requests=settings.target_requests,
            upscale_delay_s=settings.scale_out_seconds,
            downscale_delay_s=settings.scale_in_seconds,
            look_back_period_s=min(30.0, max(2.0, settings.scale_out_seconds)),
            metrics_interval_s=1.0,
            policy=AutoscalingPolicy(policy_function="valora_serve.replicas.board:wanted"),
        )}  # fmt: skip
    made = serve.deployment(
        name=DEPLOYMENT,
        **count,
        ray_actor_options=resources(settings, engine),
        graceful_shutdown_timeout_s=server.drain_seconds + DRAIN_EXTRA,
        graceful_shutdown_wait_loop_s=0.2,
        health_check_period_s=HEALTH_SECONDS[0],
        health_check_timeout_s=HEALTH_SECONDS[1],
        max_constructor_retry_count=2,
        logging_config=LoggingConfig(log_level="WARNING", enable_access_log=False),
    )
    # Folders mean the same in every process of the machine.
    base = expanded(engine.base)
    engine = dataclasses.replace(engine, base=str(base.resolve()) if base.is_dir() else engine.base)
    server = dataclasses.replace(server, max_connections=server.max_connections * fronts)
    files = ("keys_file", "state_file", "adapter_folder", "adapter_cache", "media_folder")
    return made(EngineReplica).bind(
        settings.application,
        own_version(),
        ray.util.get_node_ip_address(),
        _absolute(engine, ("cost_folder", "tiling_folder", "decision_trace")),
        _absolute(server, files),
        [(str(one.absolute()), content_hash("bundle", one)) for one in folders],
    )


def _absolute(settings: Any, names: Iterable[str]) -> Any:
    found = {name: path for name in names if (path := getattr(settings, name))}
    whole = {name: str(expanded(path).absolute()) for name, path in found.items()}
    return dataclasses.replace(settings, **whole)


def _deploy(application: Any, settings: ReplicaSettings) -> None:
    """Run what `replicas` returned, until all replicas have started."""
    name = settings.application
    # No proxies of Ray Serve: fronts and replicas speak HTTP.
    serve.start(proxy_location="Disabled", logging_config=LoggingConfig(log_level="WARNING"))
    serve.run_many(
        [serve.RunTarget(application, name=name, route_prefix=None)],
        wait_for_ingress_deployment_creation=False,
        wait_for_applications_running=False,
    )
    end = time.monotonic() + settings.start_seconds
    failed = {ApplicationStatus.DEPLOY_FAILED, ApplicationStatus.UNHEALTHY}
    said = ""
    while time.monotonic() < end:
        if (found := serve.status().applications.get(name)) is not None:
            said = "\n".join([*(one.message for one in found.deployments.values()), found.message])
            if found.status == ApplicationStatus.RUNNING:
                return
            if found.status in failed:
                raise SettingsError(_why(said))
        time.sleep(PERIOD)  # asked more often, Ray answers with a core
    raise SettingsError(
        f"the replicas did not start within {settings.start_seconds:g} s ({_line(said)[:300]}): "
        "free the GPUs and cores of the Ray cluster, or raise start_seconds"
    )


def _why(message: str) -> str:
    """Return the sentence of ours in a traceback of Ray Serve, or its last line."""
    ours = re.findall(r"^valora_\w+(?:\.\w+)*Error: (.+)$", message, re.MULTILINE)
    if ours:
        return str(ours[-1])
    lines = [line.strip() for line in message.splitlines() if re.match(r"\w[\w.]*: ", line)]
    reason = lines[-1] if lines else _line(message)[-300:]
    return f"the replicas did not start ({reason[:300]}): see /tmp/ray/session_latest/logs"


def _line(text: object) -> str:
    return " ".join(str(text).split())


def _release(application: str, *, started: bool) -> None:
    if not started:
        try:
            serve.delete(application)
            ray.kill(ray.get_actor(f"{application}-board", namespace=NAMESPACE))
        except (ray.exceptions.RayError, RayServeException, ValueError) as error:
            log.warning("the replicas were not stopped: %s", error)
    ray.shutdown()
