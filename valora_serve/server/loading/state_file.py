"""The state file: what was loaded and unloaded at run time, for the next start."""

import contextlib
import hashlib
import os
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Literal

from filelock import FileLock, Timeout
from pydantic import BaseModel, ConfigDict

from valora_data.contract.bundle import MANIFEST
from valora_data.contract.files import UnreadableError, first_fault, read_json
from valora_data.hashing import file_hash
from valora_serve.errors import AdapterError, SettingsError
from valora_serve.server.resolving.sources import FILES as ADAPTER_FILES
from valora_serve.server.resolving.sources import LABELS
from valora_serve.server.telemetry import logs

KINDS = ("bundle", "adapter", "context")  # contexts after the adapters that answer
FILES = {"bundle": (MANIFEST,), "adapter": ADAPTER_FILES}
"""Files whose hashes tell the content; a bundle's manifest has those of all its files."""


class SavedState(BaseModel):
    """Content of the state file: folders of adapters, bundles and contexts, by name."""

    model_config = ConfigDict(extra="forbid", strict=True)

    version: Literal[1] = 1
    adapters: dict[str, str] = {}
    bundles: dict[str, str] = {}
    contexts: dict[str, str] = {}
    unloaded: list[str] = []  # bundles of the command line, or replaced
    decode_only: list[str] = []
    reserved: dict[str, list[str]] = {}  # names that bundles have brought, unloaded ones too
    sha256: dict[str, str] = {}  # of adapters and bundles that replicas load, by kind and name

    @property
    def revision(self) -> str:
        """Hash of the content."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()

    def of(self, kind: str) -> dict[str, str]:
        """Folders of adapters, bundles or contexts, by name."""
        found: dict[str, str] = getattr(self, f"{kind}s")
        return found


class StateFile:
    """A state file, which has its old or its new content at any time."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._partial = self.path.with_name(self.path.name + ".partial")

    def read(self) -> SavedState:
        """Read the state; an empty one if there is no file."""
        try:
            return SavedState.model_validate(read_json(self.path, 16 << 20))
        except (UnreadableError, ValueError) as error:
            if isinstance(error.__cause__, FileNotFoundError) and not self.path.is_symlink():
                return SavedState()
            reason = getattr(error, "reason", f"is damaged ({first_fault(error)})")
            raise SettingsError(
                f"state file {self.path} cannot be used, as it {reason}: restore it, start the "
                "version of VaLoRA that wrote it, or delete it to start without run-time loads"
            ) from error

    @contextlib.asynccontextmanager
    async def turn(self) -> AsyncIterator[SavedState | None]:
        """Context in which no other process changes the state; gives it if one may have."""
        yield None

    def draft(self, state: SavedState, what: str = "") -> Any:
        """Write a state, in which a kind and name are new, beside the file, down to the disk."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with self._partial.open("w", encoding="utf-8") as file:
                file.write(state.model_dump_json(indent=1))
                file.flush()
                os.fsync(file.fileno())
        except OSError:
            self.discard()
            raise
        return self._partial

    def publish(self, draft: Any) -> None:
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

    def discard(self) -> None:
        """Remove a draft, if there is one."""
        with contextlib.suppress(OSError):
            self._partial.unlink()


def content_hash(kind: str, folder: Path) -> str:
    """Hash of a bundle's or an adapter's content."""
    try:
        hashes = [file_hash(folder / name) for name in FILES[kind]]
        if kind == "adapter" and (labels := folder / LABELS).exists():
            hashes.append(file_hash(labels))
    except OSError as error:
        raise AdapterError(
            f"{kind} {folder} cannot be read on {socket.gethostname()} ({error.strerror}): put it "
            "at the same path on every machine of the Ray cluster"
        ) from error
    return hashlib.sha256("".join(hashes).encode()).hexdigest()


def check_content(kind: str, folder: Path, sha256: str) -> None:
    """Check that a folder has the same content on this machine as on another one."""
    if content_hash(kind, folder) != sha256:
        raise AdapterError(
            f"{kind} {folder} on {socket.gethostname()} is not the one that other machines have, "
            "as its sha256 differs: copy the same one to every machine of the Ray cluster"
        )


def own_state(file: Path) -> contextlib.AbstractContextManager[Any]:
    """Lock a state file for this process: each server writes the whole file."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        return FileLock(str(file.absolute()) + ".lock", timeout=0).acquire()
    except Timeout:
        raise SettingsError(
            f"state file {file} is in use by another server: stop that one, or give this one a "
            "file of its own with --state-file"
        ) from None
    except (OSError, NotImplementedError) as error:  # a full disk, or a system without locks
        logs.LOG.warning(
            "state file %s cannot be locked (%s): start no other server with it", file, error
        )
        return contextlib.nullcontext()
