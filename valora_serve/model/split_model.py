"""Reads a process's part of a base model: no process ever holds the whole.

transformers builds the model without memory. Before it reads the weights, the decoder's linear
layers are cut to this process's parts, and the same parts are cut from the safetensors files, one
matrix at a time. Embeddings, norms, vision tower and projector are replicated. The output layer is
split by the vocabulary, unless it shares its weights with the embeddings.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

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

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

HEAD = "lm_head"
"""Path of the output layer."""


@dataclass(slots=True)
class SplitReader:
    """Reads this process's part of a base model; called like transformers' ``from_pretrained``.

    Args:
        base: Name of the base model, for messages.
        group: The processes.
        quantize: How the decoder's weights are rounded; None to keep them.

    Attributes:
        slices: Part of every linear layer of the decoder, by path.
        targets: Linear layers that adapters on disk name, with the sizes of the whole model.
    """

    base: str
    group: Group
    quantize: str | None = None
    slices: dict[str, Slice] = field(default_factory=dict)
    targets: ModelTargets | None = None

    def __call__(self, source: str, *, dtype: torch.dtype, **options: Any) -> Any:
        """Read the model to the group's device.

        Raises:
            SettingsError: The model cannot be split over the processes.
        """
        from transformers import AutoConfig

        import valora_data.models.lite_tower  # noqa: F401 (registers it with transformers)

        config = AutoConfig.from_pretrained(source)
        kind: Any = family_of(config.model_type).auto_class()._model_mapping[type(config)]
        device = self.group.device
        reader, rounds = self, self.quantize is not None

        class Part(kind):  # type: ignore[misc]
            """The same model with this process's parts of the linear layers."""

            def __init__(self, *arguments: Any, **more: Any) -> None:
                super().__init__(*arguments, **more)
                reader.cut(self)

            @staticmethod
            def _load_pretrained_model(
                model: Any, state_dict: Any, checkpoint_files: Any, load_config: Any, *more: Any
            ) -> Any:
                found = reader.open(model, checkpoint_files, dtype, load_config, rounds=rounds)
                return kind._load_pretrained_model(model, found, None, load_config, *more)

        Part.__name__, Part.__qualname__, Part.__module__ = (
            kind.__name__, kind.__qualname__, kind.__module__,
        )  # fmt: skip
        return Part.from_pretrained(source, dtype=dtype, device_map={"": device}, **options)

    def cut(self, model: Any) -> None:
        """Cut the linear layers of a model without memory to this process's parts.

        `out_features` and `in_features` stay those of the whole layers.
        """
        architecture = architecture_of(model, self.base)
        self.targets = ModelTargets.of(model, architecture)
        paths = [
            path
            for path, part in architecture.adaptable(model).items()
            if part is ModelPart.LANGUAGE
        ]
        modules = dict(model.named_modules())
        linears = {
            path: module
            for path, module in modules.items()
            if isinstance(module, nn.Linear) and path.startswith(tuple(f"{p}." for p in paths))
        }
        text = model.config.get_text_config()
        heads = int(text.num_attention_heads)
        head_dim = int(getattr(text, "head_dim", None) or text.hidden_size // heads)
        whole = architecture.linears.head_norms
        self._refuse_others(model, paths, set(linears), dict.fromkeys(whole, head_dim))
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
        for path, part in self.slices.items():
            _cut(linears[path], part)
        if not getattr(model.config, "tie_word_embeddings", False):
            head = modules[HEAD]
            self.slices[HEAD] = part = _vocabulary_slice(len(head.weight), self.group)
            _cut(head, part)

    def _refuse_others(
        self, model: Any, paths: Sequence[str], linears: set[str], norms: dict[str, int]
    ) -> None:
        """Refuse layers whose parameters are neither linear layers nor norms of one head or row."""
        for name, weight in model.named_parameters():
            owner = name.rpartition(".")[0]
            if owner in linears or not name.startswith(tuple(f"{path}." for path in paths)):
                continue
            leaf = owner.rpartition(".")[2]
            if weight.ndim > 1 or len(weight) != norms.get(leaf, len(weight)):
                raise SettingsError(
                    f"tensor_parallel: {name} of base model {self.base} cannot be split: serve it "
                    "on one GPU"
                )

    def open(
        self,
        model: Any,
        files: Sequence[str] | None,
        dtype: torch.dtype,
        load_config: Any,
        *,
        rounds: bool,
    ) -> dict[str, Any]:
        """Return the weights by their names in the files; each is read when it is indexed.

        Args:
            model: The model without memory.
            files: Safetensors files.
            dtype: Type of the weights.
            load_config: transformers' settings of the load, which hold its renamings.
            rounds: Whether the decoder's linear layers are rounded.

        Raises:
            SettingsError: The weights are no safetensors, or transformers combines several of them
                into one that is split.
        """
        from safetensors import safe_open
        from transformers.core_model_loading import (
            WeightConverter,
            WeightRenaming,
            rename_source_key,
        )

        known = load_config.weight_mapping or []
        renamings = [one for one in known if isinstance(one, WeightRenaming)]
        converters = [one for one in known if isinstance(one, WeightConverter)]
        present = model.state_dict()
        rounded = self._round(dtype) if rounds else None
        found: dict[str, Any] = {}
        for file in files or ():
            if not str(file).endswith(".safetensors"):
                raise SettingsError(
                    f"tensor_parallel: base model {self.base} is not saved as safetensors, which "
                    "can be read in parts: save it again with save_pretrained"
                )
            # The handle lives as long as its slices do.
            opened: Any = safe_open(file, framework="pt")
            for name in opened.keys():  # noqa: SIM118 - it is no dict
                target, combined = rename_source_key(
                    name, renamings, converters, model.base_model_prefix, present
                )
                path, _, leaf = target.rpartition(".")
                values = opened.get_slice(name)
                part = self.slices.get(path)
                if part is not None and combined is not None:
                    raise SettingsError(
                        f"tensor_parallel: {name} of base model {self.base} is a mix of several "
                        "layers, which cannot be split: save the model with save_pretrained"
                    )
                if part is not None:
                    step = rounded if leaf == "weight" and path != HEAD else None
                    values = _Part(values, part, step)
                found[name] = values
        return found

    def _round(self, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
        quantized.check_library(self.group.device.type)
        device = self.group.device

        def rounded(values: Tensor) -> Tensor:
            return quantized.rounded_matrix(values.to(device=device, dtype=dtype)).to(dtype)

        return rounded


def check_split(base: str, size: int) -> None:
    """Check that a base model can be split over processes, before any is started.

    Args:
        base: ``tiny``, a folder or a name on the hub.
        size: Number of processes.

    Raises:
        BundleError: There is no such model.
        SettingsError: It cannot be split over so many processes.
    """
    from transformers import AutoConfig

    import valora_data.models.lite_tower  # noqa: F401 (registers it with transformers)

    source = base_folder(base)
    try:
        model = empty_model(AutoConfig.from_pretrained(source))
    except (OSError, ValueError, ImportError):
        return  # loading it says why
    SplitReader(base, Group(0, size, torch.device("meta"))).cut(model)


class _Part:
    """A weight in a file, of which this process reads a part; indexed once, with ``...``."""

    def __init__(
        self, values: Any, part: Slice, rounded: Callable[[Tensor], Tensor] | None
    ) -> None:
        self._values, self._part, self._rounded = values, part, rounded

    def get_shape(self) -> list[int]:
        """Return the shape of the whole weight."""
        return list(self._values.get_shape())

    def get_dtype(self) -> str:
        """Return the data type in the file."""
        return str(self._values.get_dtype())

    def __getitem__(self, index: Any) -> Tensor:
        """Return this process's part."""
        assert index is Ellipsis
        start, stop = self._part.start, self._part.stop
        values = self._values
        if self._rounded is not None:  # blocks of a matrix are rounded together
            values = self._rounded(values[...])
        if len(self.get_shape()) == 1:  # a bias: whole where the inputs are split
            found: Tensor = values[...] if self._part.row else values[start:stop]
        else:
            found = values[:, start:stop] if self._part.row else values[start:stop]
        return found.contiguous()


class SplitHead(nn.Module):
    """The output layer, of which each process holds a part of the vocabulary.

    Args:
        weight: [tokens of this process, width]; fewer than others have for the last processes.
        bias: [tokens of this process] or None.
        vocabulary: Number of tokens of all processes.
        group: The processes.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, vocabulary: int, group: Group) -> None:
        super().__init__()
        self.vocabulary = vocabulary
        self._weight, self._bias, self._group = weight, bias, group
        self._each = -(-vocabulary // group.size)

    def forward(self, hidden: Tensor) -> Tensor:
        """[…, width] → […, vocabulary], the same in all processes."""
        rows = hidden.reshape(-1, hidden.shape[-1])
        own = F.linear(rows, self._weight, self._bias)
        if own.shape[1] < self._each:
            own = F.pad(own, (0, self._each - own.shape[1]))
        whole = self._group.gather(own).transpose(0, 1).reshape(len(rows), -1)
        return whole[:, : self.vocabulary].reshape(*hidden.shape[:-1], -1)


def split_head(model: Any, group: Group) -> int:
    """Replace a model's output layer by this process's part of it; return the vocabulary's size."""
    head = model.lm_head
    vocabulary = int(head.out_features)
    weight, bias = head.weight.detach(), head.bias
    if len(weight) == vocabulary:  # it shares its weights with the embeddings, which are whole
        part = _vocabulary_slice(vocabulary, group)
        weight = weight[part.start : part.stop]
        bias = None if bias is None else bias[part.start : part.stop]
    model.lm_head = SplitHead(weight, bias, vocabulary, group)
    return vocabulary


def _vocabulary_slice(vocabulary: int, group: Group) -> Slice:
    """Return the tokens whose logits this process computes."""
    each = -(-vocabulary // group.size)
    ends = [min(each * number, vocabulary) for number in (group.rank, group.rank + 1)]
    return Slice(False, *ends)


def _cut(linear: nn.Linear, part: Slice) -> None:
    """Cut the parameters of a linear layer without memory; its attributes stay."""
    outputs, inputs = linear.weight.shape
    shape = (outputs, part.width) if part.row else (part.width, inputs)
    linear.weight = nn.Parameter(linear.weight.new_empty(shape), requires_grad=False)
    if linear.bias is not None and not part.row:
        linear.bias = nn.Parameter(linear.bias.new_empty(part.width), requires_grad=False)


def local_heads(heads: int, kv_heads: int, size: int) -> tuple[int, int]:
    """Return how many query heads, and heads of keys and values, a process holds."""
    return heads // size, max(kv_heads // size, 1)
