"""Reads a process's part of a base model: no process ever holds the whole.

transformers builds the model without memory. Before it reads the weights, the decoder's linear
layers and the safetensors' matrices are cut to this process's parts. The output layer is split by
the vocabulary unless it shares its weights with the embeddings; all else is replicated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from valora_data.contract import quantized
from valora_data.contract.base_model import base_folder
from valora_data.models.base import ModelPart
from valora_data.models.registry import architecture_of, empty_model, family_of
from valora_serve.catalogue.adapters import ModelTargets
from valora_serve.errors import SettingsError
from valora_serve.parallel.group import Group
from valora_serve.parallel.partition import Slice, partition

HEAD = "lm_head"  # path of the output layer


@dataclass(slots=True)
class SplitReader:
    """Reads a rank's part of a base model; called like transformers' ``from_pretrained``."""

    base: str
    group: Group
    quantize: str | None = None
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
        self.slices = partition(
            {path: (one.out_features, one.in_features) for path, one in linears.items()},
            heads=heads,
            kv_heads=int(getattr(text, "num_key_value_heads", None) or heads),
            head_dim=head_dim,
            rank=self.group.rank,
            size=self.group.size,
            base=self.base,
            names=architecture.linears,
        )
        if not getattr(model.config, "tie_word_embeddings", False):
            linears[HEAD] = model.get_submodule(HEAD)
            self.slices[HEAD] = _vocabulary_slice(len(linears[HEAD].weight), self.group)
        for path, part in self.slices.items():
            for name, weight in list(linears[path].named_parameters(recurse=False)):
                cut = nn.Parameter(_part_of(weight, part, weight.ndim).clone(), False)
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
        device = self.group.device
        if self.quantize is not None:
            quantized.check_library(device.type)

        def rounded(values: Tensor) -> Tensor:
            return quantized.rounded_matrix(values.to(device=device, dtype=dtype)).to(dtype)

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
                rounds = self.quantize is not None and leaf == "weight" and path != HEAD
                found[name] = _Part(found[name], part, rounded if rounds else None)
        return found


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

    def __init__(
        self, values: Any, part: Slice, rounded: Callable[[Tensor], Tensor] | None
    ) -> None:
        self._values, self._part, self._rounded = values, part, rounded
        self.get_shape, self.get_dtype = values.get_shape, values.get_dtype

    def __getitem__(self, index: Any) -> Tensor:
        assert index is Ellipsis
        # Blocks of a matrix are rounded together.
        values = self._values if self._rounded is None else self._rounded(self._values[...])
        return _part_of(values, self._part, len(self.get_shape())).contiguous()


class SplitHead(nn.Module):
    """An output layer, of whose vocabulary each rank holds a part; the last may hold less."""

    def __init__(self, head: nn.Linear, group: Group) -> None:
        super().__init__()
        self.out_features = head.out_features
        self._group, self._each = group, -(-head.out_features // group.size)
        own = slice(None)
        if len(head.weight) == head.out_features:  # it is shared with the embeddings
            part = _vocabulary_slice(head.out_features, group)
            own = slice(part.start, part.stop)
        self._weight = head.weight.detach()[own]
        self._bias = None if head.bias is None else head.bias.detach()[own]

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


def _part_of(values: Any, part: Slice, ndim: int = 2) -> Tensor:
    """A part of a weight or bias, which is whole where the inputs are split."""
    if part.row and ndim == 1:
        found: Tensor = values[...]
        return found
    own = slice(part.start, part.stop)
    found = values[:, own] if part.row else values[own]
    return found
