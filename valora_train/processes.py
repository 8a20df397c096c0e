"""Worker processes: they end with their parent, and the parent alone answers to signals."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import Any

from tqdm import tqdm

from valora_data.cpu import usable_cores
from valora_train.errors import StageError

MAX_PROCESSES = 4  # that prepare domains by default: each holds its data


def preparing_processes(asked: int, device: str, waiting: int) -> int:
    """Processes that prepare domains side by side (the setting `processes`; 0 for the default)."""
    if not asked:  # beside a GPU, a teacher may take much of its memory
        asked = 1 if device != "cpu" else min(usable_cores(), MAX_PROCESSES)
    return max(1, min(asked, waiting))


@contextmanager
def worker_processes(
    count: int, setting: str, begin: Callable[..., None], *arguments: Any
) -> Iterator[ProcessPoolExecutor]:
    """Start processes that an error or signal in the block ends; `setting` is named in messages."""
    executor = ProcessPoolExecutor(
        count,
        multiprocessing.get_context("spawn"),  # CUDA cannot be used in processes that are forked
        _begin,
        (os.getpid(), begin, arguments),
    )
    try:
        yield executor
    except BaseException as error:
        for child in multiprocessing.active_children():
            child.terminate()
        executor.shutdown(cancel_futures=True)
        if isinstance(error, BrokenProcessPool):
            raise StageError(
                f"one of {count} worker processes was killed, as happens when the memory is used "
                f"up: lower {setting} and run the same command again"
            ) from error
        raise
    executor.shutdown()


def _begin(parent: int, begin: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to all; the parent decides
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    warnings.simplefilter("ignore")  # each process would repeat them
    for name in ("LOCAL_RANK", "WORLD_SIZE"):  # of the parent, which may train beside others
        os.environ.pop(name, None)
    # Its own lock is a semaphore of the system, which a process that is ended leaves behind.
    tqdm.set_lock(threading.RLock())
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    begin(*arguments)


def _end_with(parent: int) -> None:
    """End this process when its parent is gone, also after `kill -9`."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)
