"""One engine with the whole HTTP server, as a replica of Ray Serve, behind the fronts."""

import asyncio
import contextlib
import hmac
import json
import logging
import os
import secrets
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import replace
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Any, cast

import ray
from fastapi import FastAPI
from ray import serve
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from valora_serve.engine.process import EngineProcess
from valora_serve.engine.settings import EngineSettings
from valora_serve.errors import SettingsError, StoppedError
from valora_serve.pauses import short_pauses
from valora_serve.replicas.board import INSIDE, PERIOD, Report
from valora_serve.replicas.front import FRONT
from valora_serve.server.app import make_server
from valora_serve.server.constrain import read_tokenizer
from valora_serve.server.loading import state_file
from valora_serve.server.loading.startup import make_app
from valora_serve.server.loading.state_file import SavedState, StateFile
from valora_serve.server.media.pool import shared_pool
from valora_serve.server.settings import ServerSettings
from valora_serve.server.telemetry import logs

NAMESPACE = "valora"  # Ray namespace of the boards


class SharedState(StateFile):
    """The board's state file, as a replica changes it: all others follow before it is recorded."""

    def __init__(self, board: Any, replica: str, path: Path) -> None:
        super().__init__(path)
        self._board, self._replica = board, replica

    def read(self) -> SavedState:
        return cast("SavedState", ray.get(self._board.state.remote()))

    @contextlib.asynccontextmanager
    async def turn(self) -> AsyncIterator[SavedState | None]:
        state = await self._board.lock.remote(self._replica)
        try:
            yield state
        finally:
            await self._board.unlock.remote(self._replica)

    def draft(self, state: SavedState, what: str = "") -> SavedState:
        kind, _, name = what.partition(" ")
        if kind in state_file.FILES and (folder := state.of(kind).get(name)):
            state.sha256[what] = state_file.content_hash(kind, Path(folder))
        return state

    def publish(self, draft: SavedState) -> None:
        try:
            error = ray.get(self._board.change.remote(self._replica, draft))
        except ray.exceptions.RayError as failure:
            error = StoppedError(str(failure))
        if error is not None:
            raise error


class EngineReplica:
    """A server that follows the board; `host` and `cwd` are the machine and folder of fronts."""

    _followed = ""  # as in its reports
    _problem: str | None = None
    _reporting: asyncio.Task[None] | None = None  # once it serves what the board wants

    async def __init__(  # type: ignore[misc] # Ray Serve awaits it
        self, application: str, version: str, host: str, cwd: Path, engine: EngineSettings,
        settings: ServerSettings, bundles: dict[Path, str],
    ) -> None:  # fmt: skip
        if version != version_of("valora"):
            raise SettingsError(
                f"machine {socket.gethostname()} has VaLoRA {version_of('valora')}, and the server "
                f"{version}: install the same version on every machine of the Ray cluster"
            )
        with contextlib.suppress(OSError):  # then all paths have to be absolute
            os.chdir(cwd)
        logs.set_up(settings.log_level, settings.log_format)
        logs.ACCESS.setLevel(logging.ERROR)  # fronts log requests
        for folder, sha256 in bundles.items():
            await asyncio.to_thread(state_file.check_content, "bundle", folder, sha256)
        self._name = str(serve.get_replica_context().replica_id.unique_id)
        self._board = ray.get_actor(f"{application}-board", namespace=NAMESPACE)
        # No other replica uses this folder of fetched adapters.
        cache = f"{settings.adapter_cache}/{serve.get_replica_context().rank.rank}"
        settings = replace(settings, adapter_cache=cache)
        shared_pool().start()
        self._engine = await EngineProcess.start(engine, read_tokenizer)
        state = SharedState(self._board, self._name, Path(settings.state_file))
        app, served = await make_app(self._engine, settings, [*bundles], engine, state)
        here = ray.util.get_node_ip_address()
        bound = socket.create_server(("127.0.0.1" if here == host else here, 0))
        self._listen(app, bound, settings)
        await self._engine.warm_up()  # again, with what was loaded since
        await self._follow(*await self._tell())
        await self._board.served.remote(served)
        self._reporting = asyncio.create_task(self._keep_reporting())

    def _listen(self, app: FastAPI, bound: socket.socket, settings: ServerSettings) -> None:
        self._app, self._context = app, app.state.context
        self._context.guard.rates.taken = Counter()
        self._secret = secrets.token_hex(16)
        self._url = "http://{}:{}".format(*bound.getsockname())
        plain = replace(settings, tls_cert=None, tls_key=None)  # TLS ends at the fronts
        self._server = make_server(cast("Any", self), plain)
        self._server.config.http = "httptools"  # fronts have bounded what comes here
        self._serving = asyncio.create_task(self._server.serve([bound]))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let requests of fronts in, as those of their clients."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        secret, _, sent = Headers(scope=scope).get(FRONT, "").partition(" ")
        if not hmac.compare_digest(secret.encode(), self._secret.encode()):
            return await Response("Ask the server, not its replica", 403)(scope, receive, send)
        inner = {**scope, **json.loads(sent)}

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                # One whose engine has failed answers at once, and would attract requests.
                load = len(self._server.server_state.tasks) if self._engine.healthy else 1e9
                MutableHeaders(scope=message)[FRONT] = json.dumps((load, inner["state"]["facts"]))
            await send(message)

        await self._app(inner, receive, sending)

    async def _tell(self) -> tuple[SavedState | None, SavedState]:
        """Report to the board; gives what its `report` tells to serve, and what was served."""
        rates, before = self._context.guard.rates, self._context.served.state
        taken, rates.taken = rates.taken, Counter()
        told = Report(
            self._name, self._url, self._secret,
            self._engine.healthy and self._reporting is not None, self._followed, self._problem,
            # Names of all adapters would make reports long.
            replace(self._engine.stats(), on_device=(), on_disk=()),
            {m.name: m.adapter for m in self._engine.models() if m.adapter != m.name},
            taken, len(self._server.server_state.tasks),
        )  # fmt: skip
        state, reports, taken = await self._board.report.remote(told)
        self._engine.peers = {one.replica: one.stats for one in reports}
        rates.share(taken, time.monotonic())
        return state, before

    async def _follow(self, state: SavedState | None, before: SavedState) -> None:
        """Serve what the board has told, if this replica still serves what it did `before`."""
        if state is None or (self._problem and state.revision == self._followed):
            return
        self._followed, self._problem = "", None
        try:
            change = self._context.served.follow(state, before)
            if not await self._context.service.changed(change):
                return
        except Exception as error:  # the replica that makes the change is told
            if self._reporting is None:  # it does not start then
                raise
            self._problem = str(error) or repr(error)
            logs.LOG.warning("replica %s cannot serve what others do: %s", self._name, error)
        self._followed = state.revision

    async def _keep_reporting(self) -> None:
        following = asyncio.create_task(asyncio.sleep(0))
        with short_pauses():
            while True:
                try:
                    told = await self._tell()
                    if following.done():
                        following = asyncio.create_task(self._follow(*told))
                    await asyncio.wait({following}, timeout=PERIOD)
                except ray.exceptions.RayError as error:
                    logs.LOG.warning("replica %s and the board: %s", self._name, error)
                    await asyncio.sleep(PERIOD)

    async def check_health(self) -> None:
        """Raise an error if the engine has failed: Ray Serve starts another replica."""
        if not self._engine.healthy or self._serving.done():
            raise StoppedError(f"The engine of replica {self._name} has failed: see its log")

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Return what the autoscaling policy is told of this replica."""
        stats = self._engine.stats()
        return {INSIDE: stats.running + stats.waiting}

    async def __del__(self) -> None:
        """End after the requests of this replica, once no front sends any more."""
        if self._reporting is None:
            return
        self._reporting.cancel()
        with contextlib.suppress(ray.exceptions.RayError):
            await self._board.leave.remote(self._name)
        await asyncio.sleep(3 * PERIOD)
        self._server.should_exit = True
        await self._serving  # which closes the engine
