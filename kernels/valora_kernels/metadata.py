"""Which rows of a batch use which adapters: built once per batch, shared by all layers.

`grouping` sorts the rows, `tables` lays out what kernels read. `LoraBatch` keeps that in device
buffers of fixed size and address, so that one captured CUDA graph serves any mix of adapters.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeVar, cast

import numpy as np
import torch

from valora_kernels.gpus.detect import gpu_of
from valora_kernels.grouping import NONE, group_rows
from valora_kernels.tables import (
    Copier,
    DeviceBlocks,
    DeviceTiles,
    tile_capacity,
    tile_elements,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from numpy.typing import ArrayLike, NDArray

    from valora_kernels.grouping import Grouping

T = TypeVar("T", bound="Table")


class Table(Protocol):
    """What kernels read of a batch, in device buffers of fixed size and address."""

    def refresh(self, grouping: Grouping) -> None:
        """Copy what a batch has of it to the device, unless it is there."""


class Scratch:
    """Working memory that calls share, one after the other in the order of one stream.

    Args:
        device: Device of the memory.
    """

    def __init__(self, device: torch.device | str) -> None:
        self._device = device
        self._kept: dict[tuple[str, torch.dtype], list[torch.Tensor]] = {}

    def take(self, use: str, elements: int, dtype: torch.dtype) -> torch.Tensor:
        """Memory of at least so many elements.

        It is zero at first; a kernel that relies on this must leave it zero.

        Args:
            use: What it is for; calls with the same use and dtype share memory.
            elements: Number of elements that are needed.
            dtype: Element type.
        """
        kept = self._kept.setdefault((use, dtype), [])
        if not kept or kept[-1].numel() < elements:
            # Smaller buffers stay allocated: a captured graph may hold their addresses.
            kept.append(torch.zeros(max(elements, 1), dtype=dtype, device=self._device))
        return kept[-1]


class LoraBatch:
    """The adapters of one batch, in fixed device buffers that all layers read.

    Call `update` before every batch, then `atmm` for every projection. In a CUDA graph the buffers
    keep their addresses, and the launch grids cover the worst case of `max_rows` rows in
    `max_segments` segments, so a replay after `update` computes the new mix.

    Args:
        max_rows: Most rows of a batch; a captured graph has exactly as many.
        max_segments: Most different (adapter, second adapter) pairs of a batch.
        device: Device on which `atmm` runs.
        fixed: Whether CUDA graphs are captured with it: the numbers of rows and terms stay, and
            launches cover the worst case.
        scratch: Working memory of the calls, which other batches of the same stream may share;
            its own by default.

    Attributes:
        gpu: Record of the device's GPU.
        grouping: The batch of the last `update`.
        max_rank: Largest rank of the batch's adapters.
        last_adapter: Highest adapter index of the batch.
        effective_adapters: `Grouping.effective_adapters` of the batch.
        one_adapter: Whether all rows of the batch have the same single adapter.
        terms: Terms per row that kernels are launched for.
    """

    def __init__(
        self,
        max_rows: int,
        max_segments: int,
        device: torch.device | str,
        *,
        fixed: bool = False,
        scratch: Scratch | None = None,
    ) -> None:
        if max_rows < 0 or max_segments < 0:
            raise ValueError(
                f"batch: expected sizes ≥ 0, got {max_rows} rows, {max_segments} segments"
            )
        self.max_rows = max_rows
        self.max_segments = max_segments
        self.device = torch.empty(0, device=device).device  # with the index of a GPU
        self.gpu = gpu_of(self.device)
        self.fixed = fixed
        self.grouping = group_rows(np.zeros(0, np.int64), [], [])
        self.max_rank = 0
        self.last_adapter = NONE
        self.effective_adapters = 1.0
        self.one_adapter = False
        self.terms = 1
        self._tables: dict[Hashable, Table] = {}
        self.scratch = scratch or Scratch(self.device)

    def update(
        self,
        adapters: ArrayLike,
        ranks: Sequence[int] | NDArray[np.int32],
        scalings: Sequence[float] | NDArray[np.float32],
        coefficients: ArrayLike | None = None,
        counts: ArrayLike | None = None,
        rows: int | None = None,
    ) -> None:
        """Describe the next batch; see `group_rows` for the arguments.

        The copies to the device are enqueued on the current stream, and nothing waits for them:
        now if graphs may read them again, otherwise by the first call that reads them.

        Raises:
            ValueError: What `group_rows` raises, or more rows, segments or terms than there is
                room for.
        """
        grouping = group_rows(adapters, ranks, scalings, coefficients, counts, rows)
        if grouping.rows > self.max_rows:
            raise ValueError(f"batch: expected at most {self.max_rows} rows, got {grouping.rows}")
        if grouping.segments > self.max_segments:
            raise ValueError(
                f"batch: expected at most {self.max_segments} segments, got {grouping.segments}"
            )
        if grouping.terms > self.terms and self._captured and self.fixed:
            raise ValueError(
                "batch: expected one term per row, as when the graph was captured, got 2"
            )
        self.grouping = grouping
        # Stored because every layer asks for them.
        self.max_rank = int(grouping.ranks.max(initial=0))
        self.last_adapter = int(grouping.adapters.max(initial=NONE))
        self.effective_adapters = grouping.effective_adapters
        self.one_adapter = grouping.one_adapter
        self.terms = max(self.terms, grouping.terms) if self.fixed else grouping.terms
        if self.fixed:
            for table in self._tables.values():
                table.refresh(grouping)

    @property
    def _captured(self) -> bool:
        """Whether a call has read terms, which a captured graph reads again."""
        return any(not isinstance(table, DeviceBlocks) for table in self._tables.values())

    def table(self, key: Hashable, make: Callable[[], T]) -> T:
        """A table of the batch on the device, which is made once and follows every `update`.

        Args:
            key: What tells it from others.
            make: Makes it.
        """
        if key not in self._tables:
            self._tables[key] = make()
        table = self._tables[key]
        table.refresh(self.grouping)
        return cast("T", table)

    def tiles(self, block: int) -> DeviceTiles:
        """The batch in tiles of `block` rows."""

        def make() -> DeviceTiles:
            capacity = tile_capacity(self.max_rows, self.max_segments, block)
            copier = Copier(tile_elements(block, capacity), self.device)
            return DeviceTiles(block, capacity, copier)

        return self.table(("tiles", block), make)

    def blocks(self, block: int) -> DeviceBlocks:
        """The adapters of each block of rows."""
        capacity = max(1, min(block, self.max_segments))
        return self.table(
            ("blocks", block),
            lambda: DeviceBlocks.of(block, self.max_rows, capacity, self.device),
        )
