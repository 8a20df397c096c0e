"""One engine as a replica of Ray Serve."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import ray
from ray import serve

from valora_serve.engine.start import start_engine
from valora_serve.errors import (
    AdapterError,
    RequestError,
    ServeError,
    SettingsError,
    StoppedError,
)
from valora_serve.replicas.board import PERIOD
from valora_serve.replicas.request_router import RESIDENT
from valora_serve.replicas.served import Revision, ServedState, check_part
from valora_serve.replicas.wire import Batch, Done, Facts, Report, unpacked
from valora_serve.server.api.system import own_version
from valora_serve.server.constrain import Grammars
from valora_serve.server.telemetry import logs
from valora_serve.types import Finish, Output

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Sequence

    from valora_serve.engine.settings import EngineSettings
    from valora_serve.replicas.wire import Call
    from valora_serve.types import Request, ServedModel

log = logging.getLogger(__name__)

MESSAGES = 1000.0
"""Most messages of a replica in a second: with more, the server's event loop would read messages
only. Outputs of a request that come faster than its share of them are sent together."""
CATCH_UP_SECONDS = 10.0
"""Time in which a replica must learn what is served, once a request names something newer."""


class EngineReplica:
    """An engine with what the application serves; Ray Serve calls its methods.

    Args:
        settings: Settings of the engine.
        version: VaLoRA's version on the server.
        board: Name and namespace of the board.
        logging_as: Level and format of the logs.

    Raises:
        SettingsError: This machine has another version of VaLoRA, or a setting cannot be kept here.
        AdapterError: A bundle of the application is missing here, or is another one.
    """

    async def __init__(  # type: ignore[misc] # Ray Serve awaits it
        self,
        settings: EngineSettings,
        version: str,
        board: tuple[str, str],
        logging_as: tuple[str, str],
    ) -> None:
        if version != own_version():
            raise SettingsError(
                f"machine {socket.gethostname()} has VaLoRA {own_version()}, and the server "
                f"{version}: install the same version on every machine of the Ray cluster"
            )
        logs.set_up(*logging_as)
        self._name = str(serve.get_replica_context().replica_id.unique_id)
        self._board = ray.get_actor(board[0], namespace=board[1])
        self._state: ServedState | None = None
        self._missing: dict[str, ServeError] = {}  # adapters that this replica could not load
        self._changing = asyncio.Lock()
        self._engine = await start_engine(settings)
        try:
            self._grammars = Grammars(self._engine)
            await asyncio.to_thread(self._grammars.read)
            state = await self._board.state.remote()
            if state is not None:
                await self._follow(state, strict=False)
                await self._engine.warm_up()
        except BaseException:
            await self._engine.close()
            raise
        self._reporting = asyncio.create_task(self._report())

    # ------------------------------------------------------------------ requests

    async def generate(self, call: Call) -> AsyncIterator[Batch]:
        """Answer a request with batches of outputs, the first of which is empty.

        Closing the iterator cancels the request.
        """
        yield self._batch(())
        request = call.request
        try:
            await self._catch_up(call.revision)
            if request.model in self._missing:
                raise self._missing[request.model]
            request = await unpacked(call, self._grammars)
        except ServeError as error:
            yield self._batch([Output(request.id, finish=Finish.ERROR, error=error)])
            return
        queue: asyncio.Queue[Output] = asyncio.Queue()
        reading = asyncio.create_task(self._read(request, queue))
        try:
            while True:
                outputs = [await queue.get()]
                while not queue.empty() or not (request.stream or outputs[-1].finish):
                    outputs.append(await queue.get())
                yield self._batch(outputs)
                if outputs[-1].finish is not None:
                    return
                await asyncio.sleep(self._engine.stats().running / MESSAGES)
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)

    async def _read(self, request: Request, queue: asyncio.Queue[Output]) -> None:
        """Put the outputs of a request into a queue; the last one has `finish`."""
        ended = False
        try:
            stream = cast("AsyncGenerator[Output, None]", self._engine.generate(request))
            async with contextlib.aclosing(stream) as outputs:
                async for output in outputs:
                    ended = output.finish is not None
                    queue.put_nowait(output)
        except Exception as error:
            log.exception("request %s", request.id)
            wrong = ServeError(f"request {request.id} failed: {error}")
            queue.put_nowait(Output(request.id, finish=Finish.ERROR, error=wrong))
        else:
            if not ended:
                gone = StoppedError("The engine stopped while it answered: try again")
                queue.put_nowait(Output(request.id, finish=Finish.ERROR, error=gone))

    def _batch(self, outputs: Sequence[Output]) -> Batch:
        return Batch(self._name, time.monotonic(), tuple(outputs))

    # ------------------------------------------------------------------ calls to all replicas

    async def control(self, method: str, *arguments: Any) -> Done:
        """Do something that all replicas do.

        Args:
            method: ``follow``, ``warm_up``, ``cancel`` or ``facts``.
            arguments: Its arguments.

        Returns:
            What it returned, or its error: errors of ours are values, because Ray wraps exceptions.
        """
        try:
            return Done(self._name, await getattr(self, f"_on_{method}")(*arguments))
        except ServeError as error:
            return Done(self._name, error=error)
        except Exception as error:
            log.exception("%s", method)
            return Done(self._name, error=ServeError(f"replica {self._name} failed: {error}"))

    async def _on_follow(self, state: ServedState) -> list[ServedModel]:
        async with self._changing:
            await self._follow(state, strict=True)
        return self._engine.models()

    async def _on_warm_up(self) -> None:
        await self._engine.warm_up()

    async def _on_cancel(self, request_id: str) -> bool:
        return await self._engine.cancel(request_id)

    async def _on_facts(self) -> Facts:
        engine = self._engine
        return Facts(engine.base, engine.context_length, engine.tokenizer)

    # ------------------------------------------------------------------ what is served

    async def _catch_up(self, revision: Revision) -> None:
        """Serve at least what the server served when it sent a request.

        Raises:
            StoppedError: The board does not say it in time.
        """
        if self._covers(revision):
            return
        end = time.monotonic() + CATCH_UP_SECONDS
        async with self._changing:
            while not self._covers(revision):
                state = await self._board.state.remote()
                if state is not None and state.revision.covers(revision):
                    await self._follow(state, strict=False)
                elif time.monotonic() > end:
                    raise StoppedError(
                        f"Replica {self._name} does not know yet what is served: ask again"
                    )
                else:
                    await asyncio.sleep(0.1)

    def _covers(self, revision: Revision) -> bool:
        return self._state is not None and self._state.revision.covers(revision)

    async def _follow(self, state: ServedState, *, strict: bool) -> None:
        """Load and unload until exactly this state is served.

        Args:
            state: What to serve.
            strict: Whether an adapter that cannot be loaded is an error. Otherwise requests for it
                get the error, and the others are answered.

        Raises:
            AdapterError: A bundle or adapter cannot be loaded. A state that differs from the one
                before in one bundle or adapter has then changed nothing.
        """
        before = self._state
        bundles = dict(before.bundles) if before is not None else {}
        adapters = dict(before.adapters) if before is not None else {}
        engine = self._engine
        for name in [name for name in adapters if name not in state.adapters]:
            if self._missing.pop(name, None) is None:
                await engine.unload_adapter(name)
            del adapters[name]
        for name in [name for name in bundles if name not in state.bundles]:
            await engine.unload_bundle(name)
            del bundles[name]
        try:
            for name, part in state.bundles.items():
                if bundles.get(name) != part:
                    await asyncio.to_thread(check_part, part, bundle=True)
                    await engine.load_bundle(Path(part.folder))
                    bundles[name] = part
            for name, part in state.adapters.items():
                if adapters.get(name) != part or name in self._missing:
                    await self._load_adapter(name, part, strict=strict)
                    adapters[name] = part
        finally:
            # Also what was loaded before an error counts, as the next state is compared with it.
            kept = state.revision if before is None else before.revision
            self._state = ServedState(kept, bundles, adapters)
        self._state = ServedState(state.revision, bundles, adapters)

    async def _load_adapter(self, name: str, part: Any, *, strict: bool) -> None:
        try:
            await asyncio.to_thread(check_part, part, bundle=False)
            folder = Path(part.folder)
            await self._engine.load_adapter(name, folder, decode_only=part.decode_only)
            self._missing.pop(name, None)
        except (AdapterError, RequestError) as error:
            if strict:
                raise
            log.warning("adapter %s is not served by replica %s: %s", name, self._name, error)
            self._missing[name] = error

    # ------------------------------------------------------------------ how it is

    async def check_health(self) -> None:
        """Fail if the engine has failed, so that Ray Serve starts another replica."""
        if not self._engine.healthy:
            raise StoppedError(f"The engine of replica {self._name} has failed: see its log")

    def record_routing_stats(self) -> dict[str, Any]:
        """Return what the routers of Ray Serve are told of this replica."""
        return {RESIDENT: list(self._engine.stats().adapters_resident)}

    async def _report(self) -> None:
        """Report to the board again and again."""
        host, pid = socket.gethostname(), os.getpid()
        while True:
            engine, state = self._engine, self._state
            revision = None if state is None else state.revision
            stats = engine.stats()
            report = Report(self._name, host, pid, engine.healthy, revision, stats)
            with contextlib.suppress(ray.exceptions.RayError):  # the board starts anew
                await self._board.report.remote(report)
            await asyncio.sleep(PERIOD)

    async def __del__(self) -> None:
        """End, after the requests of this replica: Ray Serve has drained it."""
        reporting = getattr(self, "_reporting", None)
        if reporting is None:
            return
        reporting.cancel()
        with contextlib.suppress(ray.exceptions.RayError):
            await self._board.leave.remote(self._name)
        await self._engine.close()
