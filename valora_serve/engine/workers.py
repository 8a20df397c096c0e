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
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection, wait
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor

from valora_data.contract.contexts import FILE_BYTES
from valora_data.contract.files import read_safetensors
from valora_data.errors import ValoraError
from valora_data.hashing import file_hash
from valora_serve.catalogue.adapters import read_adapter
from valora_serve.engine import sizing
from valora_serve.engine.settings import EngineSettings
from valora_serve.errors import AdapterError, SettingsError, StoppedError
from valora_serve.memory.residency import Copy, Entry
from valora_serve.model.lmm import VisualRows
from valora_serve.model.prompt import VisualFeatures
from valora_serve.model.runner import ModelRunner
from valora_serve.model.sampler import TokenChoice, sample
from valora_serve.model.split_model import check_split
from valora_serve.parallel.group import Group, make_store
from valora_serve.pauses import short_pauses
from valora_serve.types import SamplingParams

log = logging.getLogger(__name__)

STOP_SECONDS = 10.0
LOST_SECONDS = 5.0  # at most between an error of a collective and the news that a process has ended
FAILED, STARTED, READY = -1, 0, 1  # what workers report, besides the numbers of calls

EVERYWHERE = (
    "runner.step", "runner.prepare", "runner.give_up",
    "runner.forget_graphs", "memory.copy_page",
    "lmm.linears.merge", "lmm.linears.unmerge", "lmm.linears.is_finite",
)  # fmt: skip
"""What all ranks call of their engines when rank 0 does."""

CHOICES = [TokenChoice(SamplingParams(temperature=1.0 - greedy)) for greedy in (False, True)]


def _choice(greedy: bool) -> TokenChoice:
    return CHOICES[greedy]


def _blank(shape: Sequence[int], dtype: torch.dtype, device: str, layers: int) -> VisualFeatures:
    part = torch.zeros(shape, dtype=dtype, device=device)
    return VisualFeatures(part, (part,) * layers)


def _form_of_features(one: VisualFeatures) -> tuple[Any, ...]:
    part = one.embeddings
    return _blank, (part.shape, part.dtype, part.device.type, len(one.deep))


# How a step is pickled: what rank 0 alone needs, or sends through the group, is left out.
FORMS: dict[type, Callable[[Any], tuple[Any, ...]]] = {
    TokenChoice: lambda one: (_choice, (one.is_argmax,)),
    VisualFeatures: _form_of_features,
}


class SplitRunner(ModelRunner):
    """The runner of a rank; all make the same steps. Images and chance are those of rank 0."""

    def __init__(self, group: Group, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._group = group

    def compile_together(self, *_: Any, **__: Any) -> None:
        """Nothing: split linears compute with all ranks only, in the same order."""

    def _sample(self, logits: Tensor, choices: Sequence[TokenChoice]) -> Tensor:
        if all(choice.is_argmax for choice in choices):  # the logits are everywhere the same
            return sample(logits, choices)
        tokens = torch.zeros(len(logits), dtype=torch.int64, device=self._device)
        if self._group.rank == 0:
            tokens = sample(logits, choices)
        self._group.broadcast(tokens)
        return tokens

    def _visual_rows(self, *arguments: Any) -> VisualRows | None:
        found = super()._visual_rows(*arguments)
        if found is not None:
            for part in (found.embeddings, *found.deep):
                self._group.broadcast(part)
        return found


def device_of(settings: EngineSettings, rank: int) -> torch.device:
    """Return the device of a rank; a `SettingsError` says that there are fewer GPUs."""
    name = "cuda" if settings.device == "auto" else settings.device
    first = torch.device(name)
    if first.type != "cuda":
        return sizing.find_device(name)
    start, size = first.index or 0, settings.tensor_parallel
    left = max(torch.cuda.device_count() - start, 0)
    if left < size:
        raise SettingsError(
            f"tensor_parallel: {size} GPUs are asked for, and this machine has {left or 'none'}"
            f"{f' from {first} on' if start else ''}: ask for fewer"
        )
    return torch.device("cuda", start + rank)


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
        self._closing = False
        self._answers: defaultdict[int, list[Any]] = defaultdict(list)  # by number
        self._news = threading.Condition()  # answers, or that a process has ended
        self._sending = threading.Lock()
        self._next = itertools.count(READY + 1)
        self._dropped: deque[int] = deque()
        self._packed: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._tables: tuple[Any, ...] = ()
        size, device = settings.tensor_parallel, device_of(settings, 0)
        check_split(settings.base, size)
        store = make_store(size)
        settings = replace(settings, decision_trace=None)
        level = logging.getLogger().getEffectiveLevel()
        try:
            for rank in range(1, size):
                self._start((make, settings, rank, store.port, torch.get_num_threads(), level))
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
        ways["lmm.linears.activate"] = self._activate
        for path, way in ways.items():
            owner, _, name = path.rpartition(".")
            target = attrgetter(owner)(engine)
            setattr(target, name, partial(way, path, getattr(target, name)))

    def call(self, name: str, *arguments: object) -> int:
        """Have the workers call something of their engines; return the number of the call."""
        self.check()
        with self._sending, self.explained():
            number = next(self._next)
            dropped = [self._dropped.popleft() for _ in range(len(self._dropped))]
            message = io.BytesIO()
            pickler = pickle.Pickler(message, pickle.HIGHEST_PROTOCOL)
            pickler.dispatch_table = {**copyreg.dispatch_table, **FORMS}
            pickler.dump((number, name, arguments, self._tables, dropped))
            for pipe in self._pipes:
                pipe.send_bytes(message.getbuffer())
        return number

    def _both(self, path: str, method: Callable[..., Any], *arguments: Any) -> Any:
        self.call(path, *arguments)
        return method(*arguments)

    def _activate(self, _: str, method: Any, names: Any, lora: Any, **how: Any) -> None:
        method(names, lora, **how)  # first, as there may be no memory for it
        self.call("activate", sorted(names), how)

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
            wrong = [answer for answer in self._await(number) if answer is not None]
            if packed is None or wrong:
                self._dropped.append(number)
        if wrong:
            raise AdapterError(wrong[0])
        self._packed[packed] = number
        weakref.finalize(packed, self._dropped.append, number).atexit = False
        return packed

    def _await(self, number: int) -> list[Any]:
        """Wait for all workers' answers to a call."""
        answers, size = self._answers[number], len(self.processes)
        with self._news:
            self._news.wait_for(lambda: self.lost or len(answers) == size)
        self.check()
        return self._answers.pop(number)

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
            with self._news:
                self._news.wait_for(lambda: self.lost, LOST_SECONDS)
            if self.lost is None:
                raise
            raise StoppedError(self.lost) from error
        self.check()

    def _watch(self) -> None:
        while True:
            heard: list[Any] = wait(self._pipes)
            for pipe in heard:
                rank = self._pipes.index(pipe) + 1
                try:
                    number, value = pipe.recv()
                except (EOFError, OSError):
                    return self._lose(rank, _end_of(self.processes[rank - 1]))
                if number == FAILED:
                    return self._lose(rank, f"failed: {value}")
                with self._news:
                    self._answers[number].append(value)
                    self._news.notify_all()

    def _lose(self, rank: int, how: str) -> None:
        if self._closing:
            return
        size = len(self.processes) + 1
        reason = f"process {rank} of the tensor-parallel group of {size} {how}: restart the server"
        log.error("%s", reason)
        for process in self.processes:
            process.kill()
        with self._news:
            self.lost = reason
            self._news.notify_all()
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


def _end_of(process: subprocess.Popen[bytes]) -> str:
    try:
        code = process.wait(LOST_SECONDS)
    except subprocess.TimeoutExpired:
        return "closed its connection"
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"


class Worker:
    """Calls of an engine what rank 0 calls; `answer` sends a call's number and its result back."""

    def __init__(self, engine: Any, answer: Callable[[int, object], None]) -> None:
        self._engine, self._answer = engine, answer
        self._packed: dict[int, Any] = {}  # adapters and prefixes, by the number of the call
        self._copied: dict[int, torch.cuda.Event] = {}
        self._beside = ThreadPoolExecutor(4, "beside")  # packs while steps run

    def do(
        self, number: int, name: str, arguments: Sequence[Any], tables: Any, dropped: Sequence[int]
    ) -> None:
        """Make a call of rank 0; see `Workers.call`."""
        engine = self._engine
        engine.adapters.ranks[:], engine.adapters.scalings[:] = tables
        for one in dropped:
            self._packed.pop(one, None)  # what could not be packed is not there
        if name == "pack":
            self._beside.submit(self._pack, number, *arguments)
        elif name == "activate":
            names, how = arguments
            engine.lmm.linears.activate(names, engine.memory.lora, **how)
            engine.runner.has_lora = True
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
        lmm, memory, wrong = self._engine.lmm, self._engine.memory, None
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


def main(arguments: Sequence[str]) -> int:
    """Entry point of a worker; the argument is the file descriptor of a pipe to rank 0."""
    for one in (signal.SIGINT, signal.SIGTERM):  # rank 0 ends this process
        signal.signal(one, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    pipe, sending = Connection(int(arguments[0])), threading.Lock()

    def answer(number: int, value: object) -> None:
        with sending:
            pipe.send((number, value))

    try:
        make, settings, rank, port, threads, level = pipe.recv()
        logging.basicConfig(level=level, format=f"[GPU {rank}] %(levelname)s %(message)s")
        torch.set_num_threads(threads)
        answer(STARTED, None)
        size = settings.tensor_parallel
        group = Group.join(rank, size, device_of(settings, rank), make_store(size, port))
        worker = Worker(make(settings, group=group), answer)
        answer(READY, None)
        with short_pauses():
            while True:
                worker.do(*pickle.loads(pipe.recv_bytes()))
    except (EOFError, ConnectionError):
        pass  # rank 0 is gone
    except Exception as error:
        if not isinstance(error, ValoraError):
            log.exception("this process of the tensor-parallel group failed")
        with contextlib.suppress(OSError):
            answer(FAILED, str(error) or type(error).__name__)
    return 1


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(code)  # threads and collectives under way are not waited for
