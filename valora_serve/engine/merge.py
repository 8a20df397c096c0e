"""The state of the base weights: pristine, or with one adapter merged into them (VaLoRA §4.4)."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from valora_kernels.metadata import NONE
from valora_serve.types import Mode

if TYPE_CHECKING:
    from valora_serve.memory.adapter_memory import AdapterMemory
    from valora_serve.model.linears import Linears

log = logging.getLogger(__name__)


class MergeState:
    """Owner of the mode and of the merged adapter, which is pinned; only `switch` changes them."""

    def __init__(self, linears: Linears, adapters: AdapterMemory) -> None:
        self.mode = Mode.UNMERGED
        self.adapter: str | None = None
        self.switches = 0
        self._linears, self._adapters = linears, adapters

    @property
    def slot(self) -> int:
        """Slot of the merged adapter, `NONE` while the weights are pristine."""
        return NONE if self.adapter is None else self._adapters.slot(self.adapter)

    def switch(self, mode: Mode, adapter: str | None) -> bool:
        """Merge a resident adapter, or restore the pristine weights; return whether they hold it.

        One that makes weights infinite or NaN is quarantined; the mode is unmerged then.
        """
        wanted, before, adapters = adapter, self.adapter, self._adapters
        if adapter in adapters.unmergeable:
            adapter = None
        if adapter != before:
            if adapter is not None:
                adapters.pin(adapter)
                if not self._merge(adapter):
                    adapters.unpin(adapter)
                    adapter = None
            if adapter is None:
                self._linears.unmerge()
            if before is not None:
                adapters.unpin(before)
            self.switches += 1
        self.adapter = adapter
        self.mode = mode if adapter is not None else Mode.UNMERGED
        return adapter == wanted

    def _merge(self, adapter: str) -> bool:
        """Merge an adapter; return whether that went well, after which the weights are finite."""
        adapters = self._adapters
        slot = adapters.slot(adapter)
        rank, scaling = int(adapters.ranks[slot]), float(adapters.scalings[slot])
        try:
            self._linears.merge(slot, rank, scaling)
            # Content that was merged once gives the same weights every time: wait only once.
            if adapter not in adapters.proven:
                if not self._linears.is_finite():
                    log.error("adapter %s is quarantined: %s", adapter, INFINITE)
                    adapters.unmergeable[adapter] = adapters.quarantined[adapter] = INFINITE
                    return False
                adapters.proven.add(adapter)
        except Exception as error:
            log.exception("adapter %s is not merged any more", adapter)
            adapters.unmergeable[adapter] = f"merging it failed: {error}"
            return False
        return True


INFINITE = "merging it makes base weights infinite or NaN"  # why a merge was taken back
