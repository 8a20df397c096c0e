"""Linear layers of which each process of a tensor-parallel group holds a part (S-LoRA §6).

Base weights are split as Megatron-LM does: column layers (q, k, v, gate, up) by their outputs, row
layers (o, down) by their inputs, and one all-reduce sums the outputs of a row layer. The LoRA terms
are added to the partial sums before it, so that it serves both. `LoraParallel` says what else the
terms need; that collective runs beside the base product.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from valora_data.models.base import LLAMA
from valora_kernels import two_steps
from valora_kernels.weights import LoraWeights
from valora_serve.model.linears import LastOutputs, LinearGroup, Linears, LoraScope
from valora_serve.parallel.partition import share_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from torch import nn

    from valora_data.models.base import LinearNames
    from valora_kernels.metadata import LoraBatch
    from valora_serve.memory.unified import GroupSpec
    from valora_serve.parallel.group import Group
    from valora_serve.parallel.partition import LoraParallel, Share, Slice


"""Returns how the LoRA matrices of a group, with the sizes of this process's part, are split; it is
told whether the group is split by its inputs."""


class SplitGroup(LinearGroup):
    """A part of linear layers that share their input.

    Args:
        spec: Names and sizes of the parts; it has a share.
        linears: The model's own modules, whose weights are the parts.
        scope: Adapters of the current forward pass.
        last: The group that computed last, shared by all groups of a model.
        group: The processes that hold the other parts.

    Attributes:
        share: What this process holds.
    """

    def __init__(
        self,
        spec: GroupSpec,
        linears: Sequence[nn.Linear],
        scope: LoraScope,
        last: LastOutputs,
        group: Group,
    ) -> None:
        super().__init__(spec, linears, scope, last)
        assert spec.share is not None
        self.share: Share = spec.share
        self._group = group
        if self.share.row and self.bias is not None and not group.leads:
            self.bias = torch.zeros_like(self.bias)  # it enters the sum once

    @property
    def exchanges(self) -> bool:
        """Whether LoRA terms need a collective of their own."""
        return self.share.splits_ranks or self.share.splits_row_outputs

    def _compute(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        batch = self._scope.batch(self.spec.part, len(flat))
        share = self.share
        if batch is not None and self.lora is not None and self.exchanges:
            y = self._with_exchange(flat, self.lora, batch).view(*x.shape[:-1], -1)
        else:
            y = super()._compute(x)
        if share.row:
            self._group.all_reduce(y)
        return y

    def _with_exchange(self, x: Tensor, lora: LoraWeights, batch: LoraBatch) -> Tensor:
        """x·Wᵀ + bias + LoRA of this process's part, with x·Aᵀ summed: [rows, outputs].

        A process's x·Aᵀ is zero in rank rows that others hold, so that the sum gathers them.
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


class MergeStaging:
    """The whole A, or B, of the adapter that is merged, where processes hold parts of it.

    Merging needs the whole A of a column layer and the whole B of a row layer. They are gathered
    for one adapter, when it is merged.

    Args:
        groups: Groups whose weights an adapter is merged into and whose LoRA matrices are split
            by ranks, or by the outputs of a row layer.
        group: The processes.
    """

    def __init__(self, groups: Sequence[SplitGroup], group: Group) -> None:
        self._groups, self._group = groups, group
        self._whole: dict[str, Tensor] = {}
        self._tables: dict[tuple[int, ...], Tensor] = {}
        self.sources: dict[str, LoraWeights] = {}
        for one in groups:
            assert one.lora is not None
            self.sources[one.spec.name] = self._source(one, one.lora)

    def _source(self, one: SplitGroup, lora: LoraWeights) -> LoraWeights:
        """Return LoRA weights for the merge, whose gathered matrices are the same in every slot."""
        count, ranks = len(lora.out_features), lora.max_rank
        width = one.spec.out_features[0] if one.share.row else lora.in_features
        whole = torch.zeros((count, ranks, width), dtype=lora.a.dtype, device=lora.a.device)
        self._whole[one.spec.name] = whole
        key = (count, lora.slots, lora.max_rank, ranks, width)
        if key not in self._tables:
            starts = torch.arange(count)[:, None] * ranks + torch.arange(lora.max_rank)
            table = (starts * width)[:, None].expand(count, lora.slots, lora.max_rank)
            self._tables[key] = table.contiguous().to(lora.a.device)
        row = one.share.row
        assert lora.a_table is not None
        assert lora.b_table is not None
        return LoraWeights(
            in_features=lora.in_features,
            out_features=one.spec.out_features,
            slots=lora.slots,
            max_rank=lora.max_rank,
            a=lora.a if row else whole,
            b=whole if row else lora.b,
            a_table=lora.a_table if row else self._tables[key],
            b_table=self._tables[key] if row else lora.b_table,
        )

    def fill(self, slot: int, rank: int) -> None:
        """Put the matrices of the adapter in a slot together."""
        rows = [one for one in self._groups if one.share.row]
        columns = [one for one in self._groups if not one.share.row]
        for flat, one in self._parts(rows, slot, rank, self._group.gather):
            found = flat.view(self._group.size, rank, -1)  # [size, rank, outputs / size]
            self._whole[one.spec.name][0, :rank] = found.transpose(0, 1).reshape(rank, -1)
        for flat, one in self._parts(columns, slot, rank, self._sum):
            self._whole[one.spec.name][:, :rank] = flat.view(-1, rank, one.spec.in_features)

    def _sum(self, values: Tensor) -> Tensor:
        self._group.all_reduce(values)
        return values

    def _parts(
        self,
        groups: Sequence[SplitGroup],
        slot: int,
        rank: int,
        exchange: Callable[[Tensor], Tensor],
    ) -> Iterator[tuple[Tensor, SplitGroup]]:
        """Exchange this process's parts of some groups in one call."""
        if not groups:
            return
        own = [self._own(one, slot, rank).reshape(-1) for one in groups]
        sizes = [part.numel() for part in own]
        yield from zip(exchange(torch.cat(own)).split(sizes, dim=-1), groups, strict=True)

    def _own(self, one: SplitGroup, slot: int, rank: int) -> Tensor:
        """Return this process's part of A or Bᵀ of a group: [projections, rank, width].

        Of an A it is whole, with zeros in the rank rows that others hold.
        """
        assert one.lora is not None
        if one.share.row:
            return one.lora.rows_of(0, slot, rank)[1][None]
        count = range(len(one.spec.modules))
        return torch.stack([one.lora.rows_of(p, slot, rank)[0] for p in count])


@dataclass(slots=True)
class SplitLinears(Linears):
    """All linear layers that adapters can change, in a process of a tensor-parallel group.

    Attributes:
        group: The processes.
        relay: Tells the other processes what this one does; None in all but the leader.
    """

    group: Group | None = None
    relay: Callable[..., None] | None = None
    _staging: MergeStaging | None = None

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
        """Replace a model's linear layers, whose weights are this process's parts, in place.

        Args as in `of`; `slices` are the parts of the weights, by path; others are whole.
        """

        def make(
            spec: GroupSpec, linears: Sequence[nn.Linear], scope: LoraScope, last: LastOutputs
        ) -> LinearGroup:
            if spec.name not in slices:
                return LinearGroup(spec, linears, scope, last)
            share = share_of(
                [slices[module] for module in spec.modules],
                spec.out_features,
                lora,
                rank=group.rank,
                size=group.size,
            )
            return SplitGroup(replace(spec, share=share), linears, scope, last, group)

        found = cls.of(model, parts, make, names)
        found.group = group
        return found

    def activate(
        self, names: Collection[str], lora: Mapping[str, LoraWeights], *, mergeable: bool
    ) -> None:
        """Let groups apply adapters from now on; see `Linears.activate`."""
        Linears.activate(self, names, lora, mergeable=mergeable)
        if self.relay is not None:  # not before, as the leader may have no memory for it
            self.relay("activate", sorted(names), mergeable)

    def merge(self, slot: int, rank: int, scaling: float) -> None:
        """Merge an adapter into this process's part of the weights; see `Linears.merge`."""
        if self.relay is not None:
            self.relay("merge", slot, rank, scaling)
        if self._staging is not None:
            self._staging.fill(slot, rank)
        Linears.merge(self, slot, rank, scaling)

    def unmerge(self) -> None:
        """Restore the pristine weights."""
        if self.relay is not None:
            self.relay("unmerge")
        Linears.unmerge(self)

    def is_finite(self) -> bool:
        """Whether all weights of all processes are finite; waits for the device."""
        if self.relay is not None:
            self.relay("is_finite")
        finite = Linears.is_finite(self)
        return finite if self.group is None else bool(self.group.least(int(finite)))

    def _bind(self) -> None:
        split = [
            one
            for one in self.groups.values()
            if isinstance(one, SplitGroup)
            and one.exchanges
            and one.lora is not None
            and any(one.spec.modules[0] in memory.shapes for memory in self.merged)
        ]
        found = {name: one.lora for name, one in self.groups.items() if one.lora is not None}
        self._staging = None
        if split and self.group is not None:
            self._staging = MergeStaging(split, self.group)
            found |= self._staging.sources
        self._bind_to(found)

    def _whole_norms(self, names: Sequence[str], norms: Tensor) -> Tensor:
        if self.group is None:
            return norms
        rows, totals = [], []
        for name in names:
            group, index = self.group_of[name]
            count = len(group.matrix(index))
            rows.append(count)
            whole = isinstance(group, SplitGroup) and group.share.row
            totals.append(count if whole else count * self.group.size)
        like: dict[str, Any] = {"dtype": norms.dtype, "device": norms.device}
        squares = norms.square() * torch.tensor(rows, **like)
        self.group.all_reduce(squares)
        return (squares / torch.tensor(totals, **like)).sqrt()
