"""Adapters that were fetched, on disk: of bounded size, complete or not there at all.

An adapter's folder is ``<hash of its name and version>/<last part of its name>/``; beside it,
``.entry.json`` says what it is. Folders are filled under another name and renamed, and those whose
sha256 differs when they are used are deleted. What else is there stays. For one server at a time.
"""

import contextlib
import hashlib
import json
import os
import re
import shutil
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from valora_data.contract.files import UnreadableError, read_json
from valora_data.hashing import file_hash
from valora_serve import errors
from valora_serve.server.resolving.sources import FETCHED, FILES, PIECE, Found, Resolver
from valora_serve.server.settings import ServerSettings
from valora_serve.server.telemetry import logs

_ENTRY, _PARTIAL = ".entry.json", ".partial-"
_PLACE = re.compile("[0-9a-f]{24}")


@dataclass(frozen=True, slots=True)
class Entry:
    """An adapter on disk."""

    name: str
    source: str
    place: str
    version: str
    bytes: int
    hashes: Mapping[str, str]
    folder: Path

    def is_from(self, resolver: Resolver) -> bool:
        """Return whether it came from a resolver's place."""
        return (self.source, self.place) == (resolver.scheme, _hash_of(resolver.url))

    def is_there(self, *, whole: bool = False) -> bool:
        """Return whether its files are there, as long as they were fetched; or just as fetched."""
        with contextlib.suppress(OSError):
            files = {self.folder / file: sha256 for file, sha256 in self.hashes.items()}
            if sum(file.stat().st_size for file in files) == self.bytes:
                return not whole or all(file_hash(file) == sha for file, sha in files.items())
        return False


def lock_folder(folder: Path) -> FileLock:
    """Make the folder of a cache, and lock it for this process."""
    lock = FileLock(str(folder.absolute() / ".lock"), timeout=0, thread_local=False)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock.acquire()
    except Timeout:
        raise errors.SettingsError(f"adapter_cache {folder} is in use by another server: name "
                                   "another one with --adapter-cache") from None  # fmt: skip
    except OSError as error:
        raise errors.SettingsError(f"adapter_cache {folder} cannot be used ({error.strerror}): let "
                                   "the server write there, or name one") from error  # fmt: skip
    return lock


class AdapterCache:
    """Fetched adapters by name, one version of each; may be used from any thread."""

    def __init__(self, settings: ServerSettings, keep: Callable[[str], bool]) -> None:
        folder = Path(settings.adapter_cache)
        self._folder, self._max_bytes = folder.absolute(), settings.adapter_cache_bytes
        self._adapter_bytes = settings.adapter_bytes
        self._keep = keep  # says whether an adapter is in use
        self._lock = threading.Lock()
        self._entries: OrderedDict[str, Entry] = OrderedDict()  # least recently used first
        self._reserved = 0  # bytes of what is being fetched
        self._process = lock_folder(folder)
        self._read_again()

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

    def get(self, name: str, resolver: Resolver, version: str | None = None) -> Entry | None:
        """Return an adapter, and note that it is used; one that was damaged is deleted."""
        with self._lock:
            entry = self._entries.get(name)
            if not (entry and entry.is_from(resolver) and version in (None, entry.version)):
                return None
            self._entries.move_to_end(name)
        if not entry.is_there(whole=True):
            logs.LOG.warning("adapter %s is damaged in the cache: it is fetched again", name)
            with self._lock:
                if self._entries.get(name) is entry:
                    self._delete(name)
            return None
        with contextlib.suppress(OSError):
            os.utime(entry.folder.parent)  # its place in the next run
        return entry

    def fetch(
        self, resolver: Resolver, name: str, found: Found, cancelled: threading.Event
    ) -> Entry:
        """Fetch an adapter; an older version of it is deleted."""
        sizes = found.sizes.values()
        known = sum(size for size in sizes if size is not None)
        if known > self._adapter_bytes:
            raise self._too_large(name, f"{known}")
        room = self._adapter_bytes if None in sizes else known
        place, last = _hash_of(resolver.url), name.rpartition("/")[2]
        path = self._folder / _hash_of(f"{resolver.url}\0{name}\0{found.version}")[:24]
        self._reserve(room, name)
        partial = None
        try:
            with self._writing(name):
                # An attempt that was given up may go on in a thread that hung.
                partial = Path(tempfile.mkdtemp(prefix=_PARTIAL, dir=self._folder))
                (partial / last).mkdir()
            hashes, left = {}, self._adapter_bytes
            for file, size in found.sizes.items():
                most = left if size is None else min(size, left)
                with resolver.open(name, file, found) as stream:
                    hashes[file], read = self._copy(
                        stream, partial / last / file, name, most, cancelled
                    )
                if read > left:
                    raise self._too_large(name, f"more than {self._adapter_bytes}")
                if size not in (None, read):
                    raise _changed(name)
                left -= read
            again = resolver.find(name)
            if again is None or again.version != found.version:
                raise _changed(name)
            facts = {
                "name": name, "source": resolver.scheme, "place": place, "version": found.version
            }  # fmt: skip
            size = self._adapter_bytes - left
            entry = Entry(**facts, bytes=size, hashes=hashes, folder=path / last)
            with self._writing(name):
                (partial / _ENTRY).write_text(json.dumps({**facts, "sha256": hashes}))
                with self._lock:
                    if cancelled.is_set():
                        raise _given_up(name)
                    if name in self._entries:
                        self._delete(name)
                    shutil.rmtree(path, ignore_errors=True)
                    partial.replace(path)
                    self._entries[name] = entry
            return entry
        finally:
            if partial is not None:
                shutil.rmtree(partial, ignore_errors=True)
            with self._lock:
                self._reserved -= room

    def _copy(
        self, stream: Any, file: Path, name: str, max_bytes: int, cancelled: threading.Event
    ) -> tuple[str, int]:
        """Copy a file; return its sha256 and bytes, or what is read when they are too many."""
        digest, read = hashlib.sha256(), 0
        with self._writing(name):
            file.touch()
        while read <= max_bytes and (piece := stream.read(PIECE)):
            if cancelled.is_set():
                raise _given_up(name)
            read += len(piece)
            digest.update(piece)
            with self._writing(name), file.open("ab") as opened:  # closing may fail as well
                opened.write(piece)
        return digest.hexdigest(), read

    def _too_large(self, name: str, size: str) -> errors.AdapterError:
        return errors.AdapterError(
            f"Adapter {name} has {size} bytes, and may have {self._adapter_bytes}: name a smaller "
            "one, or have --adapter-bytes raised"
        )

    @contextlib.contextmanager
    def _writing(self, name: str) -> Iterator[None]:
        """Context in which errors of the disk are those of the cache, not of the source."""
        try:
            yield
        except OSError as error:
            raise errors.StorageError(
                f"Adapter {name} cannot be written to the adapter cache ({error.strerror}), so "
                f"nothing was changed: {errors.disk_remedy(error)}, and try again"
            ) from error

    def _reserve(self, room: int, name: str) -> None:
        """Delete adapters that are not in use until another one fits; its older version last."""
        with self._lock:
            idle = [one for one in self._entries if one != name and not self._keep(one)]
            idle += [name] if name in self._entries else []
            freed = sum(self._entries[one].bytes for one in idle)
            if self._held() + room - freed > self._max_bytes:
                raise errors.OverloadedError(
                    f"Adapter {name} does not fit into the adapter cache beside those in use: try "
                    "again in 5 s, or have --adapter-cache-bytes raised",
                    5.0,
                )
            self._reserved += room
            for other in idle:
                if self._held() <= self._max_bytes:
                    break
                self._delete(other)

    def _held(self) -> int:
        return self._reserved + sum(entry.bytes for entry in self._entries.values())

    def _delete(self, name: str) -> None:
        shutil.rmtree(self._entries.pop(name).folder.parent, ignore_errors=True)

    def _read_again(self) -> None:
        """Find what an earlier run has left; what is incomplete is deleted."""
        own = filter(_is_own, self._folder.iterdir())
        for folder in sorted(own, key=lambda item: item.stat().st_mtime):
            entry = None if folder.name.startswith(_PARTIAL) else _read_entry(folder)
            if entry is None or entry.name in self._entries:
                logs.LOG.info("deleting %s of the adapter cache, which is incomplete", folder.name)
                shutil.rmtree(folder, ignore_errors=True)
            else:
                self._entries[entry.name] = entry
        for name in tuple(self._entries):
            if self._held() > self._max_bytes:
                self._delete(name)


def _is_own(folder: Path) -> bool:
    """Return whether a cache has made a folder; others are never deleted."""
    made = _PLACE.fullmatch(folder.name) is not None and (folder / _ENTRY).is_file()
    return (made or folder.name.startswith(_PARTIAL)) and not folder.is_symlink()


def _read_entry(path: Path) -> Entry | None:
    """Read an adapter of an earlier run; None if a file is missing."""
    try:
        facts = read_json(path / _ENTRY, 1 << 16)
        hashes, folder = facts.pop("sha256"), path / facts["name"].rpartition("/")[2]
        if not {*FILES} <= {*hashes} <= {*FETCHED}:
            return None
        size = sum((folder / file).stat().st_size for file in hashes)
        return Entry(**facts, bytes=size, hashes=hashes, folder=folder)
    except (UnreadableError, OSError, KeyError, TypeError, AttributeError):
        return None


def _hash_of(url: str) -> str:
    return hashlib.sha256(url.encode()).hexdigest()


def _given_up(name: str) -> errors.SourceError:
    return errors.SourceError(f"Adapter {name} was not fetched to its end: ask again")


def _changed(name: str) -> errors.SourceError:
    return errors.SourceError(
        f"Adapter {name} changed while it was read: try again once it is complete"
    )
