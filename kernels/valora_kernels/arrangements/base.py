"""What an arrangement of the LoRA operator says and does."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar, TypeAlias

from valora_kernels.tiling import ProjectionGroup, Shape, Tiling

if TYPE_CHECKING:
    import torch

    from valora_kernels.gpus.base import Gpu
    from valora_kernels.metadata import LoraBatch
    from valora_kernels.weights import LoraWeights

ALL = "all"
"""The step of a `Trial` that times the whole operator."""

Times: TypeAlias = list[tuple[float, Tiling]]
"""Median microseconds of each tiling, the fastest first."""


@dataclass(frozen=True, slots=True)
class Trial:
    """Tilings that the search is asked to time.

    Attributes:
        step: What is timed: `ALL`, or one of the arrangement's own steps.
        tilings: The candidates.
        repeats: Timed replays of each.
        compiled: Whether earlier trials have compiled the kernels already.
    """

    step: str
    tilings: Sequence[Tiling]
    repeats: int = 3
    compiled: bool = False


class Arrangement(ABC):
    """One way to compute y += Σ coefficient · scaling · (x Aᵀ) Bᵀ.

    Instances have no state; there is one of each class, see `registry.arrangement`.

    Attributes:
        name: The name that it is registered under.
        tabled: Whether a tiling table may choose it; otherwise it runs only where `takes` says so.
    """

    name: ClassVar[str]
    tabled: ClassVar[bool] = True

    @abstractmethod
    def launch(
        self,
        tiling: Tiling,
        ys: Sequence[torch.Tensor],
        x: torch.Tensor,
        weights: LoraWeights,
        batch: LoraBatch,
        *,
        add: bool = True,
    ) -> None:
        """Compute the operator; called once per layer and step, with checked arguments.

        Args:
            tiling: Tile sizes.
            ys: [P] tensors [rows, out_features[p]], changed in place.
            x: [rows, in_features].
            weights: A and B of every adapter.
            batch: Which rows have which adapters.
            add: Add to y; otherwise overwrite it, with zeros where a row has no adapter.
        """

    @abstractmethod
    def candidates(
        self, group: ProjectionGroup, rows: int, adapters: int, gpu: Gpu
    ) -> list[Tiling]:
        """Tilings that the search tries for `rows` rows of `adapters` adapters."""

    def refusal(self, weights: LoraWeights, batch: LoraBatch) -> str | None:
        """What it expected instead of this batch, if it cannot compute it; None if it can.

        Asked when a caller of `atmm` names the tiling.
        """
        return None

    def shared_memory(self, tiling: Tiling, rank: int) -> int:
        """Bytes of shared memory that a program needs for 16-bit tiles, at most; 0 by default."""
        return 0

    def programs(self, tiling: Tiling, shape: Shape) -> float:
        """Programs that it launches, counting the kernel that decides the time; 1 by default."""
        return 1

    def fits(self, tiling: Tiling, shape: Shape, gpu: Gpu) -> bool:
        """Whether the GPU can run the tiling for a shape."""
        return self.shared_memory(tiling, shape.rank) <= gpu.shared_memory

    def rounds(self, tiling: Tiling, shape: Shape, gpu: Gpu) -> int:
        """How often the processors take programs until all have run: time grows in such steps."""
        resident = max(1, gpu.shared_memory // max(1, self.shared_memory(tiling, shape.rank)))
        return max(1, math.ceil(self.programs(tiling, shape) / (gpu.processors * resident)))

    def refit(self, tiling: Tiling, measured: int, in_features: int) -> Tiling:
        """Adapt a tiling that was measured with `measured` input columns to another width."""
        return tiling

    def default_tiling(self, shape: Shape) -> Tiling:
        """The tiling for a shape on a GPU on which nothing was measured."""
        return Tiling(self.name)

    def takes(self, weights: LoraWeights, batch: LoraBatch, *, add: bool = True) -> bool:
        """Whether the call runs this way whatever the table says; asked if `Gpu.direct` names it.

        `batch.gpu.direct` holds the thresholds of this arrangement under its name.
        """
        return False

    def search(
        self, group: ProjectionGroup, rows: int, adapters: int, gpu: Gpu
    ) -> Generator[Trial, Times, Times]:
        """Ask for trials and receive their times; return the candidates for the final.

        By default all candidates are timed once, and the best two go on.
        """
        times = yield Trial(ALL, self.candidates(group, rows, adapters, gpu))
        return times[:2]

    def call(
        self,
        step: str,
        tiling: Tiling,
        ys: Sequence[torch.Tensor],
        x: torch.Tensor,
        weights: LoraWeights,
        batch: LoraBatch,
    ) -> Callable[[], object]:
        """The call that a trial's `step` times."""
        return partial(self.launch, tiling, ys, x, weights, batch)


def row_tiles(rows: int, adapters: int) -> list[int]:
    """Rows per tile that waste little on short segments and repeat little on long ones."""
    per = rows / adapters
    found = [16] if per <= 256 else []
    found += [tile for tile, least in ((32, 24), (64, 48), (128, 500)) if per >= least]
    return found


def tile_count(rows: int, adapters: int, tile: int) -> int:
    """Tiles of `tile` rows that `adapters` segments of equal length need."""
    return adapters * -(-(rows // adapters) // tile)


def tiles_of(tiling: Tiling, shape: Shape) -> float:
    """Tiles of a batch, once for each projection."""
    adapters = max(shape.adapters, 1)
    return adapters * math.ceil(shape.rows / adapters / tiling.rows) * shape.projections
