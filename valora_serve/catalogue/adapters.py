"""Reads LoRA adapters in PEFT's format.

Every option that changes an adapter's result is either honoured or refused by name, so that an
adapter never silently computes something else than under PEFT, or nothing at all.
"""

import hashlib
import json
import math
import re
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch

from valora_data.contract.files import (
    HEADER_BYTES,
    UnreadableError,
    expect,
    read_json,
    read_safetensors,
    shown,
)
from valora_data.contract.head import Head
from valora_data.contract.heads import LARGEST
from valora_data.contract.label_head import LabelHead
from valora_data.models.base import Architecture, ModelPart
from valora_serve.errors import AdapterError, pickle_error

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
MODEL_CONFIG = "config.json"
"""The model's configuration, which may lie beside an adapter and names a classifier's labels."""
CONFIG_BYTES = 1 << 20  # most bytes of `adapter_config.json`
MAX_LABELS = 4096  # most labels of a classifier: the list of models names all of them
MAX_PATTERNS, MATCH_SECONDS = 2048, 1.0  # most expressions, and processor time to match them all
MAX_RANK = 256  # largest rank that the kernels compute
SCALINGS = (1e-6, 1e4)
"""Smallest and largest absolute scaling that is not 0. Those of trained adapters lie between 0.01
and 1,000; their quotients must fit into the matrices when modules of an adapter differ."""

HONOURED = {
    "lora_alpha", "use_rslora", "alpha_pattern", "init_lora_weights", "modules_to_save",
    "peft_type",
}  # fmt: skip
"""Options of PEFT's configuration that change the result, and are followed or checked."""

WITHOUT_EFFECT = {
    # What was trained, and with which rank: the tensors are that.
    "exclude_modules", "layers_pattern", "layers_to_transform", "r", "rank_pattern",
    "target_modules",
    # Origin of the adapter.
    "auto_mapping", "base_model_name_or_path", "peft_version", "revision", "task_type",
    # Training only; `ensure_weight_tying` is of layers that cannot be adapted here.
    "corda_config", "ensure_weight_tying", "eva_config", "inference_mode", "loftq_config",
    "lora_dropout", "lora_ga_config", "monteclora_config", "velora_config",
    # Storage and parallelism; A and B of a linear layer are the same.
    "fan_in_fan_out", "megatron_config", "megatron_core", "qalora_group_size", "runtime_config",
}  # fmt: skip
"""Options of PEFT's configuration that do not change the result."""

KEEPS_BASE = (None, True, False, "gaussian", "eva", "mica", "orthogonal")
"""Initialisations that do not change the base weights, unlike PiSSA and others."""

MERGE = "merge it into a copy of the base model with PEFT's merge_and_unload and serve that"
CONVERT = (
    "convert it with PEFT's save_as_lora or merge it with merge_and_unload, where PEFT can, or "
    "train a LoRA adapter instead"
)

REMEDIES = {
    "alora_invocation_tokens": "train it again without aLoRA, which cannot be merged",
    "arrow_config": "load its adapters one by one",
    "use_dora": f"{MERGE}, or train it again without DoRA",
    "use_qalora": "train it again without QA-LoRA",
}
"""What to do about options that cannot be served; the others can be merged."""

ACTIVE_IF_EMPTY = {"arrow_config", "kasa_config", "use_bdlora"}
"""Options that an empty object switches on, unlike other empty values."""

Halves = dict[str, tuple[str, torch.Tensor]]  # A and B of a linear, with the tensors' names
TENSOR = re.compile(r"(?P<path>.+)\.lora_(?P<part>[AB])(\.default)?\.weight")
_PREFIX = "base_model.model."
_END = re.compile(r"\.(lora_|base_layer|modules_to_save|token_adapter|weight$|bias$).*")


@dataclass(frozen=True)
class ModelTargets:
    """The linear layers of a model that adapters can change."""

    linears: Mapping[str, tuple[int, int]]  # (outputs, inputs) by module path
    parts: Mapping[str, ModelPart]  # that each linear belongs to
    rename: Callable[[str], str]  # of a module path of an older checkpoint, to that of this model
    language: str  # path of the language model
    others: Mapping[str, str]  # class of the modules that cannot change, by the path's last part

    @classmethod
    def of(cls, model: Any, architecture: Architecture) -> Self:
        """Return the targets of a transformers model; it may lie on the meta device."""
        within = architecture.adaptable(model)
        linears, parts, others = {}, {}, {}
        for path, module in model.named_modules():
            part = next((p for at, p in within.items() if f"{path}.".startswith(f"{at}.")), None)
            if part is None or not isinstance(module, torch.nn.Linear):
                others[path.rpartition(".")[2]] = type(module).__name__
                continue
            linears[path] = (module.out_features, module.in_features)
            parts[path] = part if part is ModelPart.LANGUAGE else architecture.part_of(path)
        language = next(at for at, part in within.items() if part is ModelPart.LANGUAGE)
        for path in linears:
            others.pop(path.rpartition(".")[2], None)
        return cls(linears, parts, _renaming(model), language.removesuffix(".layers"), others)

    def find(self, path: str) -> str | None:
        """Return the linear that a path in an adapter's file refers to, None if there is none."""
        alone = f"{self.language}.{path.removeprefix('model.')}"  # of the language model alone
        for candidate in (path, self.rename(path), alone):
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
    """The matrices of one linear, a [rank, inputs] and b [outputs, rank], as in the file."""

    a: torch.Tensor
    b: torch.Tensor
    scaling: float


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """An adapter that was read and fits the model."""

    folder: Path  # that it was read from
    modules: Mapping[str, LoraPair]  # its matrices, by module path of the model
    rank: int  # largest of its modules
    scaling: float  # most frequent one of its modules; 0 only if all are 0
    parts: frozenset[ModelPart]  # of the model that it changes
    content: str  # hexadecimal sha256 of everything that changes its result
    vision_content: str  # the same of what changes how images are encoded; empty without any
    score: torch.Tensor | None = None  # [labels, width], a classifier's output layer


def read_adapter(folder: Path, targets: ModelTargets) -> Adapter:
    """Read an adapter, and check that it will compute the same as under PEFT; or `AdapterError`."""
    try:
        return _read(folder, targets)
    except ValueError as error:
        raise AdapterError(f"adapter {folder}: {error}") from error


def _read(folder: Path, targets: ModelTargets) -> Adapter:
    config = _read_config(folder)
    tensors = _read_tensors(folder, targets)
    score = _take_score(config, tensors)
    found: dict[str, Halves] = {}
    stored: dict[str, str] = {}
    for name, tensor in tensors.items():
        match = TENSOR.fullmatch(name)
        stored_path = "" if match is None else match["path"].removeprefix(_PREFIX)
        if match is None or (path := targets.find(stored_path)) is None:
            module = _END.sub("", name).rpartition(".")[2]
            if module not in targets.others:
                raise ValueError(f"tensor {name} matches no linear of the base model; use its own")
            raise ValueError(
                f"tensor {name} changes {module}, of type {targets.others[module]}, and only "
                "linear layers inside the language model, vision tower and projector can be "
                f"adapted: {MERGE}, or train it again without {module}"
            )
        pair = found.setdefault(path, {})
        if match["part"] in pair:
            raise ValueError(f"tensor {name} is stored twice; save it again")
        pair[match["part"]] = (name, tensor)
        stored[path] = stored_path
    if not found:
        raise ValueError("it holds no tensors: save it again")
    paths = [path for path in targets.linears if path in found]
    own = alphas(config["alpha_pattern"], {*stored, *stored.values()})
    modules = {}
    for path in paths:
        alpha = own.get(path, own.get(stored[path], config["lora_alpha"]))
        rslora, shape = config["use_rslora"], targets.linears[path]
        modules[path] = _pair(path, found[path], shape, alpha, rslora=rslora)
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
        score=score,
    )


def _read_config(folder: Path) -> dict[str, Any]:
    try:
        config = read_json(folder / CONFIG, CONFIG_BYTES)
    except UnreadableError as error:
        raise AdapterError(f"{folder} is no adapter, as it has no readable {CONFIG}, which "
                           f"{error.reason}: name a folder that PEFT saved") from error  # fmt: skip
    config = config if isinstance(config, dict) else {}
    if (kind := config.get("peft_type")) != "LORA":
        remedy = CONVERT if isinstance(kind, str) else "name a folder that PEFT saved"
        kind = shown(kind).strip("'")
        raise AdapterError(f"adapter {folder} is of type {kind}: only LORA can be served; {remedy}")
    for option, value in config.items():
        off = not value and not (option in ACTIVE_IF_EMPTY and isinstance(value, dict))
        if option in HONOURED | WITHOUT_EFFECT or off or (option, value) == ("bias", "none"):
            continue
        remedy = REMEDIES.get(option, f"{MERGE}, or train it again without that option")
        what = f"option {shown(option)[1:-1]} = {shown(value)}"
        raise ValueError(f"{what} cannot be served; {remedy}")
    start = config.get("init_lora_weights")
    if isinstance(start, list | dict) or start not in KEEPS_BASE:
        raise ValueError(
            f"init_lora_weights = {shown(start)} changed the base weights; convert it with PEFT's "
            "path_initial_model_for_weight_conversion"
        )
    try:
        _check_rules(config)
    except ValueError as error:
        raise ValueError(f"{CONFIG} is damaged: {error}; save the adapter again") from error
    return config


def _read_tensors(folder: Path, targets: ModelTargets) -> dict[str, torch.Tensor]:
    # No adapter is larger: matrices of the largest rank for every linear, in 64 bits.
    max_bytes = HEADER_BYTES + 8 * MAX_RANK * sum(map(sum, targets.linears.values()))
    try:
        # Read, not mapped into memory: the file may be replaced while the engine runs.
        tensors = read_safetensors(folder / WEIGHTS, max_bytes)[1]
    except UnreadableError as error:
        absent = isinstance(error.__cause__, FileNotFoundError)
        for pickle in (*folder.glob("*.bin"), *folder.glob("*.pt")) if absent else ():
            raise pickle_error(folder, pickle.name) from error
        if absent:
            raise ValueError(f"it holds no {WEIGHTS}: name the folder that does") from error
        raise AdapterError(f"{folder / WEIGHTS} {error.reason}: save it as float32") from error
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            raise ValueError(f"tensor {name} has dtype {tensor.dtype}; save it as floats")
        if tensor.dtype.itemsize == 1:  # PyTorch computes nothing in 8 bits; bfloat16 holds them
            tensors[name] = tensor.to(torch.bfloat16)
    return tensors


def _take_score(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> torch.Tensor | None:
    """Take the output layer of a sequence classifier; refuse other modules trained whole."""
    saved, score = config["modules_to_save"], None
    named = [name for name in tensors if name.removeprefix(_PREFIX) == "score.weight"]
    if len(named) == 1 and config.get("task_type") in (None, "SEQ_CLS"):
        score = tensors.pop(named[0])
    for name in tensors:
        if ".lora_" not in name and any(f".{module}." in f".{name}" for module in saved):
            raise ValueError(
                f"tensor {name} belongs to a module that was trained whole (modules_to_save = "
                f"{shown(saved)}), which cannot be served; {MERGE}, or train it again "
                "without that module"
            )
    # PEFT lists both names of output layers for every classifier.
    absent = [name for name in saved if score is None or name not in ("classifier", "score")]
    if absent:
        raise ValueError(
            f"modules_to_save = {shown(absent)} names modules that {WEIGHTS} does not hold; if "
            f"they were not trained, remove the option from {CONFIG}"
        )
    return score


def _check_rules(config: dict[str, Any]) -> None:
    """Check the options that are followed, and fill in those that are left out; or ValueError."""
    config["alpha_pattern"] = given = config.get("alpha_pattern") or {}
    few = isinstance(given, dict) and len(given) <= MAX_PATTERNS
    expect(few, "alpha_pattern", f"at most {MAX_PATTERNS} values by pattern", given)
    own = {f"alpha_pattern.{shown(key)}": value for key, value in given.items()}
    for option, value in {"lora_alpha": config.get("lora_alpha"), **own}.items():
        number = type(value) in (int, float) and math.isfinite(value)
        expect(number, option, "a number", value)
    config["use_rslora"] = rslora = config.get("use_rslora") or False
    expect(isinstance(rslora, bool), "use_rslora", "true or false", rslora)
    config["modules_to_save"] = saved = config.get("modules_to_save") or []
    names = isinstance(saved, list) and all(isinstance(item, str) for item in saved)
    expect(names, "modules_to_save", "a list of names", saved)


def alphas(patterns: Mapping[str, float], paths: Collection[str]) -> dict[str, float]:
    """Alphas by path, as in PEFT: of the first expression for it, or for its end after a dot.

    Expressions of adapters cannot be trusted: those of Rust take linear time, whatever they are.
    """
    found: dict[str, float] = {}
    if not patterns:
        return found
    from pydantic_core import SchemaError, SchemaValidator, core_schema  # the engine's only need

    until = time.thread_time() + MATCH_SECONDS
    for pattern, alpha in patterns.items():
        try:
            schema = core_schema.str_schema(pattern=rf"^(?:(.*\.)?({pattern})$)")
            matches = SchemaValidator(schema).isinstance_python
        except SchemaError as error:
            raise ValueError(
                f"alpha_pattern {shown(pattern)} is no regular expression, or has look-around or "
                "back-references: name modules there"
            ) from error
        found |= {path: alpha for path in paths if path not in found and matches(path)}
        if time.thread_time() > until:
            raise ValueError(
                f"matching alpha_pattern takes more than {MATCH_SECONDS:g} s: name modules there"
            )
    return found


def _pair(
    path: str, tensors: Halves, shape: tuple[int, int], alpha: float, *, rslora: bool
) -> LoraPair:
    if set(tensors) != {"A", "B"}:
        only = next(iter(tensors.values()))[0]
        raise ValueError(f"{only} has no partner; save the adapter again")
    a, b = (tensors[part][1] for part in "AB")
    rank = a.shape[0] if a.ndim else 0
    if not 1 <= rank <= MAX_RANK:
        raise ValueError(f"expected a rank of 1 to {MAX_RANK}, got {rank}; train it again")
    want = {"A": (rank, shape[1]), "B": (shape[0], rank)}
    for part, (name, tensor) in tensors.items():
        if tuple(tensor.shape) != want[part]:
            raise ValueError(f"tensor {name}: expected shape {want[part]}, got {(*tensor.shape,)}; "
                             "use the base model that it was trained on")  # fmt: skip
        if not bool(tensor.isfinite().all()):
            raise ValueError(f"tensor {name} holds NaN or Inf; train it again")
    scaling = alpha / math.sqrt(rank) if rslora else alpha / rank
    if scaling and not SCALINGS[0] <= abs(scaling) <= SCALINGS[1]:
        raise ValueError(
            f"lora_alpha {alpha:g} and rank {rank} give {path} the scaling {scaling:.3g}, "
            f"expected {SCALINGS[0]:g} to {SCALINGS[1]:g}; correct its {CONFIG}"
        )
    return LoraPair(a=a, b=b, scaling=scaling)


def _content(modules: Mapping[str, LoraPair]) -> str:
    total = hashlib.sha256()
    for path in sorted(modules):
        pair = modules[path]
        facts = (path, pair.scaling, *((str(t.dtype), *t.shape) for t in (pair.a, pair.b)))
        total.update(json.dumps(facts).encode())
        for tensor in (pair.a, pair.b):
            total.update(tensor.contiguous().view(torch.uint8).numpy().data)
    return total.hexdigest()


def make_classifier(adapter: Adapter, score: torch.Tensor, width: int) -> Head:
    """Make the head of an `AutoModelForSequenceClassification` with LoRA, as PEFT saves it.

    Its output layer `score` [labels, width] acts on the hidden state of the last token. Its labels
    are those of the model's configuration, if that lies beside the adapter, or else transformers'.
    Raises a ValueError if the two cannot be used.
    """
    outputs, file = score.shape[0] if score.ndim == 2 else 0, adapter.folder / MODEL_CONFIG
    score = score.float()
    if not 2 <= outputs <= MAX_LABELS or not (score.abs() <= LARGEST).all():
        raise ValueError(f"its shape {tuple(score.shape)} has not 2 to {MAX_LABELS} labels, or it "
                         f"holds NaN or values above {LARGEST:g}")  # fmt: skip
    config: Any = read_json(file, CONFIG_BYTES) if file.exists() else {}
    config = config if isinstance(config, dict) else {}
    kind = config.get("problem_type")
    if kind not in (None, "single_label_classification"):
        raise ValueError(f"problem_type is {shown(kind)}, not one label for each prompt")
    names = config.get("id2label") or {str(n): f"LABEL_{n}" for n in range(outputs)}
    if not isinstance(names, dict) or set(names) != {str(n) for n in range(outputs)}:
        raise ValueError(f"{MODEL_CONFIG} has id2label = {shown(names)} for {outputs} outputs")
    labels = [str(names[str(n)]) for n in range(outputs)]
    metadata = {"labels": json.dumps(labels), "pooling": "last"}
    tensors = {"weight": score, "bias": score.new_zeros(outputs)}
    return LabelHead.parse("classification", metadata, tensors, width)
