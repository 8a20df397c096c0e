"""Adapters and prefixes on a device: their copies run on a CUDA stream of their own, beside steps.

All requests about a context read its prefix's pages, before their own; of a last page that is not
full each gets a copy, in which its own tokens follow.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from valora_serve.memory.block_manager import Owner, PagePool
from valora_serve.memory.residency import Entry, MemoryBudget, P, Residency
from valora_serve.memory.unified import PackedAdapter, PackedPrefix, UnifiedMemory


class DeviceResidency(Residency[P]):
    """Things of one kind, by key, in pages of a device."""

    def __init__(
        self, memory: UnifiedMemory, budget: MemoryBudget, slots: int | None = None
    ) -> None:
        cuda = memory.device.type == "cuda"
        super().__init__(budget, slots=slots, background=cuda)
        self._memory = memory
        self._stream = torch.cuda.Stream(memory.device) if cuda else None

    def _write(self, entry: Entry[P]) -> None:
        raise NotImplementedError

    def copy(self, entry: Entry[P]) -> torch.cuda.Event | None:
        """Copy an entry to its pages; return what is recorded behind the copy on a GPU."""
        if self._stream is None:
            self._write(entry)
            return None
        # Steps that were launched may still read what the pages held before.
        self._stream.wait_stream(torch.cuda.current_stream(self._memory.device))
        with torch.cuda.stream(self._stream):
            self._write(entry)
            copied = torch.cuda.Event()
            copied.record()
        return copied


class AdapterMemory(DeviceResidency[PackedAdapter]):
    """The adapters of an engine, by key."""

    kind = "adapter"
    owner = Owner.ADAPTER

    def __init__(
        self, memory: UnifiedMemory, pool: PagePool, *, host_bytes: int | None = None
    ) -> None:
        super().__init__(memory, MemoryBudget(pool, host_bytes), memory.slots)
        # [slots] int32, rank of the adapter in each slot, 0 for an empty slot.
        self.ranks: NDArray[np.int32] = np.zeros(memory.slots, np.int32)
        # [slots] float32, scaling of the adapter in each slot.
        self.scalings: NDArray[np.float32] = np.zeros(memory.slots, np.float32)
        # Adapters that must not be merged into the base weights, each with the reason.
        self.unmergeable: dict[str, str] = {}
        # Those of them that no request may use until they are loaded again.
        self.quarantined: dict[str, str] = {}
        # Keys of the adapters that were merged once, with finite weights.
        self.proven: set[str] = set()

    def add(
        self,
        key: str,
        packed: PackedAdapter,
        reload: Callable[[], PackedAdapter] | None = None,
        *,
        unmergeable: str | None = None,
    ) -> None:
        """Add an adapter, out of quarantine; `unmergeable` says why it must not be merged."""
        self._clear(key)
        if unmergeable is not None:
            self.unmergeable[key] = unmergeable
        super().add(key, packed, reload)

    def remove(self, key: str) -> None:
        """Forget an adapter and what was found out about it; see `Residency.remove`."""
        super().remove(key)
        self._clear(key)

    def _clear(self, key: str) -> None:
        self.unmergeable.pop(key, None)
        self.quarantined.pop(key, None)
        self.proven.discard(key)

    def evict(self, entry: Entry[PackedAdapter]) -> None:
        """Free the pages and the slot of a resident adapter."""
        self.ranks[entry.slot] = self.scalings[entry.slot] = 0
        super().evict(entry)

    def _write(self, entry: Entry[PackedAdapter]) -> None:
        assert entry.packed is not None
        self._memory.write(entry.packed, entry.pages, entry.slot)
        self.ranks[entry.slot] = entry.packed.rank
        self.scalings[entry.slot] = entry.packed.scaling


class PrefixMemory(DeviceResidency[PackedPrefix]):
    """The prefixes of an engine's contexts, by key."""

    kind = "context"
    owner = Owner.CONTEXT

    def copy_rest(self, key: str, page: int) -> None:
        """Copy the last page of a resident prefix into a request's page, on the current stream."""
        self._memory.copy_page(self.held(key)[-1], page)

    def _write(self, entry: Entry[PackedPrefix]) -> None:
        assert entry.packed is not None
        self._memory.write_pages(entry.packed, entry.pages)
