"""Compiles the kernels of an attention backend beside everything else."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable, Sequence

from valora_serve.model.attention.base import AttentionBackend

log = logging.getLogger(__name__)

NICENESS = 10  # how far a compiler that nothing waits for is below its process, and requests


class Compiling:
    """The compilation of a `backend`'s kernels, in a thread that does not outlive the process.

    `on_end` is called in it. Only if nothing is `awaited` its priority is low: other engines'
    compilers would leave it next to no time. `error` is what it ended with, and is in the log.
    """

    def __init__(
        self, backend: AttentionBackend, on_end: Callable[[], None], *, awaited: bool
    ) -> None:
        self.backend, self._on_end, self._awaited = backend, on_end, awaited
        self.error: BaseException | None = None
        self.running, self._wait_on = True, threading.Event()
        threading.Thread(target=self._run, name="compile-attention", daemon=True).start()

    def wait(self, seconds: float | None = None) -> None:
        """Wait until it has ended, or nobody waits any more; at most so many seconds if given."""
        self._wait_on.wait(seconds)

    def stop_waiting(self) -> None:
        """Let nobody wait for it: the process is to end."""
        self._wait_on.set()

    def _run(self) -> None:
        # Elsewhere priorities are those of processes.
        if sys.platform == "linux" and not self._awaited:
            thread = threading.get_native_id()
            lower = os.getpriority(os.PRIO_PROCESS, thread) + NICENESS
            os.setpriority(os.PRIO_PROCESS, thread, lower)
        try:
            self.backend.compile()
        except BaseException as error:  # others would wait for ever
            self.error = error
            log.warning("the kernels of attention are not compiled", exc_info=True)
        self.running = False
        self._wait_on.set()
        self._on_end()


def side_by_side(jobs: Sequence[Callable[[], None]]) -> None:
    """Run jobs in daemon threads, and raise the first error once all have ended."""
    errors: list[BaseException] = []

    def run(job: Callable[[], None]) -> None:
        try:
            job()
        except BaseException as error:  # noqa: BLE001 - raised below
            errors.append(error)

    threads = [threading.Thread(target=run, args=(job,), daemon=True) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
