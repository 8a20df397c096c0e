"""A worker: the process of a rank above 0, whose engine does what rank 0 calls, until that ends."""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from valora_data.contract.contexts import FILE_BYTES
from valora_data.contract.files import read_safetensors
from valora_data.errors import ValoraError
from valora_data.hashing import file_hash
from valora_serve.catalogue.adapters import read_adapter
from valora_serve.engine.engine import Engine
from valora_serve.engine.workers import FAILED, READY, STARTED, device_of
from valora_serve.memory.unified import PackedAdapter, PackedPrefix
from valora_serve.parallel.group import Group, make_store
from valora_serve.pauses import short_pauses

log = logging.getLogger(__name__)


class Worker:
    """Calls of an engine what rank 0 calls; `answer` sends a call's number and its result back."""

    def __init__(self, engine: Engine, answer: Callable[[int, object], None]) -> None:
        self._engine, self._answer = engine, answer
        self._packed: dict[int, PackedAdapter | PackedPrefix] = {}  # by the number of the call
        # Beside the steps, with this process's GPU.
        device, use = engine.device, torch.cuda.set_device
        self._beside = ThreadPoolExecutor(
            4, "beside", initializer=lambda: use(device) if device.type == "cuda" else None
        )

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
                self._beside.submit(self._await, copied, number)
        else:
            attrgetter(name)(engine)(*arguments)

    def _await(self, copied: torch.cuda.Event, number: int) -> None:
        copied.synchronize()
        self._answer(number, None)

    def _pack(self, number: int, source: Path, content: str) -> None:
        """Read an adapter's folder, or a prefix's file that rank 0 has checked; pack a part."""
        lmm, memory, wrong = self._engine.lmm, self._engine.memory, None
        try:
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
    """Entry point; the argument is the file descriptor of a pipe to rank 0."""
    for one in (signal.SIGINT, signal.SIGTERM):  # rank 0 says when to stop
        signal.signal(one, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    pipe, sending = Connection(int(arguments[0])), threading.Lock()

    def answer(number: int, value: object) -> None:
        with sending:
            pipe.send((number, value))

    try:
        settings, rank, port, threads, level = pipe.recv()
        logging.basicConfig(level=level, format=f"[GPU {rank}] %(levelname)s %(message)s")
        torch.set_num_threads(threads)
        answer(STARTED, None)
        size = settings.tensor_parallel
        group = Group.join(rank, size, device_of(settings, rank), make_store(size, port))
        worker = Worker(Engine(settings, group=group), answer)
        answer(READY, None)
        with short_pauses():
            while (call := pickle.loads(pipe.recv_bytes()))[1] != "stop":
                worker.do(*call)
        group.leave()
    except (EOFError, ConnectionError):
        return 1  # rank 0 is gone
    except Exception as error:
        if not isinstance(error, ValoraError):
            log.exception("this process of the tensor-parallel group failed")
        with contextlib.suppress(OSError):
            answer(FAILED, str(error) or type(error).__name__)
        return 1
    return 0


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(code)  # threads and collectives under way are not waited for
