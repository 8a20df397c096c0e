"""What the CPU has instructions for, how many cores this process may use, and work on all."""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
Found = TypeVar("Found")
AHEAD = 3  # items per core whose work is done before they are needed

CGROUP = Path("/sys/fs/cgroup")  # where a container finds its own limits


def usable_cores() -> int:
    """Number of cores that this process may use: its affinity, and its container's limit."""
    cores = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    try:
        limit, period = map(int, (CGROUP / "cpu.max").read_text().split())
    except (OSError, ValueError):  # no control groups of version 2, or "max"
        return cores
    return max(1, min(cores, round(limit / period)))


def cpu_multiplies_bfloat16() -> bool:
    """Whether this CPU has instructions that multiply bfloat16 (AMX, or AVX-512 BF16)."""
    import torch

    found = torch.cpu.get_capabilities()
    return bool(found.get("amx_bf16") or found.get("avx512_bf16"))


def ahead(
    items: Iterable[T], work: Callable[[T], Found], key: Callable[[T], Any] = id,
    weight: Callable[[T], int] = lambda _: 1,
) -> Iterator[tuple[T, Future[Found]]]:  # fmt: skip
    """Each item with the result of its work, done ahead on all cores; equal keys share one."""
    coming, threads, held = iter(items), usable_cores(), 0
    waiting: deque[tuple[T, Future[Found]]] = deque()
    last: tuple[Any, Future[Found]] | None = None
    pool = ThreadPoolExecutor(threads, "decode")
    try:
        while True:
            while held < AHEAD * threads and (item := next(coming, None)) is not None:
                if last is None or last[0] != key(item):
                    last = (key(item), pool.submit(work, item))
                waiting.append((item, last[1]))
                held += weight(item)
            if not waiting:
                return
            held -= weight(waiting[0][0])
            yield waiting.popleft()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
