"""The engine behind an event loop: what the server uses."""

import asyncio
import contextlib
import copy
import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import transformers.utils.logging

from valora_serve.engine.engine import Engine, as_serve_error
from valora_serve.engine.profile import Profiler, adopt, ensure_costs, lacks_costs
from valora_serve.engine.sequence import Prepared
from valora_serve.engine.settings import EngineSettings
from valora_serve.errors import RequestError, ServeError, StoppedError, UnknownModelError
from valora_serve.types import (
    EngineClient,
    EngineStats,
    NewContext,
    Output,
    Request,
    ServedModel,
    failure,
    joined,
)

log = logging.getLogger(__name__)

T = TypeVar("T")
Found = Mapping[str, Prepared | ServeError]  # requests that are prepared, or why not, by id


@dataclass(frozen=True, slots=True)
class _Listener:
    request: Request
    queue: asyncio.Queue[Output]
    held: list[Output] | None  # of an answer that is passed on as a whole; None for a stream


STUCK_SECONDS = 10.0  # that the engine's thread has to end after a process of its group has ended
QUIET = 0.5  # seconds without requests after which the engine prepares, measures and tunes
PAUSE = 0.001  # seconds between checks of loading adapters while there is nothing to compute


class AsyncEngine(EngineClient):
    """Runs an `Engine`, which nothing else may use, in a thread."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._loop: asyncio.AbstractEventLoop | None = None  # of the requests
        self._calls: deque[Callable[[], None]] = deque()
        self._wake = threading.Event()
        self._stopping = self._draining = self._closed = False
        self._failed: str | None = None
        # By request id; None: the client has left, and the engine has not ended the request yet.
        self._queues: dict[str, _Listener | None] = {}
        self._closing = threading.Lock()
        # One thread: the tokenizer is not thread-safe, and the engine's thread needs a core.
        self._preparing = ThreadPoolExecutor(1, "prepare")
        self._loading = ThreadPoolExecutor(1, "load")
        self._stats = engine.stats()
        self.healthy = True
        self._profiler: Profiler | None = None
        if engine.tuning is not None:
            engine.tuning.tuner.compiler.on_news = self._wake.set
        engine.runner.on_compiled = self._wake.set
        self.base, self.context_length = engine.lmm.base, engine.context_length
        self.dtype = str(engine.lmm.dtype).removeprefix("torch.")
        # For the event loop's thread; the engine's thread has a copy of its own.
        self.tokenizer = copy.deepcopy(engine.lmm.tokenizer)
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()
        if engine.workers is not None:
            engine.workers.on_lost = self._lost

    # ------------------------------------------------------------------ the engine's thread

    def _run(self) -> None:
        """Run the calls of other threads and the steps of the engine, until it stops or fails."""
        engine = self._engine
        quiet_since = time.monotonic()
        try:
            while not self._stopping:
                while self._calls:
                    self._pause_measuring()  # a call may need what it holds
                    self._calls.popleft()()
                if not engine.busy:
                    left = quiet_since + QUIET - time.monotonic()
                    worked = left <= 0 and self._use_idle_time()
                    self._stats = engine.stats()
                    if worked:
                        continue
                    self._wake.wait(left if left > 0 else None)
                    self._wake.clear()
                    continue
                outputs = engine.step()
                quiet_since = time.monotonic()
                self._stats = engine.stats()  # first, so that who has an answer sees it counted
                self._deliver(outputs)
                if engine.stalled:
                    self._wake.wait(PAUSE)
                    self._wake.clear()
        except StoppedError as error:  # it says itself what to do
            self._failed = str(error)
        except Exception as error:
            log.exception("the engine has failed")
            self._failed = f"the engine has failed ({error}): restart the server"
        finally:
            self._failed, self.healthy = self._failed or "the engine is stopped", False
            try:
                self._deliver(engine.fail_all(self._failed))
            except Exception:
                log.exception("ending the requests of the failed engine")
            self._fail_listeners(self._failed)
            with self._closing:
                self._closed = True
            while self._calls:
                self._calls.popleft()()
            self._stats = engine.stats()
            engine.close()

    def _use_idle_time(self) -> bool:
        engine = self._engine
        if engine.prepare_next():
            return True
        if engine.runner.provisional:  # what is measured now would not hold later
            return False
        if self._profiler is None or self._profiler.failed:
            if engine.tune():
                return True
            if self._profiler is not None or not lacks_costs(engine):
                return False
            self._profiler = Profiler(engine)
        self._profiler.go_on()
        if self._profiler.found is not None:
            adopt(engine, self._profiler.found)
            self._profiler = None
        return True

    def _pause_measuring(self) -> None:
        if self._profiler is not None:
            self._profiler.pause()
        if self._engine.tuning is not None:
            self._engine.tuning.tuner.pause()

    def _lost(self, reason: str) -> None:
        """Stop, as a process of the tensor-parallel group has ended; called in another thread."""
        self._failed, self.healthy = reason, False
        self._stopping = True
        self._wake.set()
        self._thread.join(STUCK_SECONDS)
        if self._thread.is_alive():  # it waits for a GPU that waits for the lost one
            self._fail_listeners(reason)

    def _fail_listeners(self, reason: str) -> None:
        """End all requests, also if the engine cannot; those that have ended have no listener."""
        wrong, now = StoppedError(reason), time.monotonic()
        waiting = tuple(self._queues.values())
        self._deliver([failure(one.request, wrong, now) for one in waiting if one is not None])

    def _deliver(self, outputs: list[Output]) -> None:
        news: list[tuple[asyncio.Queue[Output], Output]] = []
        for output in outputs:
            waiting = self._queues.get(output.id)
            if waiting is None:
                if output.finish is not None:
                    self._queues.pop(output.id, None)
                continue
            whole = output
            if waiting.held is not None:  # each output on its own costs the event loop 50 us
                waiting.held.append(output)
                if output.finish is None:
                    continue
                whole = joined(waiting.held)
            news.append((waiting.queue, whole))
        if news and self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(_put, news)

    def _call(self, function: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                self._check_running()
                future.set_result(function())
            except Exception as error:  # noqa: BLE001 - the caller gets it
                future.set_exception(error)

        with self._closing:
            if self._closed:
                run()  # it has failed, or is stopped
            else:
                self._calls.append(run)
                self._wake.set()
        return future

    async def _do(self, function: Callable[[], T]) -> T:
        return await asyncio.wrap_future(self._call(function))

    async def _in(self, pool: ThreadPoolExecutor, function: Callable[[], T]) -> T:
        def run() -> T:
            self._check_running()
            return function()

        self._check_running()
        return await asyncio.get_running_loop().run_in_executor(pool, run)

    def _check_running(self) -> None:
        if self._failed is not None:
            raise StoppedError(self._failed)

    # ------------------------------------------------------------------ requests

    def generate(self, request: Request) -> AsyncGenerator[Output, None]:
        asked = (request, *request.also)
        return self._answer(asked, lambda: self._engine.prepare_all(asked))

    async def _answer(
        self, asked: Sequence[Request], prepare: Callable[[], Found]
    ) -> AsyncGenerator[Output, None]:
        """Answer requests together; `prepare` is called in the thread that prepares prompts."""
        self._loop, arrival = asyncio.get_running_loop(), time.monotonic()
        queue: asyncio.Queue[Output] = asyncio.Queue()
        mine = {one.id for one in asked if one.id not in self._queues}
        left = set(mine)
        for one in asked:
            if one.id in mine:
                self._queues[one.id] = _Listener(one, queue, None if one.stream else [])
        try:
            failed = await self._begin(mine, prepare)
            for one in asked:
                if one.id not in mine:
                    yield failure(one, RequestError(f"request id {one.id} is in use"), arrival)
                elif (wrong := failed.get(one.id)) is not None:
                    left.discard(one.id)
                    yield failure(one, wrong, arrival)
            while left:
                output = await queue.get()
                if output.finish is not None:
                    left.discard(output.id)
                yield output
        finally:
            for key in mine:
                if key not in left or self._closed:
                    del self._queues[key]
                    continue
                # The id stays in use until the request has ended; its outputs would reach the
                # next request of this id otherwise.
                self._queues[key] = None
                # Runs after `add_all`, which is in the same queue of calls.
                self._call(partial(self._abandon, key))

    async def _begin(
        self, mine: Set[str], prepare: Callable[[], Found], attempts: int = 3
    ) -> dict[str, ServeError]:
        """Prepare requests and put them in the queue; return why some cannot be, by id.

        They are prepared again if what they name was replaced meanwhile.
        """
        if self._draining and self._failed is None:
            stopped = StoppedError("the server is shutting down: ask another one")
            return dict.fromkeys(mine, stopped)
        try:
            found = await self._in(self._preparing, prepare)
            found = {key: one for key, one in found.items() if key in mine}
            ready = [one for one in found.values() if isinstance(one, Prepared)]
            refused = await self._do(lambda: self._engine.add_all(ready))
        except Exception as error:  # noqa: BLE001 - the requests get it
            return {key: as_serve_error(key, error) for key in mine}
        old = {key for key, one in refused.items() if isinstance(one, UnknownModelError)}
        wrong = {key: one for key, one in found.items() if isinstance(one, ServeError)} | refused
        if old and attempts > 1:
            wrong = {key: one for key, one in wrong.items() if key not in old}
            wrong |= await self._begin(old, prepare, attempts - 1)
        return wrong

    def _abandon(self, request_id: str) -> None:
        if not self._engine.cancel(request_id):
            self._queues.pop(request_id, None)

    async def warm_up(self) -> None:
        """Capture CUDA graphs, and measure costs that are not known, after graphs that wait."""
        engine = self._engine

        def start() -> None:
            engine.warm_up()
            if not engine.start_up.left:
                with engine.start_up.phase("costs"):
                    ensure_costs(engine)
            elif lacks_costs(engine):
                self._profiler = Profiler(engine)

        await self._do(start)

    # ------------------------------------------------------------------ models

    def models(self) -> list[ServedModel]:
        return self._engine.store.models()

    def stats(self) -> EngineStats:
        return self._stats

    async def load(
        self, kind: str, folder: Path, name: str = "", *, decode_only: bool = False
    ) -> list[ServedModel]:
        registry = self._engine.registry
        read = partial(registry.read, kind, folder, name, decode_only=decode_only)
        found = await self._in(self._loading, read)
        return await self._do(lambda: registry.register(found))  # between two steps

    async def unload(self, kind: str, name: str) -> None:
        await self._do(partial(self._engine.registry.unregister, kind, name))

    async def make_context(self, wanted: NewContext, folder: Path) -> None:
        name = f"context-{secrets.token_hex(8)}"
        prepared, write = await self._in(
            self._preparing, lambda: self._engine.prepare_compression(wanted, name)
        )
        answering = self._answer([prepared.request], lambda: {name: prepared})
        async with contextlib.aclosing(answering) as outputs:
            *_, last = [output async for output in outputs]
        await self._in(self._loading, partial(write, folder, last))

    # ------------------------------------------------------------------ facts

    @property
    def lost(self) -> str | None:
        """Why the engine's tensor-parallel group cannot go on; None while it can."""
        return None if self._engine.workers is None else self._engine.workers.lost

    async def close(self, drain: float = 0.0) -> None:
        self._draining = True
        end = time.monotonic() + drain
        while self._queues and time.monotonic() < end and self.healthy:
            await asyncio.sleep(0.02)
        self._stopping = True
        self._engine.start_up.interrupted = True  # it ends after what it prepares now
        self._engine.runner.interrupt()
        self._wake.set()
        seconds = None if self.lost is None else STUCK_SECONDS
        await asyncio.get_running_loop().run_in_executor(None, self._thread.join, seconds)
        self._preparing.shutdown(wait=False)  # what waits there is told that the engine is stopped
        self._loading.shutdown(wait=False)


async def start_engine(settings: EngineSettings) -> AsyncEngine:
    """Load the base model and start an engine, without adapters.

    Raises:
        ServeError: A setting cannot be kept on this machine.
    """
    transformers.utils.logging.disable_progress_bar()
    return AsyncEngine(await asyncio.to_thread(Engine, settings))


def _put(news: list[tuple[asyncio.Queue[Output], Output]]) -> None:
    for queue, output in news:
        queue.put_nowait(output)
