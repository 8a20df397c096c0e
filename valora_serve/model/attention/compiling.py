"""Compiles the kernels of an attention backend beside everything else."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from valora_serve.model.attention.base import AttentionBackend

log = logging.getLogger(__name__)

NICENESS = 10
"""Priority of the compiler: below the kernels that the start waits for, and requests."""


class Compiling:
    """The compilation of a backend's kernels, in a thread that ends with the process.

    Args:
        backend: The backend; nothing else uses it until the end.

    Attributes:
        backend: The same.
        failed: Whether it has ended with an error, which is in the log.
        on_end: Called in that thread at its end; None for nothing.
    """

    def __init__(self, backend: AttentionBackend) -> None:
        self.backend = backend
        self.failed = False
        self.on_end: Callable[[], None] | None = None
        self._ended = threading.Event()
        threading.Thread(target=self._run, name="compile-attention", daemon=True).start()

    @property
    def running(self) -> bool:
        """Whether it has not ended."""
        return not self._ended.is_set()

    def wait(self, seconds: float | None = None) -> None:
        """Wait until it has ended, at most so many seconds if given."""
        self._ended.wait(seconds)

    def _run(self) -> None:
        if sys.platform == "linux":  # elsewhere priorities are those of processes
            with contextlib.suppress(OSError):  # the process has a lower one already
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        try:
            self.backend.compile()
        except Exception:
            self.failed = True
            log.warning("the kernels of attention are not compiled", exc_info=True)
        self._ended.set()
        if self.on_end is not None:
            self.on_end()
