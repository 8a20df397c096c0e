"""Compiles the kernels of an attention backend beside everything else."""

from __future__ import annotations

import logging
import os
import sys
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from valora_serve.model.attention.base import AttentionBackend

log = logging.getLogger(__name__)

NICENESS = 10  # how far a compiler that nothing waits for is below its process, and requests


class Compiling:
    """The compilation of a backend's kernels, in a thread that does not outlive the process.

    Args:
        backend: The backend; nothing else uses it until the end.
        on_end: Called in that thread at the end.
        awaited: Whether something will wait for the end however long it takes. Compilers of other
            engines that start on the machine would leave a lower priority next to no time.

    Attributes:
        running: Whether it has not ended.
        error: The error that it has ended with, which is in the log; None if there is none.
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
    """Run jobs in a thread each, and raise the first error once all have ended.

    A pool of threads would keep the process from ending before its compilers do.
    """
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
