"""Adapters in host memory and on the device (S-LoRA §5.1, §5.2).

`residency` loads and evicts them; here is what they have besides pages: a slot each, whose rank and
scaling the kernels read, and what was found out about merging them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from valora_serve.memory.block_manager import Owner
from valora_serve.memory.device_residency import DeviceResidency
from valora_serve.memory.residency import Room

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from valora_serve.memory.block_manager import PagePool
    from valora_serve.memory.residency import Entry
    from valora_serve.memory.unified import PackedAdapter, UnifiedMemory


class AdapterMemory(DeviceResidency["PackedAdapter"]):
    """The adapters of an engine, by key.

    Args:
        memory: Pages and address tables of adapters on the device.
        pool: Free and used pages of `memory`.
        host_bytes: Most bytes of host memory, see `Room`.

    Attributes:
        ranks: [slots] int32, rank of the adapter in each slot, 0 for an empty slot.
        scalings: [slots] float32, scaling of the adapter in each slot.
        unmergeable: Adapters that must not be merged into the base weights, each with the reason.
        quarantined: Those of them that requests must not use either; loading them again lifts that.
        proven: Keys of the adapters that were merged once, with finite weights.
    """

    kind = "adapter"
    owner = Owner.ADAPTER

    def __init__(
        self, memory: UnifiedMemory, pool: PagePool, *, host_bytes: int | None = None
    ) -> None:
        super().__init__(Room(pool, host_bytes), memory.device)
        self.ranks: NDArray[np.int32] = np.zeros(memory.slots, np.int32)
        self.scalings: NDArray[np.float32] = np.zeros(memory.slots, np.float32)
        self.unmergeable: dict[str, str] = {}
        self.quarantined: dict[str, str] = {}
        self.proven: set[str] = set()
        self._memory = memory
        self._free_slots = list(range(memory.slots - 1, -1, -1))

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
            reload: Reads and packs the adapter's file again, see `Residency.add`.
            unmergeable: Why it must not be merged into the base weights, None if it may be.
        """
        self._forgotten(key)
        if unmergeable is not None:
            self.unmergeable[key] = unmergeable
        super().add(key, packed, reload)

    def bar(self, key: str, reason: str) -> None:
        """Keep an adapter from being merged from now on."""
        self.unmergeable[key] = reason

    def quarantine(self, key: str, reason: str) -> None:
        """Keep an adapter from being merged and used from now on."""
        self.unmergeable[key] = self.quarantined[key] = reason

    def slot(self, key: str) -> int:
        """Return the slot of a resident adapter."""
        return self._entries[key].slot

    def _forgotten(self, key: str) -> None:
        self.unmergeable.pop(key, None)
        self.quarantined.pop(key, None)
        self.proven.discard(key)

    def _write(self, entry: Entry[PackedAdapter]) -> None:
        assert entry.packed is not None
        self._memory.write(entry.packed, entry.pages, entry.slot)

    def _has_slot(self) -> bool:
        return bool(self._free_slots)

    def _placing(self, entry: Entry[PackedAdapter]) -> None:
        entry.slot = self._free_slots.pop()

    def _placed(self, entry: Entry[PackedAdapter]) -> None:
        assert entry.packed is not None
        self.ranks[entry.slot] = entry.packed.rank
        self.scalings[entry.slot] = entry.packed.scaling

    def _leaving(self, entry: Entry[PackedAdapter]) -> None:
        self.ranks[entry.slot] = 0
        self.scalings[entry.slot] = 0.0
        self._free_slots.append(entry.slot)
