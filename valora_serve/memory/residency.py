"""What lies in host memory and, while it is used, in pages: loading, pinning, eviction (S-LoRA §5).

When pages are short, the least recently used adapters and prefixes are evicted; pinned ones never.
Torch-free and for one thread: engine and simulator drive it, and a subclass makes the copies.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from valora_serve.errors import AdapterError, BusyError, ServeError
from valora_serve.memory.block_manager import Owner, PagePool


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Packed:
    """Something in host memory, laid out as in its pages: content hash, and what it takes."""

    content: str
    pages: int
    bytes: int


P = TypeVar("P", bound=Packed)


@dataclass(slots=True, eq=False)
class Entry(Generic[P]):
    """An adapter or a prefix, and where it is."""

    key: str
    residency: Residency[P]
    page_count: int
    host_bytes: int
    content: str  # which its file must still have when it is read again
    packed: P | None  # None: it was dropped from host memory
    reload: Callable[[], P] | None  # reads and packs its file again
    pages: list[int] = field(default_factory=list)  # on the device, or being copied there
    slot: int = -1  # for the same time
    users: int = 0  # number of pins
    reading: Future[P] | None = None  # result of `reload`, while its file is read
    urgent: bool = False  # whether it may evict wanted ones once its file is read
    copied: Any = None  # the CUDA event behind its copy to the device, while that runs

    @property
    def wanted(self) -> bool:
        """Whether unfinished requests use it."""
        return self.key in self.residency.wanted


class MemoryBudget:
    """Pages and at most `host_bytes` of host memory, which adapters and prefixes share.

    Beyond it the least recently loaded ones with a file are dropped, and read again when needed.
    `held_bytes` are what host memory takes.
    """

    def __init__(self, pool: PagePool, host_bytes: int | None = None) -> None:
        self.pool = pool
        self.held_bytes = 0
        self._host_bytes = math.inf if host_bytes is None else host_bytes
        # Resident ones that are not pinned, the least recently used first.
        self.idle: dict[Entry[Any], None] = {}
        self._on_host: OrderedDict[Entry[Any], None] = OrderedDict()  # least recently loaded first
        pool.on_short = lambda lacking: self.make_room(pool.free + lacking)

    @property
    def idle_pages(self) -> int:
        """Number of pages that eviction would free."""
        return sum(len(entry.pages) for entry in self.idle)

    def make_room(
        self, pages: int, *, urgent: bool = True, slot_of: Residency[Any] | None = None
    ) -> bool:
        """Evict until this many pages, and a slot, are free; nothing if that cannot be reached.

        What requests want is evicted last, and only if it is urgent.
        """
        pool, idle = self.pool, [one for one in self.idle if urgent or not one.wanted]
        victims = sorted(idle, key=lambda entry: entry.wanted)
        if slot_of is not None and all(entry.residency is not slot_of for entry in victims):
            return False
        if pages > pool.free + sum(len(entry.pages) for entry in victims):
            return False
        for entry in victims:
            if entry.residency is slot_of:
                slot_of = None
            elif pages <= pool.free:
                continue
            entry.residency.evict(entry)
        return True

    def hold(self, entry: Entry[Any]) -> None:
        """Note that an entry is in host memory."""
        self._on_host[entry] = None
        entry.residency.dropped.discard(entry.key)
        self.held_bytes += entry.host_bytes
        self.trim(but=entry)

    def mark_loaded(self, entry: Entry[Any]) -> None:
        """Note that an entry is copied to the device, by which host memory is freed in order."""
        self._on_host.move_to_end(entry)

    def drop(self, entry: Entry[Any]) -> None:
        """Free an entry's host memory."""
        if entry.packed is not None:
            entry.packed = None
            del self._on_host[entry]
            entry.residency.dropped.add(entry.key)
            self.held_bytes -= entry.host_bytes

    def trim(self, but: Entry[Any] | None = None) -> None:
        """Drop entries from host memory, least recently loaded first, down to its limit."""
        for entry in tuple(self._on_host):
            if self.held_bytes <= self._host_bytes:
                return
            if entry is not but and entry.reload and entry.key not in entry.residency.loading:
                self.drop(entry)


class Residency(Generic[P]):
    """Things of one kind, by key; at most `slots` on the device, each with a slot of its own.

    In the `background`, another thread reads files again.
    """

    kind: str  # what it holds, for messages
    owner: Owner  # use of its pages

    def __init__(
        self, budget: MemoryBudget, *, slots: int | None = None, background: bool = False
    ) -> None:
        self.budget = budget
        # Keys of those on the device; as the next two, updated in place: do not change it.
        self.resident: set[str] = set()
        self.loading: set[str] = set()  # keys of those that are being loaded
        self.dropped: set[str] = set()  # keys of those that are not in host memory
        # Unfinished requests by the key of what they use; that is evicted last.
        self.wanted: Counter[str] = Counter()
        self.loads = 0  # how often one was copied to the device
        self._entries: dict[str, Entry[P]] = {}
        self._removed: set[str] = set()  # are forgotten as soon as they have loaded
        self._free_slots = None if slots is None else list(range(slots - 1, -1, -1))
        self._reader = ThreadPoolExecutor(1, self.kind) if background else None

    def __contains__(self, key: object) -> bool:
        return key in self._entries and key not in self._removed

    def __len__(self) -> int:
        return len(self._entries) - len(self._removed)

    def __getitem__(self, key: str) -> Entry[P]:
        return self._entries[key]

    def copy(self, entry: Entry[P]) -> Any:
        """Copy an entry to its pages; return an event behind the copy, None if it is done."""
        raise NotImplementedError

    def add(self, key: str, packed: P, reload: Callable[[], P] | None = None) -> None:
        """Add something in host memory, from which it may be dropped if `reload` reads it again."""
        entry = self._entries.get(key)
        if entry is not None:
            # The former folder may be gone when the file must be read again.
            self._removed.discard(key)
            entry.reload = reload or entry.reload
            return
        entry = Entry(key, self, packed.pages, packed.bytes, packed.content, packed, reload)
        self._entries[key] = entry
        self.budget.hold(entry)

    def remove(self, key: str) -> None:
        """Forget something that is not pinned; if it is loading, as soon as it has loaded."""
        entry = self._entries[key]
        if entry.users:
            raise BusyError(f"{self.kind} {key} is in use: wait for its requests to end")
        if key in self.loading:
            self._removed.add(key)
            return
        if key in self.resident:
            self.evict(entry)
        self.budget.drop(entry)
        self._forget(key)

    def _forget(self, key: str) -> None:
        del self._entries[key]
        self.dropped.discard(key)
        self._removed.discard(key)

    def load(self, key: str, *, urgent: bool = True) -> bool:
        """Start loading something to the device; False without room, of wanted ones if `urgent`.

        An `AdapterError` says that its file is unreadable; on a GPU `ready` and `poll` do later.
        """
        entry = self._entries[key]
        if key in self.resident or key in self.loading:
            return True
        if entry.packed is not None:
            return self._place(entry, urgent)
        assert entry.reload is not None
        if self._reader is None:
            return self._take_in(entry, entry.reload, urgent)
        entry.urgent = urgent
        entry.reading = self._reader.submit(entry.reload)
        self.loading.add(key)
        return True

    def ready(self, key: str) -> bool:
        """Return whether something is on the device, without waiting; raises as `load`."""
        if key in self.loading:
            self._advance(key)
        return key in self.resident

    def poll(self) -> dict[str, ServeError]:
        """Update what has finished loading; return the errors of what could not be, by key."""
        failed: dict[str, ServeError] = {}
        for key in sorted(self.loading):  # not in the order of a set, which differs by process
            try:
                self._advance(key)
            except ServeError as error:
                failed[key] = error
        return failed

    def unwant(self, key: str) -> None:
        """Note that a request which used something has ended."""
        self.wanted[key] -= 1
        if not self.wanted[key]:
            del self.wanted[key]

    def pin(self, key: str) -> None:
        """Protect something on the device from eviction until it is unpinned as often."""
        entry = self._entries[key]
        assert key in self.resident
        if not entry.users:
            del self.budget.idle[entry]
        entry.users += 1

    def unpin(self, key: str) -> None:
        """Release one pin."""
        entry = self._entries[key]
        assert entry.users
        entry.users -= 1
        if not entry.users:
            self.budget.idle[entry] = None

    def close(self) -> None:
        """Stop reading files; what is in memory stays."""
        if self._reader is not None:
            self._reader.shutdown(wait=True, cancel_futures=True)

    def evict(self, entry: Entry[P]) -> None:
        """Free the pages of something resident that is not pinned."""
        del self.budget.idle[entry]
        for page in entry.pages:
            self.budget.pool.give(page)
        if self._free_slots is not None:
            self._free_slots.append(entry.slot)
        entry.pages, entry.slot = [], -1
        self.resident.discard(entry.key)

    def _advance(self, key: str) -> None:
        """Check whether something has been read or copied, and go on with it."""
        entry = self._entries[key]
        if entry.reading is not None:
            if entry.reading.done():
                reading, entry.reading = entry.reading, None
                self.loading.discard(key)
                if key in self._removed:
                    self._forget(key)
                else:
                    self._take_in(entry, reading.result, entry.urgent)
        elif entry.copied is not None and entry.copied.query():
            self.arrived(entry)

    def _take_in(self, entry: Entry[P], read: Callable[[], P], urgent: bool) -> bool:
        """Hold what was read again, if it still has the same content, and start copying it."""
        try:
            packed = read()
        except ServeError:
            raise
        except Exception as error:
            raise AdapterError(f"{self.kind} {entry.key} cannot be read again: {error}") from error
        if packed.content != entry.content:
            raise AdapterError(
                f"the file of {self.kind} {entry.key} was changed since it was loaded: load it "
                "again"
            )
        entry.packed = packed
        self.budget.hold(entry)
        return self._place(entry, urgent)

    def _place(self, entry: Entry[P], urgent: bool) -> bool:
        """Take pages for something in host memory and start copying it; False without room."""
        full = self if self._free_slots == [] else None
        if not self.budget.make_room(entry.page_count, urgent=urgent, slot_of=full):
            return False
        pages = self.budget.pool.take(entry.page_count, self.owner)
        assert pages is not None
        entry.pages = pages
        if self._free_slots is not None:
            entry.slot = self._free_slots.pop()
        self.loading.add(entry.key)
        self.budget.mark_loaded(entry)
        entry.copied = self.copy(entry)
        if entry.copied is None:
            self.arrived(entry)
        return True

    def arrived(self, entry: Entry[P]) -> None:
        """Note that an entry is on the device."""
        entry.copied = None
        self.loading.discard(entry.key)
        self.resident.add(entry.key)
        self.loads += 1
        self.budget.idle[entry] = None
        if entry.key in self._removed:
            self.remove(entry.key)
        else:
            self.budget.trim()
