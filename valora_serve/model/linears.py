"""The model's linears, replaced by ones that share inputs, take LoRA terms and can be merged into.

transformers' modules go on calling ``self.q_proj(x)``, ``self.k_proj(x)``, ``self.v_proj(x)``; the
first call computes all three in one product over stacked weights, with one shrink for their
adapters (VaLoRA §4.3), the others pick their part up.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from valora_kernels.launching import ALIGNMENT
from valora_kernels.merge import MergeableWeights
from valora_kernels.project import add_projection, linear
from valora_kernels.reference import atmm_reference

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from valora_kernels.metadata import LoraBatch
    from valora_kernels.weights import LoraWeights

Function = TypeVar("Function", bound="Callable[..., object]")


def _uncompiled(function: Function) -> Function:
    """Leave a function to Python when torch compiles what calls it."""
    left: Function = torch.compiler.disable(function)
    return left


SHARING = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Linears of one module that read the same input."""


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """Linears that share their input.

    Attributes:
        name: Of the group: the first module's.
        modules: Full names of the linears in the model, in the order of their outputs.
        in_features: Width of the input.
        out_features: Widths of the outputs.
        part: ``text`` for the language model, ``vision`` for tower and projector.
    """

    name: str
    modules: tuple[str, ...]
    in_features: int
    out_features: tuple[int, ...]
    part: str


@dataclass(slots=True)
class LoraContext:
    """Which adapters the rows of the present forward pass have; None where none has any.

    Transformers' modules pass nothing through to their linears, so this is where these look.

    Attributes:
        text: Rows of the language model.
        vision: For a number of rows of the tower or projector, theirs.
        last: The group that computed last, whose outputs are kept.
    """

    text: LoraBatch | None = None
    vision: Callable[[int], LoraBatch | None] | None = None
    last: LinearGroup | None = None


class LinearGroup:
    """Stacked weights of linears that share their input.

    Args:
        spec: Which ones.
        linears: The model's own modules.
        context: Where the present batch is found.

    Attributes:
        spec: The same.
        weights: One [sum of outputs, inputs], or one a linear where they cannot be stacked.
        bias: [sum of outputs] or None.
        lora: Adapters of these linears; None while no adapter has any.
    """

    def __init__(self, spec: GroupSpec, linears: Sequence[nn.Linear], context: LoraContext) -> None:
        self.spec = spec
        self.lora: LoraWeights | None = None
        self._context = context
        with torch.no_grad():
            weights = [linear.weight.detach() for linear in linears]
            self.weights: tuple[Tensor, ...] = (
                weights[0] if len(weights) == 1 else torch.cat(weights),
            )
            biases: list[Tensor | None] = [linear.bias for linear in linears]
            self.bias: Tensor | None = None
            if any(bias is not None for bias in biases):
                parts: list[Tensor] = [
                    bias if bias is not None else weight.new_zeros(len(weight))
                    for bias, weight in zip(biases, weights, strict=True)
                ]
                self.bias = parts[0] if len(parts) == 1 else torch.cat(parts)
        self._aligned = all(n % ALIGNMENT == 0 for n in (spec.in_features, *spec.out_features))
        self._input: Tensor | None = None
        self._outputs: Sequence[Tensor] = ()

    def matrix(self, index: int) -> Tensor:
        """Weight of linear `index`: [outputs, inputs]."""
        if len(self.weights) > 1:
            return self.weights[index]
        parts: Sequence[Tensor] = self.weights[0].split(self.spec.out_features)
        return parts[index]

    @_uncompiled
    def compute(self, x: Tensor) -> Tensor:
        """The first linear's output; the others' are kept until another group computes."""
        if self._context.last is not None:
            self._context.last.forget()
        self._context.last = self
        self._input, self._outputs = x, self._compute(x)
        return self._outputs[0]

    def output(self, index: int, x: Tensor) -> Tensor:
        """What linear `index` says of x [..., inputs]: [..., outputs of that linear]."""
        if index == 0:
            return self.compute(x)
        # While torch compiles a layer, it cannot tell whether x is the same, but then it is.
        if not torch.compiler.is_compiling() and self._input is not x:
            self.compute(x)
        return self._outputs[index]

    def forget(self) -> None:
        """Let the last outputs go."""
        self._input, self._outputs = None, ()

    def _compute(self, x: Tensor) -> Sequence[Tensor]:
        flat = x.reshape(-1, x.shape[-1])
        batch = self._batch(len(flat))
        if batch is not None and self.lora is not None and self._aligned:
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
                atmm_reference(y.split(self.spec.out_features, dim=1), flat, self.lora, batch)
        parts: Sequence[Tensor] = y.view(*x.shape[:-1], -1).split(self.spec.out_features, dim=-1)
        return parts

    def _base(self, x: Tensor) -> Tensor:
        """x·Wᵀ + bias of all linears: [rows, sum of outputs]."""
        if len(self.weights) == 1:
            return linear(x, self.weights[0], self.bias)
        y = torch.cat([F.linear(x, weight) for weight in self.weights], dim=-1)
        return y if self.bias is None else y + self.bias

    def _batch(self, rows: int) -> LoraBatch | None:
        """Adapters of the rows at hand."""
        context = self._context
        if self.spec.part == "text":
            return context.text
        return None if context.vision is None else context.vision(rows)


class GroupedLinear(nn.Module):
    """Stands where one of a group's linears stood."""

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
        """[outputs, inputs], the merge included."""
        return self._group.matrix(self._index)

    @property
    def bias(self) -> Tensor | None:
        """[outputs] or None."""
        bias = self._group.bias
        return None if bias is None else bias[self._slice()]

    def forward(self, x: Tensor) -> Tensor:
        """[..., inputs] → [..., outputs]."""
        return self._group.output(self._index, x)


@dataclass(slots=True)
class Linears:
    """All linears that adapters can change.

    Attributes:
        groups: By name.
        group_of: Group and place in it, by module name.
        context: What the groups read.
        merged: Memory of the weights that adapters are merged into; several if targets were added
            later.
    """

    groups: dict[str, LinearGroup]
    group_of: dict[str, tuple[LinearGroup, int]]
    context: LoraContext
    merged: list[MergeableWeights] = field(default_factory=list)

    @classmethod
    def of(cls, model: nn.Module, parts: Mapping[str, str]) -> Linears:
        """Replace a model's linears in place.

        Args:
            model: The model.
            parts: Which modules' linears, by name, and which part they are: ``text`` or
                ``vision``.
        """
        context = LoraContext()
        found = cls({}, {}, context)
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
            members = _members(name, linears)
            taken.update(members)
            parts_of = [linears[member][0] for member in members]
            spec = GroupSpec(
                members[0],
                tuple(members),
                module.in_features,
                tuple(linear.out_features for linear in parts_of),
                part,
            )
            group = LinearGroup(spec, parts_of, context)
            found.groups[spec.name] = group
            for index, member in enumerate(members):
                parent, _, leaf = member.rpartition(".")
                setattr(model.get_submodule(parent), leaf, GroupedLinear(group, index))
                found.group_of[member] = (group, index)
        return found

    def release(self) -> None:
        """Let an engine's memory go, so that another one can take the model over."""
        self.context.last = None
        for group in self.groups.values():
            group.lora = None
            group.forget()
        for memory in self.merged:
            memory.bind({})

    def make_mergeable(self, names: Iterable[str]) -> None:
        """Move the weights of groups into memory that one launch can merge an adapter into.

        Args:
            names: Groups of the language model; those that are there already are left alone.
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
        weight = groups[0].weights[0]
        memory = MergeableWeights(shapes, dtype=weight.dtype, device=weight.device)
        for group in groups:
            names_of = group.spec.modules
            views = [memory.set(name, group.matrix(i)) for i, name in enumerate(names_of)]
            group.weights = _stacked(views)
        self.merged.append(memory)


def _members(name: str, linears: Mapping[str, tuple[nn.Linear, str]]) -> list[str]:
    """The linears that share the input of this one, itself included."""
    parent, _, leaf = name.rpartition(".")
    for names in SHARING:
        if leaf in names:
            members = [f"{parent}.{other}" for other in names]
            if all(member in linears for member in members):
                return members
    return [name]


def _stacked(views: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """One view over matrices that lie one after the other, or themselves if they do not."""
    first = views[0]
    offset = first.storage_offset()
    for view in views:
        if view.storage_offset() != offset:
            return tuple(views)
        offset += view.numel()
    rows = sum(len(view) for view in views)
    return (first.as_strided((rows, first.shape[1]), (first.shape[1], 1)),)
