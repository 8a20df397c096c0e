"""Adapters in host memory and on the device: loading, pinning, eviction (S-LoRA §5.1, §5.2).

Adapters are packed in host memory and copied into pages of the unified memory on a CUDA stream of
their own. When pages or slots are short, the least recently used adapters are evicted; pinned
adapters never are. For the engine's thread only.
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


class AdapterState(StrEnum):
    """Place of an adapter's weights: file, host memory or device."""

    FILE = "file"
    """In its file only: it was dropped from host memory."""
    HOST = "host"
    """In host memory, not on the device."""
    LOADING = "loading"
    """Being read from its file or copied to the device."""
    RESIDENT = "resident"
    """On the device."""


@dataclass(slots=True)
class _Entry:
    """An adapter.

    Attributes:
        pages_needed: Pages that it takes on the device.
        host_bytes: Bytes that it takes in host memory.
        packed: The adapter in host memory, None if it was dropped from there.
        reload: Reads and packs its file again, None if it has no file.
        content: Content hash, which the file must still have when it is read again.
        pages: Its pages while it is on the device, or being copied there.
        slot: Its slot for the same time, -1 otherwise.
        users: Number of pins.
        reading: Result of `reload`, while its file is read.
        urgent: Whether it may evict wanted adapters once its file is read.
        copied: Event after its copy to the device, while that runs.
        removed: Whether to forget it as soon as it has loaded.
    """

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
    """The adapters of an engine, by key.

    Args:
        memory: Pages and address tables of adapters on the device.
        pool: Free and used pages of `memory`.
        host_bytes: Most bytes of host memory for adapters, None for no limit. Beyond it the least
            recently loaded adapters that have a file are dropped, and read again when needed.

    Attributes:
        ranks: [slots] int32, rank of the adapter in each slot, 0 for an empty slot.
        scalings: [slots] float32, scaling of the adapter in each slot.
        resident: Keys of the adapters on the device; updated in place, do not change it.
        loading: Keys of the adapters that are being loaded; updated in place, do not change it.
        wanted: Keys of the adapters that unfinished requests use; they are evicted last.
        unmergeable: Adapters that must not be merged into the base weights, each with the reason.
        quarantined: Those of them that requests must not use either; loading them again lifts that.
        proven: Keys of the adapters that were merged once, with finite weights.
        loads: How often an adapter was copied to the device.
    """

    def __init__(
        self, memory: UnifiedMemory, pool: PagePool, *, host_bytes: int | None = None
    ) -> None:
        self.ranks: NDArray[np.int32] = np.zeros(memory.slots, np.int32)
        self.scalings: NDArray[np.float32] = np.zeros(memory.slots, np.float32)
        self.resident: set[str] = set()
        self.loading: set[str] = set()
        self.wanted: Collection[str] = ()
        self.unmergeable: dict[str, str] = {}
        self.quarantined: dict[str, str] = {}
        self.proven: set[str] = set()
        self.loads = 0
        self._memory, self._pool = memory, pool
        self._host_bytes = host_bytes
        self._held_bytes = 0
        self._entries: dict[str, _Entry] = {}
        self._on_host: OrderedDict[str, None] = OrderedDict()  # least recently loaded first
        # Resident and not pinned, least recently used first.
        self._idle: OrderedDict[str, None] = OrderedDict()
        self._idle_pages = 0
        self._free_slots = list(range(memory.slots - 1, -1, -1))
        self._cuda = memory.device.type == "cuda"
        self._stream = torch.cuda.Stream(memory.device) if self._cuda else None
        self._reader = ThreadPoolExecutor(1, "adapters") if self._cuda else None
        pool.on_short = self._give_back

    def __contains__(self, key: object) -> bool:
        return key in self._entries and not self._entries[str(key)].removed

    def __len__(self) -> int:
        """Number of known adapters."""
        return sum(not entry.removed for entry in self._entries.values())

    @property
    def idle_pages(self) -> int:
        """Pages of resident adapters that are not pinned, which eviction would free."""
        return self._idle_pages

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory that adapters take now."""
        return self._held_bytes

    def add(
        self,
        key: str,
        packed: PackedAdapter,
        reload: Callable[[], PackedAdapter] | None = None,
        *,
        unmergeable: str | None = None,
    ) -> None:
        """Add an adapter in host memory; a known one stays where it is, out of quarantine.

        Args:
            key: Key of the adapter.
            packed: The adapter, from `UnifiedMemory.pack`.
            reload: Reads and packs the adapter's file again, after it was dropped from host
                memory; called in another thread. None to never drop it.
            unmergeable: Why it must not be merged into the base weights, None if it may be.
        """
        self._absolve(key)
        if unmergeable is not None:
            self.unmergeable[key] = unmergeable
        if key in self._entries:
            entry = self._entries[key]
            # The former folder may be gone when the file must be read again.
            entry.removed, entry.reload = False, reload or entry.reload
            return
        self._entries[key] = _Entry(packed.pages, packed.bytes, packed, reload, packed.content)
        self._keep(key)

    def remove(self, key: str) -> None:
        """Forget an adapter and free its memory; if it is loading, as soon as it has loaded.

        Raises:
            BusyError: The adapter is pinned.
            KeyError: No adapter has this key.
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
        self._absolve(key)

    def bar(self, key: str, reason: str) -> None:
        """Keep an adapter from being merged from now on."""
        self.unmergeable[key] = reason

    def quarantine(self, key: str, reason: str) -> None:
        """Keep an adapter from being merged and used from now on."""
        self.unmergeable[key] = self.quarantined[key] = reason

    def _absolve(self, key: str) -> None:
        """Forget what was found out about an adapter."""
        self.unmergeable.pop(key, None)
        self.quarantined.pop(key, None)
        self.proven.discard(key)

    def state(self, key: str) -> AdapterState:
        """Return where an adapter is."""
        if key in self.resident:
            return AdapterState.RESIDENT
        if key in self.loading:
            return AdapterState.LOADING
        return AdapterState.FILE if self._entries[key].packed is None else AdapterState.HOST

    def pages(self, key: str) -> int:
        """Return the number of pages that an adapter takes on the device."""
        return self._entries[key].pages_needed

    def slot(self, key: str) -> int:
        """Return the slot of a resident adapter."""
        return self._entries[key].slot

    def load(self, key: str, *, urgent: bool = True) -> bool:
        """Start loading an adapter to the device, without waiting for it.

        Args:
            key: Key of the adapter.
            urgent: Whether wanted adapters may be evicted for it; a prefetch must not.

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
                raise AssertionError(f"adapter {key} was dropped from the host and has no file")
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
        """Return whether an adapter is on the device, without waiting for it.

        Raises:
            AdapterError: Its file could not be read again; `load` may be tried again.
        """
        if key in self.loading:
            self._advance(key)
        return key in self.resident

    def poll(self) -> dict[str, ServeError]:
        """Update which adapters have finished loading.

        Returns:
            The errors of adapters that could not be loaded, by key.
        """
        failed: dict[str, ServeError] = {}
        for key in tuple(self.loading):
            try:
                self._advance(key)
            except ServeError as error:
                failed[key] = error
        return failed

    def pin(self, key: str) -> None:
        """Protect a resident adapter from eviction until it is unpinned as often.

        Raises:
            ValueError: The adapter is not resident.
        """
        entry = self._entries[key]
        if not entry.resident:
            raise ValueError(f"adapter {key}: expected a resident one, got {self.state(key)}")
        if not entry.users:
            del self._idle[key]
            self._idle_pages -= len(entry.pages)
        entry.users += 1

    def unpin(self, key: str) -> None:
        """Release one pin of an adapter."""
        entry = self._entries[key]
        if not entry.users:
            raise ValueError(f"adapter {key}: expected a pinned one")
        entry.users -= 1
        if not entry.users:
            self._idle[key] = None
            self._idle_pages += len(entry.pages)

    def close(self) -> None:
        """Stop reading files; adapters in memory stay."""
        if self._reader is not None:
            self._reader.shutdown(wait=True, cancel_futures=True)

    def _advance(self, key: str) -> None:
        """Check whether a loading adapter has been read or copied, and go on with it."""
        entry = self._entries[key]
        if entry.reading is not None:
            if not entry.reading.done():
                return
            reading, entry.reading = entry.reading, None
            self.loading.discard(key)
            if entry.removed:
                del self._entries[key]
                self._absolve(key)
                return
            entry.packed = self._read(key, reading)
            self._keep(key)
            self._place(key, entry.urgent)
            return
        if (
            entry.copied is not None
            and entry.copied.query()
            and self._memory.has_arrived(entry.slot)
        ):
            self._arrived(key)

    def _read(self, key: str, reading: Future[PackedAdapter]) -> PackedAdapter:
        """Return an adapter that was read again, if it still has the same content."""
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
        """Take pages and a slot for an adapter in host memory, and start copying it.

        Returns:
            False if there is no room for it now.
        """
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
        # Steps that were launched may still read what the pages held before.
        self._stream.wait_stream(torch.cuda.current_stream(self._memory.device))
        with torch.cuda.stream(self._stream):
            self._memory.write(entry.packed, pages, entry.slot)
            entry.copied = torch.cuda.Event()
            entry.copied.record()
        return True

    def _arrived(self, key: str) -> None:
        """Make an adapter resident whose copy is complete."""
        entry = self._entries[key]
        assert entry.packed is not None
        entry.copied = None
        self.loading.discard(key)
        self.resident.add(key)
        self.loads += 1
        self.ranks[entry.slot] = entry.packed.rank
        self.scalings[entry.slot] = entry.packed.scaling
        self._idle[key] = None
        self._idle_pages += len(entry.pages)
        if entry.removed:
            self.remove(key)
        else:
            self._trim_host()

    def _make_room(self, pages: int, urgent: bool) -> bool:
        """Evict adapters until this many pages and a slot are free, if that can be reached."""
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
        """Return the adapters that may be evicted, in this order."""
        unwanted = [key for key in self._idle if key not in self.wanted]
        return unwanted + [key for key in self._idle if key in self.wanted] if urgent else unwanted

    def _give_back(self, lacking: int) -> None:
        """Evict adapters to free this many pages; none if that does not free enough."""
        if lacking > self._idle_pages:
            return
        for key in self._victims(urgent=True):
            if lacking <= 0:
                return
            lacking -= len(self._entries[key].pages)
            self._evict(key)

    def _evict(self, key: str) -> None:
        """Free the pages and the slot of a resident adapter that is not pinned."""
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
        """Note that an adapter is in host memory."""
        self._on_host[key] = None
        self._held_bytes += self._entries[key].host_bytes
        self._trim_host(but=key)

    def _trim_host(self, but: str | None = None) -> None:
        """Drop adapters from host memory, least recently loaded first, down to its limit."""
        if self._host_bytes is None:
            return
        for key in tuple(self._on_host):
            if self._held_bytes <= self._host_bytes:
                return
            if key == but or key in self.loading or self._entries[key].reload is None:
                continue
            self._drop(key)

    def _drop(self, key: str) -> None:
        """Drop an adapter from host memory."""
        entry = self._entries[key]
        if entry.packed is not None:
            entry.packed = None
            del self._on_host[key]
            self._held_bytes -= entry.host_bytes


def _done(read: Callable[[], PackedAdapter]) -> Future[PackedAdapter]:
    """Read now, and return the result or the error as a future."""
    future: Future[PackedAdapter] = Future()
    try:
        future.set_result(read())
    except Exception as error:  # noqa: BLE001 - whatever it is, it is this adapter's
        future.set_exception(error)
    return future
