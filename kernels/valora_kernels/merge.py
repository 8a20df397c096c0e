"""Merge one adapter into the weights of all layers in one launch, and unmerge it exactly (§4.4).

Adding B·A to a 16-bit weight and subtracting it later leaves an error that grows with every switch,
so merging writes pristine + scaling · B · A, rounded once, and unmerging copies the pristine bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from valora_kernels.launching import ALIGNMENT, precision_of, use_triton
from valora_kernels.reference import merge_reference

if TYPE_CHECKING:
    from valora_kernels.weights import LoraWeights

MATRIX_ALIGNMENT = 128  # elements at whose multiples every matrix starts in memory


@dataclass(frozen=True, slots=True)
class MergeTiling:
    """A program computes a strip of `outputs` rows and `span` columns, `inputs` columns a step."""

    outputs: int = 64
    inputs: int = 128
    span: int = 4096
    ranks: int = 64
    warps: int = 8
    stages: int = 3


class MergeableWeights:
    """The weights that adapters can be merged into, in one allocation beside a pristine copy.

    The weights of the model's linears are views of the flat `live`, so every reader sees a merge.
    `shapes` are (outputs, inputs) of every matrix by its name, in the order of the memory.
    """

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, int]],
        *,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        if not shapes:
            raise ValueError("shapes: expected at least one matrix, got none")
        self.shapes = dict(shapes)
        self._starts: dict[str, int] = {}
        size = 0
        for name, (outputs, inputs) in self.shapes.items():
            self._starts[name] = size
            size += -(-outputs * inputs // MATRIX_ALIGNMENT) * MATRIX_ALIGNMENT
        self.live = torch.zeros(size, dtype=dtype, device=device)
        self._sources: dict[str, tuple[LoraWeights, int]] = {}
        self._tables: dict[MergeTiling, tuple[torch.Tensor, torch.Tensor]] = {}

    @cached_property
    def pristine(self) -> torch.Tensor:
        """The base weights, laid out like `live` and copied from it at first use."""
        return self.live.clone()

    def keep(self) -> None:
        """Take the pristine copy now, for which there may be no memory at the first merge."""
        _ = self.pristine

    def weight(self, name: str) -> torch.Tensor:
        """The matrix that the model reads: a view [outputs, inputs] of `live`."""
        return self._view(self.live, name)

    def pristine_weight(self, name: str) -> torch.Tensor:
        """The matrix that nothing is merged into: a view [outputs, inputs] of `pristine`."""
        return self._view(self.pristine, name)

    def _view(self, memory: torch.Tensor, name: str) -> torch.Tensor:
        outputs, inputs = self.shapes[name]
        start = self._starts[name]
        return memory[start : start + outputs * inputs].view(outputs, inputs)

    def set(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        """Copy a weight [outputs, inputs] into `live`, before `pristine` is used; return it."""
        want = self.shapes.get(name)
        if want != tuple(weight.shape):
            raise ValueError(f"{name}: expected shape {want}, got {tuple(weight.shape)}")
        if "pristine" in self.__dict__:
            raise RuntimeError(f"{name}: the pristine weights are taken; set all matrices before")
        with torch.no_grad():
            view = self.weight(name)
            view.copy_(weight)
        return view

    def bind(self, sources: Mapping[str, tuple[LoraWeights, int]]) -> None:
        """Name the adapters of each matrix: LoRA weights, and which of their projections it is."""
        for name, (weights, projection) in sources.items():
            shape, memory = (weights.out_features[projection], weights.in_features), weights.a
            got = (memory.dtype, memory.device, shape)
            want = (self.live.dtype, self.live.device, self.shapes.get(name))
            if got != want:
                raise ValueError(
                    f"{name}: expected {' '.join(map(str, want))}, got {' '.join(map(str, got))}"
                )
        assert len({weights.max_rank for weights, _ in sources.values()}) <= 1
        self._sources = dict(sources)
        self._tables.clear()

    def merge(
        self, slot: int, rank: int, scaling: float, *, tiling: MergeTiling | None = None
    ) -> None:
        """Set live = pristine + scaling · B · A in all bound matrices, in fp32 and rounded once.

        What was merged before does not matter, nothing waits for the device. A `tiling` runs the
        kernel wherever the weights are. A `ValueError` says that no source has the slot and rank.
        """
        if not self._sources:
            return  # the adapters of an engine before this one changed these weights
        slots = min(weights.slots for weights, _ in self._sources.values())
        ranks = min(weights.max_rank for weights, _ in self._sources.values())
        if not 0 <= slot < slots:
            raise ValueError(f"slot: expected 0 to {slots - 1}, got {slot}")
        if not 1 <= rank <= ranks:
            raise ValueError(f"rank: expected 1 to {ranks}, got {rank}")
        aligned = all(n % ALIGNMENT == 0 for shape in self.shapes.values() for n in shape)
        if tiling is None and not (use_triton(self.live) and aligned):
            self._merge_each(slot, rank, scaling)
            return
        from valora_kernels.merge_kernels import merge_kernel

        tiling = tiling or MergeTiling()
        tiles, matrices = self._table(tiling)
        sources = self._sources.values()
        a_rows = torch.stack([weights.a_table[p, slot] for weights, p in sources])
        b_rows = torch.stack([weights.b_table[p, slot] for weights, p in sources])
        first = next(iter(sources))[0]
        merge_kernel[(len(tiles),)](
            self.live, self.pristine, first.a, first.b, a_rows, b_rows, tiles, matrices,
            scaling, rank, SLOT_RANKS=ranks, BO=tiling.outputs, BI=tiling.inputs, BR=tiling.ranks,
            SPAN=tiling.span, STAGES=tiling.stages, MORE=rank > tiling.ranks,
            PRECISION=precision_of(self.live), num_warps=tiling.warps, num_stages=tiling.stages,
        )  # fmt: skip

    def _merge_each(self, slot: int, rank: int, scaling: float) -> None:
        for name, (weights, projection) in self._sources.items():
            a, b = weights.rows_of(projection, slot, rank)
            merged = merge_reference(self.pristine_weight(name), a, b.T, scaling)
            self.weight(name).copy_(merged)

    def merge_by_matrix(self, slot: int, rank: int, scaling: float) -> None:
        """Merge as systems without a swift switch do: unmerge first, and wait for every step."""
        self.unmerge_by_matrix()
        self._merge_each(slot, rank, scaling)
        self._wait()

    def unmerge_by_matrix(self) -> None:
        """Restore the base weights, one matrix after the other, and wait for the device."""
        for name in self.shapes:
            self.weight(name).copy_(self.pristine_weight(name))
        self._wait()

    def _wait(self) -> None:
        if self.live.is_cuda:
            torch.cuda.synchronize(self.live.device)

    def is_finite(self) -> bool:
        """Whether all weights that the model reads are finite; waits for the device."""
        return bool(torch.stack(torch.aminmax(self.live)).isfinite().all())

    def unmerge(self) -> None:
        """Restore the base weights exactly, by copying the pristine ones."""
        self.live.copy_(self.pristine)

    def _table(self, tiling: MergeTiling) -> tuple[torch.Tensor, torch.Tensor]:
        """`tiles` [programs, 2] int32 and `matrices` [matrices, 5] int64, as of `merge_kernel`."""
        if tiling not in self._tables:
            device, size = self.live.device, self.live.element_size()
            first = next(iter(self._sources.values()))[0]
            matrices, tiles = [], []
            for number, (name, (weights, _)) in enumerate(self._sources.items()):
                outputs, inputs = self.shapes[name]
                a_start = (weights.a.data_ptr() - first.a.data_ptr()) // size
                b_start = (weights.b.data_ptr() - first.b.data_ptr()) // size
                matrices.append([self._starts[name], outputs, inputs, a_start, b_start])
                count = -(-outputs // tiling.outputs) * -(-inputs // tiling.span)
                numbers = torch.arange(count, dtype=torch.int32)
                tiles.append(torch.stack([torch.full_like(numbers, number), numbers], dim=1))
            self._tables[tiling] = (
                torch.cat(tiles).to(device),
                torch.tensor(matrices, dtype=torch.int64).to(device),
            )
        return self._tables[tiling]
