"""Starts processes of this package: fresh interpreters, as a forked one has no GPU."""

import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection


def launch(module: str, count: int) -> tuple[subprocess.Popen[bytes], list[Connection]]:
    """Run a module, whose arguments are file descriptors of so many pipes; return our ends.

    Its session is its own, without Ctrl-C; it ends itself when the other end of a pipe is closed.
    """
    ours, theirs = zip(*(multiprocessing.Pipe() for _ in range(count)), strict=True)
    numbers = [one.fileno() for one in theirs]
    process = subprocess.Popen(
        [sys.executable, "-m", module, *map(str, numbers)],
        pass_fds=numbers, start_new_session=True, stdin=subprocess.DEVNULL,
        stdout=2,  # standard output is that of this process
        # Threads that spin for long while one waits for a busy core keep it busy.
        env={"GOMP_SPINCOUNT": "3000"} | os.environ | {
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "PYTHONSAFEPATH": "1",  # -m would put the working directory first
        },
    )  # fmt: skip
    for one in theirs:
        one.close()
    return process, [*ours]


def pipes(arguments: Sequence[str]) -> list[Connection]:
    """In such a process, its ends of the pipes; signals are for the one that started it."""
    for one in (signal.SIGINT, signal.SIGTERM):
        signal.signal(one, signal.SIG_IGN)
    return [Connection(int(one)) for one in arguments]


def how_it_ended(code: int) -> str:
    """Say how a process ended, from its exit code."""
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"
