"""A rank's part of a base model: how it is read, and how its layers compute (S-LoRA §6).

transformers builds the model without memory. Before it reads the weights, the decoder's linear
layers and the safetensors' matrices are cut to this process's parts, so that none ever holds the
whole. Column layers (q, k, v, gate, up) are split by their outputs, row layers (o, down) by their
inputs, and one all-reduce sums the outputs of a row layer with its LoRA terms. The output layer is
split by the vocabulary; all else is replicated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from valora_data.contract import quantized
from valora_data.contract.base_model import base_folder
from valora_data.models.base import ModelPart
from valora_data.models.registry import architecture_of, empty_model, family_of
from valora_kernels import two_steps
from valora_kernels.metadata import LoraBatch
from valora_kernels.weights import LoraWeights
from valora_serve.catalogue.adapters import ModelTargets
from valora_serve.errors import SettingsError
from valora_serve.memory.unified import GroupSpec
from valora_serve.model.linears import LinearGroup, LoraScope
from valora_serve.parallel.group import Group
from valora_serve.parallel.partition import (
    ALIGNMENT,
    REPLICATE_A,
    SLORA,
    Share,
    Slice,
    partition,
)

HEAD = "lm_head"  # path of the output layer


@dataclass(slots=True)
class SplitReader:
    """Reads a rank's part of a base model; called like transformers' ``from_pretrained``."""

    base: str
    group: Group
    quantize: str | None = None
    lora: str = REPLICATE_A  # how LoRA matrices are split
    slices: dict[str, Slice] = field(default_factory=dict)  # of the decoder's linears, by path
    targets: ModelTargets | None = None  # those of adapters, with the sizes of the whole model

    def __call__(self, source: str, *, dtype: torch.dtype, **options: Any) -> Any:
        """Read the model to the group's device."""
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(source)
        kind: Any = family_of(config.model_type).auto_class()._model_mapping[type(config)]
        reader = self

        class Part(kind):  # type: ignore[misc]
            def __init__(self, *arguments: Any, **more: Any) -> None:
                super().__init__(*arguments, **more)
                reader.cut(self)

            @staticmethod
            def _load_pretrained_model(
                model: Any, state_dict: Any, checkpoint_files: Any, load_config: Any, *more: Any
            ) -> Any:
                found = reader.open(model, checkpoint_files, dtype, load_config)
                return kind._load_pretrained_model(model, found, None, load_config, *more)

        for name in ("__name__", "__qualname__", "__module__"):
            setattr(Part, name, getattr(kind, name))
        return Part.from_pretrained(
            source, dtype=dtype, device_map={"": self.group.device}, use_safetensors=True, **options
        )

    def cut(self, model: Any) -> None:
        """Cut the linear layers of a model without memory; their features stay the whole ones."""
        architecture = architecture_of(model, self.base)
        self.targets = ModelTargets.of(model, architecture)
        parts = architecture.adaptable(model).items()
        inside = tuple(f"{path}." for path, part in parts if part is ModelPart.LANGUAGE)
        linears = {
            path: module for path, module in model.named_modules()
            if isinstance(module, nn.Linear) and path.startswith(inside)
        }  # fmt: skip
        text = model.config.get_text_config()
        heads = int(text.num_attention_heads)
        kv_heads = int(getattr(text, "num_key_value_heads", None) or heads)
        head_dim = int(getattr(text, "head_dim", None) or text.hidden_size // heads)
        for name, weight in model.named_parameters():
            owner = name.rpartition(".")[0]
            if owner in linears or not name.startswith(inside):
                continue
            # Besides linear layers, only norms of a row, or of a head, can be on every GPU.
            of_head = owner.rpartition(".")[2] in architecture.linears.head_norms
            if weight.ndim > 1 or (of_head and len(weight) != head_dim):
                raise SettingsError(
                    f"tensor_parallel: {name} of base model {self.base} cannot be split: serve it "
                    "on one GPU"
                )
        shapes = {path: (one.out_features, one.in_features) for path, one in linears.items()}
        self.slices = partition(
            shapes, heads, kv_heads, head_dim, self.group.rank, self.group.size, self.base,
            architecture.linears,
        )  # fmt: skip
        if not getattr(model.config, "tie_word_embeddings", False):
            linears[HEAD] = model.get_submodule(HEAD)
            self.slices[HEAD] = _vocabulary_slice(len(linears[HEAD].weight), self.group)
        for path, part in self.slices.items():
            for name, weight in list(linears[path].named_parameters(recurse=False)):
                cut = nn.Parameter(part.of(weight, weight.ndim).clone(), False)
                setattr(linears[path], name, cut)

    def open(
        self, model: Any, files: Sequence[str] | None, dtype: torch.dtype, load_config: Any
    ) -> dict[str, Any]:
        """Return the weights in safetensors files by their names there, to be read one by one."""
        from safetensors import safe_open
        from transformers import core_model_loading as loading

        known = load_config.weight_mapping or []
        kinds = (loading.WeightRenaming, loading.WeightConverter)
        mapping: Any = [[one for one in known if isinstance(one, kind)] for kind in kinds]
        mapping += model.base_model_prefix, model.state_dict()
        if self.quantize is not None:
            quantized.check_library(self.group.device.type)

        def quantize(values: Tensor) -> Tensor:
            values = values.to(device=self.group.device, dtype=dtype)
            return quantized.quantized_matrix(values).to(dtype)

        found: dict[str, Any] = {}
        for file in files or ():
            # The handle lives as long as its slices do.
            opened: Any = safe_open(file, framework="pt")
            for name in opened.keys():  # noqa: SIM118 - it is no dict
                target, combined = loading.rename_source_key(name, *mapping)
                path, _, leaf = target.rpartition(".")
                found[name] = opened.get_slice(name)
                if (part := self.slices.get(path)) is None:
                    continue
                if combined is not None:
                    raise SettingsError(
                        f"tensor_parallel: {name} of base model {self.base} is a mix of several "
                        "layers, which cannot be split: save the model with save_pretrained"
                    )
                packs = self.quantize is not None and leaf == "weight" and path != HEAD
                found[name] = _Part(found[name], part, quantize if packs else None)
        return found

    def make(self, spec: GroupSpec, linears: Sequence[nn.Linear], scope: LoraScope) -> LinearGroup:
        """Make a group of linear layers; weights at the paths of `slices` are the rank's parts."""
        if spec.name not in self.slices:
            return LinearGroup(spec, linears, scope)
        own = tuple(self.slices[module] for module in spec.modules)
        # By the other side, by which the base weights are not split.
        width = spec.out_features[0] if own[0].row else spec.in_features
        exchanges = self.lora == SLORA and not width % (self.group.size * ALIGNMENT)
        share = Share(self.group.rank, self.group.size, own, exchanges)
        return SplitGroup(self.group, share, spec, linears, scope)


def check_split(base: str, size: int) -> None:
    """Check that a base model can be split, before processes are started."""
    from transformers import AutoConfig

    import valora_data.models.lite_tower  # noqa: F401 (registers it with transformers)

    source = base_folder(base)
    try:
        model = empty_model(AutoConfig.from_pretrained(source))
    except (OSError, ValueError, ImportError):
        return  # loading it says why
    SplitReader(base, Group(0, size, torch.device("meta"))).cut(model)


class _Part:
    """A weight in a file, of which this rank reads a part; indexed once, with ``...``."""

    def __init__(self, values: Any, part: Slice, quantize: Callable[..., Tensor] | None) -> None:
        self._values, self._part, self._quantize = values, part, quantize
        self.get_shape, self.get_dtype = values.get_shape, values.get_dtype

    def __getitem__(self, index: Any) -> Tensor:
        assert index is Ellipsis
        # Blocks of a matrix are quantized together.
        values = self._values if self._quantize is None else self._quantize(self._values[...])
        found: Tensor = self._part.of(values, len(self.get_shape()))
        return found.contiguous()


class SplitHead(nn.Module):
    """An output layer, of whose vocabulary each rank holds a part; the last may hold less."""

    def __init__(self, head: nn.Linear, group: Group) -> None:
        super().__init__()
        self.out_features = head.out_features
        self._group, self._each = group, -(-head.out_features // group.size)
        part = Slice(False, 0, len(head.weight))  # the rank's own, as it was read
        if part.stop == head.out_features:  # it is shared with the embeddings
            part = _vocabulary_slice(head.out_features, group)
        self._weight = part.of(head.weight.detach())
        self._bias = None if head.bias is None else part.of(head.bias.detach())

    def forward(self, hidden: Tensor) -> Tensor:
        """[…, width] → […, vocabulary], the same in all ranks."""
        own = F.linear(hidden.reshape(-1, hidden.shape[-1]), self._weight, self._bias)
        if own.shape[1] < self._each:
            own = F.pad(own, (0, self._each - own.shape[1]))
        whole = torch.cat(tuple(self._group.gather(own)), dim=1)
        return whole[:, : self.out_features].reshape(*hidden.shape[:-1], -1)


def _vocabulary_slice(vocabulary: int, group: Group) -> Slice:
    each = -(-vocabulary // group.size)
    return Slice(False, *(min(each * n, vocabulary) for n in (group.rank, group.rank + 1)))


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
            count = len(self._gathered)
            own = [self.lora.rows_of(p, slot, rank)[self.share.row] for p in range(count)]
            parts = tuple(self._group.gather(torch.stack(own)))
            self._gathered[:, :rank] = torch.cat(parts, dim=-1)
