"""The other processes of a tensor-parallel group: what rank 0 has them do, and how they do it.

Every rank has an engine. What rank 0 calls of its runner, weights and memory is sent to the
workers, which call it in the same order, so that their collectives meet. One that ends, ends all.
`python -m valora_serve.engine.workers` is a worker.
"""

import contextlib
import copyreg
import io
import itertools
import logging
import os
import pickle
import subprocess
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from multiprocessing.connection import Connection
from operator import attrgetter
from types import SimpleNamespace
from typing import Any, ClassVar

import torch

from valora_data.errors import ValoraError
from valora_serve.engine.launch import how_it_ended, launch, pipes
from valora_serve.engine.settings import EngineSettings
from valora_serve.engine.sizing import find_device
from valora_serve.errors import AdapterError, StoppedError
from valora_serve.memory.residency import Entry
from valora_serve.model.prompt import VisualFeatures
from valora_serve.model.sampler import TokenChoice
from valora_serve.model.split import check_split
from valora_serve.parallel.group import Group, make_store
from valora_serve.pauses import short_pauses
from valora_serve.types import SamplingParams

log = logging.getLogger(__name__)

STOP_SECONDS = 10.0
LOST_SECONDS = 5.0  # at most between an error of a collective and the news that a process has ended

EVERYWHERE = (
    "runner.step", "runner.prepare", "runner.give_up", "runner.take_lora", "runner.forget_graphs",
    "memory.copy_page", "lmm.linears.merge", "lmm.linears.unmerge", "lmm.linears.is_finite",
)  # fmt: skip
"""What all ranks call of their engines when rank 0 does."""


@cache
def _choice(greedy: bool) -> TokenChoice:
    return TokenChoice(SamplingParams(temperature=1.0 - greedy))


def _blank(layers: int, shape: Sequence[int], dtype: torch.dtype, device: str) -> VisualFeatures:
    part = torch.zeros(*shape, dtype=dtype, device=device)
    return VisualFeatures(part, (part,) * layers)


class _Pickler(pickle.Pickler):
    """Leaves out of a step what rank 0 alone needs, or sends through the group."""

    dispatch_table: Any = copyreg.dispatch_table | {
        TokenChoice: lambda one: (_choice, (one.is_argmax,)),
        VisualFeatures: lambda one: (_blank, (
            len(one.deep), (part := one.embeddings).shape, part.dtype, part.device.type,
        )),
    }  # fmt: skip


class Workers:
    """The processes of all ranks but 0, whose engines `make(settings, group=group)` makes.

    A `SettingsError` says that they cannot share the model; a `StoppedError`, here and later, that
    one has ended: then `lost` says why, and `on_lost` is called with it in another thread.
    """

    module: ClassVar[str] = "valora_serve.engine.workers"

    def __init__(self, make: Callable[..., Any], settings: EngineSettings) -> None:
        self.lost: str | None = None
        self.on_lost: Callable[[str], None] = lambda _: None
        self.group: Group | None = None
        self.processes: list[subprocess.Popen[bytes]] = []
        self._calls: list[Connection] = []  # to each worker's steps
        self._beside: list[Connection] = []  # and to its thread that packs while steps run
        self._closing, self._ended = False, threading.Event()
        self._sending, self._packing = threading.Lock(), threading.Lock()
        self._numbers = itertools.count()
        self._dropped: deque[int] = deque()
        self._packed: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._tables: tuple[Any, ...] = ()
        size, device = settings.tensor_parallel, find_device(settings)
        check_split(settings.base, size)
        store = make_store(size)
        threads, level = torch.get_num_threads(), logging.getLogger().getEffectiveLevel()
        orders = make, replace(settings, decision_trace=None), store.port, threads, level
        try:
            for rank in range(1, size):
                process, [calls, beside] = launch(self.module, 2)
                self.processes.append(process)
                self._calls.append(calls)
                self._beside.append(beside)
                calls.send((rank, *orders))
                threading.Thread(target=self._watch, args=(rank,), daemon=True).start()
            with self.explained():
                self._answers()  # so that no process waits for one that cannot start
                self.group = Group.join(0, size, device, store)
        except BaseException:
            self.close()
            raise

    def lead(self, engine: Any) -> None:
        """Wait for the workers' engines; from now on they do what this one does."""
        self._answers()
        self._tables = engine.adapters.ranks, engine.adapters.scalings
        ways: dict[str, Callable[..., Any]] = dict.fromkeys(EVERYWHERE, self._both)
        ways |= dict.fromkeys(("adapters.copy", "prefixes.copy"), self._copy)
        ways |= dict.fromkeys(("adapters.arrived", "prefixes.arrived"), self._arrived)
        ways |= dict.fromkeys(("memory.pack", "registry.pack_prefix"), self._pack)
        ways["lmm.linears.activate"] = self._after
        for path, way in ways.items():
            owner, _, name = path.rpartition(".")
            target = attrgetter(owner)(engine)
            setattr(target, name, partial(way, path, getattr(target, name)))

    def call(self, name: str, *arguments: object) -> None:
        """Have the workers call something of their engines."""
        with self._sending, self.explained():
            dropped = [self._dropped.popleft() for _ in range(len(self._dropped))]
            message = io.BytesIO()
            _Pickler(message, 5).dump((name, arguments, self._tables, dropped))
            for pipe in self._calls:
                pipe.send_bytes(message.getbuffer())

    def _both(self, path: str, method: Callable[..., Any], *arguments: Any) -> Any:
        self.call(path, *arguments)
        return method(*arguments)

    def _after(self, path: str, method: Callable[..., Any], *arguments: Any) -> None:
        method(*arguments)  # first, as there may be no memory for it
        self.call(path, *arguments)

    def _copy(self, path: str, method: Callable[..., Any], entry: Entry[Any]) -> Any:
        self.call("copy", path, self._packed[entry.packed], entry.pages, entry.slot)
        return method(entry)

    def _arrived(self, _: str, method: Callable[..., None], entry: Entry[Any]) -> None:
        self.call("arrived", self._packed[entry.packed])
        method(entry)

    def _pack(self, path: str, method: Callable[..., Any], *arguments: Any) -> Any:
        """Have every rank pack its part of an adapter or a prefix."""
        with self._packing, self.explained():
            number, packed, wrong = next(self._numbers), None, ""
            # Not `send`, with which torch would pass tensors through /dev/shm, which may be small.
            message = pickle.dumps((number, path, arguments), 5)
            for pipe in self._beside:
                pipe.send_bytes(message)
            try:
                packed = method(*arguments)
            finally:
                wrong = self._answers()
                if packed is None or wrong:
                    self._dropped.append(number)
        if wrong:
            raise AdapterError(wrong)
        self._packed[packed] = number
        weakref.finalize(packed, self._dropped.append, number).atexit = False
        return packed

    def _answers(self) -> str:
        """Wait until all workers have answered; return what went wrong in the first."""
        return next(filter(None, [pipe.recv() for pipe in self._beside]), "")

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """Context whose errors and results give way to the news that a process has ended."""
        try:
            yield
        except ValoraError:
            raise  # it says itself what is wrong
        except Exception as error:
            if not self._ended.wait(LOST_SECONDS):
                raise
            raise StoppedError(self.lost or "") from error
        if self.lost is not None:
            raise StoppedError(self.lost)

    def _watch(self, rank: int) -> None:
        code = self.processes[rank - 1].wait()
        if self._closing or self.lost is not None:
            return
        how = how_it_ended(code)
        with contextlib.suppress(EOFError, OSError):  # it may have said why
            how = f"failed: {self._calls[rank - 1].recv()}"
        size = len(self.processes) + 1
        reason = f"process {rank} of the tensor-parallel group of {size} {how}: restart the server"
        self.lost = reason
        log.error("%s", reason)
        for one in self.processes:
            one.kill()
        self._ended.set()
        if self.group is not None:
            threading.Thread(target=self.group.abort, daemon=True).start()  # it may take long
        self.on_lost(reason)

    def close(self) -> None:
        """End the workers, which have nothing to put in order, and leave the group."""
        if self._closing:
            return
        self._closing = True
        for process in self.processes:
            process.kill()
            process.wait()
        if self.group is not None:
            leaving = threading.Thread(target=self.group.leave, daemon=True)
            leaving.start()
            leaving.join(STOP_SECONDS)


class Worker:
    """Calls of an engine what rank 0 calls, until one of them ends."""

    def __init__(self, calls: Connection, beside: Connection) -> None:
        self._calls, self._beside = calls, beside
        self._packed: dict[int, Any] = {}  # adapters and prefixes, by their numbers
        self._copied: dict[int, torch.cuda.Event | None] = {}

    def run(self) -> None:
        """Make an engine, and its calls."""
        rank, make, settings, port, threads, level = self._calls.recv()
        torch.set_num_threads(threads)
        logging.basicConfig(level=level, format=f"[GPU {rank}] %(levelname)s %(message)s")
        size, device = settings.tensor_parallel, find_device(settings, rank)
        threading.Thread(target=self._pack, args=(device,), daemon=True).start()
        self._beside.send("")
        group = Group.join(rank, size, device, make_store(size, port))
        self._engine = make(settings, group=group)
        self._beside.send("")
        with short_pauses():
            while True:
                self._do(*self._calls.recv())

    def _do(self, name: str, arguments: Sequence[Any], tables: Any, dropped: Sequence[int]) -> None:
        engine = self._engine
        engine.adapters.ranks[:], engine.adapters.scalings[:] = tables
        for number in dropped:
            self._packed.pop(number, None)  # what could not be packed is not there
        if name == "copy":
            path, number, pages, slot = arguments
            entry = SimpleNamespace(packed=self._packed[number], pages=pages, slot=slot)
            self._copied[number] = attrgetter(path)(engine)(entry)
        elif name == "arrived":  # steps from now on read what was copied
            if (copied := self._copied.pop(*arguments)) is not None:
                copied.synchronize()
        else:
            attrgetter(name)(engine)(*arguments)

    def _pack(self, device: torch.device) -> None:
        """Pack this rank's part of what rank 0 packs; end with it, also in a collective."""
        if device.type == "cuda":
            torch.cuda.set_device(device)
        try:
            while True:
                (number, path, arguments), wrong = self._beside.recv(), ""
                try:
                    self._packed[number] = attrgetter(path)(self._engine)(*arguments)
                except Exception as error:  # noqa: BLE001 - rank 0 is told
                    wrong = _said(error)
                self._beside.send(wrong)
        finally:
            os._exit(1)


def _said(error: Exception) -> str:
    """Say what rank 0 is told of an error; what nobody expected is logged."""
    if not isinstance(error, ValoraError):
        log.error("this process of the tensor-parallel group failed", exc_info=error)
    return str(error) or type(error).__name__


def main(arguments: Sequence[str]) -> None:
    """Entry point of a worker; the arguments are the file descriptors of pipes to rank 0."""
    calls, beside = pipes(arguments)
    try:
        Worker(calls, beside).run()
    except (EOFError, ConnectionError):
        pass  # rank 0 has ended
    except Exception as error:  # noqa: BLE001 - rank 0 is told
        calls.send(_said(error))
    finally:
        sys.stderr.flush()
        os._exit(1)  # threads and collectives under way are not waited for


if __name__ == "__main__":
    main(sys.argv[1:])
