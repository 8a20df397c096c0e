"""Reads LoRA adapters in PEFT's format.

Every option that changes an adapter's result is either honoured or refused by name, so that an
adapter never silently computes something else than under PEFT, or nothing at all.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load

from valora_data.contract.architectures.base import ModelPart
from valora_serve.errors import AdapterError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from valora_data.contract.architectures.base import Architecture

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
MAX_RANK = 256

"""Largest rank that the kernels compute."""

HONOURED = {
    "r",
    "lora_alpha",
    "use_rslora",
    "rank_pattern",
    "alpha_pattern",
    "target_modules",
    "exclude_modules",
    "layers_to_transform",
    "layers_pattern",
    "init_lora_weights",
    "peft_type",
}
"""Options of PEFT's configuration that change the result, and are followed."""

WITHOUT_EFFECT = {
    # Origin of the adapter.
    "auto_mapping",
    "base_model_name_or_path",
    "peft_version",
    "revision",
    "task_type",
    # Training only.
    "corda_config",
    "eva_config",
    "inference_mode",
    "loftq_config",
    "lora_dropout",
    "lora_ga_config",
    "monteclora_config",
    "velora_config",
    # Storage and parallelism; A and B of a linear layer are the same.
    "fan_in_fan_out",
    "megatron_config",
    "megatron_core",
    "qalora_group_size",
    "runtime_config",
}
"""Options of PEFT's configuration that do not change the result."""

KEEPS_BASE = (None, True, False, "gaussian", "eva", "orthogonal")
"""Initialisations that do not change the base weights, unlike PiSSA and others."""

TENSOR = re.compile(r"(?P<path>.+)\.lora_(?P<part>[AB])(\.default)?\.weight")


@dataclass(frozen=True)
class ModelTargets:
    """The linear layers of a model that adapters can change.

    Attributes:
        linears: (outputs, inputs) of every linear by module path.
        parts: Part of the model that each linear belongs to.
        rename: Returns the path in this model for a module path of an older checkpoint.
    """

    linears: Mapping[str, tuple[int, int]]
    parts: Mapping[str, ModelPart]
    rename: Callable[[str], str]

    @classmethod
    def of(cls, model: Any, architecture: Architecture) -> ModelTargets:
        """Return the targets of a transformers model, before its linears are replaced.

        Args:
            model: The model; it may lie on the meta device.
            architecture: Its architecture, which names the modules that can be adapted.
        """
        within = architecture.adaptable(model)
        linears, parts = {}, {}
        for path, module in model.named_modules():
            if not isinstance(module, torch.nn.Linear):
                continue
            part = next((p for at, p in within.items() if f"{path}.".startswith(f"{at}.")), None)
            if part is None:
                continue
            linears[path] = (module.out_features, module.in_features)
            parts[path] = part if part is ModelPart.LANGUAGE else architecture.part_of(path)
        return cls(linears, parts, _renaming(model))

    def find(self, path: str) -> str | None:
        """Return the linear that a path in an adapter's file refers to, None if there is none."""
        for candidate in (path, self.rename(path)):
            if candidate in self.linears:
                return candidate
        return None


def _renaming(model: Any) -> Callable[[str], str]:
    """Return a function that renames module paths of checkpoints as transformers does."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming, rename_source_key

    known = get_model_conversion_mapping(model, add_legacy=False)
    renamings = [entry for entry in known if isinstance(entry, WeightRenaming)]
    prefix = getattr(model, "base_model_prefix", "") or None
    present = dict.fromkeys((name for name, _ in model.named_parameters()), True)

    def rename(path: str) -> str:
        renamed, _ = rename_source_key(f"{path}.weight", renamings, [], prefix, present)
        return str(renamed).removesuffix(".weight")

    return rename


@dataclass(frozen=True, slots=True, eq=False)
class LoraPair:
    """The matrices of one linear.

    Attributes:
        a: [rank, inputs], in the dtype of the file.
        b: [outputs, rank], in the dtype of the file.
        scaling: Factor of B·A.
    """

    a: torch.Tensor
    b: torch.Tensor
    scaling: float


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """An adapter that was read and fits the model.

    Attributes:
        folder: Folder that it was read from.
        modules: Its matrices, by module path of the model.
        rank: Largest rank of its modules.
        scaling: Most frequent scaling of its modules; 0 only if all are 0.
        parts: Parts of the model that it changes.
        content: Content hash: hexadecimal sha256 of everything that changes its result.
        vision_content: The same hash over the modules that change how images are encoded (vision
            tower, projector); empty if it has none.
    """

    folder: Path
    modules: Mapping[str, LoraPair]
    rank: int
    scaling: float
    parts: frozenset[ModelPart]
    content: str
    vision_content: str


def read_adapter(folder: Path, targets: ModelTargets) -> Adapter:
    """Read an adapter and check that it will compute the same as under PEFT.

    Args:
        folder: Folder with `adapter_config.json` and `adapter_model.safetensors`.
        targets: Linears of the model.

    Raises:
        AdapterError: A file is missing, damaged or a pickle; an option cannot be served; a tensor
            matches no linear of the model, has another shape, or contains NaN or Inf.
    """
    config = _read_config(folder)
    tensors = _read_tensors(folder)
    found: dict[str, dict[str, tuple[str, torch.Tensor]]] = {}
    stored: dict[str, str] = {}
    for name, tensor in tensors.items():
        match = TENSOR.fullmatch(name)
        path = None
        if match is not None:
            stored_path = match["path"].removeprefix("base_model.model.")
            path = targets.find(stored_path)
        if match is None or path is None:
            raise AdapterError(
                f"adapter {folder}: tensor {name} matches no linear of the base model; use the "
                "base model that it was trained on"
            )
        pair = found.setdefault(path, {})
        if match["part"] in pair:
            raise AdapterError(f"adapter {folder}: tensor {name} is stored twice; save it again")
        pair[match["part"]] = (name, tensor)
        stored[path] = stored_path
    if not found:
        raise AdapterError(f"adapter {folder} holds no tensors: save it again")
    modules = {
        path: _pair(folder, config, (path, stored[path]), found[path], targets.linears[path])
        for path in sorted(found, key=list(targets.linears).index)
    }
    scalings = Counter(pair.scaling for pair in modules.values() if pair.scaling)
    vision = {
        path: pair for path, pair in modules.items() if targets.parts[path] != ModelPart.LANGUAGE
    }
    return Adapter(
        folder=folder,
        modules=modules,
        rank=max(pair.a.shape[0] for pair in modules.values()),
        scaling=scalings.most_common(1)[0][0] if scalings else 0.0,
        parts=frozenset(targets.parts[path] for path in modules),
        content=_content(modules),
        vision_content=_content(vision) if vision else "",
    )


def _read_config(folder: Path) -> dict[str, Any]:
    """Read the configuration, and refuse options that cannot be served."""
    file = folder / CONFIG
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise AdapterError(
            f"{folder} is no adapter, as it has no readable {CONFIG}: name a folder that PEFT saved"
        ) from error
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        kind = config.get("peft_type") if isinstance(config, dict) else type(config).__name__
        raise AdapterError(f"adapter {folder} is of type {kind}: only LORA can be served")
    for option, value in config.items():
        if option in HONOURED | WITHOUT_EFFECT or not value:
            continue
        if option == "bias" and value == "none":
            continue
        raise AdapterError(
            f"adapter {folder}: option {option} = {value!r} cannot be served; merge it into the "
            "base model, or train without it"
        )
    start = config.get("init_lora_weights")
    if start not in KEEPS_BASE:
        raise AdapterError(
            f"adapter {folder}: init_lora_weights = {start!r} changed the base weights; convert it "
            "with PEFT's path_initial_model_for_weight_conversion"
        )
    try:
        _check_numbers(config)
    except (TypeError, ValueError, KeyError, re.error) as error:
        raise AdapterError(f"adapter {folder}: {CONFIG} is damaged: {error!r}") from error
    return config


def _check_numbers(config: dict[str, Any]) -> None:
    ranks = {"r": config["r"], **(config.get("rank_pattern") or {})}
    alphas = {"lora_alpha": config["lora_alpha"], **(config.get("alpha_pattern") or {})}
    for name, rank in ranks.items():
        if not isinstance(rank, int) or rank < 1:
            raise ValueError(f"{name}: expected a rank of at least 1, got {rank!r}")
    for name, alpha in alphas.items():
        if not isinstance(alpha, int | float) or not math.isfinite(alpha):
            raise ValueError(f"{name}: expected a number, got {alpha!r}")
    for pattern in (*ranks, *alphas):
        re.compile(pattern)


def _read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    file = folder / WEIGHTS
    if not file.is_file():
        pickles = [p.name for p in (*folder.glob("*.bin"), *folder.glob("*.pt"))]
        if pickles:
            raise AdapterError(
                f"adapter {folder} holds a pickle ({pickles[0]}), which can run code: save it as "
                "safetensors"
            )
        raise AdapterError(f"adapter {folder} holds no {WEIGHTS}: name the folder that does")
    try:
        # Read, not mapped into memory: the file may be replaced while the engine runs.
        return load(file.read_bytes())
    except (OSError, SafetensorError) as error:
        raise AdapterError(f"{file} is truncated or damaged ({error}): copy it again") from error


def _pair(
    folder: Path,
    config: dict[str, Any],
    paths: tuple[str, str],
    tensors: dict[str, tuple[str, torch.Tensor]],
    shape: tuple[int, int],
) -> LoraPair:
    """Return the matrices of a linear after checking them.

    Args:
        folder: Folder of the adapter.
        config: Its configuration.
        paths: Module path in the model, and in the adapter's file.
        tensors: Name and tensor of ``A`` and ``B``.
        shape: (outputs, inputs) of the linear.
    """
    if set(tensors) != {"A", "B"}:
        only = next(iter(tensors.values()))[0]
        raise AdapterError(f"adapter {folder}: {only} has no partner; save the adapter again")
    if not any(_targeted(config, path) for path in paths):
        raise AdapterError(
            f"adapter {folder}: tensor {tensors['A'][0]} is of a module that target_modules does "
            f"not name; correct its {CONFIG}"
        )
    rank = int(_pattern(config, "rank_pattern", "r", paths))
    alpha = float(_pattern(config, "alpha_pattern", "lora_alpha", paths))
    want = {"A": (rank, shape[1]), "B": (shape[0], rank)}
    for part, (name, tensor) in tensors.items():
        if tuple(tensor.shape) != want[part]:
            raise AdapterError(
                f"adapter {folder}: tensor {name}: expected shape {want[part]}, got "
                f"{tuple(tensor.shape)}; use the base model that it was trained on"
            )
        if not tensor.is_floating_point():
            raise AdapterError(
                f"adapter {folder}: tensor {name} has dtype {tensor.dtype}; save it as floats"
            )
        if not bool(tensor.float().abs().max().isfinite()):
            raise AdapterError(f"adapter {folder}: tensor {name} holds NaN or Inf; train it again")
    if rank > MAX_RANK:
        raise AdapterError(
            f"adapter {folder}: expected a rank of at most {MAX_RANK}, got {rank}; train it again"
        )
    scaling = alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank
    return LoraPair(a=tensors["A"][1], b=tensors["B"][1], scaling=scaling)


def _pattern(config: dict[str, Any], patterns: str, option: str, paths: tuple[str, str]) -> float:
    """Return a module's rank or alpha: that of the first matching pattern, else the option's.

    As in PEFT, a pattern matches the whole path, or its end after a dot.
    """
    for path in paths:
        for pattern, value in (config.get(patterns) or {}).items():
            if re.match(rf"(.*\.)?({pattern})$", path):
                return float(value)
    return float(config[option])


def _targeted(config: dict[str, Any], path: str) -> bool:
    """Return whether PEFT would adapt a module."""
    if (excluded := config.get("exclude_modules")) and _named(excluded, path):
        return False
    target = config.get("target_modules")
    if isinstance(target, str):
        return target.lower() == "all-linear" or re.fullmatch(target, path) is not None
    if not target or not _named(target, path):
        return False
    layers = config.get("layers_to_transform")
    if layers is None or layers == []:
        return True
    patterns = config.get("layers_pattern") or []
    patterns = [patterns] if isinstance(patterns, str) else patterns
    found = (
        next(filter(None, (re.match(rf"(?:^|.*?\.){p}\.(\d+)\.", path) for p in patterns)), None)
        if patterns
        else re.match(r".*?\.[^.]*\.(\d+)\.", path)
    )
    return found is not None and int(found[1]) in ([layers] if isinstance(layers, int) else layers)


def _named(names: str | list[str], path: str) -> bool:
    """Return whether a regular expression, or a list of names, names a module as in PEFT."""
    if isinstance(names, str):
        return re.fullmatch(names, path) is not None
    return path in names or any(path.endswith(f".{name}") for name in names)


def _content(modules: Mapping[str, LoraPair]) -> str:
    """Return the hexadecimal sha256 of module paths, scalings and matrices."""
    total = hashlib.sha256()
    for path in sorted(modules):
        pair = modules[path]
        facts = (path, pair.scaling, *((str(t.dtype), *t.shape) for t in (pair.a, pair.b)))
        total.update(json.dumps(facts).encode())
        for tensor in (pair.a, pair.b):
            total.update(tensor.contiguous().view(torch.uint8).numpy().data)
    return total.hexdigest()
