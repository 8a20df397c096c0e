"""The replicas as one engine: what the server talks to instead of an engine of its own."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray.serve.exceptions import RayServeException

from valora_data.contract.bundle import read_manifest
from valora_data.errors import BundleError
from valora_serve.errors import (
    AdapterError,
    BusyError,
    DeadlineError,
    RequestError,
    ServeError,
    StoppedError,
    UnknownModelError,
)
from valora_serve.replicas.board import PERIOD, STALE
from valora_serve.replicas.wire import Revision, ServedState, find_part, localised, packed
from valora_serve.server.service import merged
from valora_serve.types import EngineStats, NewContext, Output, Request, ServedModel, failure

if TYPE_CHECKING:
    from valora_serve.replicas.wire import Batch, Part, Report

    Parts = dict[tuple[str, str], Part]

log = logging.getLogger(__name__)

TAKEN_SECONDS = 60.0
"""Time in which a replica must take a request; all of them queue what they cannot compute yet."""
CHANGE_SECONDS = 900.0
"""Time in which all replicas must have loaded a bundle or an adapter, or be warm."""
LATE_SECONDS = 2.0
"""Time beyond a request's deadline in which its replica must say so, before the server does."""
ATTEMPTS = 2
"""How often a request is sent to a replica, if none of its answer has been passed on yet."""


class _LostError(Exception):
    """The replica of a request has died, or cannot be reached."""


class ReplicatedEngine:
    """All replicas of an application: a `types.EngineClient`, once `start` was called.

    `handle` and `board` are Ray's to the replicas and the actor with the board; `release` stops the
    replicas, and is called once at the end, in a thread.
    """

    base: str
    context_length: int
    tokenizer: Any

    def __init__(self, handle: Any, board: Any, release: Callable[[], None]) -> None:
        self._handle, self._board, self._release = handle, board, release
        self._control = handle.options(method_name="control")
        self._streams = handle.options(method_name="generate", stream=True)
        self._state = ServedState(Revision(secrets.token_hex(8), 0))
        self._models: list[ServedModel] = []
        self._adapters: dict[str, str | None] = {}  # adapter of each name
        self._reports: list[Report] = []
        self._seen = time.monotonic()
        self._running: set[str] = set()  # ids of unfinished requests
        self._changing = asyncio.Lock()
        self._watching: asyncio.Task[None] | None = None
        self._closed = False

    async def start(self) -> None:
        """Ask for the facts of the base model, and have all replicas serve it alone."""
        await self._board.pin.remote(self._state)
        async with asyncio.timeout(CHANGE_SECONDS):
            facts = _value(await self._control.remote("facts"))
        self.base, self.context_length, self.tokenizer = facts
        await self._publish(self._state)
        await self._look()
        self._watching = asyncio.create_task(self._watch())

    async def generate(self, request: Request) -> AsyncIterator[Output]:
        # Requests that are asked together go to one replica for each adapter. If it dies before
        # anything of the answer was passed on, they are sent to another one, once.
        groups: dict[str | None, list[Request]] = {}
        for one in (request, *request.also):
            groups.setdefault(self._adapter(one), []).append(one)
        streams = [self._together(group) for group in groups.values()]
        async with contextlib.aclosing(merged(streams)) as outputs:
            async for _, output in outputs:
                yield output

    def _adapter(self, request: Request) -> str | None:
        name = request.adapters[0][0] if request.adapters else request.model
        return self._adapters.get(name or "")

    async def _together(self, asked: Sequence[Request]) -> AsyncGenerator[Output, None]:
        arrival = time.monotonic()
        left = {one.id: one for one in asked if one.id not in self._running}
        mine = set(left)
        self._running |= mine
        passed_on = False
        try:
            for one in asked:
                if one.id not in mine:
                    yield failure(one, RequestError(f"request id {one.id} is in use"), arrival)
            for attempt in range(ATTEMPTS):
                try:
                    asking = self._ask(list(left.values()), arrival)
                    async with contextlib.aclosing(asking) as outputs:
                        async for output in outputs:
                            passed_on = True
                            if output.finish is not None:
                                left.pop(output.id, None)
                            yield output
                except _LostError as error:
                    log.warning("the replica of %s is lost: %s", ", ".join(left), error)
                    if passed_on or attempt + 1 == ATTEMPTS:
                        raise StoppedError(
                            "The replica that answered has died, after a part of the answer was "
                            "sent: ask again"
                            if passed_on
                            else "Two replicas died one after the other with this request: ask "
                            "again"
                        ) from error
                else:
                    return
        except ServeError as error:
            for one in left.values():
                yield failure(one, error, arrival)
        finally:
            self._running -= mine

    async def _ask(self, asked: Sequence[Request], arrival: float) -> AsyncGenerator[Output, None]:
        """Send requests to a replica, and pass their outputs on; _LostError if it is lost."""
        if not asked:
            return
        if self._closed:
            raise StoppedError("the server is shutting down: ask another one")
        now, limits = time.monotonic(), [one.deadline for one in asked]
        ends = None if None in limits else arrival + max(filter(None, limits), default=0.0)
        if ends is not None and ends <= now:
            raise _late(asked[0])
        first, *also = [
            one if one.deadline is None
            else dataclasses.replace(one, deadline=max(one.deadline + arrival - now, 0.0))
            for one in asked
        ]  # fmt: skip
        first = dataclasses.replace(first, also=tuple(also))
        response = self._streams.remote(packed(first, self._adapter(first), self._state.revision))
        left = len(asked)
        try:
            stream = aiter(response)
            try:
                await _next(
                    stream, TAKEN_SECONDS if ends is None else min(ends - now, TAKEN_SECONDS)
                )
            except TimeoutError as error:
                if ends is not None and time.monotonic() >= ends:
                    raise _late(first) from error
                raise StoppedError(
                    "No replica takes requests now: ask again in a moment, or see the log of the "
                    "Ray cluster"
                ) from error
            while left:
                wait = None if ends is None else ends - time.monotonic() + LATE_SECONDS
                try:
                    batch = await _next(stream, None if wait is None else max(wait, LATE_SECONDS))
                except TimeoutError as error:
                    raise _late(first) from error
                later = time.monotonic() - batch.sent
                for output in batch.outputs:
                    left -= output.finish is not None
                    yield localised(output, arrival, later)
        finally:
            if left:
                response.cancel()

    def models(self) -> list[ServedModel]:
        return list(self._models)

    def stats(self) -> EngineStats:
        """Return the sum of the replicas' states and counters (`total`)."""
        return total([report.stats for report in self._live()])

    def replicas(self) -> dict[str, EngineStats]:
        return {report.replica: report.stats for report in self._live()}

    async def load_adapter(
        self, name: str, folder: Path, *, decode_only: bool = False
    ) -> ServedModel:
        found = await asyncio.to_thread(find_part, folder.absolute(), "adapter")
        part = dataclasses.replace(found, decode_only=decode_only)
        return (await self._serve("adapter", name, part))[0]

    async def load_bundle(self, folder: Path) -> list[ServedModel]:
        try:
            manifest = await asyncio.to_thread(read_manifest, folder)
        except BundleError as error:
            raise AdapterError(str(error)) from error
        name = str(manifest["name"])
        part = await asyncio.to_thread(find_part, folder.absolute(), "bundle")
        return await self._serve("bundle", name, part, f"{name}@{manifest['version']}")

    async def load_context(self, name: str, folder: Path) -> ServedModel:
        part = await asyncio.to_thread(find_part, folder.absolute(), "context")
        return (await self._serve("context", name, part))[0]

    async def make_context(self, wanted: NewContext, folder: Path) -> ServedModel:
        sent = self._control.remote("compress", wanted, folder.absolute(), self._state.revision)
        try:
            async with asyncio.timeout(CHANGE_SECONDS):
                part = await sent
        except (TimeoutError, ray.exceptions.RayError, RayServeException) as error:
            raise StoppedError(
                f"context {wanted.name}: the replica that read the document has gone: ask again"
            ) from error
        return (await self._serve("context", wanted.name, _value(part)))[0]

    async def _serve(
        self, kind: str, name: str, part: Part, label: str | None = None
    ) -> list[ServedModel]:
        await self._change(lambda: {**self._state.parts, (kind, name): part})
        return [one for one in self._models if (label or name) in (one.name, one.bundle)]

    async def unload(self, kind: str, name: str) -> None:
        def without() -> Parts:
            parts, short, models = dict(self._state.parts), name, self._models
            if kind == "bundle" and name in {model.bundle for model in models}:
                short = name.partition("@")[0]
            if parts.pop((kind, short), None) is None:
                of = [m.bundle for m in models if m.name == name and (m.form or kind == "adapter")]
                if kind != "bundle" and (bundle := next(filter(None, of), None)):
                    raise BusyError(f"{kind} {name} belongs to bundle {bundle}: unload the bundle")
                known = ", ".join(one for what, one in parts if what == kind) or "none"
                raise UnknownModelError(f"no {kind} is named {name}: known are {known}")
            return parts

        await self._change(without)

    async def warm_up(self) -> None:
        """Capture CUDA graphs and measure costs in all replicas."""
        for done in await self._everywhere("warm_up"):
            _value(done)

    async def _change(self, change: Callable[[], Parts]) -> None:
        """Have all replicas serve other parts, which `change` returns in its turn: all or none."""
        async with self._changing:
            before, parts = self._state, change()
            front, number = before.revision.front, before.revision.number
            try:
                await self._publish(ServedState(Revision(front, number + 1), parts))
            except BaseException as error:
                try:
                    await self._publish(ServedState(Revision(front, number + 2), before.parts))
                except ServeError as failure:
                    raise AdapterError(
                        f"{error}; what was served before could not be loaded again: {failure}"
                    ) from error
                raise

    async def _publish(self, state: ServedState) -> None:
        """Have all replicas serve a state, then those that start, then requests."""
        models = [_value(one) for one in await self._everywhere("follow", state)]
        self._state, self._models = state, models[0]
        # Requests of a domain need its adapter; those of the base model need none.
        self._adapters = {model.name: model.adapter for model in self._models}
        with contextlib.suppress(ray.exceptions.RayError):  # `_watch` pins it again
            await self._board.pin.remote(state)

    async def _everywhere(self, method: str, *arguments: Any) -> list[Any]:
        """Call `EngineReplica.control` of all replicas; those that die are left out."""
        sent = self._handle.broadcast("control", method, *arguments)
        try:
            found = await sent.results_async(timeout_s=CHANGE_SECONDS, return_exceptions=True)
        except TimeoutError as error:
            raise StoppedError("A replica does not answer: see Ray's logs") from error
        except (ray.exceptions.RayError, RayServeException) as error:
            found = [error]
        done = [one for one in found
                if isinstance(one, ServeError) or not isinstance(one, BaseException)]  # fmt: skip
        if not done:
            raise StoppedError(f"No replica runs now ({_line(found[0])}): ask again in a moment")
        return done

    async def _watch(self) -> None:
        """Look at the board again and again; pinning the state again fills a new board."""
        while True:
            try:
                await self._look()
            except ray.exceptions.RayError as error:
                log.warning("the state of the replicas is not known: %s", _line(error))
            await asyncio.sleep(PERIOD)

    async def _look(self) -> None:
        self._reports = await self._board.pin.remote(self._state)
        self._seen = time.monotonic()

    def _live(self) -> list[Report]:
        return self._reports if time.monotonic() - self._seen < STALE else []

    def count_tokens(self, text: str) -> int:
        return len(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    @property
    def healthy(self) -> bool:
        """Whether a replica runs."""
        return not self._closed and any(report.healthy for report in self._live())

    async def close(self, drain: float = 0.0) -> None:
        if self._closed:
            return
        self._closed = True
        end = time.monotonic() + drain
        while self._running and time.monotonic() < end:
            await asyncio.sleep(0.02)
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        await self._handle.shutdown_async()
        await asyncio.to_thread(self._release)


def total(states: list[EngineStats]) -> EngineStats:
    """The sum of states: of counters, sizes and names; the mode is that of the busiest."""
    if not states:
        return EngineStats()
    busiest = max(states, key=lambda stats: stats.running)
    made: dict[str, Any] = {}
    for name in (item.name for item in dataclasses.fields(EngineStats)):
        values: list[Any] = [getattr(stats, name) for stats in states]
        if isinstance(values[0], tuple):
            names: Any = set.intersection if name == "on_disk" else set.union  # everywhere
            made[name] = tuple(sorted(names(*map(set, values))))
        elif isinstance(values[0], dict):
            merges: dict[str, Any] = {"finished": sum, "start_seconds": max}
            merge = merges.get(name, lambda found: found[-1])
            keys = {key for value in values for key in value}
            made[name] = {k: merge([one[k] for one in values if k in one]) for k in keys}
        elif type(values[0]) is int:  # all replicas know the same adapters and contexts
            fold: Any = max if name in ("adapters_known", "contexts_known") else sum
            made[name] = fold(values)
        else:
            made[name] = getattr(busiest, name)
    return EngineStats(**made)


def _value(done: Any) -> Any:
    if isinstance(done, ServeError):
        raise done
    return done


async def _next(stream: AsyncIterator[Batch], seconds: float | None) -> Batch:
    """Return the next batch of a response; TimeoutError if it is late, _LostError if it is lost."""
    try:
        async with asyncio.timeout(seconds):
            return await anext(stream)
    except TimeoutError:
        raise
    except StopAsyncIteration as error:
        raise _LostError("its answer ended early") from error
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise _LostError("the replica ended the request") from error  # Ray raises this as well
    except ray.exceptions.RayTaskError as error:  # an error in the replica's code
        raise ServeError(f"A replica failed: {_line(error)}") from error
    except (ray.exceptions.RayError, RayServeException) as error:
        raise _LostError(_line(error)) from error


def _late(request: Request) -> DeadlineError:
    return DeadlineError(f"request {request.id} missed its deadline: allow it more time")


def _line(error: object) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]
