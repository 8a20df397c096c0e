"""Linear layers of which each rank of a tensor-parallel group holds a part (S-LoRA §6).

Column layers (q, k, v, gate, up) are split by their outputs, row layers (o, down) by their inputs,
and one all-reduce sums the outputs of a row layer with its LoRA terms. What else `LoraParallel`
needs is exchanged beside the base product.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from valora_data.models.base import LLAMA, LinearNames
from valora_kernels import two_steps
from valora_kernels.weights import LoraWeights
from valora_serve.model.linears import LinearGroup, Linears
from valora_serve.parallel.partition import LoraParallel, Share, Slice

if TYPE_CHECKING:
    from valora_kernels.metadata import LoraBatch
    from valora_serve.memory.unified import GroupSpec
    from valora_serve.parallel.group import Group


class SplitGroup(LinearGroup):
    """A part of linear layers that share their input; the weights of `linears` are the part."""

    def __init__(
        self, spec: GroupSpec, linears: Sequence[nn.Linear], *shared: Any, group: Group
    ) -> None:
        super().__init__(spec, linears, *shared)
        assert spec.share is not None
        self.share: Share = spec.share
        self._group = group
        if self.share.row and self.bias is not None and group.rank:
            self.bias = torch.zeros_like(self.bias)  # it enters the sum once

    def _compute(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        batch = self._scope.batch(self.spec.part, len(flat))
        if batch is not None and self.lora is not None and self.share.exchanges:
            y = self._with_exchange(flat, self.lora, batch).view(*x.shape[:-1], -1)
        else:
            y = super()._compute(x)
        if self.share.row:
            self._group.all_reduce(y)
        return y

    def _with_exchange(self, x: Tensor, lora: LoraWeights, batch: LoraBatch) -> Tensor:
        """x·Wᵀ + bias + LoRA of this rank's part, with x·Aᵀ summed: [rows, outputs]."""
        own = x if self.share.row else x[:, self.share.part(0, x.shape[1], inputs=True)]
        shrunk = two_steps.shrink(own, lora, batch)
        wait = self._group.start_all_reduce(shrunk.h)
        y = self._base(x)
        wait()
        ys: Sequence[Tensor] = y.split(self.spec.out_features, dim=1)
        if self.share.row:
            ys = [y[:, self.share.part(0, y.shape[1], inputs=False)]]
        two_steps.expand(ys, shrunk, lora, batch)
        return y


@dataclass
class SplitLinears(Linears):
    """A rank's linear layers; the parts of an adapter's A or B are gathered to merge it."""

    group: Group = field(kw_only=True)
    _whole: list[tuple[SplitGroup, Tensor]] = field(default_factory=list)

    @classmethod
    def split(
        cls,
        model: nn.Module,
        parts: Mapping[str, str],
        group: Group,
        slices: Mapping[str, Slice],
        lora: LoraParallel,
        names: LinearNames = LLAMA,
    ) -> SplitLinears:
        """Replace a model's linear layers, see `of`; weights at the paths of `slices` are parts."""

        def make(spec: GroupSpec, linears: Sequence[nn.Linear], *shared: Any) -> LinearGroup:
            if spec.name not in slices:
                return LinearGroup(spec, linears, *shared)
            own = [slices[module] for module in spec.modules]
            width = spec.out_features[0] if own[0].row else spec.in_features
            share = Share.of(own, width, lora, group.rank, group.size)
            return SplitGroup(replace(spec, share=share), linears, *shared, group=group)

        made = Linears.of(model, parts, make, names)
        return cls(made.groups, made.group_of, made.scope, group=group)

    def merge(self, slot: int, rank: int, scaling: float) -> None:
        """Merge an adapter into this rank's part of the weights."""
        for one, whole in self._whole:
            assert one.lora is not None
            own = [one.lora.rows_of(p, slot, rank)[one.share.row] for p in range(len(whole))]
            whole[:, :rank] = torch.cat(tuple(self.group.gather(torch.stack(own))), dim=-1)
        super().merge(slot, rank, scaling)

    def is_finite(self) -> bool:
        """Whether the weights of all ranks are finite; waits for the device."""
        return bool(self.group.least(int(super().is_finite())))

    def _bind(self) -> None:
        found = {name: one.lora for name, one in self.groups.items() if one.lora is not None}
        merged = {module for memory in self.merged for module in memory.shapes}
        self._whole = []
        for name, lora in found.items():
            one, count = self.groups[name], len(lora.out_features)
            if name not in merged or not (isinstance(one, SplitGroup) and one.share.exchanges):
                continue
            inputs, outputs = one.spec.in_features, one.spec.out_features
            width = outputs[0] if one.share.row else inputs
            whole = lora.a.new_zeros((count, lora.max_rank, width))
            self._whole.append((one, whole))
            rows = width * torch.arange(count * lora.max_rank, device=whole.device)
            table = rows.view(count, 1, -1).repeat(1, lora.slots, 1)  # the same in every slot
            part = "b" if one.share.row else "a"
            own: dict[str, Any] = {part: whole, f"{part}_table": table}
            found[name] = replace(lora, in_features=inputs, out_features=outputs, **own)
        self._bind_to(found)

    def _sum(self, values: Tensor) -> None:
        self.group.all_reduce(values)
