"""What lies in host memory and, when it is used, in pages: loading, pinning, eviction (S-LoRA §5).

Adapters (`adapter_memory`) and prefixes of contexts (`prefix_memory`) are packed in host memory and
copied into pages of the unified memory. When pages are short, those that were not used for longest
are evicted, of either kind; pinned ones never are. Plain bookkeeping without torch, for one thread:
engine and simulator drive it, and a kind says how its copies are made (`Residency.copy`).
"""

from __future__ import annotations

from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from valora_serve.errors import AdapterError, BusyError, ServeError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from valora_serve.memory.block_manager import Owner, PagePool


class Place(StrEnum):
    """Where something lies: file, host memory or device."""

    FILE = "file"
    """In its file only: it was dropped from host memory."""
    HOST = "host"
    """In host memory, not on the device."""
    LOADING = "loading"
    """Being read from its file or copied to the device."""
    RESIDENT = "resident"
    """On the device."""


class Copy(Protocol):
    """A copy to the device under way, such as a CUDA event behind it."""

    def query(self) -> bool:
        """Return whether it is complete."""


class Packed(Protocol):
    """Something in host memory, laid out as in its pages."""

    @property
    def content(self) -> str:
        """Content hash."""

    @property
    def pages(self) -> int:
        """Number of pages that it takes on the device."""

    @property
    def bytes(self) -> int:
        """Bytes that it takes in host memory."""


P = TypeVar("P", bound=Packed)


@dataclass(slots=True, eq=False)
class Entry(Generic[P]):
    """An adapter or a prefix.

    Attributes:
        key: Its key.
        pages_needed: Pages that it takes on the device.
        host_bytes: Bytes that it takes in host memory.
        packed: What is in host memory, None if it was dropped from there.
        reload: Reads and packs its file again, None if it has no file.
        content: Content hash, which the file must still have when it is read again.
        pages: Its pages while it is on the device, or being copied there.
        slot: Its slot for the same time, -1 otherwise.
        users: Number of pins.
        reading: Result of `reload`, while its file is read.
        urgent: Whether it may evict wanted ones once its file is read.
        copied: Its copy to the device, while that runs.
        removed: Whether to forget it as soon as it has loaded.
    """

    key: str
    pages_needed: int
    host_bytes: int
    packed: P | None
    reload: Callable[[], P] | None
    content: str
    pages: list[int] = field(default_factory=list)
    slot: int = -1
    users: int = 0
    reading: Future[P] | None = None
    urgent: bool = False
    copied: Copy | None = None
    removed: bool = False

    @property
    def resident(self) -> bool:
        """Whether it is on the device."""
        return bool(self.pages) and self.copied is None


class Room:
    """Pages and host memory, which adapters and prefixes share.

    Args:
        pool: Free and used pages.
        host_bytes: Most bytes of host memory, None for no limit. Beyond it those that have a file
            and were not loaded for longest are dropped, and read again when needed.

    Attributes:
        pool: Free and used pages.
        idle_pages: Pages of what is resident and not pinned, which eviction would free.
        held_bytes: Bytes of host memory that are taken now.
    """

    def __init__(self, pool: PagePool, host_bytes: int | None = None) -> None:
        self.pool = pool
        self.idle_pages = self.held_bytes = 0
        self._host_bytes = host_bytes
        # Resident and not pinned, least recently used first.
        self._idle: OrderedDict[Entry[Any], Residency[Any]] = OrderedDict()
        # In host memory, least recently loaded first.
        self._on_host: OrderedDict[Entry[Any], Residency[Any]] = OrderedDict()
        pool.on_short = self._give_back

    def rest(self, entry: Entry[Any], owner: Residency[Any]) -> None:
        """Note that an entry is resident and not pinned."""
        self._idle[entry] = owner
        self.idle_pages += len(entry.pages)

    def wake(self, entry: Entry[Any]) -> None:
        """Note that an entry is pinned, or not resident any more."""
        del self._idle[entry]
        self.idle_pages -= len(entry.pages)

    def victims(self, *, urgent: bool) -> list[tuple[Entry[Any], Residency[Any]]]:
        """Return what may be evicted, in this order; what requests want only if it is urgent."""
        unwanted = [(e, owner) for e, owner in self._idle.items() if e.key not in owner.wanted]
        if not urgent:
            return unwanted
        return unwanted + [(e, owner) for e, owner in self._idle.items() if e.key in owner.wanted]

    def _give_back(self, lacking: int) -> None:
        """Free this many pages by eviction; none if that does not free enough."""
        if lacking > self.idle_pages:
            return
        for entry, owner in self.victims(urgent=True):
            if lacking <= 0:
                return
            lacking -= len(entry.pages)
            owner.evict(entry)

    def keep(self, entry: Entry[Any], owner: Residency[Any]) -> None:
        """Note that an entry is in host memory."""
        self._on_host[entry] = owner
        owner.dropped.discard(entry.key)
        self.held_bytes += entry.host_bytes
        self.trim(but=entry)

    def loaded(self, entry: Entry[Any]) -> None:
        """Note that an entry is copied to the device, by which host memory is freed in order."""
        self._on_host.move_to_end(entry)

    def drop(self, entry: Entry[Any]) -> None:
        """Free an entry's host memory."""
        if entry.packed is not None:
            entry.packed = None
            self._on_host.pop(entry).dropped.add(entry.key)
            self.held_bytes -= entry.host_bytes

    def trim(self, but: Entry[Any] | None = None) -> None:
        """Drop entries from host memory, least recently loaded first, down to its limit."""
        if self._host_bytes is None:
            return
        for entry, owner in tuple(self._on_host.items()):
            if self.held_bytes <= self._host_bytes:
                return
            if entry is but or entry.key in owner.loading or entry.reload is None:
                continue
            self.drop(entry)


class Residency(Generic[P]):
    """Things of one kind, by key.

    Args:
        room: Pages and host memory.
        background: Whether files are read again in another thread.

    Attributes:
        kind: What it holds, for messages.
        owner: Use of its pages.
        room: Pages and host memory.
        resident: Keys of those on the device; updated in place, do not change it.
        loading: Keys of those that are being loaded; updated in place, do not change it.
        dropped: Keys of those that are not in host memory; updated in place, do not change it.
        wanted: Keys of those that unfinished requests use; they are evicted last.
        loads: How often one was copied to the device.
    """

    kind: str
    owner: Owner

    def __init__(self, room: Room, *, background: bool = False) -> None:
        self.room = room
        self.resident: set[str] = set()
        self.loading: set[str] = set()
        self.dropped: set[str] = set()
        self.wanted: Collection[str] = ()
        self.loads = 0
        self._entries: dict[str, Entry[P]] = {}
        self._reader = ThreadPoolExecutor(1, self.kind) if background else None

    def __contains__(self, key: object) -> bool:
        return key in self._entries and not self._entries[str(key)].removed

    def __len__(self) -> int:
        """Number of those that are known."""
        return sum(not entry.removed for entry in self._entries.values())

    @property
    def idle_pages(self) -> int:
        """Pages that eviction would free, of all kinds."""
        return self.room.idle_pages

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory that all kinds take now."""
        return self.room.held_bytes

    # ------------------------------------------------------------------ what a kind adds

    def copy(self, entry: Entry[P]) -> Copy | None:
        """Copy an entry to its pages; return the copy under way, None if it is complete."""
        raise NotImplementedError

    def _has_slot(self) -> bool:
        """Return whether one more could be on the device, apart from its pages."""
        return True

    def _placing(self, entry: Entry[P]) -> None:
        """Give an entry what it needs on the device besides pages."""

    def _placed(self, entry: Entry[P]) -> None:
        """Note that an entry is on the device."""

    def _leaving(self, entry: Entry[P]) -> None:
        """Take back what `_placing` gave."""

    def _forgotten(self, key: str) -> None:
        """Note that nothing has this key any more."""

    # ------------------------------------------------------------------ what all have in common

    def add(self, key: str, packed: P, reload: Callable[[], P] | None = None) -> None:
        """Add something in host memory; a known one stays where it is.

        Args:
            key: Its key.
            packed: What is in host memory.
            reload: Reads and packs its file again, after it was dropped from host memory; called in
                another thread. None to never drop it.
        """
        if key in self._entries:
            entry = self._entries[key]
            # The former folder may be gone when the file must be read again.
            entry.removed, entry.reload = False, reload or entry.reload
            return
        entry = Entry(key, packed.pages, packed.bytes, packed, reload, packed.content)
        self._entries[key] = entry
        self.room.keep(entry, self)

    def remove(self, key: str) -> None:
        """Forget something and free its memory; if it is loading, as soon as it has loaded.

        Raises:
            BusyError: It is pinned.
            KeyError: Nothing has this key.
        """
        entry = self._entries[key]
        if entry.users:
            raise BusyError(f"{self.kind} {key} is in use: wait for its requests to end")
        if key in self.loading:
            entry.removed = True
            return
        if entry.resident:
            self.evict(entry)
        self.room.drop(entry)
        self.dropped.discard(key)
        del self._entries[key]
        self._forgotten(key)

    def state(self, key: str) -> Place:
        """Return where something is."""
        if key in self.resident:
            return Place.RESIDENT
        if key in self.loading:
            return Place.LOADING
        return Place.FILE if self._entries[key].packed is None else Place.HOST

    def pages(self, key: str) -> int:
        """Return the number of pages that something takes on the device."""
        return self._entries[key].pages_needed

    def held(self, key: str) -> Sequence[int]:
        """Return the pages of something that is on the device, in order; do not change them."""
        return self._entries[key].pages

    def load(self, key: str, *, urgent: bool = True) -> bool:
        """Start loading something to the device, without waiting for it.

        Args:
            key: Its key.
            urgent: Whether wanted ones may be evicted for it; a prefetch must not.

        Returns:
            Whether it is resident or loading; False if there is no room for it now.

        Raises:
            AdapterError: Its file could not be read again. On a GPU, where the file is read in
                another thread, `ready` and `poll` report that.
        """
        entry = self._entries[key]
        if key in self.resident or key in self.loading:
            return True
        if entry.packed is None:
            if entry.reload is None:
                raise AssertionError(f"{self.kind} {key} was dropped from the host and has no file")
            entry.urgent = urgent
            self.loading.add(key)
            if self._reader is not None:
                entry.reading = self._reader.submit(entry.reload)
            else:
                entry.reading = _done(entry.reload)
                self._advance(key)
            return key in self.resident or key in self.loading
        return self._place(entry, urgent)

    def ready(self, key: str) -> bool:
        """Return whether something is on the device, without waiting for it.

        Raises:
            AdapterError: Its file could not be read again; `load` may be tried again.
        """
        if key in self.loading:
            self._advance(key)
        return key in self.resident

    def poll(self) -> dict[str, ServeError]:
        """Update what has finished loading.

        Returns:
            The errors of those that could not be loaded, by key.
        """
        failed: dict[str, ServeError] = {}
        for key in tuple(self.loading):
            try:
                self._advance(key)
            except ServeError as error:
                failed[key] = error
        return failed

    def pin(self, key: str) -> None:
        """Protect something on the device from eviction until it is unpinned as often.

        Raises:
            ValueError: It is not resident.
        """
        entry = self._entries[key]
        if not entry.resident:
            state = self.state(key)
            raise ValueError(f"{self.kind} {key}: expected a resident one, got {state}")
        if not entry.users:
            self.room.wake(entry)
        entry.users += 1

    def unpin(self, key: str) -> None:
        """Release one pin."""
        entry = self._entries[key]
        if not entry.users:
            raise ValueError(f"{self.kind} {key}: expected a pinned one")
        entry.users -= 1
        if not entry.users:
            self.room.rest(entry, self)

    def pinned(self, key: str) -> bool:
        """Return whether something is pinned."""
        return bool(self._entries[key].users)

    def close(self) -> None:
        """Stop reading files; what is in memory stays."""
        if self._reader is not None:
            self._reader.shutdown(wait=True, cancel_futures=True)

    def _advance(self, key: str) -> None:
        """Check whether something has been read or copied, and go on with it."""
        entry = self._entries[key]
        if entry.reading is not None:
            if not entry.reading.done():
                return
            reading, entry.reading = entry.reading, None
            self.loading.discard(key)
            if entry.removed:
                del self._entries[key]
                self.dropped.discard(key)
                self._forgotten(key)
                return
            entry.packed = self._read(entry, reading)
            self.room.keep(entry, self)
            self._place(entry, entry.urgent)
            return
        if entry.copied is not None and entry.copied.query():
            self._arrived(entry)

    def _read(self, entry: Entry[P], reading: Future[P]) -> P:
        """Return what was read again, if it still has the same content."""
        try:
            packed = reading.result()
        except ServeError:
            raise
        except Exception as error:
            raise AdapterError(f"{self.kind} {entry.key} cannot be read again: {error}") from error
        if packed.content != entry.content:
            raise AdapterError(
                f"the file of {self.kind} {entry.key} was changed since it was loaded: load it "
                "again"
            )
        return packed

    def _place(self, entry: Entry[P], urgent: bool) -> bool:
        """Take pages for something in host memory, and start copying it.

        Returns:
            False if there is no room for it now.
        """
        assert entry.packed is not None
        if not self._make_room(entry.pages_needed, urgent):
            return False
        pages = self.room.pool.take(entry.pages_needed, self.owner)
        assert pages is not None
        entry.pages = pages
        self._placing(entry)
        self.loading.add(entry.key)
        self.room.loaded(entry)
        entry.copied = self.copy(entry)
        if entry.copied is None:
            self._arrived(entry)
        return True

    def _arrived(self, entry: Entry[P]) -> None:
        """Make something resident whose copy is complete."""
        entry.copied = None
        self.loading.discard(entry.key)
        self.resident.add(entry.key)
        self.loads += 1
        self._placed(entry)
        self.room.rest(entry, self)
        if entry.removed:
            self.remove(entry.key)
        else:
            self.room.trim()

    def _make_room(self, pages: int, urgent: bool) -> bool:
        """Evict until this many pages and a slot are free, if that can be reached."""
        pool, victims = self.room.pool, self.room.victims(urgent=urgent)
        if not self._has_slot() and all(owner is not self for _, owner in victims):
            return False
        if pages > pool.free + sum(len(entry.pages) for entry, _ in victims):
            return False
        for entry, owner in victims:
            enough = pages <= pool.free
            if enough and self._has_slot():
                break
            if not enough or owner is self:  # no other kind has slots
                owner.evict(entry)
        return True

    def evict(self, entry: Entry[P]) -> None:
        """Free the pages of something resident that is not pinned."""
        self.room.wake(entry)
        for page in entry.pages:
            self.room.pool.give(page)
        self._leaving(entry)
        entry.pages, entry.slot = [], -1
        self.resident.discard(entry.key)


def _done(read: Callable[[], P]) -> Future[P]:
    """Read now, and return the result or the error as a future."""
    future: Future[P] = Future()
    try:
        future.set_result(read())
    except Exception as error:  # noqa: BLE001 - whatever it is, it is this one's
        future.set_exception(error)
    return future
