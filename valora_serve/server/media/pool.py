"""Decodes images and videos in processes of their own, with limits on memory and time."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import dataclasses
import fcntl
import json
import logging
import os
import select
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import TYPE_CHECKING, Any, cast

from PIL import Image

from valora_serve.errors import ImageError, OverloadedError, ServeError
from valora_serve.server.media import worker

if TYPE_CHECKING:
    from collections.abc import Callable
    from io import FileIO

    from valora_serve.server.media.decode import Limits

log = logging.getLogger(__name__)

PROCESSES = 2
"""Two at most, so that decoding does not starve the engine."""
START_SECONDS = 60.0
"""Time limit for starting a process."""
LEAVE_SECONDS = 0.5
"""Seconds that a decode whose request has ended may go on before its process is killed."""
_LATE_SECONDS = 2.0  # the process ends itself before, see `worker.GRACE`
_MESSAGE_BYTES = 4096
_PIPE_BYTES = 1 << 20
_F_SETPIPE_SZ = getattr(fcntl, "F_SETPIPE_SZ", None)


@dataclasses.dataclass
class Job:
    """One image or video to decode.

    Attributes:
        what: ``image`` or ``video``.
        content: The file's content.
        limits: Its limits.
        take: Called with width and height before each image is decoded; may refuse it.
        seconds: How long it took, without waiting, in seconds.
        stopped: Whether nobody waits for it any more.
    """

    what: str
    content: bytes | bytearray
    limits: Limits
    take: Callable[[int, int], None]
    seconds: float = 0.0
    stopped: bool = False
    _process: _Process | None = None
    _lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)

    def run(self, process: _Process, room: Room) -> list[Image.Image]:
        """Decode in a process; `stop` kills it meanwhile.

        Args:
            process: The process.
            room: Memory of all jobs that run.
        """
        process.wait_until_ready()
        began = time.monotonic()
        with self._lock:
            self._process = process
        waited = 0.0

        def reserve(size: int) -> float:
            nonlocal waited
            waited += room.reserve(self, size)
            return waited

        try:
            return process.decode(self, reserve)
        finally:
            room.release(self)
            with self._lock:
                self._process = None
            self.seconds = time.monotonic() - began - waited

    def take_content(self) -> bytes | bytearray:
        """Return the file's content, which the job no longer holds then."""
        content, self.content = self.content, b""
        return content

    def stop(self) -> None:
        """Kill the process that decodes, if one still does."""
        self.stopped = True
        with self._lock:
            if self._process is not None:
                self._process.kill()


class Room:
    """Memory of the jobs that run at the same time.

    One job may take as much as its own limit says; several take no more together.
    """

    def __init__(self) -> None:
        self._held: dict[int, int] = {}  # bytes by job
        self._changed = threading.Condition()
        self._turn = threading.Lock()  # whoever waits is not overtaken

    def reserve(self, job: Job, size: int) -> float:
        """Wait until a job has room.

        Args:
            job: The job.
            size: Its memory, in bytes.

        Returns:
            How long it waited, in seconds.

        Raises:
            EOFError: The job was stopped meanwhile.
        """
        began = time.monotonic()
        with self._turn, self._changed:
            while self._held and sum(self._held.values()) + size > job.limits.memory:
                self._changed.wait(0.1)
                if job.stopped:
                    raise EOFError("nobody waits for the job any more")
            self._held[id(job)] = size
        return time.monotonic() - began

    def release(self, job: Job) -> None:
        """Give back what a job has reserved, if anything."""
        with self._changed:
            self._held.pop(id(job), None)
            self._changed.notify_all()


class DecodePool:
    """Processes that decode, started when they are first needed.

    A process that takes too long, crashes or is killed costs its own request only; another one
    takes its place. The processes end with this one, however it ends.

    Args:
        count: Most processes.
    """

    def __init__(self, count: int = PROCESSES) -> None:
        # A thread for each process, which waits for its answers; the queue of the threads is the
        # queue for the processes.
        self._threads = ThreadPoolExecutor(count, thread_name_prefix="decode")
        self._idle: list[_Process] = []
        self._all: set[_Process] = set()
        self._count = count
        self._lock = threading.Lock()
        self._closed = False
        self._room = Room()
        atexit.register(self.close)

    def start(self) -> None:
        """Start all processes without waiting for them, so that the first image need not wait."""
        with self._lock:
            missing = self._count - len(self._all)
        for process in [self._new() for _ in range(missing)]:
            self._give_back(process)

    async def decode(self, job: Job, wait: float) -> list[Image.Image]:
        """Decode an image or a video.

        If the caller is cancelled, a waiting job is dropped and a running one soon stopped.

        Args:
            job: What to decode.
            wait: Time limit for waiting until a process is free, in seconds.

        Returns:
            RGB images: one, or a video's frames in order.

        Raises:
            ImageError: It cannot be decoded within its limits.
            OverloadedError: No process was free in time.
        """
        loop = asyncio.get_running_loop()
        future = self._threads.submit(self._run, job)
        late = False

        def give_up() -> None:
            nonlocal late
            late = future.cancel()  # does nothing once the job runs

        timer = loop.call_later(wait, give_up)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            if late and not _cancelling():
                raise OverloadedError(
                    f"The {job.what} waited {wait:g} s for others to be decoded: try again soon"
                ) from None
            if not future.cancel():
                stop = threading.Timer(LEAVE_SECONDS, job.stop)  # the loop may end before
                stop.daemon = True
                stop.start()
            raise
        finally:
            timer.cancel()

    def close(self) -> None:
        """End all processes and threads; running jobs fail."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
            busy = self._all.difference(idle)
        for process in busy:
            process.kill()  # its thread ends it
        for process in idle:
            self._end(process)
        self._threads.shutdown(wait=False, cancel_futures=True)
        atexit.unregister(self.close)

    def _run(self, job: Job) -> list[Image.Image]:
        """Decode in an idle process; called in a thread."""
        try:
            process = self._idle_process()
        except OSError as error:
            log.exception("a process that decodes images does not start")
            raise _cannot_start() from error
        try:
            return job.run(process, self._room)
        finally:
            self._give_back(process)

    def _idle_process(self) -> _Process:
        while True:
            with self._lock:
                # The one used last: its memory is warm.
                process = self._idle.pop() if self._idle else None
            if process is None:
                return self._new()
            if process.usable:
                return process
            self._end(process)

    def _give_back(self, process: _Process) -> None:
        if not process.usable and not self._closed:
            self._end(process)
            try:
                process = self._new()  # at once, so that the next image need not wait for it
            except OSError:
                return  # no memory or no files are left; the next job tries again
        with self._lock:
            if not self._closed:
                self._idle.append(process)
                return
        self._end(process)

    def _new(self) -> _Process:
        process = _Process()
        with self._lock:
            self._all.add(process)
        return process

    def _end(self, process: _Process) -> None:
        with self._lock:
            self._all.discard(process)
        process.end()


@cache
def shared_pool() -> DecodePool:
    """Return the pool of this process, which all servers and loaders in it share."""
    return DecodePool()


class _Process:
    """A process that decodes one job after another; used by one thread at a time."""

    def __init__(self) -> None:
        # A session of its own: Ctrl-C in a terminal is the server's to handle. -P: the current
        # folder holds no modules, unless it is on the server's own path.
        self._popen = subprocess.Popen(
            [sys.executable, "-P", "-m", worker.__name__],
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            env=_environment(),
        )
        self._stdin = cast("FileIO", self._popen.stdin)
        self._stdout = cast("FileIO", self._popen.stdout)
        if _F_SETPIPE_SZ is not None:
            for pipe in (self._stdin, self._stdout):
                with contextlib.suppress(OSError):  # more than this user may have
                    fcntl.fcntl(pipe, _F_SETPIPE_SZ, _PIPE_BYTES)
        self._poll = select.poll()
        self._poll.register(self._stdout, select.POLLIN)
        self._until = time.monotonic() + START_SECONDS
        self._ready = False
        self._in_step = True  # no answer is left unread

    @property
    def usable(self) -> bool:
        """Whether it can take a job."""
        return self._in_step and self._popen.poll() is None

    def kill(self) -> None:
        """Kill it; the thread that waits for its answer gets an error."""
        self._popen.kill()

    def end(self) -> None:
        """Kill it, wait until it has ended and close the pipes."""
        self._popen.kill()
        self._popen.wait()
        for pipe in (self._stdin, self._stdout):
            with contextlib.suppress(OSError):
                pipe.close()

    def wait_until_ready(self) -> None:
        """Wait until it has started.

        Raises:
            ServeError: It does not start.
        """
        if self._ready:
            return
        self._in_step = False
        try:
            self._header()  # of kind READY
        except (OSError, EOFError) as error:
            log.exception("a process that decodes images does not start")
            raise _cannot_start() from error
        self._ready = self._in_step = True

    def decode(self, job: Job, reserve: Callable[[int], float]) -> list[Image.Image]:
        """Decode an image or a video.

        Args:
            job: What to decode.
            reserve: Reserves so many bytes for the job; returns how long it has waited for them.

        Raises:
            ImageError: It cannot be decoded within its limits.
        """
        self._in_step = False
        size = len(job.content)
        try:
            return self._decode(job, reserve)
        except (OSError, EOFError) as error:
            raise self._why_ended(job, size, error) from error

    def _decode(self, job: Job, reserve: Callable[[int], float]) -> list[Image.Image]:
        limits = dataclasses.asdict(job.limits)
        until = self._until = time.monotonic() + job.limits.seconds + _LATE_SECONDS
        asked = {"what": job.what, "bytes": len(job.content), "limits": limits}
        self._write(json.dumps(asked).encode() + b"\n")
        self._write(job.take_content())
        found: list[Image.Image] = []
        most = job.limits.frames if job.what == "video" else 1
        allowed, wrong = 0, None
        while True:
            kind, *numbers = self._header()
            match kind, numbers:
                case worker.SIZE, [width, height, _] if wrong is None:
                    try:
                        job.limits.check(job.what, width, height)
                        job.take(width, height)
                    except ServeError as error:
                        wrong = error
                    allowed = 0 if wrong else width * height
                    self._write(worker.NO if wrong else worker.GO)
                case worker.MEMORY, [size, _, _] if size <= job.limits.memory:
                    self._until = until + reserve(size)
                    self._write(worker.GO)
                case worker.PIXELS, [width, height, times] if (
                    0 < width * height == allowed and 0 < times <= most - len(found)
                ):
                    found += [self._image(width, height)] * times
                    allowed = 0
                case worker.FAILED, [size, _, _] if size <= _MESSAGE_BYTES:
                    wrong = ImageError(self._read(size).decode("utf-8", "replace"))
                case worker.DONE, [retire, _, _] if wrong is not None or found:
                    self._in_step = not retire
                    if wrong is not None:
                        # Its traceback may hold this frame: the frame must not hold it as well.
                        try:
                            raise wrong
                        finally:
                            wrong = None
                    return found
                case _:
                    raise EOFError("answers out of order")

    def _image(self, width: int, height: int) -> Image.Image:
        """Read the RGB pixels of an image, in strips: there is no second copy of all of them."""
        rows = min(height, max(1, worker.STRIP_BYTES // (3 * width)))
        if rows == height:
            return Image.frombytes("RGB", (width, height), self._read(3 * width * height))
        image = Image.new("RGB", (width, height))
        for top in range(0, height, rows):
            size = width, min(rows, height - top)
            strip = Image.frombytes("RGB", size, self._read(3 * size[0] * size[1]))
            image.paste(strip, (0, top))
        return image

    def _header(self) -> tuple[Any, ...]:
        return worker.HEADER.unpack(self._read(worker.HEADER.size))

    def _read(self, size: int) -> bytearray:
        content = bytearray(size)
        left = memoryview(content)
        while left:
            if not self._poll.poll(max(0.0, 1000 * (self._until - time.monotonic()))):
                raise TimeoutError("no answer in time")
            count = self._stdout.readinto(left)
            if not count:
                raise EOFError("the process has ended")
            left = left[count:]
        return content

    def _write(self, content: bytes | bytearray) -> None:
        left = memoryview(content)
        while left:
            left = left[self._stdin.write(left) or 0 :]

    def _why_ended(self, job: Job, size: int, error: Exception) -> ImageError:
        """Return the error of a job whose process has ended, or answered nonsense."""
        try:
            status = self._popen.wait(1.0)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            status = self._popen.wait()
        if status == -signal.SIGALRM or isinstance(error, TimeoutError):
            return ImageError(
                f"The {job.what} takes longer than {job.limits.seconds:g} s to decode: send a "
                "smaller or simpler one"
            )
        log.warning(
            "decoding %s of %d bytes ended its process with status %d",
            job.what, size, status,
        )  # fmt: skip
        return ImageError(
            f"The {job.what} cannot be decoded, its decoder gave up: send it in another format"
        )


def _cancelling() -> bool:
    """Return whether the current task is being cancelled."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _cannot_start() -> ServeError:
    return ServeError("Images cannot be decoded now: see the server's log")


def _environment() -> dict[str, str]:
    """Environment of the processes: our own modules, and memory that is given back when freed."""
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "MALLOC_MMAP_THRESHOLD_": str(1 << 18),
        "MALLOC_ARENA_MAX": "1",
    }
