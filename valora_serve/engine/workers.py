"""The other processes of a tensor-parallel group: what rank 0 has them do, and how they do it.

Every rank has an engine. What rank 0 calls of its runner, weights and memory is sent to the
workers, which call it in the same order, so that their collectives meet. One that ends, ends all.
`python -m valora_serve.engine.workers` is a worker.
"""

from __future__ import annotations

import contextlib
import copyreg
import io
import itertools
import logging
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache, partial
from multiprocessing.connection import Connection, wait
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import torch

from valora_data.contract.contexts import FILE_BYTES
from valora_data.contract.files import read_safetensors
from valora_data.errors import ValoraError
from valora_data.hashing import file_hash
from valora_serve.catalogue.adapters import read_adapter
from valora_serve.engine.settings import EngineSettings
from valora_serve.engine.sizing import find_device
from valora_serve.errors import AdapterError, StoppedError
from valora_serve.memory.residency import Copy, Entry
from valora_serve.model.prompt import VisualFeatures
from valora_serve.model.sampler import TokenChoice
from valora_serve.model.split import check_split
from valora_serve.parallel.group import Group, make_store
from valora_serve.pauses import short_pauses
from valora_serve.types import SamplingParams

log = logging.getLogger(__name__)

STOP_SECONDS = 10.0
LOST_SECONDS = 5.0  # at most between an error of a collective and the news that a process has ended
POLL_SECONDS = 0.005  # between two looks for answers
FAILED, STARTED, READY = -1, 0, 1  # what workers report, besides the numbers of calls

EVERYWHERE = (
    "runner.step", "runner.prepare", "runner.give_up", "runner.take_lora", "runner.forget_graphs",
    "memory.copy_page", "lmm.linears.merge", "lmm.linears.unmerge", "lmm.linears.is_finite",
)  # fmt: skip
"""What all ranks call of their engines when rank 0 does."""


@cache
def _choice(greedy: bool) -> TokenChoice:
    return TokenChoice(SamplingParams(temperature=1.0 - greedy))


def _blank(layers: int, *shape: int, **like: Any) -> VisualFeatures:
    part = torch.zeros(shape, **like)
    return VisualFeatures(part, (part,) * layers)


def _form(one: VisualFeatures) -> tuple[Any, ...]:
    part = one.embeddings
    return partial(_blank, dtype=part.dtype, device=part.device.type), (len(one.deep), *part.shape)


class _Pickler(pickle.Pickler):
    """Leaves out of a step what rank 0 alone needs, or sends through the group."""

    dispatch_table: Any = copyreg.dispatch_table | {
        TokenChoice: lambda one: (_choice, (one.is_argmax,)), VisualFeatures: _form,
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
        self._pipes: list[Connection] = []
        self._closing, self._ended = False, threading.Event()
        self._sending = threading.Lock()
        self._next = itertools.count(READY + 1)
        self._dropped: deque[int] = deque()
        self._packed: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._tables: tuple[Any, ...] = ()
        size, device = settings.tensor_parallel, find_device(settings)
        check_split(settings.base, size)
        store = make_store(size)
        self._store = make_store(size, store.port)  # apart from the group's, which may wait
        orders = make, replace(settings, decision_trace=None), store.port
        rest = torch.get_num_threads(), logging.getLogger().getEffectiveLevel()
        try:
            for rank in range(1, size):
                self._start((rank, *orders, *rest))
            threading.Thread(target=self._watch, name="workers", daemon=True).start()
            self._await(STARTED)
            with self.explained():
                self.group = Group.join(0, size, device, store)
        except BaseException:
            self.close()
            raise

    def _start(self, orders: tuple[object, ...]) -> None:
        """Start a fresh interpreter (a forked one has no GPU) in a session without Ctrl-C."""
        ours, theirs = multiprocessing.Pipe()
        with theirs:
            self.processes.append(subprocess.Popen(
                [sys.executable, "-m", self.module, str(theirs.fileno())],
                pass_fds=[theirs.fileno()], start_new_session=True, stdin=subprocess.DEVNULL,
                stdout=2,  # rank 0's standard output is its own
                env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            ))  # fmt: skip
        self._pipes.append(ours)
        ours.send(orders)

    def lead(self, engine: Any) -> None:
        """Wait for the workers' engines; from now on they do what this one does."""
        self._await(READY)
        self._tables = engine.adapters.ranks, engine.adapters.scalings
        ways: dict[str, Callable[..., Any]] = dict.fromkeys(EVERYWHERE, self._both)
        ways |= dict.fromkeys(("adapters.copy", "prefixes.copy"), self._copy)
        ways |= dict.fromkeys(("memory.pack", "registry.pack_prefix"), self._pack)
        ways["lmm.linears.activate"] = self._after
        for path, way in ways.items():
            owner, _, name = path.rpartition(".")
            target = attrgetter(owner)(engine)
            setattr(target, name, partial(way, path, getattr(target, name)))

    def call(self, name: str, *arguments: object) -> int:
        """Have the workers call something of their engines; return the number of the call."""
        with self._sending, self.explained():
            number = next(self._next)
            dropped = [self._dropped.popleft() for _ in range(len(self._dropped))]
            message = io.BytesIO()
            _Pickler(message, 5).dump((number, name, arguments, self._tables, dropped))
            for pipe in self._pipes:
                pipe.send_bytes(message.getbuffer())
        return number

    def _both(self, path: str, method: Callable[..., Any], *arguments: Any) -> Any:
        self.call(path, *arguments)
        return method(*arguments)

    def _after(self, path: str, method: Callable[..., Any], *arguments: Any) -> None:
        method(*arguments)  # first, as there may be no memory for it
        self.call(path, *arguments)

    def _copy(self, path: str, method: Callable[..., Copy | None], entry: Entry[Any]) -> Any:
        number = self.call("copy", path, self._packed[entry.packed], entry.pages, entry.slot)
        if (copied := method(entry)) is None:  # as on all CPUs before their next step
            return None
        return SimpleNamespace(query=lambda: copied.query() and bool(self.call("await", number)))

    def _pack(self, _: str, method: Callable[..., Any], what: Any, *more: Any) -> Any:
        """Pack an adapter, or a prefix by its name, file and content hash; each rank its part."""
        source, content = more[:2] if more else (what.folder, what.content)
        number, packed = self.call("pack", source, content), None
        try:
            packed = method(what, *more)
        finally:
            wrong = self._await(number)
            if packed is None or wrong:
                self._dropped.append(number)
        if wrong:
            raise AdapterError(wrong)
        self._packed[packed] = number
        weakref.finalize(packed, self._dropped.append, number).atexit = False
        return packed

    def _await(self, number: int) -> str:
        """Wait until all workers have answered a call; return what went wrong in the first."""
        keys = [f"{number} {rank}" for rank in range(1, len(self.processes) + 1)]
        while not self._store.check(keys):
            self.check()
            time.sleep(POLL_SECONDS)
        return next(filter(None, (self._store.get(key).decode() for key in keys)), "")

    def check(self) -> None:
        """Raise a `StoppedError` if a process has ended."""
        if self.lost is not None:
            raise StoppedError(self.lost)

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
        self.check()

    def _watch(self) -> None:
        """Wait until a process ends, as workers send nothing, and end the group."""
        rank = self._pipes.index(wait(self._pipes)[0]) + 1  # type: ignore[arg-type]
        process, key = self.processes[rank - 1], f"{FAILED} {rank}"
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(LOST_SECONDS)
        if self._closing:
            return
        how, code = f"ended with exit code {process.returncode}", process.returncode
        if self._store.check([key]):
            how = f"failed: {self._store.get(key).decode()}"
        elif code is not None and code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
        size = len(self.processes) + 1
        reason = f"process {rank} of the tensor-parallel group of {size} {how}: restart the server"
        log.error("%s", reason)
        for one in self.processes:
            one.kill()
        self.lost = reason
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
    """Calls of an engine what rank 0 calls, and answers in the group's store."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._rank, self._make, self._settings, self._port, *rest = pipe.recv()
        form = f"[GPU {self._rank}] %(levelname)s %(message)s"
        torch.set_num_threads(rest[0])
        logging.basicConfig(level=rest[1], format=form)
        self._store = make_store(1, self._port)  # apart from the group's, which may wait
        self._packed: dict[int, Any] = {}  # adapters and prefixes, by the number of the call
        self._copied: dict[int, torch.cuda.Event] = {}
        self._beside = ThreadPoolExecutor(4, "beside")  # packs while steps run

    def run(self) -> None:
        """Make an engine, and make its calls until rank 0 or this process ends."""
        rank, settings, size = self._rank, self._settings, self._settings.tensor_parallel
        try:
            self._answer(STARTED)
            device = find_device(settings, rank)
            group = Group.join(rank, size, device, make_store(size, self._port))
            self._engine = self._make(settings, group=group)
            self._answer(READY)
            with short_pauses():
                while True:
                    self._do(*self._pipe.recv())
        except (EOFError, ConnectionError):
            raise  # rank 0 is gone
        except Exception as error:
            if not isinstance(error, ValoraError):
                log.exception("this process of the tensor-parallel group failed")
            self._answer(FAILED, str(error) or type(error).__name__)

    def _answer(self, number: int, wrong: str = "") -> None:
        self._store.set(f"{number} {self._rank}", wrong)

    def _do(
        self, number: int, name: str, arguments: Sequence[Any], tables: Any, dropped: Sequence[int]
    ) -> None:
        """Make a call of rank 0; see `Workers.call`."""
        engine = self._engine
        engine.adapters.ranks[:], engine.adapters.scalings[:] = tables
        for one in dropped:
            self._packed.pop(one, None)  # what could not be packed is not there
        if name == "pack":
            self._beside.submit(self._pack, number, *arguments)
        elif name == "copy":
            path, packed, pages, slot = arguments
            entry = SimpleNamespace(packed=self._packed[packed], pages=pages, slot=slot)
            if (copied := attrgetter(path)(engine)(entry)) is not None:
                self._copied[number] = copied
        elif name == "await":  # steps from now on read what was copied
            self._copied.pop(*arguments).synchronize()
        else:
            attrgetter(name)(engine)(*arguments)

    def _pack(self, number: int, source: Path, content: str) -> None:
        """Read an adapter's folder, or a prefix's file that rank 0 has checked; pack a part."""
        lmm, memory, wrong = self._engine.lmm, self._engine.memory, ""
        try:
            if lmm.device.type == "cuda":
                torch.cuda.set_device(lmm.device)
            adapter = read_adapter(source, lmm.targets) if source.is_dir() else None
            if content != (file_hash(source) if adapter is None else adapter.content):
                wrong = f"{source} was changed while it was loaded: load it again"
            elif adapter is not None:
                self._packed[number] = memory.pack(adapter)
            else:
                _, tensors = read_safetensors(source, FILE_BYTES)
                parts = (tensors[name][:, lmm.own_kv_heads] for name in ("keys", "values"))
                self._packed[number] = memory.pack_prefix(source.stem, content, *parts)
        except ValoraError as error:
            wrong = str(error)
        except Exception as error:
            log.exception("packing %s", source)
            wrong = f"{source} cannot be packed: {error}"
        self._answer(number, wrong)


def _end_with(parent: int) -> None:
    """End with rank 0, also while a collective waits for it."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def main(arguments: Sequence[str]) -> None:
    """Entry point of a worker; the argument is the file descriptor of a pipe to rank 0."""
    for one in (signal.SIGINT, signal.SIGTERM):  # rank 0 ends this process
        signal.signal(one, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    try:
        with contextlib.suppress(EOFError, ConnectionError):
            Worker(Connection(int(arguments[0]))).run()
    except Exception:
        log.exception("this process of a tensor-parallel group failed")
    finally:
        sys.stderr.flush()
        os._exit(1)  # threads and collectives under way are not waited for


if __name__ == "__main__":
    main(sys.argv[1:])
