"""The model's linear layers, replaced by grouped ones that add LoRA terms and can be merged into.

transformers' modules still call ``self.q_proj(x)``, ``self.k_proj(x)`` and ``self.v_proj(x)``. The
first call computes all three in one product over stacked weights, with one LoRA shrink for all
(VaLoRA §4.3); the other calls return their part of the result.

Where torch compiles the model's layers, a group is one operation of theirs, `valora::linears`. What
compiled kernels then read has constant widths and distances between rows: kernels that do not know
them divide by them and load 2 bytes at a time. On an H100 rotating q and k of 8,192 rows took
0.48 ms a layer so, where reading and writing them takes 0.09.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate, count, pairwise
from typing import TYPE_CHECKING, ClassVar, Self, TypeAlias
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from valora_data.contract.quantized import shape_of
from valora_data.models.base import LLAMA
from valora_kernels.launching import ALIGNMENT
from valora_kernels.merge import MergeableWeights
from valora_kernels.operators import ATMM, operator
from valora_kernels.project import add_projection, linear
from valora_serve.memory.unified import GroupSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from valora_data.models.base import LinearNames
    from valora_kernels.metadata import LoraBatch
    from valora_kernels.weights import LoraWeights


class LoraScope:
    """The adapters of the current forward pass.

    transformers' modules pass no further arguments to their linear layers, so the layers look here
    for the adapters of their rows::

        with linears.scope.text(batch):
            lmm.hidden(...)

    Outside such a block no adapter applies.

    Attributes:
        operator: Computes the LoRA terms.
    """

    def __init__(self) -> None:
        self.operator = operator(ATMM)
        self._text: LoraBatch | None = None
        self._vision: Callable[[int], LoraBatch | None] | None = None

    @contextmanager
    def text(self, batch: LoraBatch | None) -> Iterator[None]:
        """Apply adapters to the language model.

        Args:
            batch: Adapters of the rows; None for no adapter.
        """
        before, self._text = self._text, batch
        try:
            yield
        finally:
            self._text = before

    @contextmanager
    def vision(self, batch_of: Callable[[int], LoraBatch | None]) -> Iterator[None]:
        """Apply adapters to the vision tower and the projector.

        Args:
            batch_of: Returns the adapters of a number of rows, which changes from layer to layer;
                None for no adapter.
        """
        before, self._vision = self._vision, batch_of
        try:
            yield
        finally:
            self._vision = before

    def batch(self, part: str, rows: int) -> LoraBatch | None:
        """Adapters of the rows of a layer's input; None if no adapter applies.

        Args:
            part: Part of the model, as in `GroupSpec.part`.
            rows: Number of rows.
        """
        if part == "text":
            return self._text
        return None if self._vision is None else self._vision(rows)


@dataclass(slots=True)
class LastOutputs:
    """The group that computed last, which is the only one to keep its outputs.

    Attributes:
        group: The group; None before the first computation.
    """

    group: LinearGroup | None = None

    def hold(self, group: LinearGroup | None) -> None:
        """Let another group keep its outputs from now on, or none."""
        if self.group is not None:
            self.group.forget()
        self.group = group


class LinearGroup:
    """Linear layers that share their input, with stacked weights.

    `split_linears.SplitGroup` is the part of them that a process of a tensor-parallel group holds.

    Args:
        spec: Names and sizes of the layers.
        linears: The model's own modules.
        scope: Adapters of the current forward pass.
        last: The group that computed last, shared by all groups of a model.

    Attributes:
        spec: Names and sizes of the layers.
        weights: One [sum of outputs, inputs], or one per layer where they cannot be stacked.
        bias: [sum of outputs] or None.
        lora: LoRA weights of these layers; None while no adapter has any.
        rounded: Whether weights are stored as other numbers than those that x is multiplied by,
            so that nothing can be merged into them, nor can our own products read them.
    """

    rounded: ClassVar[bool] = False

    def __init__(
        self, spec: GroupSpec, linears: Sequence[nn.Linear], scope: LoraScope, last: LastOutputs
    ) -> None:
        self.spec = spec
        self.lora: LoraWeights | None = None
        self._scope, self._last = scope, last
        with torch.no_grad():
            self.weights: tuple[Tensor, ...] = self._stack(linears)
            self.bias: Tensor | None = None
            biases: list[Tensor | None] = [linear.bias for linear in linears]
            one = next((bias for bias in biases if bias is not None), None)
            if one is not None:
                parts: list[Tensor] = [
                    one.new_zeros(width) if bias is None else bias
                    for bias, width in zip(biases, spec.out_features, strict=True)
                ]
                self.bias = parts[0] if len(parts) == 1 else torch.cat(parts)
        self._aligned = all(n % ALIGNMENT == 0 for n in (spec.in_features, *spec.out_features))
        ends = list(accumulate(spec.out_features, initial=0))
        self._columns = [slice(*pair) for pair in pairwise(ends)]
        self._width = ends[-1]
        # A tensor, as torch would compile each layer anew for numbers that differ.
        self._number = torch.tensor(next(_numbers))
        _groups[int(self._number)] = self
        self._input: Tensor | None = None
        self._whole: Tensor | None = None

    def _stack(self, linears: Sequence[nn.Linear]) -> tuple[Tensor, ...]:
        """The layers' weights, see `weights`."""
        weights = [linear.weight.detach() for linear in linears]
        return (weights[0] if len(weights) == 1 else torch.cat(weights),)

    def matrix(self, index: int) -> Tensor:
        """Weight of the layer at `index`: [outputs, inputs], a merged adapter included."""
        if len(self.weights) > 1:
            return self.weights[index]
        parts: Sequence[Tensor] = self.weights[0].split(self.spec.out_features)
        return parts[index]

    def compute(self, x: Tensor) -> Tensor:
        """Outputs of all layers, side by side; they are kept until another group computes."""
        self._last.hold(self)
        self._input, self._whole = x, self._compute(x)
        return self._whole

    def output(self, index: int, x: Tensor) -> Tensor:
        """Output of the layer at `index`: x [..., inputs] → [..., outputs of that layer]."""
        if torch.compiler.is_compiling():
            whole = self._traced(index, x)
        elif index and self._whole is not None and self._input is x:
            whole = self._whole
        else:
            whole = self.compute(x)
        return whole if len(self._columns) == 1 else whole[..., self._columns[index]]

    def _traced(self, index: int, x: Tensor) -> Tensor:
        """Outputs of all layers, side by side, while torch compiles what calls them.

        Tensors cannot be compared here, and the input of layers that follow is always the same.
        They are kept up to the last layer, so that nothing outlives what is compiled.
        """
        whole = self._whole if index else None
        if whole is None:
            whole = torch.ops.valora.linears(x, self._number, self._width)
        self._whole = None if index == len(self._columns) - 1 else whole
        return whole

    def forget(self) -> None:
        """Free the last outputs."""
        self._input = self._whole = None

    def _compute(self, x: Tensor) -> Tensor:
        """Outputs of all layers, side by side: [..., inputs] → [..., sum of outputs]."""
        flat = x.reshape(-1, x.shape[-1])
        batch = self._scope.batch(self.spec.part, len(flat))
        way = self._scope.operator
        adaptive = way.adaptive and self._aligned and not self.rounded
        if batch is not None and self.lora is not None and adaptive:
            y = x.new_empty(len(flat), sum(self.spec.out_features))
            bases = [self.matrix(index) for index in range(len(self.spec.modules))]
            biases = None
            if self.bias is not None:
                biases = list(self.bias.split(self.spec.out_features))
            ys = y.split(self.spec.out_features, dim=1)
            add_projection(ys, flat, bases, self.lora, batch, biases=biases)
        else:
            y = self._base(flat)
            if batch is not None and self.lora is not None:
                way.add(y.split(self.spec.out_features, dim=1), flat, self.lora, batch)
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
"""All groups by their numbers."""


@torch.library.custom_op("valora::linears", mutates_args=())
def _linears(x: Tensor, group: Tensor, width: int) -> Tensor:
    """Outputs of a group's layers, side by side, as an operation that torch does not look into.

    Args:
        x: [..., inputs].
        group: Number of the group, [] int64 on the CPU.
        width: Sum of the outputs.

    Returns:
        [..., width].
    """
    del width
    return _groups[int(group)]._compute(x)


@_linears.register_fake
def _linears_shape(x: Tensor, group: Tensor, width: int) -> Tensor:
    del group
    return x.new_empty((*x.shape[:-1], width))


class GroupedLinear(nn.Module):
    """Replaces one linear layer of the model; its group computes."""

    def __init__(self, group: LinearGroup, index: int) -> None:
        super().__init__()
        self._group = group
        self._index = index

    @property
    def in_features(self) -> int:
        """Width of the input."""
        return self._group.spec.in_features

    @property
    def out_features(self) -> int:
        """Width of the output."""
        return self._group.spec.out_features[self._index]

    def _slice(self) -> slice:
        start = sum(self._group.spec.out_features[: self._index])
        return slice(start, start + self.out_features)

    @property
    def weight(self) -> Tensor:
        """[outputs, inputs], a merged adapter included."""
        return self._group.matrix(self._index)

    @property
    def bias(self) -> Tensor | None:
        """[outputs] or None."""
        bias = self._group.bias
        return None if bias is None else bias[self._slice()]

    def forward(self, x: Tensor) -> Tensor:
        """[..., inputs] → [..., outputs]."""
        return self._group.output(self._index, x)


MakeGroup: TypeAlias = (
    "Callable[[GroupSpec, Sequence[nn.Linear], LoraScope, LastOutputs], LinearGroup]"
)


@dataclass(slots=True)
class Linears:
    """All linear layers that adapters can change.

    Attributes:
        groups: Groups by name.
        group_of: Group of each module by the module's name, and the module's index in it.
        scope: Adapters of the current forward pass.
        last: The group that computed last.
        merged: Memory of the weights that adapters are merged into; more than one if later
            adapters have other targets.
        by_matrix: Whether merges take one matrix after the other, to compare the swift switch
            with.
    """

    groups: dict[str, LinearGroup]
    group_of: dict[str, tuple[LinearGroup, int]]
    scope: LoraScope
    last: LastOutputs
    merged: list[MergeableWeights] = field(default_factory=list)
    by_matrix: bool = False

    @classmethod
    def of(
        cls,
        model: nn.Module,
        parts: Mapping[str, str],
        make: MakeGroup | None = None,
        names: LinearNames = LLAMA,
    ) -> Self:
        """Replace a model's linear layers in place.

        Args:
            model: The model.
            parts: Names of the modules whose linear layers are replaced, each with its part:
                ``text`` or ``vision``.
            make: Makes a group of linear layers; `LinearGroup` if None.
            names: Names of the linear layers in the model's family.
        """
        found = cls({}, {}, LoraScope(), LastOutputs())
        linears = {
            name: (module, part)
            for prefix, part in parts.items()
            for name, module in model.get_submodule(prefix).named_modules(prefix=prefix)
            if isinstance(module, nn.Linear)
        }
        taken: set[str] = set()
        for name, (module, part) in linears.items():
            if name in taken:
                continue
            members = _members(name, linears, names)
            taken.update(members)
            parts_of = [linears[member][0] for member in members]
            # The sizes of the weights: a process of a tensor-parallel group holds parts of them.
            spec = GroupSpec(
                members[0],
                tuple(members),
                shape_of(module.weight)[1],
                tuple(shape_of(linear.weight)[0] for linear in parts_of),
                part,
            )
            group = (make or LinearGroup)(spec, parts_of, found.scope, found.last)
            found.groups[group.spec.name] = group
            for index, member in enumerate(members):
                parent, _, leaf = member.rpartition(".")
                setattr(model.get_submodule(parent), leaf, GroupedLinear(group, index))
                found.group_of[member] = (group, index)
        return found

    def release(self) -> None:
        """Free an engine's memory, so that another engine can take the model over."""
        self.forget_outputs()
        for group in self.groups.values():
            group.lora = None
            group.forget()
        for memory in self.merged:
            memory.unmerge()
            memory.bind({})

    def row_norms(self) -> dict[str, float]:
        """Return the size of the language model's weights, into which adapters are merged.

        Nothing may be merged into them.

        Returns:
            Root mean square of the norms of the rows, by name of the linear.
        """
        names = [name for name, (group, _) in self.group_of.items() if group.spec.part == "text"]
        if not names:
            return {}
        values = torch.stack([self._row_norm(name) for name in names])
        return dict(zip(names, self._whole_norms(names, values).tolist(), strict=True))

    def _row_norm(self, name: str) -> Tensor:
        """Root mean square of the norms of a linear's rows, as far as this process holds it."""
        group, index = self.group_of[name]
        weight = group.matrix(index)
        norm: Tensor = torch.linalg.vector_norm(weight, dtype=torch.float32) / len(weight) ** 0.5
        return norm

    def _whole_norms(self, names: Sequence[str], norms: Tensor) -> Tensor:
        """The results of `_row_norm` for whole linears."""
        del names
        return norms

    def forget_outputs(self) -> None:
        """Free the outputs that the last group keeps."""
        self.last.hold(None)

    def activate(
        self, names: Collection[str], lora: Mapping[str, LoraWeights], *, mergeable: bool
    ) -> None:
        """Let groups apply adapters from now on.

        Nothing may be merged into the weights.

        Args:
            names: The groups.
            lora: LoRA weights of all groups by name.
            mergeable: Whether adapters can be merged into groups of the language model.
        """
        if mergeable:  # first, as there may be no memory for it
            self._make_mergeable(
                [name for name, group in self.groups.items()
                 if name in names and group.spec.part == "text"]
            )  # fmt: skip
        for name in names:
            self.groups[name].lora = lora[name]
        if mergeable:
            self._bind()

    def merge(self, slot: int, rank: int, scaling: float) -> None:
        """Merge the adapter in a slot into the weights of the language model.

        Args:
            slot: Its slot.
            rank: Its rank.
            scaling: Its scaling.
        """
        for weights in self.merged:
            if self.by_matrix:
                weights.merge_by_matrix(slot, rank, scaling)
            else:
                weights.merge(slot, rank, scaling)

    def unmerge(self) -> None:
        """Restore the pristine weights."""
        for weights in self.merged:
            if self.by_matrix:
                weights.unmerge_by_matrix()
            else:
                weights.unmerge()

    def is_finite(self) -> bool:
        """Whether all weights that adapters are merged into are finite; waits for the device."""
        return all(weights.is_finite() for weights in self.merged)

    def _bind(self) -> None:
        """Name the adapters of the mergeable weights."""
        self._bind_to({name: one.lora for name, one in self.groups.items() if one.lora is not None})

    def _bind_to(self, lora: Mapping[str, LoraWeights]) -> None:
        # An engine that had the model before may have made groups mergeable that this one's
        # adapters do not change.
        for weights in self.merged:
            found = {module: self.group_of[module] for module in weights.shapes}
            weights.bind(
                {
                    module: (lora[group.spec.name], index)
                    for module, (group, index) in found.items()
                    if group.spec.name in lora
                }
            )

    def _make_mergeable(self, names: Iterable[str]) -> None:
        """Move the weights of groups into one allocation, which one launch can merge into.

        Args:
            names: Groups of the language model; those that were moved before are skipped.
        """
        held = {name for memory in self.merged for name in memory.shapes}
        groups = [self.groups[name] for name in names if name not in held]
        if not groups:
            return
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
        self.merged.append(memory)


def _members(
    name: str, linears: Mapping[str, tuple[nn.Linear, str]], names: LinearNames
) -> list[str]:
    """Names of the linear layers that share the input of one, itself included."""
    parent, _, leaf = name.rpartition(".")
    for sharing in names.column:
        if leaf in sharing:
            members = [f"{parent}.{other}" for other in sharing]
            if all(member in linears for member in members):
                return members
    return [name]


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
