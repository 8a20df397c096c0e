"""Decodes images and videos in processes of their own, with limits on memory and time."""

import asyncio
import contextlib
import logging
import mmap
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from io import FileIO
from typing import Any

from pebble import ProcessExpired, ProcessPool
from PIL import Image

from valora_serve.errors import ImageError, OverloadedError, ServeError
from valora_serve.server.media import decode
from valora_serve.server.media.fetch import MediaUrl

log = logging.getLogger(__name__)

Pixels = Any  # of `reader`, which imports this module
PROCESSES = 2  # two at most, so that decoding does not starve the engine
TASKS = 500  # A process is replaced after so many tasks, whatever its codecs have kept until then


class DecodePool:
    """Processes that decode, started when they are needed; they end with this one, however it ends.

    A process that takes too long, crashes or is killed costs its own request only. One job may
    take as much memory as its own limit says; several take no more together, but for small ones.
    """

    def __init__(self, count: int = PROCESSES) -> None:
        # A thread for each process: the queue of the threads is the queue for the processes.
        self._threads = ThreadPoolExecutor(count, thread_name_prefix="decode")
        self._count, self._lock = count, threading.Lock()
        self._processes: ProcessPool | None = None
        self._held, self._released = 0, threading.Condition()

    def start(self) -> None:
        """Start all processes without waiting for them, so that the first image need not wait."""
        self._threads.submit(self._schedule, os.getpid, 60.0)

    async def decode(self, what: str, content: MediaUrl, pixels: Pixels) -> list[Image.Image]:
        """Decode an image or a video; it is dropped if the caller is cancelled before it begins."""
        future = self._threads.submit(self._run, what, content, pixels)
        wait = pixels.limits.media_seconds
        timer = asyncio.get_running_loop().call_later(wait, future.cancel)  # not once it runs
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            task = asyncio.current_task()  # here alone: an error's frame must not refer to it
            if not (task and task.cancelling()):
                raise OverloadedError(
                    f"The {what} waited {wait:g} s for others to be decoded: try again soon"
                ) from None
            raise
        finally:
            timer.cancel()

    def _run(self, what: str, content: MediaUrl, pixels: Pixels) -> list[Image.Image]:
        with _memory_file(content.take()) as file, _memory_file() as target:
            names = (f"/proc/{os.getpid()}/fd/{one.fileno()}" for one in (file, target))
            given, spent = (what, *names, pixels.limits), list[float]()
            try:
                size, memory, sizes = self._result(spent, decode.measure, *given)
                pixels.take(size)
                with self._reserved(0 if sizes else memory, pixels.limits.max_decode_bytes):
                    sizes = sizes or self._result(spent, decode.decode, *given, memory)
                    return list(_images(target, sizes))
            finally:
                pixels.seconds += spent

    def _result(self, spent: list[float], function: Callable[..., Any], *given: Any) -> Any:
        what, *_, limits = given[:4]
        for _ in range(3):  # a process that is killed while it is idle breaks the pool
            began = time.monotonic()
            try:
                left = limits.decode_seconds - sum(spent)
                return self._schedule(function, left, *given).result()
            except (TimeoutError, ProcessExpired) as error:
                # -SIGALRM: the process ended itself, as the thread that watches limits was late
                if getattr(error, "exitcode", -signal.SIGALRM) == -signal.SIGALRM:
                    raise ImageError(
                        f"The {what} takes longer than {limits.decode_seconds:g} s to decode: "
                        "send a smaller or simpler one"
                    ) from error
                log.warning("decoding %s ended its process: %s", what, error)
                raise ImageError(
                    f"The {what} cannot be decoded, its decoder gave up: send it in another format"
                ) from error
            except RuntimeError as error:
                log.warning("the processes that decode images are started again: %s", error)
            finally:
                spent.append(time.monotonic() - began)
        raise ServeError("Images cannot be decoded now: see the server's log")

    def _schedule(
        self, function: Callable[..., Any], seconds: float, *arguments: Any
    ) -> Future[Any]:
        with self._lock:
            if self._processes is None:
                context = multiprocessing.get_context("forkserver")  # a new one takes no imports
                context.set_forkserver_preload(["av", decode.__name__])
                self._processes = ProcessPool(self._count, TASKS, decode.begin, context=context)
            try:  # a limit of 0 would be none
                return self._processes.schedule(function, arguments, timeout=max(0.01, seconds))
            except (OSError, RuntimeError):
                broken: Any = self._processes
                self._processes = None
                broken.stop()
                broken.join()
                raise

    @contextlib.contextmanager
    def _reserved(self, size: int, most: int) -> Iterator[None]:
        """Wait until there is room for so many bytes, and hold them."""
        with self._released:
            self._released.wait_for(lambda: not self._held or self._held + size <= most)
            self._held += size
        try:
            yield
        finally:
            with self._released:
                self._held -= size
                self._released.notify_all()


@cache
def shared_pool() -> DecodePool:
    """Return the pool of this process, which all servers and loaders in it share."""
    return DecodePool()


@contextlib.contextmanager
def _memory_file(content: Any = b"") -> Iterator[FileIO]:
    """A file in memory, which a process of this user opens below /proc: nothing is pickled."""
    try:
        with open(os.memfd_create("media"), "w+b", buffering=0) as file:  # noqa: PTH123
            at = 0
            while at < len(content):  # at a limit, a part is written before the error
                at += file.write(memoryview(content)[at:])
            del content
            yield file
    except OSError as error:
        raise OverloadedError("No memory is left to decode the file: try again soon") from error


def _images(file: FileIO, sizes: list[tuple[int, int, int]]) -> Iterator[Image.Image]:
    """Read RGB pixels: (width, height, times) of each image."""
    with mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped, memoryview(mapped) as pixels:
        at = 0
        for width, height, times in sizes:
            end = at + 3 * width * height
            image = Image.frombytes("RGB", (width, height), pixels[at:end])
            at = end
            yield from [image] * times
