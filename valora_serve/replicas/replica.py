"""One engine as a replica of Ray Serve."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
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
    StorageError,
)
from valora_serve.pauses import short_pauses
from valora_serve.replicas.board import PERIOD
from valora_serve.replicas.request_router import RESIDENT
from valora_serve.replicas.served import Revision, ServedState, check_part, find_part
from valora_serve.replicas.wire import Batch, Done, Facts, Report, unpacked
from valora_serve.server.api.system import own_version
from valora_serve.server.constrain import Grammars
from valora_serve.server.telemetry import logs
from valora_serve.types import Finish, Output

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Sequence

    from valora_serve.engine.settings import EngineSettings
    from valora_serve.replicas.served import Part
    from valora_serve.replicas.wire import Call
    from valora_serve.types import NewContext, Request, ServedModel

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
        self._missing: dict[str, ServeError] = {}  # what this replica could not load, by name
        self._changing = asyncio.Lock()
        self._pauses = contextlib.ExitStack()
        self._engine = await start_engine(settings)
        try:
            self._grammars = Grammars(self._engine)
            await asyncio.to_thread(self._grammars.read)
            state = await self._board.state.remote()
            if state is not None:
                await self._follow(state, strict=False)
                await self._on_warm_up()
        except BaseException:
            self._pauses.close()
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
            for name in (request.model, *(one for one, _ in request.adapters)):
                if name in self._missing:
                    raise self._missing[name]
            request = await unpacked(call, self._grammars)
        except ServeError as error:
            failed = [request.id, *(one.id for one in request.also)]
            yield self._batch([Output(one, finish=Finish.ERROR, error=error) for one in failed])
            return
        queue: asyncio.Queue[Output] = asyncio.Queue()
        reading = asyncio.create_task(self._read(request, queue))
        left = 1 + len(request.also)
        try:
            while True:
                outputs = [await queue.get()]
                while not queue.empty() or not (request.stream or outputs[-1].finish):
                    outputs.append(await queue.get())
                yield self._batch(outputs)
                left -= sum(output.finish is not None for output in outputs)
                if not left:
                    return
                await asyncio.sleep(self._engine.stats().running / MESSAGES)
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)

    async def _read(self, request: Request, queue: asyncio.Queue[Output]) -> None:
        """Put the outputs of requests into a queue; the last one of each has `finish`."""
        left = {request.id, *(one.id for one in request.also)}
        wrong: ServeError = StoppedError("The engine stopped while it answered: try again")
        try:
            stream = cast("AsyncGenerator[Output, None]", self._engine.generate(request))
            async with contextlib.aclosing(stream) as outputs:
                async for output in outputs:
                    if output.finish is not None:
                        left.discard(output.id)
                    queue.put_nowait(output)
        except Exception as error:
            log.exception("request %s", request.id)
            wrong = ServeError(f"request {request.id} failed: {error}")
        for one in left:
            queue.put_nowait(Output(one, finish=Finish.ERROR, error=wrong))

    def _batch(self, outputs: Sequence[Output]) -> Batch:
        return Batch(self._name, time.monotonic(), tuple(outputs))

    # ------------------------------------------------------------------ calls to all replicas

    async def control(self, method: str, *arguments: Any) -> Done:
        """Do something that all replicas do.

        Args:
            method: ``follow``, ``warm_up``, ``cancel``, ``facts`` or ``compress``.
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
        self._pauses.close()  # again, with what was loaded since
        self._pauses.enter_context(short_pauses())

    async def _on_cancel(self, request_id: str) -> bool:
        return await self._engine.cancel(request_id)

    async def _on_facts(self) -> Facts:
        engine = self._engine
        return Facts(engine.base, engine.context_length, engine.tokenizer)

    async def _on_compress(self, wanted: NewContext, folder: Path, revision: Revision) -> Part:
        await self._catch_up(revision)  # the adapter that is to answer
        try:
            await self._engine.compress(wanted, folder)
        except OSError as error:
            raise StorageError(f"{folder} cannot be written ({error.strerror})") from error
        return await asyncio.to_thread(find_part, folder, "context")

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
            strict: Whether an adapter or a context that cannot be loaded is an error. Otherwise
                requests for it get the error, and the others are answered.

        Raises:
            AdapterError: A part cannot be loaded. A state that differs from the one before in one
                part has then changed nothing.
        """
        before = self._state
        bundles = dict(before.bundles) if before is not None else {}
        adapters = dict(before.adapters) if before is not None else {}
        contexts = dict(before.contexts) if before is not None else {}
        engine = self._engine
        # Contexts name the adapters that answer: they go before them, and come after them.
        for served, wanted, unload in (
            (contexts, state.contexts, engine.unload_context),
            (adapters, state.adapters, engine.unload_adapter),
        ):
            for name in [name for name in served if name not in wanted]:
                if self._missing.pop(name, None) is None:
                    await unload(name)
                del served[name]
        for name in [name for name in bundles if name not in state.bundles]:
            await engine.unload_bundle(name)
            del bundles[name]
        try:
            for name, part in state.bundles.items():
                if bundles.get(name) != part:
                    await asyncio.to_thread(check_part, part, "bundle")
                    await engine.load_bundle(Path(part.folder))
                    bundles[name] = part
            for served, wanted_parts, what in (
                (adapters, state.adapters, "adapter"),
                (contexts, state.contexts, "context"),
            ):
                for name, part in wanted_parts.items():
                    if served.get(name) != part or name in self._missing:
                        await self._load(what, name, part, strict=strict)
                        served[name] = part
        finally:
            # Also what was loaded before an error counts, as the next state is compared with it.
            kept = state.revision if before is None else before.revision
            self._state = ServedState(kept, bundles, adapters, contexts)
        self._state = dataclasses.replace(self._state, revision=state.revision)

    async def _load(self, what: str, name: str, part: Part, *, strict: bool) -> None:
        """Load an adapter or a context."""
        engine, folder = self._engine, Path(part.folder)
        try:
            await asyncio.to_thread(check_part, part, what)
            if what == "context":
                await engine.load_context(name, folder)
            else:
                await engine.load_adapter(name, folder, decode_only=part.decode_only)
            self._missing.pop(name, None)
        except (AdapterError, RequestError) as error:
            if strict:
                raise
            log.warning("%s %s is not served by replica %s: %s", what, name, self._name, error)
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
        self._pauses.close()
        self._grammars.close()
        with contextlib.suppress(ray.exceptions.RayError):
            await self._board.leave.remote(self._name)
        await self._engine.close()
