"""One kernel for both steps of the operator: `fused_kernel`."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, ClassVar

from valora_kernels.arrangements.base import Arrangement, row_tiles, tile_count, tiles_of
from valora_kernels.launching import (
    ALIGNMENT,
    common_arguments,
    kernels,
    outputs_of,
    sizes_of,
    start,
    tiles_to_launch,
)
from valora_kernels.tiling import ProjectionGroup, Shape, Tiling

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from valora_kernels.gpus.base import Gpu
    from valora_kernels.metadata import LoraBatch
    from valora_kernels.weights import LoraWeights


class Fused(Arrangement):
    """One launch: a program shrinks its rows over the whole input width and expands them.

    h stays in registers. Only many rows occupy the GPU this way, and large ranks do not fit.
    """

    name: ClassVar[str] = "fused"

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
        """Launch one program per tile, projection and part of the output width."""
        table = batch.tiles(tiling.rows)
        tiles = tiles_to_launch(table, batch, x, add=add)
        if not tiles:
            return
        start(
            kernels().fused_kernel,
            tiles * len(ys) * tiling.parts,
            *outputs_of(ys),
            x,
            x.stride(0) // ALIGNMENT,
            weights.a,
            weights.a_table,
            weights.b,
            weights.b_table,
            table.records,
            table.rows,
            table.scale,
            *sizes_of(table, x, weights),
            weights.in_features // ALIGNMENT,
            BN=tiling.outputs,
            BK=tiling.inputs,
            PARTS=tiling.parts,
            EVEN_K=weights.in_features % tiling.inputs == 0,
            STAGES=tiling.stages,
            ADD=add,
            num_warps=tiling.warps,
            num_stages=tiling.stages,
            **common_arguments(tiling, x, weights, batch),
        )

    def shared_memory(self, tiling: Tiling, rank: int) -> int:
        """Bytes that the step that needs more of them holds."""
        first = (tiling.rows + rank) * tiling.inputs
        return 2 * tiling.stages * max(first, (tiling.rows + rank) * tiling.outputs)

    def programs(self, tiling: Tiling, shape: Shape) -> float:
        """One per tile, projection and part."""
        return tiles_of(tiling, shape) * tiling.parts

    def candidates(
        self, group: ProjectionGroup, rows: int, adapters: int, gpu: Gpu
    ) -> list[Tiling]:
        """Tilings for many rows of small ranks."""
        if rows < 512 or group.rank > 128:
            return []
        found = []
        for tile, outputs, step, parts, stages in product(
            (16, 32, 64, 128), (64, 128), (64, 128), (1, 2, 4), (3, 4)
        ):
            programs = tile_count(rows, adapters, tile) * parts * len(group.out_features)
            enough = gpu.share(96) <= programs <= gpu.share(1100)
            if tile not in row_tiles(rows, adapters) or not enough:
                continue
            memory = stages * max(tile + group.rank, 1) * max(step, outputs) * 2
            if memory > gpu.shared_memory or (step, outputs) == (64, 128):
                continue
            warps = 8 if tile == 128 else 4
            found.append(
                Tiling(
                    self.name, tile, outputs, step, 0, 64, parts=parts, warps=warps, stages=stages
                )
            )
        return found
