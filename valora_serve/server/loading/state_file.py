"""The state file: what was loaded and unloaded at run time, for the next start."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout
from pydantic import BaseModel, ConfigDict

from valora_data.contract.files import UnreadableError, parse_json, read_bytes
from valora_serve.errors import SettingsError
from valora_serve.server.telemetry import logs

VERSION = 1
"""Version of the state file's format."""


class SavedState(BaseModel):
    """Content of the state file: folders of adapters, bundles and contexts, by name.

    `unloaded` are bundles of the command line that were unloaded or replaced, and `reserved` names
    that bundles have brought, also those that were unloaded or replaced since.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    version: int = VERSION
    adapters: dict[str, str] = {}
    bundles: dict[str, str] = {}
    contexts: dict[str, str] = {}
    unloaded: list[str] = []
    decode_only: list[str] = []
    reserved: dict[str, list[str]] = {}

    def of(self, kind: str) -> dict[str, str]:
        """Folders of adapters, bundles or contexts, by name."""
        found: dict[str, str] = getattr(self, f"{kind}s")
        return found

    def copied(self) -> SavedState:
        """Return a copy that can be changed."""
        return self.model_copy(deep=True)


class StateFile:
    """A state file, which has its old or its new content at any time."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def draft(self, state: SavedState) -> Path:
        """Write a state beside the state file, down to the disk."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        draft = self.path.with_name(self.path.name + ".partial")
        try:
            with draft.open("w", encoding="utf-8") as file:
                file.write(state.model_dump_json(indent=1))
                file.flush()
                os.fsync(file.fileno())
        except OSError:
            self.discard(draft)
            raise
        return draft

    def publish(self, draft: Path) -> None:
        """Rename a draft to the state file."""
        draft.replace(self.path)
        try:
            descriptor = os.open(self.path.parent, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        except OSError as error:  # only a loss of power could undo the renaming now
            logs.LOG.warning("the folder of %s could not be synchronized: %s", self.path, error)

    @staticmethod
    def discard(draft: Path) -> None:
        """Remove a draft."""
        with contextlib.suppress(OSError):
            draft.unlink()


def read_state(file: Path) -> SavedState:
    """Read a state file; an empty state if there is none."""
    start_without = "or delete it to start without run-time loads"
    try:
        file.lstat()
        saved = parse_json(read_bytes(file, 16 << 20))
    except FileNotFoundError:
        return SavedState()
    except OSError as error:
        raise SettingsError(
            f"state file {file} cannot be read ({error.strerror}): give the server "
            f"permission, {start_without}"
        ) from error
    except UnreadableError as error:
        denied = error.reason.startswith("cannot be read")
        raise SettingsError(
            f"state file {file} "
            + (error.reason if denied else f"is damaged, as it {error.reason}")
            + f": restore it, {start_without}"
        ) from error
    version = saved.get("version", VERSION) if isinstance(saved, dict) else VERSION
    if type(version) is int and version != VERSION:
        age = "a newer" if version > VERSION else "another"
        raise SettingsError(
            f"state file {file} is of {age} version of VaLoRA: start that version, {start_without}"
        )
    try:
        return SavedState.model_validate(saved)
    except ValueError as error:
        raise SettingsError(f"state file {file} is damaged: restore it, {start_without}") from error


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
