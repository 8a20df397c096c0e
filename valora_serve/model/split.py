"""A rank's part of a base model: how it is read, and how its layers compute (S-LoRA §6).

transformers builds the model without memory. Before it reads the weights, the decoder's linear
layers and the safetensors' matrices are cut to this process's parts, so that none ever holds the
whole. Column layers (q, k, v, gate, up) are split by their outputs, row layers (o, down) by their
inputs, and one all-reduce sums the outputs of a row layer with its LoRA terms. The output layer is
split by the vocabulary once it is read; all else is replicated.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from valora_data.contract import quantized
from valora_data.contract.base_model import load_model
from valora_data.models.base import LLAMA, LinearNames, ModelPart
from valora_data.models.registry import architecture_of, empty_model, family_of
from valora_kernels import two_steps
from valora_kernels.launching import ALIGNMENT
from valora_kernels.metadata import LoraBatch
from valora_kernels.weights import LoraWeights
from valora_serve.catalogue.adapters import ModelTargets
from valora_serve.errors import SettingsError
from valora_serve.memory.unified import GroupSpec, Share
from valora_serve.model.linears import LinearGroup, LoraScope
from valora_serve.parallel import REPLICATE_A, SLORA
from valora_serve.parallel.group import Group


def part_of(width: int, rank: int, size: int) -> slice:
    """A rank's part of a width that the ranks divide equally, or of heads that they may share."""
    first = rank * width // size
    return slice(first, first + max(width // size, 1))


def attention_sizes(config: Any) -> tuple[int, int, int]:
    """Heads of queries, and of keys and values, of a language model, and the width of a head."""
    text = config.get_text_config()
    heads = int(text.num_attention_heads)
    kv_heads = int(getattr(text, "num_key_value_heads", None) or heads)
    return heads, kv_heads, int(getattr(text, "head_dim", None) or text.hidden_size // heads)


@dataclass(frozen=True, slots=True)
class Slice:
    """The inputs (of a `row` layer) or outputs of a linear layer that a rank holds."""

    row: bool
    own: slice

    def of(self, values: Any, name: str) -> Any:
        """The part of the ``weight``, or of the ``bias``, which is whole where inputs are split."""
        if not self.row:
            return values[self.own]
        return values[...] if name == "bias" else values[:, self.own]


@dataclass(slots=True)
class SplitReader:
    """Reads a rank's part of a base model; called like transformers' ``from_pretrained``."""

    base: str
    group: Group
    quantize: str | None = None
    lora: str = REPLICATE_A  # how LoRA matrices are split
    slices: dict[str, Slice] = field(default_factory=dict)  # of the decoder's linears, by path

    def __call__(self, source: str, *, dtype: torch.dtype, **options: Any) -> Any:
        """Read the model to the group's device."""
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(source)
        kind: Any = family_of(config.model_type).auto_class()._model_mapping[type(config)]

        def load(model: Any, _: Any, files: Sequence[str], load_config: Any, *more: Any) -> Any:
            parts = self.open(model, files, dtype)
            return kind._load_pretrained_model(model, parts, None, load_config, *more)

        # Of the same name, by which transformers knows how its weights are called in files.
        own = {"_load_pretrained_model": staticmethod(load), "__module__": kind.__module__}
        part: Any = type(kind.__name__, (kind,), own)
        return part.from_pretrained(
            source, dtype=dtype, device_map={"": self.group.device}, use_safetensors=True, **options
        )

    def cut(self, model: Any) -> ModelTargets:
        """Cut the linear layers of a model without memory; their features stay the whole ones."""
        architecture = architecture_of(model, self.base)
        targets = ModelTargets.of(model, architecture)
        language = [path for path, part in targets.parts.items() if part is ModelPart.LANGUAGE]
        shapes = {path: targets.linears[path] for path in language}
        self.partition(shapes, *attention_sizes(model.config), architecture.linears)
        for path, part in self.slices.items():
            linear = model.get_submodule(path)
            for name, weight in list(linear.named_parameters(recurse=False)):
                setattr(linear, name, nn.Parameter(part.of(weight, name).clone(), False))
        return targets

    def partition(
        self, linears: Mapping[str, tuple[int, int]], heads: int, kv_heads: int, head_dim: int,
        names: LinearNames = LLAMA,
    ) -> None:  # fmt: skip
        """Find the slices of all linear layers of a decoder, given as (outputs, inputs) by path.

        Query heads are dealt out in runs of equal length; where there are fewer heads of keys and
        values than ranks, each is on all ranks whose query heads read it.
        """
        rank, size = self.group.rank, self.group.size
        known, widths = (*itertools.chain(*names.column), *names.row), set()
        own_heads = part_of(kv_heads, rank, size)
        for path, (outputs, inputs) in linears.items():
            leaf = path.rpartition(".")[2]
            if leaf not in known:
                raise SettingsError(
                    f"tensor_parallel: {path} of base model {self.base} cannot be split (known "
                    f"layers: {', '.join(known)}); serve it on one GPU"
                )
            own = slice(own_heads.start * head_dim, own_heads.stop * head_dim)
            if leaf not in names.kv:
                width = inputs if leaf in names.row else outputs
                widths.add(width)
                own = part_of(width, rank, size)
            self.slices[path] = Slice(leaf in names.row, own)
        fitting = [
            str(n) for n in range(1, heads + 1)
            if not (kv_heads % n and n % kv_heads) and not any(w % n for w in (heads, *widths))
        ]  # fmt: skip
        if str(size) not in fitting:
            raise SettingsError(
                f"tensor_parallel: {size} GPUs cannot share base model {self.base} with {heads} "
                f"attention heads, {kv_heads} of keys and values, and widths {sorted(widths)} "
                f"equally: use {', '.join(fitting)}"
            )

    def open(self, model: Any, files: Sequence[str], dtype: torch.dtype) -> dict[str, Any]:
        """Cut a model, and return its weights in safetensors files, by their names there."""
        from safetensors import safe_open

        rename = self.cut(model).rename
        if self.quantize is not None:
            quantized.check_library(self.group.device.type)

        def read(weight: Any, path: str, leaf: str) -> Tensor:
            if self.quantize is not None and leaf == "weight":
                # Blocks of a matrix are quantized together.
                whole = weight[...].to(device=self.group.device, dtype=dtype)
                weight = quantized.quantized_matrix(whole).to(dtype)
            own: Tensor = self.slices[path].of(weight, leaf)
            return own.contiguous()

        found: dict[str, Any] = {}
        for file in files:
            # The handle lives as long as its slices do.
            opened: Any = safe_open(file, framework="pt")
            for name in opened.keys():  # noqa: SIM118 - it is no dict
                stored, _, leaf = name.rpartition(".")
                path, found[name] = rename(stored), opened.get_slice(name)
                if path in self.slices:
                    found[name] = _Part(partial(read, found[name], path, leaf))
        return found

    def make(self, spec: GroupSpec, linears: Sequence[nn.Linear], scope: LoraScope) -> LinearGroup:
        """Make a group of linear layers; weights at the paths of `slices` are the rank's parts."""
        if spec.name not in self.slices:
            return LinearGroup(spec, linears, scope)
        own, rank, size = [self.slices[m] for m in spec.modules], self.group.rank, self.group.size
        row = own[0].row
        # Of the side by which the base weights are not split.
        width = spec.out_features[0] if row else spec.in_features
        exchanges = self.lora == SLORA and not width % (size * ALIGNMENT)
        other = part_of(width, rank, size) if exchanges else slice(0, width)
        parts = tuple(part.own for part in own)
        inputs, outputs = (parts[0], (other,)) if row else (other, parts)
        return SplitGroup(self.group, Share(row, inputs, outputs, exchanges), spec, linears, scope)


def check_split(base: str, size: int) -> None:
    """Check that a base model can be split, before processes are started."""
    from transformers import AutoConfig

    reader = SplitReader(base, Group(0, size, torch.device("meta")))

    def read(source: str, **_: Any) -> Any:
        model = empty_model(AutoConfig.from_pretrained(source))
        reader.cut(model)
        return model, {"missing_keys": ()}

    load_model(base, torch.float32, read=read, plain=True)


@dataclass(frozen=True, slots=True)
class _Part:
    """A weight in a file, of which this rank reads a part when it is indexed, with ``...``."""

    read: Callable[[], Tensor]

    def __getitem__(self, index: Any) -> Tensor:
        return self.read()


class SplitHead(nn.Module):
    """An output layer, of whose vocabulary each rank holds a part; the last may hold less."""

    def __init__(self, head: nn.Linear, group: Group) -> None:
        super().__init__()
        self.out_features, self._group = head.out_features, group
        each = -(-head.out_features // group.size)
        own = slice(each * group.rank, each * (group.rank + 1))
        lacking = each - len(head.weight[own])
        self._weight = F.pad(head.weight.detach()[own], (0, 0, 0, lacking))
        self._bias = None if head.bias is None else F.pad(head.bias.detach()[own], (0, lacking))

    def forward(self, hidden: Tensor) -> Tensor:
        """[…, width] → […, vocabulary], the same in all ranks."""
        own = F.linear(hidden.reshape(-1, hidden.shape[-1]), self._weight, self._bias)
        whole = self._group.gather(own)[:, : self.out_features]
        return whole.reshape(*hidden.shape[:-1], -1)


class SplitGroup(LinearGroup):
    """A part of linear layers that share their input; the weights of `linears` are the part."""

    def __init__(self, group: Group, share: Share, spec: GroupSpec, *linears: Any) -> None:
        super().__init__(replace(spec, share=share), *linears)
        self.share, self._group = share, group
        self._gathered: Tensor | None = None  # A or B of an adapter that is merged, of all ranks
        if share.row and self.bias is not None and group.rank:
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
        own = x if self.share.row else x[:, self.share.inputs]
        shrunk = two_steps.shrink(own, lora, batch)
        wait = self._group.start_all_reduce(shrunk.h)
        y = self._base(x)
        wait()
        ys: Sequence[Tensor] = y.split(self.spec.out_features, dim=1)
        if self.share.row:
            ys = [y[:, self.share.outputs[0]]]
        two_steps.expand(ys, shrunk, lora, batch)
        return y

    def lora_to_merge(self) -> LoraWeights:
        """LoRA weights whose A or B, of which each rank holds a part, is that of all ranks."""
        lora = super().lora_to_merge()
        if not self.share.exchanges:
            return lora
        inputs, outputs = self.spec.in_features, self.spec.out_features
        count = len(outputs)
        width = outputs[0] if self.share.row else inputs
        self._gathered = whole = lora.a.new_zeros((count, lora.max_rank, width))
        rows = width * torch.arange(count * lora.max_rank, device=whole.device)
        table = rows.view(count, 1, -1).repeat(1, lora.slots, 1)  # the same in every slot
        part = "b" if self.share.row else "a"
        own: dict[str, Any] = {part: whole, f"{part}_table": table}
        return replace(lora, in_features=inputs, out_features=outputs, **own)

    def gather(self, slot: int, rank: int) -> None:
        """Gather what `lora_to_merge` holds of the adapter in a slot."""
        if self._gathered is not None and self.lora is not None:
            parts = [self.lora.rows_of(p, slot, rank) for p in range(len(self._gathered))]
            own = torch.stack([part[self.share.row] for part in parts])
            self._gathered[:, :rank] = self._group.gather(own)
