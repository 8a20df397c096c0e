"""Keeps two servers from recording what they load in the same state file."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from filelock import FileLock, Timeout

from valora_serve.errors import SettingsError
from valora_serve.server.telemetry import logs

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@contextlib.contextmanager
def own_state(file: Path) -> Iterator[None]:
    """Lock a state file for this process.

    Each server writes the whole file: with two of them, the loads of one would be lost. The
    kernel holds the lock, and drops it when the process ends, however it ends.
    """
    lock = FileLock(str(file.absolute()) + ".lock", timeout=0)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout:
        raise SettingsError(
            f"state file {file} is in use by another server: stop that one, or give this one a "
            "file of its own with --state-file"
        ) from None
    except (OSError, NotImplementedError) as error:  # a full disk, or a system without locks
        logs.LOG.warning(
            "state file %s cannot be locked (%s): start no other server with it", file, error
        )
    try:
        yield
    finally:
        lock.release()
