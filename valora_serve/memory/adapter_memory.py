"""Which adapters are where: file, host, on their way, on the device (S-LoRA §5.1, §5.2).

For the engine's thread. Adapters wait in host memory and are copied into pages of the unified
memory on a stream of their own; the least recently used make room, never one that is in use.
"""

from __future__ import annotations

from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

import numpy as np
import torch

from valora_serve.errors import AdapterError, BusyError, ServeError
from valora_serve.memory.block_manager import Owner

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from numpy.typing import NDArray

    from valora_serve.memory.block_manager import PagePool
    from valora_serve.memory.unified import PackedAdapter, UnifiedMemory


class State(StrEnum):
    """Where an adapter is."""

    FILE = "file"
    HOST = "host"
    LOADING = "loading"
    RESIDENT = "resident"


@dataclass(slots=True)
class _Entry:
    pages_needed: int
    host_bytes: int
    packed: PackedAdapter | None
    reload: Callable[[], PackedAdapter] | None
    content: str
    pages: list[int] = field(default_factory=list)
    slot: int = -1
    users: int = 0
    reading: Future[PackedAdapter] | None = None
    urgent: bool = False
    copied: torch.cuda.Event | None = None
    removed: bool = False

    @property
    def resident(self) -> bool:
        return self.slot >= 0 and self.copied is None


class AdapterMemory:
    """Adapters of an engine, by a key of the caller's (best the content hash).

    Args:
        memory: Pages and tables.
        pool: Whose pages they are.
        host_bytes: Host memory for adapters that have a file to be read again; None for any. The
            least recently loaded are dropped from the host.

    Attributes:
        ranks: [slots] int32, rank of the adapter in each slot, 0 for none; for `LoraBatch.update`.
        scalings: [slots] float32, likewise.
        resident: Adapters on the device; a live set, only read it.
        loading: Adapters on their way there; likewise.
        wanted: Adapters that requests name; they are evicted only after all others.
    """

    def __init__(
        self, memory: UnifiedMemory, pool: PagePool, *, host_bytes: int | None = None
    ) -> None:
        self.ranks: NDArray[np.int32] = np.zeros(memory.slots, np.int32)
        self.scalings: NDArray[np.float32] = np.zeros(memory.slots, np.float32)
        self.resident: set[str] = set()
        self.loading: set[str] = set()
        self.wanted: Collection[str] = ()
        self._memory, self._pool = memory, pool
        self._host_bytes = host_bytes
        self._held_bytes = 0
        self._entries: dict[str, _Entry] = {}
        self._on_host: OrderedDict[str, None] = OrderedDict()  # by last load
        self._idle: OrderedDict[str, None] = OrderedDict()  # resident without users, by last use
        self._idle_pages = 0
        self._free_slots = list(range(memory.slots - 1, -1, -1))
        self._cuda = memory.device.type == "cuda"
        self._stream = torch.cuda.Stream(memory.device) if self._cuda else None
        self._reader = ThreadPoolExecutor(1, "adapters") if self._cuda else None
        pool.on_short = self._give_back

    def __contains__(self, key: object) -> bool:
        return key in self._entries and not self._entries[str(key)].removed

    def __len__(self) -> int:
        """Number of adapters, wherever they are."""
        return sum(not entry.removed for entry in self._entries.values())

    @property
    def idle_pages(self) -> int:
        """Pages that could be had by evicting every resident adapter that is not in use."""
        return self._idle_pages

    @property
    def host_bytes(self) -> int:
        """Host memory that adapters take now."""
        return self._held_bytes

    def add(
        self, key: str, packed: PackedAdapter, reload: Callable[[], PackedAdapter] | None = None
    ) -> None:
        """Make an adapter known; one that is known already stays where it is.

        Args:
            key: Its name here.
            packed: From `UnifiedMemory.pack`.
            reload: Reads and packs it again, in another thread, after the host's memory of it was
                dropped; None to keep it there.
        """
        if key in self._entries:
            entry = self._entries[key]
            # The folder of before may be gone by the time that it must be read again.
            entry.removed, entry.reload = False, reload or entry.reload
            return
        self._entries[key] = _Entry(packed.pages, packed.bytes, packed, reload, packed.content)
        self._keep(key)

    def remove(self, key: str) -> None:
        """Forget an adapter and free what it takes; one that is loading goes when it has loaded.

        Raises:
            BusyError: It is in use.
            KeyError: There is none.
        """
        entry = self._entries[key]
        if entry.users:
            raise BusyError(f"adapter {key} is in use: wait for its requests to end")
        if key in self.loading:
            entry.removed = True
            return
        if entry.resident:
            self._evict(key)
        self._drop(key)
        del self._entries[key]

    def state(self, key: str) -> State:
        """Where an adapter is."""
        if key in self.resident:
            return State.RESIDENT
        if key in self.loading:
            return State.LOADING
        return State.FILE if self._entries[key].packed is None else State.HOST

    def pages(self, key: str) -> int:
        """Pages that an adapter takes on the device."""
        return self._entries[key].pages_needed

    def slot(self, key: str) -> int:
        """Slot of a resident adapter."""
        return self._entries[key].slot

    def load(self, key: str, *, urgent: bool = True) -> bool:
        """Have an adapter come to the device; nothing waits for it.

        Args:
            key: Which one.
            urgent: May evict adapters that requests name; a prefetch may not.

        Returns:
            Whether it is there or on its way; False if there is no room for it now.

        Raises:
            AdapterError: It could not be read again; on a GPU `ready` and `poll` tell, as the file
                is read in another thread.
        """
        entry = self._entries[key]
        if key in self.resident or key in self.loading:
            return True
        if entry.packed is None:
            if entry.reload is None:
                raise AssertionError(f"adapter {key}: dropped from the host without a way back")
            entry.urgent = urgent
            self.loading.add(key)
            if self._reader is not None:
                entry.reading = self._reader.submit(entry.reload)
            else:
                entry.reading = _done(entry.reload)
                self._advance(key)
            return key in self.resident or key in self.loading
        return self._place(key, urgent)

    def ready(self, key: str) -> bool:
        """Whether an adapter is on the device; does not wait.

        Raises:
            AdapterError: It could not be read again; it is on its file again, and may be tried
                again.
        """
        if key in self.loading:
            self._advance(key)
        return key in self.resident

    def poll(self) -> dict[str, ServeError]:
        """See what has arrived.

        Returns:
            Why adapters that should have come did not.
        """
        failed: dict[str, ServeError] = {}
        for key in tuple(self.loading):
            try:
                self._advance(key)
            except ServeError as error:
                failed[key] = error
        return failed

    def pin(self, key: str) -> None:
        """One more user of a resident adapter: it stays.

        Raises:
            ValueError: It is not resident.
        """
        entry = self._entries[key]
        if not entry.resident:
            raise ValueError(f"adapter {key}: expected a resident one, got {self.state(key)}")
        if not entry.users:
            del self._idle[key]
            self._idle_pages -= len(entry.pages)
        entry.users += 1

    def unpin(self, key: str) -> None:
        """One user less."""
        entry = self._entries[key]
        if not entry.users:
            raise ValueError(f"adapter {key}: expected one that is in use")
        entry.users -= 1
        if not entry.users:
            self._idle[key] = None
            self._idle_pages += len(entry.pages)

    def close(self) -> None:
        """Stop reading files; the adapters that are there stay."""
        if self._reader is not None:
            self._reader.shutdown(wait=True, cancel_futures=True)

    def _advance(self, key: str) -> None:
        """Take an adapter on its way as far as it is."""
        entry = self._entries[key]
        if entry.reading is not None:
            if not entry.reading.done():
                return
            reading, entry.reading = entry.reading, None
            self.loading.discard(key)
            if entry.removed:
                del self._entries[key]
                return
            entry.packed = self._read(key, reading)
            self._keep(key)
            self._place(key, entry.urgent)
            return
        if entry.copied is not None and entry.copied.query():
            self._arrived(key)

    def _read(self, key: str, reading: Future[PackedAdapter]) -> PackedAdapter:
        entry = self._entries[key]
        try:
            packed = reading.result()
        except ServeError:
            raise
        except Exception as error:
            raise AdapterError(f"adapter {key} cannot be read again: {error}") from error
        if packed.content != entry.content:
            raise AdapterError(
                f"the file of adapter {key} was changed since it was loaded: load it again"
            )
        return packed

    def _place(self, key: str, urgent: bool) -> bool:
        """Give a packed adapter pages and a slot, and start the copy."""
        entry = self._entries[key]
        assert entry.packed is not None
        if not self._make_room(entry.pages_needed, urgent):
            return False
        pages = self._pool.take(entry.pages_needed, Owner.ADAPTER)
        assert pages is not None
        entry.pages, entry.slot = pages, self._free_slots.pop()
        self.loading.add(key)
        self._on_host.move_to_end(key)
        if self._stream is None:
            self._memory.write(entry.packed, pages, entry.slot)
            self._arrived(key)
            return True
        # What is enqueued may still read what the pages held before.
        self._stream.wait_stream(torch.cuda.current_stream(self._memory.device))
        with torch.cuda.stream(self._stream):
            self._memory.write(entry.packed, pages, entry.slot)
            entry.copied = torch.cuda.Event()
            entry.copied.record()
        return True

    def _arrived(self, key: str) -> None:
        entry = self._entries[key]
        assert entry.packed is not None
        entry.copied = None
        self.loading.discard(key)
        self.resident.add(key)
        self.ranks[entry.slot] = entry.packed.rank
        self.scalings[entry.slot] = entry.packed.scaling
        self._idle[key] = None
        self._idle_pages += len(entry.pages)
        if entry.removed:
            self.remove(key)
        else:
            self._trim_host()

    def _make_room(self, pages: int, urgent: bool) -> bool:
        """Evict until so many pages and a slot are free; nothing if that cannot be reached."""
        victims = self._victims(urgent)
        if not self._free_slots and not victims:
            return False
        if pages > self._pool.free + sum(len(self._entries[key].pages) for key in victims):
            return False
        for key in victims:
            if self._free_slots and pages <= self._pool.free:
                break
            self._evict(key)
        return True

    def _victims(self, urgent: bool) -> list[str]:
        """Idle adapters in the order in which they go."""
        unwanted = [key for key in self._idle if key not in self.wanted]
        return unwanted + [key for key in self._idle if key in self.wanted] if urgent else unwanted

    def _give_back(self, lacking: int) -> None:
        """Keys and values need so many pages more; evict if that gives them all."""
        if lacking > self._idle_pages:
            return
        for key in self._victims(urgent=True):
            if lacking <= 0:
                return
            lacking -= len(self._entries[key].pages)
            self._evict(key)

    def _evict(self, key: str) -> None:
        entry = self._entries[key]
        del self._idle[key]
        self._idle_pages -= len(entry.pages)
        for page in entry.pages:
            self._pool.give(page)
        self.ranks[entry.slot] = 0
        self.scalings[entry.slot] = 0.0
        self._free_slots.append(entry.slot)
        entry.pages, entry.slot = [], -1
        self.resident.discard(key)

    def _keep(self, key: str) -> None:
        """An adapter has come to the host."""
        self._on_host[key] = None
        self._held_bytes += self._entries[key].host_bytes
        self._trim_host(but=key)

    def _trim_host(self, but: str | None = None) -> None:
        """Drop the least recently loaded from the host until its bound is kept."""
        if self._host_bytes is None:
            return
        for key in tuple(self._on_host):
            if self._held_bytes <= self._host_bytes:
                return
            if key == but or key in self.loading or self._entries[key].reload is None:
                continue
            self._drop(key)

    def _drop(self, key: str) -> None:
        entry = self._entries[key]
        if entry.packed is not None:
            entry.packed = None
            del self._on_host[key]
            self._held_bytes -= entry.host_bytes


def _done(read: Callable[[], PackedAdapter]) -> Future[PackedAdapter]:
    """The result of reading at once, or its error."""
    future: Future[PackedAdapter] = Future()
    try:
        future.set_result(read())
    except Exception as error:  # noqa: BLE001 - whatever it is, it is this adapter's
        future.set_exception(error)
    return future
