"""The replicas as one engine: what the server talks to instead of an engine of its own."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import secrets
import time
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
from valora_serve.replicas.served import Revision, ServedState, find_part
from valora_serve.replicas.wire import localised, packed
from valora_serve.server.service import merged
from valora_serve.types import EngineStats, Output, failure

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence

    from valora_serve.replicas.served import Part
    from valora_serve.replicas.wire import Batch, Done, Facts, Report
    from valora_serve.types import NewContext, Request, ServedModel

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
    """All replicas of an application; implements `types.EngineClient`.

    `start` must be called before anything else.

    Args:
        handle: Handle of Ray Serve to the replicas.
        board: Handle to the actor with the board.
        release: Stops the replicas; called once at the end, in a thread.
    """

    def __init__(self, handle: Any, board: Any, release: Callable[[], None]) -> None:
        self._handle, self._board, self._release = handle, board, release
        self._streams = handle.options(method_name="generate", stream=True)
        self._state = ServedState(Revision(secrets.token_hex(8), 0))
        self._models: list[ServedModel] = []
        self._adapters: dict[str, str | None] = {}  # adapter of each name
        self._reports: dict[str, Report] = {}
        self._seen = time.monotonic()
        self._running: set[str] = set()  # ids of unfinished requests
        self._changing = asyncio.Lock()
        self._facts: Facts | None = None
        self._watching: asyncio.Task[None] | None = None
        self._closed = False

    @property
    def front(self) -> str:
        """Id of this server, which all revisions of what it serves have."""
        return self._state.revision.front

    async def start(self) -> None:
        """Ask for the facts of the base model, and have all replicas serve it alone.

        Raises:
            ServeError: No replica answers.
        """
        await self._board.pin.remote(self._state)
        async with asyncio.timeout(CHANGE_SECONDS):
            done: Done = await self._handle.options(method_name="control").remote("facts")
        if done.error is not None:
            raise done.error
        self._facts = done.value
        await self._publish(self._state)
        await self._look()
        self._watching = asyncio.create_task(self._watch())

    # ------------------------------------------------------------------ requests

    async def generate(self, request: Request) -> AsyncIterator[Output]:
        """Answer a request with a stream of outputs; see `types.EngineClient`.

        Requests that are asked together go to one replica for each adapter. If it dies before
        anything of the answer was passed on, they are sent to another one, once. Answers that are
        not streamed are passed on as a whole.
        """
        groups: dict[str | None, list[Request]] = {}
        for one in (request, *request.also):
            groups.setdefault(self._adapter(one), []).append(one)
        streams = [self._together(group) for group in groups.values()]
        async with contextlib.aclosing(merged(streams)) as outputs:
            async for _, output in outputs:
                yield output

    def _adapter(self, request: Request) -> str | None:
        """Name of the adapter by which a request is routed, None for the base model."""
        name = request.adapters[0][0] if request.adapters else request.model
        return self._adapters.get(name or "")

    async def _together(self, asked: Sequence[Request]) -> AsyncGenerator[Output, None]:
        """Answer requests on one adapter."""
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
                        raise _unanswered(passed_on) from error
                else:
                    return
        except ServeError as error:
            for one in left.values():
                yield failure(one, error, arrival)
        finally:
            self._running -= mine

    async def _ask(self, asked: Sequence[Request], arrival: float) -> AsyncGenerator[Output, None]:
        """Send requests to a replica, and pass their outputs on.

        Raises:
            _LostError: The replica is lost.
            ServeError: No replica takes the requests, or the deadline of all has passed.
        """
        if not asked:
            return
        if self._closed:
            raise StoppedError("the server is shutting down: ask another one")
        now, limits = time.monotonic(), [one.deadline for one in asked]
        ends = None if None in limits else arrival + max(filter(None, limits), default=0.0)
        if ends is not None and ends <= now:
            raise _late(asked[0])
        first, *also = [self._left(one, now - arrival) for one in asked]
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

    @staticmethod
    def _left(request: Request, gone: float) -> Request:
        """The request with the time that is left of its deadline after `gone` seconds."""
        if request.deadline is None:
            return request
        return dataclasses.replace(request, deadline=max(request.deadline - gone, 0.0))

    async def cancel(self, request_id: str) -> bool:
        """Cancel a request; see `types.EngineClient`."""
        if request_id not in self._running:
            return False
        done = await self._everywhere("cancel", request_id)
        return any(one.value for one in done)

    # ------------------------------------------------------------------ models

    def models(self) -> list[ServedModel]:
        """Return what requests can name; see `types.EngineClient`."""
        return list(self._models)

    def stats(self) -> EngineStats:
        """Return the sum of the replicas' states and counters; see `types.EngineClient`.

        Mode and merged adapter are those of the replica with the most running requests.
        """
        return total([report.stats for report in self._live()])

    def replicas(self) -> dict[str, EngineStats]:
        """Return the state of every replica by its name; see `types.EngineClient`."""
        return {report.replica: report.stats for report in self._live()}

    async def load_adapter(
        self, name: str, folder: Path, *, decode_only: bool = False
    ) -> ServedModel:
        """Load a PEFT folder into all replicas; see `types.EngineClient`."""
        found = await asyncio.to_thread(find_part, folder.absolute(), "adapter")
        part = dataclasses.replace(found, decode_only=decode_only)
        await self._change(lambda: {"adapters": {**self._state.adapters, name: part}})
        return next(model for model in self._models if model.name == name)

    async def load_bundle(self, folder: Path) -> list[ServedModel]:
        """Verify and load a bundle in all replicas; see `types.EngineClient`."""
        try:
            manifest = await asyncio.to_thread(read_manifest, folder)
        except BundleError as error:
            raise AdapterError(str(error)) from error
        name = str(manifest["name"])
        part = await asyncio.to_thread(find_part, folder.absolute(), "bundle")
        await self._change(lambda: {"bundles": {**self._state.bundles, name: part}})
        label = f"{name}@{manifest['version']}"
        return [model for model in self._models if model.bundle == label]

    async def unload_adapter(self, name: str) -> None:
        """Unload an adapter from all replicas; see `types.EngineClient`."""

        def without() -> dict[str, Any]:
            if name not in self._state.adapters:
                bundle = next((m.bundle for m in self._models if m.name == name and m.bundle), None)
                if bundle is not None:
                    raise BusyError(f"adapter {name} belongs to bundle {bundle}: unload the bundle")
                known = list(self._state.adapters)
                raise UnknownModelError(f"no adapter is named {name}: known are {known}")
            return {"adapters": _without(name, self._state.adapters)}

        await self._change(without)

    async def unload_bundle(self, name: str) -> None:
        """Unload a bundle from all replicas; see `types.EngineClient`."""

        def without() -> dict[str, Any]:
            short, _, version = name.partition("@")
            labels = {model.bundle for model in self._models}
            if short not in self._state.bundles or (version and name not in labels):
                known = list(self._state.bundles)
                raise UnknownModelError(f"no bundle is named {name}: known are {known}")
            return {"bundles": _without(short, self._state.bundles)}

        await self._change(without)

    async def make_context(self, wanted: NewContext, folder: Path) -> ServedModel:
        """Have one replica compress a document, and all serve it; see `types.EngineClient`."""
        sent = self._handle.options(method_name="control").remote(
            "compress", wanted, folder.absolute(), self._state.revision
        )
        try:
            async with asyncio.timeout(CHANGE_SECONDS):
                done: Done = await sent
        except (TimeoutError, ray.exceptions.RayError, RayServeException) as error:
            raise StoppedError(
                f"context {wanted.name}: the replica that read the document has gone: ask again"
            ) from error
        if done.error is not None:
            raise done.error
        return await self._serve_context(wanted.name, done.value)

    async def load_context(self, name: str, folder: Path) -> ServedModel:
        """Load a context into all replicas; see `types.EngineClient`."""
        part = await asyncio.to_thread(find_part, folder.absolute(), "context")
        return await self._serve_context(name, part)

    async def _serve_context(self, name: str, part: Part) -> ServedModel:
        await self._change(lambda: {"contexts": {**self._state.contexts, name: part}})
        return next(model for model in self._models if model.name == name)

    async def unload_context(self, name: str) -> None:
        """Forget a context in all replicas; see `types.EngineClient`."""

        def without() -> dict[str, Any]:
            if name not in self._state.contexts:
                bundle = next((m.bundle for m in self._models if m.name == name and m.form), None)
                if bundle is not None:
                    raise BusyError(f"context {name} belongs to bundle {bundle}: unload the bundle")
                known = ", ".join(model.name for model in self._models if model.form) or "none"
                raise UnknownModelError(f"no context is named {name}: known are {known}")
            return {"contexts": _without(name, self._state.contexts)}

        await self._change(without)

    async def warm_up(self) -> None:
        """Capture CUDA graphs and measure costs in all replicas."""
        for done in await self._everywhere("warm_up"):
            if done.error is not None:
                raise done.error

    async def _change(self, parts: Callable[[], dict[str, Any]]) -> None:
        """Have all replicas serve something else: all of them, or none.

        Args:
            parts: Returns the fields of `ServedState` that change; called while nothing else is
                changed.

        Raises:
            AdapterError: A replica cannot load it.
        """
        async with self._changing:
            before, changed = self._state, parts()
            revision = Revision(self.front, before.revision.number + 1)
            try:
                await self._publish(dataclasses.replace(before, revision=revision, **changed))
            except BaseException as error:
                after = Revision(self.front, revision.number + 1)
                try:
                    await self._publish(dataclasses.replace(before, revision=after))
                except ServeError as failure:
                    raise AdapterError(
                        f"{error}; what was served before could not be loaded again: {failure}"
                    ) from error
                raise

    async def _publish(self, state: ServedState) -> None:
        """Have all replicas serve a state, then those that start, then requests.

        Raises:
            ServeError: A replica cannot.
        """
        done = await self._everywhere("follow", state)
        for one in done:
            if one.error is not None:
                raise one.error
        self._state, self._models = state, done[0].value
        # Requests of a domain need its adapter; those of the base model need none.
        self._adapters = {model.name: model.adapter for model in self._models}
        with contextlib.suppress(ray.exceptions.RayError):  # `_watch` pins it again
            await self._board.pin.remote(state)

    async def _everywhere(self, method: str, *arguments: Any) -> list[Done]:
        """Call `EngineReplica.control` of all replicas; those that die are left out.

        Raises:
            StoppedError: No replica is left, or one does not answer.
        """
        sent = self._handle.broadcast("control", method, *arguments)
        try:
            found = await sent.results_async(timeout_s=CHANGE_SECONDS, return_exceptions=True)
        except TimeoutError as error:
            raise StoppedError("A replica does not answer: see Ray's logs") from error
        except (ray.exceptions.RayError, RayServeException) as error:
            raise _none_runs(error) from error
        done = [one for one in found if not isinstance(one, BaseException)]
        if not done:
            raise _none_runs(found[0])
        return done

    # ------------------------------------------------------------------ how the replicas are

    async def _watch(self) -> None:
        """Look at the board again and again; pinning the state again fills a new board."""
        while True:
            try:
                await self._look()
            except ray.exceptions.RayError as error:
                log.warning("the state of the replicas is not known: %s", _line(error))
            await asyncio.sleep(PERIOD)

    async def _look(self) -> None:
        found = await self._board.pin.remote(self._state)
        self._reports = {report.replica: report for report in found}
        self._seen = time.monotonic()

    def _live(self) -> list[Report]:
        """Return the reports of the replicas that run; none if they are old."""
        return list(self._reports.values()) if time.monotonic() - self._seen < STALE else []

    # ------------------------------------------------------------------ facts

    def count_tokens(self, text: str) -> int:
        """Return the number of tokens of a text."""
        return len(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    @property
    def tokenizer(self) -> Any:
        """The base model's tokenizer."""
        return self._known().tokenizer

    @property
    def base(self) -> str:
        """Id of the base model."""
        return self._known().base

    @property
    def context_length(self) -> int:
        """Longest prompt and answer together, in tokens."""
        return self._known().context_length

    def _known(self) -> Facts:
        assert self._facts is not None, "start was not called"
        return self._facts

    @property
    def healthy(self) -> bool:
        """Whether a replica runs."""
        return not self._closed and any(report.healthy for report in self._live())

    async def close(self, drain: float = 0.0) -> None:
        """Stop the replicas; see `types.EngineClient`."""
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
    """Return the sum of states: of counters, sizes and names.

    Mode and merged adapter are those of the state with the most running requests, and phases of the
    start take the longest of all.
    """
    if not states:
        return EngineStats()
    busiest = max(states, key=lambda stats: stats.running)
    made: dict[str, Any] = {}
    for item in dataclasses.fields(EngineStats):
        values = [getattr(stats, item.name) for stats in states]
        if item.name == "on_disk":  # everywhere
            made[item.name] = tuple(sorted(set.intersection(*map(set, values))))
        elif isinstance(values[0], tuple):
            made[item.name] = tuple(sorted({name for names in values for name in names}))
        elif item.name == "finished":
            reasons = {reason for counts in values for reason in counts}
            made[item.name] = {r: sum(counts.get(r, 0) for counts in values) for r in reasons}
        elif item.name == "start_seconds":
            phases = {phase for seconds in values for phase in seconds}
            made[item.name] = {p: max(seconds.get(p, 0.0) for seconds in values) for p in phases}
        elif isinstance(values[0], dict):
            made[item.name] = {name: text for texts in values for name, text in texts.items()}
        elif item.name in ("adapters_known", "contexts_known"):
            made[item.name] = max(values)  # all replicas know the same ones
        elif type(values[0]) is int:
            made[item.name] = sum(values)
        else:
            made[item.name] = getattr(busiest, item.name)
    return EngineStats(**made)


async def _next(stream: AsyncIterator[Batch], seconds: float | None) -> Batch:
    """Return the next batch of a response.

    Raises:
        TimeoutError: It does not come in time.
        _LostError: The replica is lost.
    """
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


def _without(name: str, parts: Mapping[str, Part]) -> dict[str, Part]:
    return {key: part for key, part in parts.items() if key != name}


def _none_runs(error: object) -> StoppedError:
    return StoppedError(f"No replica runs now ({_line(error)}): ask again in a moment")


def _unanswered(passed_on: bool) -> StoppedError:
    if passed_on:
        return StoppedError(
            "The replica that answered has died, after a part of the answer was sent: ask again"
        )
    return StoppedError("Two replicas died one after the other with this request: ask again")


def _late(request: Request) -> DeadlineError:
    return DeadlineError(f"request {request.id} missed its deadline: allow it more time")


def _line(error: object) -> str:
    """Return the first line of an error."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]
