"""One engine with the whole HTTP server, as a replica of Ray Serve, behind the fronts."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hmac
import json
import logging
import secrets
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import httpx
import ray
from ray import serve
from starlette.requests import Request
from starlette.responses import Response

from valora_data.errors import ValoraError
from valora_serve.engine.start import start_engine
from valora_serve.errors import AdapterError, ServeError, SettingsError, StoppedError
from valora_serve.pauses import short_pauses
from valora_serve.replicas.board import INSIDE, PERIOD, Report
from valora_serve.replicas.front import FACTS, FRONT
from valora_serve.server.api.system import own_version
from valora_serve.server.app import make_server
from valora_serve.server.errors import error_answer
from valora_serve.server.loading.startup import make_app
from valora_serve.server.loading.state_file import (
    FILES,
    SavedState,
    StateFile,
    check_content,
    content_hash,
)
from valora_serve.server.media.pool import shared_pool
from valora_serve.server.telemetry import logs

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from valora_serve.engine.settings import EngineSettings
    from valora_serve.server.settings import ServerSettings

log = logging.getLogger(__name__)

NAMESPACE = "valora"  # Ray namespace of the boards
CHANGE_SECONDS = 900.0  # in which all replicas must have loaded something
FOLLOW = "/internal/follow"  # path at which a replica is told to load what another one has


class SharedState(StateFile):
    """The board's state file, as a replica changes it: all others follow before it is recorded."""

    def __init__(self, board: Any, replica: str, path: Path) -> None:
        super().__init__(path)
        self._board, self._replica = board, replica
        self._others: list[Report] = []

    def read(self) -> SavedState:
        state: SavedState = ray.get(self._board.state.remote())
        return state

    @contextlib.asynccontextmanager
    async def turn(self) -> AsyncIterator[SavedState | None]:
        self._before, reports = await self._board.lock.remote(self._replica)
        self._others = [report for report in reports if report.replica != self._replica]
        try:
            yield self._before
        finally:
            await self._board.unlock.remote(self._replica)

    def draft(self, state: SavedState, what: str = "") -> SavedState:
        kind, _, name = what.partition(" ")
        if kind in FILES and name in state.of(kind):
            state.sha256[what] = content_hash(kind, Path(state.of(kind)[name]))
        return state

    def publish(self, draft: SavedState) -> None:
        try:
            asyncio.run(self._everywhere(draft))
            error = ray.get(self._board.record.remote(self._replica, draft))
        except (ServeError, ray.exceptions.RayError) as failure:
            error = failure
        if error is not None:
            with contextlib.suppress(ServeError):  # they follow the board when they report
                asyncio.run(self._everywhere(self._before))
            raise error if isinstance(error, OSError | ServeError) else StoppedError(str(error))

    def discard(self, draft: SavedState) -> None:
        pass

    async def _everywhere(self, state: SavedState) -> None:
        """Have the other replicas serve a state; those that have died are left out."""
        timeout = httpx.Timeout(CHANGE_SECONDS, connect=5)
        async with httpx.AsyncClient(timeout=timeout, trust_env=False) as client:
            asked = [
                client.post(one.url + FOLLOW, content=state.model_dump_json(),
                            headers={FRONT.decode(): one.secret})
                for one in self._others
            ]  # fmt: skip
            answers = await asyncio.gather(*asked, return_exceptions=True)
        for other, answer in zip(self._others, answers, strict=True):
            if isinstance(answer, httpx.HTTPError):
                log.warning("replica %s follows later: %s", other.replica, answer)
            elif isinstance(answer, BaseException):
                raise answer
            elif answer.status_code != 200:
                raise AdapterError(str(answer.json()["error"]["message"]))


class Gate:
    """ASGI application: lets requests of fronts in, as those of their clients."""

    def __init__(self, app: ASGIApp, follow: Callable[[SavedState], Awaitable[None]]) -> None:
        self._app, self._follow = app, follow
        self.secret = secrets.token_hex(16)
        self.inside = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = [pair for pair in scope["headers"] if pair[0] != FRONT]
        sent = dict(scope["headers"]).get(FRONT, b"")
        secret, _, told = sent.decode("latin-1").partition(" ")
        if not hmac.compare_digest(secret.encode(), self.secret.encode()):
            await Response("Ask the server, not its replica", 403)(scope, receive, send)
            return
        if not told:  # by another replica
            answer = Response()
            try:
                body = await Request(scope, receive).body()
                await self._follow(SavedState.model_validate_json(body))
            except ValoraError as error:
                answer = error_answer(error)
            await answer(scope, receive, send)
            return
        facts: dict[str, Any] = {}
        client, server, scheme, counts = json.loads(told)
        inner = {
            **scope, "client": client and tuple(client), "server": server and tuple(server),
            "scheme": scheme, "headers": headers, "state": {"facts": facts, "counts": counts},
        }  # fmt: skip

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                line = json.dumps(facts).encode()
                message["headers"] = [*message.get("headers", ()), (FACTS, line)]
            await send(message)

        self.inside += 1
        try:
            await self._app(inner, receive, sending)
        finally:
            self.inside -= 1


class EngineReplica:
    """A server that follows the board; `host` has the fronts, `bundles` folders and hashes."""

    async def __init__(  # type: ignore[misc] # Ray Serve awaits it
        self, application: str, version: str, host: str, engine: EngineSettings,
        settings: ServerSettings, bundles: Sequence[tuple[str, str]],
    ) -> None:  # fmt: skip
        if version != own_version():
            raise SettingsError(
                f"machine {socket.gethostname()} has VaLoRA {own_version()}, and the server "
                f"{version}: install the same version on every machine of the Ray cluster"
            )
        logs.set_up(settings.log_level, settings.log_format)
        logs.ACCESS.setLevel(logging.ERROR)  # fronts log requests
        for folder, sha256 in bundles:
            await asyncio.to_thread(check_content, "bundle", Path(folder), sha256)
        self._name = str(serve.get_replica_context().replica_id.unique_id)
        self._board = ray.get_actor(f"{application}-board", namespace=NAMESPACE)
        self._pauses = contextlib.ExitStack()
        # No other replica uses this folder of fetched adapters.
        cache = f"{settings.adapter_cache}/{serve.get_replica_context().rank.rank}"
        settings = dataclasses.replace(settings, adapter_cache=cache)
        shared_pool().start()
        self._engine = await start_engine(engine)
        try:
            state = SharedState(self._board, self._name, Path(settings.state_file))
            folders = [Path(folder) for folder, _ in bundles]
            app, served = await make_app(self._engine, settings, folders, engine, state)
            self._context = app.state.context
            self._context.guard.rates.taken = Counter()
            self._gate = Gate(app, self._follow)
            here = ray.util.get_node_ip_address()
            bound = socket.create_server(("127.0.0.1" if here == host else here, 0))
            self._url = "http://{}:{}".format(*bound.getsockname())
            self._server = make_server(cast("Any", self._gate), settings)
            self._server.config.http = "httptools"  # fronts have bounded what comes here
            self._serving = asyncio.create_task(self._server.serve([bound]))
            while not self._server.started and not self._serving.done():
                await asyncio.sleep(0.02)
            await self._engine.warm_up()  # again, with what was loaded since
            while (newer := await self._board.join.remote(self._report(), served)) is not None:
                await self._follow(newer)
            self._pauses.enter_context(short_pauses())
        except BaseException:
            await self._engine.close()
            raise
        self._reporting = asyncio.create_task(self._keep_reporting())

    async def _follow(self, state: SavedState) -> None:
        await self._context.service.changed(self._context.served.follow(state))

    def _report(self) -> Report:
        rates = self._context.guard.rates
        taken, rates.taken = rates.taken, Counter()
        models = self._engine.models()
        return Report(
            self._name, self._url, self._gate.secret, self._engine.healthy,
            self._context.served.revision,
            # Names of all adapters would make reports long.
            dataclasses.replace(self._engine.stats(), on_device=(), on_disk=()),
            {model.name: model.adapter for model in models if model.adapter != model.name},
            taken,
        )  # fmt: skip

    async def _keep_reporting(self) -> None:
        while True:
            try:
                told = self._report()
                state, reports, taken = await self._board.report.remote(told)
                self._engine.peers = {one.replica: one.stats for one in reports}
                self._context.guard.rates.share(taken, time.monotonic())
                if state is not None and told.revision == self._context.served.revision:
                    await self._follow(state)
            except (ray.exceptions.RayError, ValoraError, OSError) as error:
                log.warning("replica %s and the board: %s", self._name, error)
            await asyncio.sleep(PERIOD)

    async def check_health(self) -> None:
        """Fail if the engine has failed, so that Ray Serve starts another replica."""
        if not self._engine.healthy or self._serving.done():
            raise StoppedError(f"The engine of replica {self._name} has failed: see its log")

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Return what the autoscaling policy is told of this replica."""
        return {INSIDE: self._gate.inside}

    async def __del__(self) -> None:
        """End after the requests of this replica, once no front sends any more."""
        if not hasattr(self, "_reporting"):
            return
        self._reporting.cancel()
        with contextlib.suppress(ray.exceptions.RayError):
            await self._board.leave.remote(self._name)
        await asyncio.sleep(3 * PERIOD)
        self._server.should_exit = True
        await self._serving  # which closes the engine
        self._pauses.close()
