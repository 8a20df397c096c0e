"""Keeps Python from stopping a process that serves."""

import contextlib
import gc
import sys
from collections.abc import Iterator

SWITCH_SECONDS = 0.0005
"""Time that a thread may hold Python's lock while another one waits for it, in seconds.

An answer takes the event loop about ten turns of the lock. Each of them lasts as long as this for
every other thread that runs Python; with Python's default, 5 ms, five threads cost 0.25 s.
"""

_before: list[float] = []  # what it was before, one for each context that is entered


@contextlib.contextmanager
def short_pauses() -> Iterator[None]:
    """Context in which no thread holds Python's lock for long; several may overlap.

    Whoever runs an engine enters it when everything is loaded. A full garbage collection stops all
    threads while it walks every object: 0.4 s with those of PyTorch and the models. They live as
    long as the engine, and are left out here.
    """
    _before.append(sys.getswitchinterval())
    sys.setswitchinterval(SWITCH_SECONDS)
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        sys.setswitchinterval(_before.pop())  # the process's own by the last one
        if not _before:
            gc.unfreeze()
