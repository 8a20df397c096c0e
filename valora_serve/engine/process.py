"""An engine in a process of its own, as its steps and an event loop would fight for Python's lock.

`EngineProcess` passes calls and their results through a pipe; `python -m
valora_serve.engine.process` is the other end, which has them done by an `AsyncEngine`.
"""

from __future__ import annotations

import asyncio
import contextlib
import copyreg
import io
import itertools
import logging
import os
import pickle
import sys
import threading
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partialmethod
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from PIL import Image

from valora_data.errors import ValoraError
from valora_serve.engine.launch import how_it_ended, launch, pipes
from valora_serve.engine.settings import EngineSettings
from valora_serve.errors import ServeError, StoppedError
from valora_serve.pauses import short_pauses
from valora_serve.types import EngineClient, EngineStats, Output, Request, ServedModel, failure

log = logging.getLogger(__name__)

STATE_SECONDS = 0.05  # between two states of an engine that answers nothing
CLOSE_SECONDS = 30.0  # that an engine has to stop, once its requests had theirs


class _Pickler(pickle.Pickler):
    """Keeps pixels apart: they are sent without a copy, each of which holds Python's lock."""

    dispatch_table: Any = copyreg.dispatch_table | {
        Image.Image: lambda image: (Image.fromarray, (np.asarray(image),))
    }


class EngineProcess(EngineClient):
    """An engine in a process, which ends with this one, however that ends."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._process, [self._pipe] = launch(__name__, 1)
        self._numbers = itertools.count()
        self._queues: dict[int, asyncio.Queue[tuple[bool, Any]]] = {}  # by numbers of calls
        # One thread, so that no large image holds the event loop up, and all stay in order.
        self._sending = ThreadPoolExecutor(1, "send")
        self._models: list[ServedModel] = []
        self._stats = EngineStats()
        self.healthy, self._closing, self._gone = True, False, asyncio.Event()
        self.lost: str | None = None  # why the engine cannot go on; None while it can
        self._loop.add_reader(self._pipe.fileno(), self._read)
        os.set_blocking(self._pipe.fileno(), True)  # uvloop has made it non-blocking
        threading.Thread(target=self._watch, name="watch", daemon=True).start()

    @classmethod
    async def start(
        cls, settings: EngineSettings, read_tokenizer: Callable[[Any], None] | None = None
    ) -> EngineProcess:
        """Start an engine, as `async_engine.start_engine` does in this process.

        `read_tokenizer` is called there with the tokenizer before anything is asked.
        """
        made = cls()
        try:
            level = logging.getLogger("valora_serve").getEffectiveLevel()
            facts = await made._call("start", settings, level, read_tokenizer)
        except BaseException:
            await made.close()
            raise
        made.base, made.context_length, made.dtype, made.tokenizer = facts
        return made

    # ------------------------------------------------------------------ the pipe

    async def _answers(self, name: str, *arguments: Any, **named: Any) -> AsyncGenerator[Any, None]:
        """Call something of the engine; leaving before the last of what it gives cancels it."""
        if self._gone.is_set():
            raise self._stopped()
        number, last = next(self._numbers), False
        queue = self._queues[number] = asyncio.Queue()
        self._sending.submit(self._send, number, name, arguments, named)
        try:
            while not last:
                last, found = await queue.get()
                if isinstance(found, Exception):
                    raise found
                if found is not None:
                    yield found
        finally:
            del self._queues[number]
            if not last and not self._gone.is_set():
                self._sending.submit(self._send, number, "", (), {})

    async def _call(self, name: str, *arguments: Any, **named: Any) -> Any:
        async with contextlib.aclosing(self._answers(name, *arguments, **named)) as answers:
            async for result, self._models in answers:
                return result

    def _send(self, number: int, name: str, arguments: Any, named: Any) -> None:
        file, buffers = io.BytesIO(), list[pickle.PickleBuffer]()
        try:
            _Pickler(file, 5, buffer_callback=buffers.append).dump((arguments, named))
            self._pipe.send_bytes(pickle.dumps((number, name, len(buffers))))
            for part in (file.getbuffer(), *(one.raw() for one in buffers)):
                self._pipe.send_bytes(part)
        except OSError:
            pass  # the process has ended, which `_watch` tells
        except Exception as error:  # noqa: BLE001 - the caller gets it
            self._loop.call_soon_threadsafe(self._dispatch, number, True, error)

    def _read(self) -> None:
        try:
            while self._pipe.poll():
                messages, state = pickle.loads(self._pipe.recv_bytes())
                if state is not None:
                    self._stats, self.healthy, self.lost = state
                for number, last, content in messages:
                    self._dispatch(number, last, pickle.loads(content))
        except (EOFError, OSError):
            self._loop.remove_reader(self._pipe.fileno())

    def _dispatch(self, number: int, last: bool, found: Any) -> None:
        if isinstance(found, logging.LogRecord):
            logging.getLogger(found.name).handle(found)
        elif (queue := self._queues.get(number)) is not None:
            queue.put_nowait((last, found))

    def _watch(self) -> None:
        how = how_it_ended(self._process.wait())
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._ended, how)

    def _ended(self, how: str) -> None:
        self._read()  # what it said until then
        self._loop.remove_reader(self._pipe.fileno())
        if not self._closing:
            self.lost = self.lost or f"the process of the engine {how}: restart the server"
            log.error("%s", self.lost)
        self.healthy = False
        self._gone.set()
        for queue in self._queues.values():
            queue.put_nowait((True, self._stopped()))

    def _stopped(self) -> StoppedError:
        return StoppedError(self.lost or "the engine is stopped")

    # ------------------------------------------------------------------ `types.EngineClient`

    async def generate(self, request: Request) -> AsyncGenerator[Output, None]:
        left, arrival = {one.id: one for one in (request, *request.also)}, time.monotonic()
        try:
            async with contextlib.aclosing(self._answers("generate", request)) as outputs:
                async for output in outputs:
                    if output.finish is not None:
                        left.pop(output.id, None)
                    yield output
        except Exception as error:  # noqa: BLE001 - it is an output
            wrong = error if isinstance(error, ServeError) else ServeError(str(error))
            for one in left.values():
                yield failure(one, wrong, arrival)

    warm_up = partialmethod(_call, "warm_up")
    load = partialmethod(_call, "load")
    unload = partialmethod(_call, "unload")
    make_context = partialmethod(_call, "make_context")

    def models(self) -> list[ServedModel]:
        return self._models

    def stats(self) -> EngineStats:
        return self._stats

    async def close(self, drain: float = 0.0) -> None:
        if hasattr(self, "base") and not self._closing:  # it has started
            with contextlib.suppress(ServeError, TimeoutError):  # the process has ended, or hangs
                await asyncio.wait_for(self._call("close", drain), drain + CLOSE_SECONDS)
        self._closing = True
        self._process.kill()  # it has nothing to put in order any more
        await self._gone.wait()
        self._sending.shutdown(wait=False)
        self._pipe.close()


class _EngineServer(logging.Handler):
    """The other end of the pipe; the server logs what is logged here."""

    def __init__(self, pipe: Connection) -> None:
        super().__init__()
        self._pipe, self._loop = pipe, asyncio.get_running_loop()
        self._engine: Any = None
        self._tasks: dict[int, asyncio.Task[None]] = {}  # calls by their numbers
        self._unsent: list[tuple[int, bool, bytes]] = []
        self._sent_state: tuple[Any, ...] = ()
        self._pauses = contextlib.ExitStack()

    def receive(self) -> None:
        """Take calls in, in a thread, until the server has ended."""
        with contextlib.suppress(EOFError, OSError):
            while True:
                number, name, count = pickle.loads(self._pipe.recv_bytes())
                content, *buffers = (self._pipe.recv_bytes() for _ in range(count + 1))
                try:
                    arguments, named = pickle.loads(content, buffers=buffers)
                except Exception as error:  # noqa: BLE001 - the caller gets it
                    self._loop.call_soon_threadsafe(self._fail, number, name, error)
                    continue
                self._loop.call_soon_threadsafe(self._begin, number, name, arguments, named)
        os._exit(1)  # threads and collectives under way are not waited for

    def _begin(self, number: int, name: str, arguments: Any, named: Any) -> None:
        if name:
            doing = asyncio.create_task(self._do(number, name, arguments, named))
            self._tasks[number] = doing
            doing.add_done_callback(lambda _: self._tasks.pop(number))
        elif (task := self._tasks.get(number)) is not None:
            task.cancel()

    async def _do(self, number: int, name: str, arguments: Any, named: Any) -> None:
        try:
            if name == "generate":
                async with contextlib.aclosing(self._engine.generate(*arguments)) as outputs:
                    async for output in outputs:
                        self.send(number, False, output)
                self.send(number, True, None)
                return
            do = self._start if name == "start" else getattr(self._engine, name)
            result = await do(*arguments, **named)
            if name == "warm_up":  # what is loaded by now lives as long as the engine
                self._pauses.close()
                self._pauses.enter_context(short_pauses())
            self.send(number, True, (result, self._engine.models()))
        except Exception as error:  # noqa: BLE001 - the caller gets it
            self._fail(number, name, error)

    def _fail(self, number: int, name: str, error: Exception) -> None:
        if not isinstance(error, ValoraError):  # nobody expected it
            log.error("%s in the process of the engine", name, exc_info=error)
        self.send(number, True, error)

    async def _start(
        self, settings: EngineSettings, level: int, read_tokenizer: Callable[[Any], None] | None
    ) -> tuple[Any, ...]:
        from valora_serve.engine.async_engine import start_engine

        logger = logging.getLogger("valora_serve")
        logger.handlers, logger.propagate = [self], False
        logger.setLevel(level)
        engine = self._engine = await start_engine(settings)
        if read_tokenizer is not None:
            read_tokenizer(engine.tokenizer)
        return engine.base, engine.context_length, engine.dtype, engine.tokenizer

    def emit(self, record: logging.LogRecord) -> None:
        """Have the server log something, in a form that can be pickled; in any thread."""
        record.msg, record.args = record.getMessage(), None
        if record.exc_info:
            record.exc_text = logging.Formatter().formatException(record.exc_info)
            record.exc_info = None
        self._loop.call_soon_threadsafe(self.send, -1, False, record)

    def send(self, number: int, last: bool, found: Any) -> None:
        """Send something, together with what else comes in this turn of the event loop."""
        if not self._unsent:
            self._loop.call_soon(self.tell)
        try:
            content = pickle.dumps(found, 5)
            if isinstance(found, Exception):
                pickle.loads(content)  # which fails for some
        except Exception as error:  # noqa: BLE001 - of another package's head, say
            said = f"an answer cannot leave the engine's process: {error}"
            if isinstance(found, Exception):
                said = f"{type(found).__name__}: {found}"
            last, content = True, pickle.dumps(ServeError(said))
        self._unsent.append((number, last, content))

    def tell(self) -> None:
        """Send what is unsent, and the engine's state if it is another one."""
        messages, self._unsent, state, engine = self._unsent, [], None, self._engine
        if engine is not None:
            state_now = engine.stats(), engine.healthy, engine.lost
            if state_now != self._sent_state:
                state = self._sent_state = state_now
        if messages or state is not None:
            self._pipe.send_bytes(pickle.dumps((messages, state), 5))


def main(arguments: Sequence[str]) -> None:
    """Entry point of the process; the argument is the file descriptor of its pipe."""

    async def run() -> None:
        server = _EngineServer(*pipes(arguments))
        threading.Thread(target=server.receive, name="receive", daemon=True).start()
        while True:  # also when the engine answers nothing
            await asyncio.sleep(STATE_SECONDS)
            server.tell()

    with contextlib.suppress(OSError):  # the server has ended
        asyncio.run(run())
    os._exit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
