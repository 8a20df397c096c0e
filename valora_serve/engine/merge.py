"""The state of the base weights: pristine, or with one adapter merged into them (VaLoRA §4.4)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from valora_kernels.metadata import NONE
from valora_serve.types import Mode

if TYPE_CHECKING:
    from valora_serve.memory.adapter_memory import AdapterMemory
    from valora_serve.model.linears import Linears


class MergeState:
    """Owner of the inference mode and of the merged adapter; only `switch` changes them.

    The merged adapter is pinned, so that it is never evicted.

    Args:
        linears: Linears of the base model, whose weights adapters are merged into.
        adapters: Adapters of the engine.

    Attributes:
        mode: Mode in which the next step runs.
        adapter: Key of the merged adapter, None while the weights are pristine.
        switches: How often the weights were changed since the start; going from one adapter to
            another counts once.
    """

    def __init__(self, linears: Linears, adapters: AdapterMemory) -> None:
        self.mode = Mode.UNMERGED
        self.adapter: str | None = None
        self.switches = 0
        self._linears, self._adapters = linears, adapters

    @property
    def slot(self) -> int:
        """Slot of the merged adapter, `NONE` while the weights are pristine."""
        return NONE if self.adapter is None else self._adapters.slot(self.adapter)

    def switch(self, mode: Mode, adapter: str | None) -> None:
        """Merge a resident adapter into the weights, or restore the pristine weights.

        Args:
            mode: Mode of the next steps; without a merged adapter it is always unmerged.
            adapter: Key of the adapter to merge, None for pristine weights.
        """
        self.mode = mode if adapter is not None else Mode.UNMERGED
        if adapter == self.adapter:
            return
        adapters = self._adapters
        if adapter is not None:
            adapters.pin(adapter)
            slot = adapters.slot(adapter)
            rank, scaling = int(adapters.ranks[slot]), float(adapters.scalings[slot])
            for weights in self._linears.merged:
                weights.merge(slot, rank, scaling)
        else:
            for weights in self._linears.merged:
                weights.unmerge()
        if self.adapter is not None:
            adapters.unpin(self.adapter)
        self.adapter = adapter
        self.switches += 1
