"""The followers of a tensor-parallel group, as their leader sees them: start, tell, watch, stop.

Every follower is a process with two pipes to the leader. On one the leader tells what to do, and
the follower reports copies that are complete; on the other one adapters are packed, beside the
steps. A pipe ends with its process, so that neither side ever waits for one that is gone.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist

from valora_data.errors import ValoraError
from valora_serve.engine import sizing
from valora_serve.errors import AdapterError, ServeError, SettingsError, StoppedError
from valora_serve.model.split_model import check_split
from valora_serve.parallel.group import Group, make_store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from valora_serve.engine.settings import EngineSettings

log = logging.getLogger(__name__)

START_SECONDS = 300.0
"""Most seconds for a follower to start, before it reads the model."""

STOP_SECONDS = 10.0
"""Most seconds for a follower to stop when it is told to."""

LOST_SECONDS = 5.0
"""Most seconds between an error of a collective and the news that a process has ended."""


@dataclass(frozen=True, slots=True)
class Orders:
    """What a follower is told at its start.

    Attributes:
        settings: Settings of the engine.
        rank: Number of the follower.
        port: Port of the leader's store.
        threads: Threads of torch's operators on a CPU.
        log_level: Level of the leader's log.
    """

    settings: EngineSettings
    rank: int
    port: int
    threads: int
    log_level: int


@dataclass(slots=True)
class _Follower:
    """A follower's process and pipes."""

    rank: int
    process: subprocess.Popen[bytes]
    steps: Connection
    packs: Connection


def device_of(settings: EngineSettings, rank: int) -> torch.device:
    """Return the device of a process of a tensor-parallel group.

    Raises:
        SettingsError: There are fewer GPUs.
    """
    name = "cuda" if settings.device == "auto" else settings.device
    first = torch.device(name)
    if first.type != "cuda":
        return sizing.find_device(name)
    size, count = settings.tensor_parallel, torch.cuda.device_count()
    start = first.index or 0
    if start + size > count:
        raise SettingsError(
            f"tensor_parallel: {size} GPUs are asked for, and this machine has "
            f"{count - start if count > start else 'none'}"
            f"{f' from {first} on' if start else ''}: ask for fewer"
        )
    return torch.device("cuda", start + rank)


class Crew:
    """The followers of an engine.

    Args:
        settings: Settings of the engine.

    Attributes:
        module: Program of the followers.
        group: The processes.
        lost: Why the group cannot go on, once a follower has ended; None before.
        on_lost: Called then, in another thread.

    Raises:
        SettingsError: There are fewer GPUs than asked for.
        ServeError: A follower did not start.
    """

    module: ClassVar[str] = "valora_serve.engine.follower"

    def __init__(self, settings: EngineSettings) -> None:
        self.lost: str | None = None
        self.on_lost: Callable[[str], None] | None = None
        self._size = settings.tensor_parallel
        device = device_of(settings, 0)
        check_split(settings.base, self._size)
        self._followers: list[_Follower] = []
        self._gone = threading.Event()
        self._closing = False
        self._acks: dict[int, int] = {}  # followers that have done it, by ticket
        self._tickets = 0
        self._acked = threading.Condition()
        self._dropped: deque[int] = deque()
        self._packing = threading.Lock()
        self._ready: set[int] = set()
        try:
            for rank in range(1, self._size):
                self._followers.append(_start(rank, self.module))
            self._await_hello()
            store = make_store(self._size)
            for follower in self._followers:
                orders = Orders(
                    replace(settings, decision_trace=None),
                    follower.rank,
                    store.port,
                    torch.get_num_threads(),
                    logging.getLogger().getEffectiveLevel(),
                )
                follower.steps.send(orders)
            self._watcher = threading.Thread(target=self._watch, name="followers", daemon=True)
            self._watcher.start()
            self.group = Group.join(0, self._size, device, store)
        except BaseException as error:
            explained = self.explain(error)
            self._end_all()
            if explained is not None:
                raise explained from error
            raise

    def _await_hello(self) -> None:
        """Wait until every follower has come up."""
        waiting: dict[Any, _Follower] = {one.steps: one for one in self._followers}
        until = time.monotonic() + START_SECONDS
        while waiting:
            heard = wait(list(waiting), max(0.0, until - time.monotonic()))
            if not heard:
                rank = next(iter(waiting.values())).rank
                raise ServeError(
                    f"process {rank} of the tensor-parallel group has not started within "
                    f"{START_SECONDS:.0f} s: look for its messages above"
                )
            for pipe in heard:
                follower = waiting.pop(pipe)
                try:
                    follower.steps.recv()
                except EOFError:
                    raise ServeError(_ended(follower, self._size)) from None

    # ------------------------------------------------------------------ telling

    def tell(self, name: str, *arguments: object, table: tuple[bytes, bytes] | None = None) -> None:
        """Tell all followers what this process does next, in the same order.

        Args:
            name: What to do, see `follower`.
            arguments: Its arguments.
            table: Ranks and scalings of the adapters' slots, if they have changed.

        Raises:
            StoppedError: A follower has ended.
        """
        order = self._order(name, arguments, table)
        for follower in self._followers:
            self._send(follower, order)

    def tell_one(self, rank: int, name: str, *arguments: object) -> None:
        """Tell one follower what to do; see `tell`."""
        self._send(self._followers[rank - 1], self._order(name, arguments, None))

    def _order(
        self, name: str, arguments: tuple[object, ...], table: tuple[bytes, bytes] | None
    ) -> bytes:
        self.check()
        dropped = []
        while self._dropped and name != "encode":  # which only one follower hears
            dropped.append(self._dropped.popleft())
        return pickle.dumps((name, arguments, table, dropped), pickle.HIGHEST_PROTOCOL)

    def _send(self, follower: _Follower, order: bytes) -> None:
        try:
            follower.steps.send_bytes(order)
        except OSError as error:
            raise self.explain(error) or StoppedError(str(error)) from error

    def check(self) -> None:
        """Check that all processes are there.

        Raises:
            StoppedError: One has ended.
        """
        if self.lost is not None:
            raise StoppedError(self.lost)

    def explain(self, error: BaseException) -> ServeError | None:
        """Return the error of a process that has ended, if that can be why a call failed."""
        if isinstance(error, ValoraError) or not isinstance(error, Exception):
            return None  # it says itself what is wrong
        if self._followers:
            self._gone.wait(LOST_SECONDS)
        return StoppedError(self.lost) if self.lost is not None else None

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """Context whose errors are replaced by that of a process that has ended, if one has."""
        try:
            yield
        except Exception as error:
            explained = self.explain(error)
            if explained is None:
                raise
            raise explained from error

    # ------------------------------------------------------------------ adapters

    def start_packing(self, number: int, folder: Path, content: str) -> Callable[[], None]:
        """Let the followers read and pack an adapter.

        Args:
            number: Number by which later calls name it.
            folder: Its folder.
            content: Its content hash.

        Returns:
            A function that waits for them, and raises `AdapterError` if one could not pack it. It
            must be called.
        """
        self._packing.acquire()
        try:
            for follower in self._followers:
                with contextlib.suppress(OSError):  # `finish` finds out
                    follower.packs.send((number, folder, content))
        except BaseException:
            self._packing.release()
            raise

        def finish() -> None:
            try:
                answers = [follower.packs.recv() for follower in self._followers]
            except (EOFError, OSError) as error:
                raise self.explain(error) or StoppedError(
                    "a process of the tensor-parallel group has ended: restart the server"
                ) from error
            finally:
                self._packing.release()
            for wrong in answers:
                if wrong is not None:
                    raise AdapterError(wrong)

        return finish

    def drop(self, number: int) -> None:
        """Let the followers free the host memory of an adapter, with the next order."""
        self._dropped.append(number)

    def ticket(self) -> int:
        """Return a new number, by which followers report that something is done."""
        self._tickets += 1
        return self._tickets

    def is_done(self, ticket: int) -> bool:
        """Return whether all followers have reported a ticket."""
        self.check()
        return self._acks.get(ticket, 0) == len(self._followers)

    def wait(self, ticket: int) -> None:
        """Wait until all followers have reported a ticket.

        Raises:
            StoppedError: One has ended.
        """
        with self._acked:
            self._acked.wait_for(
                lambda: self.lost is not None or self._acks.get(ticket) == len(self._followers)
            )
        self.check()

    def wait_ready(self) -> None:
        """Wait until all followers have read the model.

        Raises:
            StoppedError: One has ended.
        """
        with self._acked:
            self._acked.wait_for(
                lambda: self.lost is not None or len(self._ready) == len(self._followers)
            )
        self.check()

    # ------------------------------------------------------------------ watching

    def _watch(self) -> None:
        """Read what the followers report, until one ends."""
        pipes: dict[Any, _Follower] = {one.steps: one for one in self._followers}
        while not self._closing:
            for pipe in wait(list(pipes)):
                follower = pipes[pipe]
                try:
                    kind, value = follower.steps.recv()
                except (EOFError, OSError):
                    if not self._closing:
                        self._lose(_ended(follower, self._size))
                    return
                if kind == "failed":
                    self._lose(
                        f"process {follower.rank} of the tensor-parallel group of {self._size} "
                        f"failed: {value}"
                    )
                    return
                with self._acked:
                    if kind == "ready":
                        self._ready.add(follower.rank)
                    else:
                        self._acks[value] = self._acks.get(value, 0) + 1
                    self._acked.notify_all()

    def _lose(self, reason: str) -> None:
        """Give the group up, as one process has ended."""
        self.lost = f"{reason}: restart the server"
        log.error("%s", self.lost)
        for follower in self._followers:
            follower.process.kill()
        with self._acked:
            self._acked.notify_all()
        self._gone.set()
        threading.Thread(target=self._abort, daemon=True).start()  # it may take long
        if self.on_lost is not None:
            self.on_lost(self.lost)

    def _abort(self) -> None:
        with contextlib.suppress(Exception):
            self.group.abort()

    # ------------------------------------------------------------------ end

    def close(self) -> None:
        """Stop the followers."""
        if self._closing:
            return
        lost = self.lost is not None
        self._closing = True
        if not lost:
            for follower in self._followers:
                with contextlib.suppress(OSError):
                    follower.steps.send_bytes(pickle.dumps(("stop", (), None, [])))
        until = time.monotonic() + STOP_SECONDS
        leaving = threading.Thread(target=self._leave, daemon=True)
        leaving.start()
        for follower in self._followers:
            with contextlib.suppress(subprocess.TimeoutExpired):
                follower.process.wait(max(0.0, until - time.monotonic()))
        leaving.join(max(0.1, until - time.monotonic()))
        self._end_all()

    def _leave(self) -> None:
        with contextlib.suppress(Exception):
            self.group.leave()

    def _end_all(self) -> None:
        """End what is left of the followers."""
        self._closing = True
        for follower in self._followers:
            follower.process.kill()
            follower.process.wait()
            for pipe in (follower.steps, follower.packs):
                pipe.close()
        if dist.is_initialized() and not hasattr(self, "group"):
            dist.destroy_process_group()


def _start(rank: int, module: str) -> _Follower:
    """Start the process of a follower.

    It is a fresh interpreter: a forked one could not use its GPU. It is in a session of its own, so
    that Ctrl-C reaches the leader alone, which finishes its requests first.
    """
    pairs = [socket.socketpair() for _ in range(2)]
    theirs = [pair[1] for pair in pairs]
    process = subprocess.Popen(
        [sys.executable, "-m", module,
         *(str(one.fileno()) for one in theirs)],
        pass_fds=[one.fileno() for one in theirs],
        stdin=subprocess.DEVNULL,
        stdout=2,  # the leader's standard output is its own
        start_new_session=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )  # fmt: skip
    for one in theirs:
        one.close()
    steps, packs = (Connection(pair[0].detach()) for pair in pairs)
    return _Follower(rank, process, steps, packs)


def _ended(follower: _Follower, size: int) -> str:
    """Return a sentence that says how a follower ended."""
    try:
        code = follower.process.wait(LOST_SECONDS)
    except subprocess.TimeoutExpired:
        how = "closed its connection"
    else:
        how = f"ended with exit code {code}"
        if code < 0:
            name: Any = -code
            with contextlib.suppress(ValueError):
                name = signal.Signals(-code).name
            how = f"was killed by {name}"
    return f"process {follower.rank} of the tensor-parallel group of {size} {how}"
