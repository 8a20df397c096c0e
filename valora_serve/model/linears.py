"""The model's linear layers, replaced by grouped ones that add LoRA terms and can be merged into.

transformers' modules still call ``self.q_proj(x)``, ``self.k_proj(x)`` and ``self.v_proj(x)``. The
first call computes all three in one product over stacked weights, with one LoRA shrink for all
(VaLoRA §4.3); the other calls return their part of the result. Compiled layers call one operation,
`valora::linears`, whose outputs have constant widths and row distances: kernels that do not know
them load 2 bytes at a time (rotating 8,192 rows: 0.48 ms a layer on an H100 instead of 0.09).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from itertools import accumulate, count, pairwise
from typing import ClassVar, TypeAlias
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from valora_data.contract.quantized import shape_of
from valora_data.models.base import LLAMA, LinearNames
from valora_kernels.launching import ALIGNMENT
from valora_kernels.merge import MergeableWeights
from valora_kernels.metadata import LoraBatch
from valora_kernels.operators import ATMM, operator
from valora_kernels.project import add_projection, linear
from valora_kernels.weights import LoraWeights
from valora_serve.memory.unified import GroupSpec
from valora_serve.parallel.group import Group


class LoraScope:
    """The adapters of the current pass: none outside `text` and `part`.

    `last` is the group that computed last, its input and its outputs, which no other group keeps.
    """

    def __init__(self) -> None:
        self.operator = operator(ATMM)
        self.last: tuple[LinearGroup, Tensor, Tensor] | None = None
        self._batch_of: dict[str, Callable[[int], LoraBatch | None]] = {}

    @contextmanager
    def part(self, part: str, batch_of: Callable[[int], LoraBatch | None]) -> Iterator[None]:
        """Apply adapters to a part of the model, by the number of a layer's rows."""
        self._batch_of[part] = batch_of
        try:
            yield
        finally:
            del self._batch_of[part]

    def text(self, batch: LoraBatch | None) -> AbstractContextManager[None]:
        """Apply adapters to the language model; None for no adapter."""
        return self.part("text", lambda _: batch)

    def batch(self, part: str, rows: int) -> LoraBatch | None:
        """Adapters of a layer's rows; None if no adapter applies."""
        batch_of = self._batch_of.get(part)
        return None if batch_of is None else batch_of(rows)


class LinearGroup:
    """Linear layers that share their input, with stacked weights."""

    # Whether weights are stored quantized, so that nothing can merge or read them.
    quantized: ClassVar[bool] = False

    def __init__(self, spec: GroupSpec, linears: Sequence[nn.Linear], scope: LoraScope) -> None:
        self.spec = spec
        # LoRA weights of these layers; None while no adapter has any.
        self.lora: LoraWeights | None = None
        self._scope = scope
        widths = spec.out_features
        with torch.no_grad():
            # One [sum of outputs, inputs], or one per layer where they cannot be stacked.
            self.weights: tuple[Tensor, ...] = self._stack(linears)
            self.pristine: tuple[Tensor, ...] = ()  # likewise, once adapters may be merged
            self.bias: Tensor | None = None  # [sum of outputs] or None
            biases: list[Tensor | None] = [linear.bias for linear in linears]
            if (one := next((bias for bias in biases if bias is not None), None)) is not None:
                parts = [
                    one.new_zeros(width) if bias is None else bias
                    for bias, width in zip(biases, widths, strict=True)
                ]
                self.bias = parts[0] if len(parts) == 1 else torch.cat(parts)
        self.is_aligned = all(n % ALIGNMENT == 0 for n in (spec.in_features, *widths))
        self._columns = [slice(*pair) for pair in pairwise(accumulate(widths, initial=0))]
        # A tensor, as torch would compile each layer anew for numbers that differ.
        self._number = torch.tensor(next(_numbers))
        _groups[int(self._number)] = self
        self._whole: Tensor | None = None  # outputs while torch compiles

    def _stack(self, linears: Sequence[nn.Linear]) -> tuple[Tensor, ...]:
        weights = [linear.weight.detach() for linear in linears]
        return (weights[0] if len(weights) == 1 else torch.cat(weights),)

    def lora_to_merge(self) -> LoraWeights:
        """The weights from which adapters are merged into these layers."""
        assert self.lora is not None
        return self.lora

    def gather(self, slot: int, rank: int) -> None:
        """Complete `lora_to_merge` for the adapter in a slot, before it is merged."""

    def matrix(self, index: int) -> Tensor:
        """Weight of the layer at `index`: [outputs, inputs], a merged adapter included."""
        if len(self.weights) > 1:
            return self.weights[index]
        parts: Sequence[Tensor] = self.weights[0].split(self.spec.out_features)
        return parts[index]

    def compute(self, x: Tensor) -> Tensor:
        """Outputs of all layers, side by side; they are kept until another group computes."""
        self._scope.last = None  # its memory is free before there is more
        whole = self._compute(x)
        self._scope.last = self, x, whole
        return whole

    def output(self, index: int, x: Tensor) -> Tensor:
        """Output of the layer at `index`: x [..., inputs] → [..., outputs of that layer]."""
        if torch.compiler.is_compiling():
            whole = self._traced(index, x)
        elif index and (last := self._scope.last) and last[0] is self and last[1] is x:
            whole = last[2]
        else:
            whole = self.compute(x)
        return whole if len(self._columns) == 1 else whole[..., self._columns[index]]

    def _traced(self, index: int, x: Tensor) -> Tensor:
        """Outputs under compilation, where tensors are not comparable, up to the last layer."""
        whole = self._whole if index else None
        if whole is None:
            whole = torch.ops.valora.linears(x, self._number, self._columns[-1].stop)
        self._whole = None if index == len(self._columns) - 1 else whole
        return whole

    def _compute(self, x: Tensor) -> Tensor:
        """Outputs of all layers, side by side: [..., inputs] → [..., sum of outputs]."""
        flat = x.reshape(-1, x.shape[-1])
        batch = self._scope.batch(self.spec.part, len(flat))
        way, widths = self._scope.operator, self.spec.out_features
        if batch is None or self.lora is None:
            y = self._base(flat)
        elif way.adaptive and self.is_aligned and not self.quantized:
            y = x.new_empty(len(flat), sum(widths))
            bases = [self.matrix(index) for index in range(len(widths))]
            biases = None if self.bias is None else list(self.bias.split(widths))
            add_projection(y.split(widths, dim=1), flat, bases, self.lora, batch, biases=biases)
        else:
            y = self._base(flat)
            way.add(y.split(widths, dim=1), flat, self.lora, batch)
        whole: Tensor = y.view(*x.shape[:-1], -1)
        return whole

    def _base(self, x: Tensor) -> Tensor:
        """x·Wᵀ + bias of all layers: [rows, sum of outputs]."""
        if len(self.weights) == 1:
            return linear(x, self.weights[0], self.bias)
        y = torch.cat([F.linear(x, weight) for weight in self.weights], dim=-1)
        return y if self.bias is None else y + self.bias


_numbers = count()
_groups: WeakValueDictionary[int, LinearGroup] = WeakValueDictionary()


@torch.library.custom_op("valora::linears", mutates_args=())
def _linears(x: Tensor, group: Tensor, width: int) -> Tensor:
    """A group's layers, [..., inputs] → [..., width], by its number [] int64 on the CPU."""
    return _groups[int(group)]._compute(x)


@_linears.register_fake
def _linears_shape(x: Tensor, group: Tensor, width: int) -> Tensor:
    return x.new_empty((*x.shape[:-1], width))


class GroupedLinear(nn.Module):
    """Replaces one linear layer of the model; its group computes."""

    def __init__(self, group: LinearGroup, index: int) -> None:
        super().__init__()
        self._group = group
        self._index = index

    @property
    def weight(self) -> Tensor:
        """[outputs, inputs], a merged adapter included."""
        return self._group.matrix(self._index)

    @property
    def bias(self) -> Tensor | None:
        """[outputs] or None."""
        bias = self._group.bias
        return None if bias is None else bias[self._group._columns[self._index]]

    def forward(self, x: Tensor) -> Tensor:
        """[..., inputs] → [..., outputs]."""
        return self._group.output(self._index, x)


MakeGroup: TypeAlias = "Callable[[GroupSpec, Sequence[nn.Linear], LoraScope], LinearGroup]"


@dataclass
class Linears:
    """All linear layers that adapters can change."""

    groups: dict[str, LinearGroup]  # groups by name
    # Group of each module by the module's name, and the module's index in it.
    group_of: dict[str, tuple[LinearGroup, int]]
    scope: LoraScope  # adapters of the current forward pass
    # LoRA weights of each group in the engine's memory, for groups that adapters change.
    lora: Mapping[str, LoraWeights] = field(default_factory=dict)
    # Memories of the weights that adapters are merged into, by when their targets came.
    merged: list[MergeableWeights] = field(default_factory=list)
    # Whether merges take one matrix after the other, to compare the swift switch.
    by_matrix: bool = False
    group: Group | None = None  # whose ranks hold parts of the layers

    @classmethod
    def of(
        cls,
        model: nn.Module,
        parts: Mapping[str, str],
        make: MakeGroup = LinearGroup,
        names: LinearNames = LLAMA,
        group: Group | None = None,
    ) -> Linears:
        """Replace linear layers in the modules that `parts` names, each ``text`` or ``vision``."""
        found = cls({}, {}, LoraScope(), group=group)
        linears = {
            name: (module, part)
            for prefix, part in parts.items()
            for name, module in model.get_submodule(prefix).named_modules(prefix=prefix)
            if isinstance(module, nn.Linear)
        }
        for name, (_, part) in linears.items():
            if name in found.group_of:
                continue
            parent, _, leaf = name.rpartition(".")
            sharing = next((one for one in names.column if leaf in one), ())
            members = [f"{parent}.{one}" for one in sharing]
            if not members or any(member not in linears for member in members):
                members = [name]
            modules = [linears[member][0] for member in members]
            # The sizes of the weights: a process of a tensor-parallel group holds parts of them.
            sizes = [shape_of(module.weight) for module in modules]
            widths = tuple(size[0] for size in sizes)
            spec = GroupSpec(members[0], tuple(members), sizes[0][1], widths, part)
            found.groups[spec.name] = made = make(spec, modules, found.scope)
            for index, member in enumerate(members):
                parent, _, leaf = member.rpartition(".")
                setattr(model.get_submodule(parent), leaf, GroupedLinear(made, index))
                found.group_of[member] = (made, index)
        return found

    def release(self) -> None:
        """Free an engine's memory, so that another engine can take the model over."""
        self.scope.last, self.lora = None, {}
        for group in self.groups.values():
            group.lora = None
        for memory in self.merged:
            memory.unmerge()
            memory.bind({})

    def row_norms(self) -> dict[str, float]:
        """Root mean square of the norms of a weight's rows, by linear; nothing may be merged."""
        if not self.group_of:
            return {}
        weights = [group.matrix(index) for group, index in self.group_of.values()]
        norms = [torch.linalg.vector_norm(weight, dtype=torch.float32) for weight in weights]
        rows = norms[0].new_tensor([len(weight) for weight in weights])
        sums = torch.stack((torch.stack(norms).square(), rows))
        if self.group is not None:
            # Of a row layer, each rank has all rows.
            shares = [group.spec.share for group, _ in self.group_of.values()]
            split = [share is not None and share.row for share in shares]
            sums[1, split] /= self.group.size
            self.group.all_reduce(sums)
        return dict(zip(self.group_of, (sums[0] / sums[1]).sqrt().tolist(), strict=True))

    def activate(self, names: Collection[str], mergeable: bool) -> None:
        """Let groups apply adapters, and merge them if `mergeable`; nothing may be merged now."""
        if mergeable:  # first, as there may be no memory for it
            self._make_mergeable(names)
        for name in names:
            self.groups[name].lora = self.lora[name]
        if mergeable:
            # An engine that had the model before may have made groups mergeable that this one's
            # adapters do not change.
            lora = {
                name: group.lora_to_merge() for name, group in self.groups.items()
                if group.lora is not None
            }  # fmt: skip
            for weights in self.merged:
                found = [(module, *self.group_of[module]) for module in weights.shapes]
                bound = ((module, one.spec.name, index) for module, one, index in found)
                weights.bind({m: (lora[name], index) for m, name, index in bound if name in lora})

    def merge(self, slot: int, rank: int, scaling: float) -> None:
        """Merge the adapter in a slot into all weights that it changes."""
        for group in self.groups.values():
            group.gather(slot, rank)
        for weights in self.merged:
            merge = weights.merge_by_matrix if self.by_matrix else weights.merge
            merge(slot, rank, scaling)

    def unmerge(self) -> None:
        """Restore the pristine weights."""
        for weights in self.merged:
            (weights.unmerge_by_matrix if self.by_matrix else weights.unmerge)()

    @contextmanager
    def without_merged(self, part: str) -> Iterator[None]:
        """Context in which a part's layers compute with their pristine weights."""
        groups = [one for one in self.groups.values() if one.spec.part == part and one.pristine]
        for group in groups:
            group.weights, group.pristine = group.pristine, group.weights
        try:
            yield
        finally:
            for group in groups:
                group.weights, group.pristine = group.pristine, group.weights

    def is_finite(self) -> bool:
        """Whether all weights that adapters are merged into are finite; waits for the device."""
        found = all(weights.is_finite() for weights in self.merged)
        return found if self.group is None else bool(self.group.minimum(int(found)))

    def _make_mergeable(self, names: Collection[str]) -> None:
        """Move the weights of groups into an allocation, which one launch can merge into.

        Those of widths that the launch cannot take go into another one (3,420 of Qwen2.5-VL's
        tower), so that only they are merged one matrix after the other.
        """
        held = {name for memory in self.merged for name in memory.shapes}
        new = [one for name, one in self.groups.items() if name in names and name not in held]
        for aligned in (True, False):
            if groups := [one for one in new if one.is_aligned == aligned]:
                self._move(groups)

    def _move(self, groups: Sequence[LinearGroup]) -> None:
        shapes = {
            module: (width, group.spec.in_features)
            for group in groups
            for module, width in zip(group.spec.modules, group.spec.out_features, strict=True)
        }
        like = groups[0].weights[0]
        memory = MergeableWeights(shapes, dtype=like.dtype, device=like.device)
        del like
        for group in groups:
            names_of = group.spec.modules
            views = [memory.set(name, group.matrix(i)) for i, name in enumerate(names_of)]
            group.weights = _stacked(views)  # the only one that held the weights until now
        memory.keep()
        for group in groups:
            group.pristine = _stacked([memory.pristine_weight(m) for m in group.spec.modules])
        self.merged.append(memory)


def _stacked(views: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """One view over matrices that follow each other in memory, or the matrices themselves."""
    first = views[0]
    offset = first.storage_offset()
    for view in views:
        if view.storage_offset() != offset:
            return tuple(views)
        offset += view.numel()
    rows = sum(len(view) for view in views)
    return (first.as_strided((rows, first.shape[1]), (first.shape[1], 1)),)
