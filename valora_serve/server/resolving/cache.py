"""Adapters that were fetched, on disk: of bounded size, complete or not there at all.

An adapter's folder is ``<hash of its name and version>/<last part of its name>/``; beside it,
``entry.json`` says what it is. Folders are filled under another name and renamed, and those of an
earlier run whose content does not match its sha256 are deleted. For one server at a time.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
import threading
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from filelock import FileLock, Timeout

from valora_data.contract.files import UnreadableError, read_json
from valora_serve.errors import (
    AdapterError,
    OverloadedError,
    SettingsError,
    SourceError,
    StorageError,
)
from valora_serve.server.resolving.base import CONFIG, FILES
from valora_serve.server.telemetry import logs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from valora_serve.server.resolving.base import Found, Resolver, Stream

PIECE = 1 << 20
"""Bytes that are read at a time."""
CONFIG_BYTES = 1 << 20
"""Most bytes of `adapter_config.json`; the engine reads no more."""
_ENTRY, _PARTIAL = "entry.json", ".partial-"


@dataclass(frozen=True, slots=True)
class Entry:
    """An adapter on disk.

    Attributes:
        name: Its name.
        url: Place that it came from.
        version: Version of its files there.
        bytes: Bytes of its files.
        folder: Folder of its files.
    """

    name: str
    url: str
    version: str
    bytes: int
    folder: Path

    @property
    def source(self) -> str:
        """Scheme of its place."""
        return self.url.partition("://")[0]


class AdapterCache:
    """Fetched adapters by name, one version of each; may be used from any thread.

    Args:
        folder: Folder of the cache.
        most_bytes: Most bytes of all adapters together.
        adapter_bytes: Most bytes of one.
        keep: Whether the adapter of a name is in use, and must stay.

    Raises:
        SettingsError: The folder cannot be written, or another server uses it.
    """

    def __init__(
        self, folder: Path, most_bytes: int, adapter_bytes: int, keep: Callable[[str], bool]
    ) -> None:
        self._folder, self._most, self._adapter_bytes = folder.absolute(), most_bytes, adapter_bytes
        self._keep = keep
        self._lock = threading.Lock()
        self._entries: OrderedDict[str, Entry] = OrderedDict()  # least recently used first
        self._reserved = 0  # bytes of what is being fetched
        self._process = FileLock(str(self._folder / ".lock"), timeout=0, thread_local=False)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._process.acquire()
            self._read_again()
        except Timeout:
            raise SettingsError(
                f"adapter_cache {folder} is in use by another server: give this one a folder of "
                "its own with --adapter-cache"
            ) from None
        except OSError as error:
            raise SettingsError(
                f"adapter_cache {folder} cannot be used ({error.strerror}): let the server write "
                "there, or name another folder"
            ) from error

    def close(self) -> None:
        """Let another server use the folder."""
        self._process.release()

    @property
    def bytes(self) -> int:
        """Bytes of all adapters."""
        with self._lock:
            return self._held()

    def entries(self) -> list[Entry]:
        """Return all adapters, least recently used first."""
        with self._lock:
            return list(self._entries.values())

    def get(self, name: str, url: str, version: str | None = None) -> Entry | None:
        """Return an adapter, and note that it is used.

        Args:
            name: Its name.
            url: Place that it must come from.
            version: Version that it must have, None for any.
        """
        with self._lock:
            entry = self._entries.get(name)
            if entry is None or entry.url != url or version not in (None, entry.version):
                return None
            self._entries.move_to_end(name)
        with contextlib.suppress(OSError):
            os.utime(entry.folder.parent)  # its place in the next run
        return entry

    def fetch(
        self, resolver: Resolver, name: str, found: Found, cancelled: threading.Event
    ) -> Entry:
        """Fetch an adapter; an older version of it is deleted.

        Args:
            resolver: Finds it.
            name: Its name.
            found: What the resolver found.
            cancelled: Set to end the download.

        Raises:
            AdapterError: It is too large.
            OverloadedError: Adapters in use fill the cache.
            SourceError: It changed while it was read, or the download was cancelled.
            StorageError: It cannot be written.
            OSError: It cannot be read.
        """
        known = [size for size in found.sizes.values() if size is not None]
        if sum(known) > self._adapter_bytes:
            raise self._too_large(name, f"{sum(known)}")
        room = sum(known) if len(known) == len(found.sizes) else self._adapter_bytes
        digest = hashlib.sha256(f"{resolver.url}\0{name}\0{found.version}".encode())
        place = self._folder / digest.hexdigest()[:24]
        partial = self._folder / f"{_PARTIAL}{place.name}"
        self._reserve(room, name)
        try:
            folder = partial / name.rpartition("/")[2]
            with self._writing(name):
                shutil.rmtree(partial, ignore_errors=True)
                folder.mkdir(parents=True)
            hashes, read = {}, 0
            for file in FILES:
                with resolver.open(name, file, found) as stream:
                    left = self._adapter_bytes - read
                    size, hashes[file] = self._copy(
                        stream, folder / file, name, found.sizes[file], left, cancelled
                    )
                read += size
            again = resolver.find(name)
            if again is None or again.version != found.version:
                raise _changed(name)
            facts = {"name": name, "url": resolver.url, "version": found.version}
            with self._writing(name):
                (partial / _ENTRY).write_text(json.dumps({**facts, "sha256": hashes}))
                self._forget(name)
                partial.replace(place)
            entry = Entry(name, resolver.url, found.version, read, place / folder.name)
            with self._lock:
                self._entries[name] = entry
            return entry
        finally:
            shutil.rmtree(partial, ignore_errors=True)
            with self._lock:
                self._reserved -= room

    def _copy(
        self,
        stream: Stream,
        file: Path,
        name: str,
        size: int | None,
        left: int,
        cancelled: threading.Event,
    ) -> tuple[int, str]:
        """Copy a file, and return its bytes and their sha256."""
        digest, read = hashlib.sha256(), 0
        most = min(left, CONFIG_BYTES) if file.name == CONFIG else left
        with self._writing(name):
            opened = file.open("wb")
        with opened:
            while piece := stream.read(PIECE):
                read += len(piece)
                if cancelled.is_set():
                    raise SourceError(f"Adapter {name} was not fetched to its end: ask again")
                if size is not None and read > size:
                    raise _changed(name)
                if read > most:
                    raise self._too_large(name, f"more than {most}")
                digest.update(piece)
                with self._writing(name):
                    opened.write(piece)
            with self._writing(name):
                opened.close()
        if size is not None and read != size:
            raise _changed(name)
        return read, digest.hexdigest()

    def _too_large(self, name: str, size: str) -> AdapterError:
        return AdapterError(
            f"Adapter {name} has {size} bytes, and may have {self._adapter_bytes} (its "
            f"{CONFIG} {CONFIG_BYTES}): name a smaller one, or have --adapter-bytes raised"
        )

    @contextlib.contextmanager
    def _writing(self, name: str) -> Iterator[None]:
        """Context in which errors of the disk are those of the cache, not of the source."""
        try:
            yield
        except OSError as error:
            remedy = "let the server write there"
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                remedy = "free space on that disk"
            raise StorageError(
                f"Adapter {name} cannot be written to the adapter cache ({error.strerror}), so "
                f"nothing was changed: {remedy}, and try again"
            ) from error

    def _reserve(self, room: int, name: str) -> None:
        """Delete adapters that are not in use until there is room for another one."""
        with self._lock:
            self._reserved += room
            for other in tuple(self._entries):
                if self._held() <= self._most:
                    break
                if other != name and not self._keep(other):
                    self._delete(other)
            if self._held() > self._most:
                self._reserved -= room
                raise OverloadedError(
                    f"Adapter {name} does not fit into the adapter cache beside those in use: try "
                    "again in 5 s, or have --adapter-cache-bytes raised",
                    5.0,
                )

    def _held(self) -> int:
        return self._reserved + sum(entry.bytes for entry in self._entries.values())

    def _forget(self, name: str) -> None:
        with self._lock:
            if name in self._entries:
                self._delete(name)

    def _delete(self, name: str) -> None:
        shutil.rmtree(self._entries.pop(name).folder.parent, ignore_errors=True)

    def _read_again(self) -> None:
        """Find what an earlier run has left; what is incomplete or damaged is deleted."""
        places = [item for item in self._folder.iterdir() if item.is_dir()]
        for place in sorted(places, key=lambda item: item.stat().st_mtime):
            entry = None if place.name.startswith(_PARTIAL) else _read_entry(place)
            if entry is None or entry.name in self._entries:
                logs.LOG.info("deleting %s of the adapter cache, which is incomplete", place.name)
                shutil.rmtree(place, ignore_errors=True)
            else:
                self._entries[entry.name] = entry
        for name in tuple(self._entries):
            if self._held() > self._most:
                self._delete(name)


def _read_entry(place: Path) -> Entry | None:
    """Read an adapter of an earlier run; None if it is not as it was written."""
    try:
        facts = read_json(place / _ENTRY, 1 << 16)
        name, url, version = (str(facts[key]) for key in ("name", "url", "version"))
        folder, size = place / name.rpartition("/")[2], 0
        for file in FILES:
            with (folder / file).open("rb") as opened:
                if hashlib.file_digest(opened, "sha256").hexdigest() != facts["sha256"][file]:
                    return None
                size += opened.tell()
    except (UnreadableError, OSError, KeyError, TypeError):
        return None
    return Entry(name, url, version, size, folder)


def _changed(name: str) -> SourceError:
    return SourceError(f"Adapter {name} changed while it was read: try again once it is complete")
