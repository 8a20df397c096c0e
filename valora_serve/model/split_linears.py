"""Linear layers of which each rank of a tensor-parallel group holds a part (S-LoRA §6).

Column layers (q, k, v, gate, up) are split by their outputs, row layers (o, down) by their inputs,
and one all-reduce sums the outputs of a row layer. The LoRA terms are added to the partial sums
before it, so that it serves both. `LoraParallel` says what else the terms need; that collective
runs beside the base product.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from valora_data.models.base import LLAMA
from valora_kernels import two_steps
from valora_kernels.weights import LoraWeights
from valora_serve.model.linears import LinearGroup, Linears
from valora_serve.parallel.partition import share_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import nn

    from valora_data.models.base import LinearNames
    from valora_kernels.metadata import LoraBatch
    from valora_serve.memory.unified import GroupSpec
    from valora_serve.parallel.group import Group
    from valora_serve.parallel.partition import LoraParallel, Share, Slice


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

    @property
    def exchanges(self) -> bool:
        """Whether LoRA terms need a collective of their own."""
        return self.share.splits_ranks or self.share.splits_row_outputs

    def _compute(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        batch = self._scope.batch(self.spec.part, len(flat))
        if batch is not None and self.lora is not None and self.exchanges:
            y = self._with_exchange(flat, self.lora, batch).view(*x.shape[:-1], -1)
        else:
            y = super()._compute(x)
        if self.share.row:
            self._group.all_reduce(y)
        return y

    def _with_exchange(self, x: Tensor, lora: LoraWeights, batch: LoraBatch) -> Tensor:
        """x·Wᵀ + bias + LoRA of this rank's part, with x·Aᵀ summed: [rows, outputs].

        A rank's x·Aᵀ is zero in rank rows that others hold, so that the sum gathers them.
        """
        shrunk = two_steps.shrink(x, lora, batch)
        wait = self._group.start_all_reduce(shrunk.h)
        y = self._base(x)
        wait()
        if self.share.row:
            ys: Sequence[Tensor] = [y[:, self.share.outputs(self.spec.out_features[0])]]
        else:
            ys = y.split(self.spec.out_features, dim=1)
        two_steps.expand(ys, shrunk, lora, batch)
        return y


@dataclass
class SplitLinears(Linears):
    """All linear layers that adapters can change, in one rank.

    Merging needs the whole A of a column layer and the whole B of a row layer. Where ranks hold
    parts of them, they are gathered for one adapter when it is merged.
    """

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
        """Replace a model's linear layers in place, see `of`.

        The weights at the paths of `slices` are these parts of the layers, others are whole.
        """

        def make(spec: GroupSpec, linears: Sequence[nn.Linear], *shared: Any) -> LinearGroup:
            if spec.name not in slices:
                return LinearGroup(spec, linears, *shared)
            share = share_of(
                [slices[module] for module in spec.modules],
                spec.out_features,
                lora,
                rank=group.rank,
                size=group.size,
            )
            return SplitGroup(replace(spec, share=share), linears, *shared, group=group)

        made = Linears.of(model, parts, make, names)
        return cls(made.groups, made.group_of, made.scope, group=group)

    def merge(self, slot: int, rank: int, scaling: float) -> None:
        """Merge an adapter into this rank's part of the weights, see `Linears.merge`."""
        for one, whole in self._whole:
            assert one.lora is not None
            if one.share.row:
                parts = self.group.gather(one.lora.rows_of(0, slot, rank)[1])
                whole[0, :rank] = parts.transpose(0, 1).reshape(rank, -1)
            else:  # zeros in the rank rows that others hold
                rows = [one.lora.rows_of(p, slot, rank)[0] for p in range(len(whole))]
                own = torch.stack(rows)
                self.group.all_reduce(own)
                whole[:, :rank] = own
        super().merge(slot, rank, scaling)

    def is_finite(self) -> bool:
        """Whether the weights of all ranks are finite; waits for the device."""
        return bool(self.group.least(int(super().is_finite())))

    def _bind(self) -> None:
        found = {name: one.lora for name, one in self.groups.items() if one.lora is not None}
        self._whole, tables = [], {}
        for name, lora in found.items():
            one, count, ranks = self.groups[name], len(lora.out_features), lora.max_rank
            if not (isinstance(one, SplitGroup) and one.exchanges):
                continue
            if all(one.spec.modules[0] not in memory.shapes for memory in self.merged):
                continue
            row = one.share.row
            width = one.spec.out_features[0] if row else lora.in_features
            whole = torch.zeros((count, ranks, width), dtype=lora.a.dtype, device=lora.a.device)
            self._whole.append((one, whole))
            if (count, width) not in tables:  # the same rows in every slot
                rows = (
                    torch.arange(count * ranks, device=whole.device).view(count, 1, ranks) * width
                )
                tables[count, width] = rows.expand(-1, lora.slots, -1).contiguous()
            table = tables[count, width]
            own: Any = {"b": whole, "b_table": table} if row else {"a": whole, "a_table": table}
            found[name] = replace(lora, out_features=one.spec.out_features, **own)
        self._bind_to(found)

    def _whole_norms(self, names: Sequence[str], norms: Tensor) -> Tensor:
        rows, totals = [], []
        for name in names:
            group, index = self.group_of[name]
            rows.append(len(group.matrix(index)))
            whole = isinstance(group, SplitGroup) and group.share.row
            totals.append(rows[-1] * (1 if whole else self.group.size))
        like: dict[str, Any] = {"dtype": norms.dtype, "device": norms.device}
        squares = norms.square() * torch.tensor(rows, **like)
        self.group.all_reduce(squares)
        return (squares / torch.tensor(totals, **like)).sqrt()
