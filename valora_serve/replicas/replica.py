"""One engine as a replica of Ray Serve."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import socket
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
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
from valora_serve.replicas.wire import FILES, Batch, Report, ServedState, check_part, find_part
from valora_serve.server.api.system import own_version
from valora_serve.server.constrain import Grammars
from valora_serve.server.telemetry import logs
from valora_serve.types import Finish, NewContext, Output, Request, ServedModel

if TYPE_CHECKING:
    from valora_serve.engine.settings import EngineSettings
    from valora_serve.replicas.wire import Call, Part, Revision

log = logging.getLogger(__name__)

MESSAGES = 1000.0
"""Most messages of a replica in a second: with more, the server's event loop would read messages
only. Outputs of a request that come faster than its share of them are sent together."""
CATCH_UP_SECONDS = 10.0
"""Time in which a replica must learn what is served, once a request names something newer."""


class EngineReplica:
    """An engine with what the application serves; Ray Serve calls its methods.

    `version` is the server's, `board` a name and namespace, `logging_as` a level and format.
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

    async def generate(self, call: Call) -> AsyncIterator[Batch]:
        """Answer a request with batches of outputs; closing the iterator cancels it."""
        yield self._batch(())
        request = call.request
        try:
            await self._catch_up(call.revision)
            for name in (request.model, *(one for one, _ in request.adapters)):
                if name in self._missing:
                    raise self._missing[name]
            if call.grammar is not None:
                # The server has counted them by client already: here each request counts as one.
                (made,) = await self._grammars.constraints(call.grammar, client=request.id)
                sampling = dataclasses.replace(request.sampling, constraint=made)
                request = dataclasses.replace(request, sampling=sampling)
        except ServeError as error:
            failed = [request.id, *(one.id for one in request.also)]
            yield self._batch([Output(one, finish=Finish.ERROR, error=error) for one in failed])
            return
        queue: asyncio.Queue[Output] = asyncio.Queue()
        reading = asyncio.create_task(self._read(request, queue))
        left = 1 + len(request.also)
        try:
            while left:
                outputs = [await queue.get()]
                while not queue.empty() or not (request.stream or outputs[-1].finish):
                    outputs.append(await queue.get())
                left -= sum(output.finish is not None for output in outputs)
                yield self._batch(outputs)
                if left:
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
        return Batch(time.monotonic(), tuple(outputs))

    async def control(self, method: str, *arguments: Any) -> Any:
        """Call ``follow``, ``warm_up`` …; our errors are returned, as Ray wraps exceptions."""
        try:
            return await getattr(self, f"_on_{method}")(*arguments)
        except ServeError as error:
            return error
        except Exception as error:
            log.exception("%s", method)
            return ServeError(f"replica {self._name} failed: {error}")

    async def _on_follow(self, state: ServedState) -> list[ServedModel]:
        async with self._changing:
            await self._follow(state, strict=True)
        return self._engine.models()

    async def _on_warm_up(self) -> None:
        await self._engine.warm_up()
        self._pauses.close()  # again, with what was loaded since
        self._pauses.enter_context(short_pauses())

    async def _on_facts(self) -> tuple[str, int, Any]:
        return self._engine.base, self._engine.context_length, self._engine.tokenizer

    async def _on_compress(self, wanted: NewContext, folder: Path, revision: Revision) -> Part:
        await self._catch_up(revision)  # the adapter that is to answer
        try:
            await self._engine.compress(wanted, folder)
        except OSError as error:
            raise StorageError(f"{folder} cannot be written ({error.strerror})") from error
        return await asyncio.to_thread(find_part, folder, "context")

    async def _catch_up(self, revision: Revision) -> None:
        """Serve at least what the server served when it sent a request."""
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

        Unless `strict`, what cannot be loaded but a bundle is an error of its requests alone.
        """
        served = {} if self._state is None else dict(self._state.parts)
        revision = state.revision if self._state is None else self._state.revision
        # Contexts name the adapters that answer: they go before them, and come after them.
        kinds = list(FILES)
        gone = [key for key in served if key not in state.parts]
        try:
            for kind, name in sorted(gone, key=lambda key: -kinds.index(key[0])):
                if self._missing.pop(name, None) is None:
                    await self._engine.unload(kind, name)
                del served[kind, name]
            for key in sorted(state.parts, key=lambda key: kinds.index(key[0])):
                part = state.parts[key]
                if served.get(key) != part or key[1] in self._missing:
                    await self._load(*key, part, strict=strict)
                    served[key] = part
            revision = state.revision
        finally:
            # Also what was loaded before an error counts, as the next state is compared with it.
            self._state = ServedState(revision, served)

    async def _load(self, kind: str, name: str, part: Part, *, strict: bool) -> None:
        engine, folder = self._engine, Path(part.folder)
        try:
            await asyncio.to_thread(check_part, part, kind)
            if kind == "bundle":
                await engine.load_bundle(folder)
            elif kind == "context":
                await engine.load_context(name, folder)
            else:
                await engine.load_adapter(name, folder, decode_only=part.decode_only)
            self._missing.pop(name, None)
        except (AdapterError, RequestError) as error:
            if strict or kind == "bundle":
                raise
            log.warning("%s %s is not served by replica %s: %s", kind, name, self._name, error)
            self._missing[name] = error

    async def check_health(self) -> None:
        """Fail if the engine has failed, so that Ray Serve starts another replica."""
        if not self._engine.healthy:
            raise StoppedError(f"The engine of replica {self._name} has failed: see its log")

    def record_routing_stats(self) -> dict[str, Any]:
        """Return what the routers of Ray Serve are told of this replica."""
        return {RESIDENT: list(self._engine.stats().adapters_resident)}

    async def _report(self) -> None:
        while True:
            report = Report(self._name, self._engine.healthy, self._engine.stats())
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
