"""Checks of a run before any work, without a library that takes long to import.

`settings` checks each value by itself; here settings are compared with each other and with the
machine: whether files and folders are there, and whether outputs can be written.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from valora_data.contract import quantized
from valora_data.contract.base_model import TINY, base_folder
from valora_data.contract.files import expanded
from valora_data.identity import hub_commit
from valora_teachers.base import TeacherError
from valora_teachers.registry import KINDS
from valora_train.errors import SettingsError
from valora_train.fusion.strategies.registry import make_strategy
from valora_train.settings import LABELS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from valora_teachers.base import Teacher
    from valora_train.settings import DomainSettings, Settings, TeacherSettings

FUSING = ("fuse", "export")
"""Commands that need the base model."""
RANKS = (4, 8, 16, 32, 64, 128, 256)
NAME = re.compile(r"[\w][\w.@+-]{0,99}")
DEVICE = re.compile(r"(cpu|mps|(?:cuda|xpu)(?::\d+)?)")
OWN_CONTRACT = re.compile(r"task\.of_teacher|domains\.[^.]+\.(required|of_teacher|relative)")
CONTRACTS_AS_EXPERIMENTS = ("paper", "relative", "teacher97")
TASKS_AS_EXPERIMENTS = ("mixed",)


def check(settings: Settings) -> None:
    """Check that a run can begin.

    Args:
        settings: All settings.

    Raises:
        ValoraError: If it cannot; the message names the setting and the remedy.
    """
    fuses = settings.command in FUSING
    _check_task(settings)
    _check_places(settings)
    for domain in settings.chosen():
        _check_source(domain)
        _check_teacher(domain, domain.taught_by or settings.teacher)
    _check_context(settings)
    if fuses:
        _check_dedicated(settings)
        make_strategy(settings.fusion.strategy)
        _check_lora(settings)
        _check_model(settings)
        if settings.fusion.parent is not None:
            _check_parent(Path(settings.fusion.parent))


def check_contracts_asked(settings: Settings, overrides: Sequence[str]) -> None:
    """Check that an experiment's contract and the other settings do not contradict each other.

    Args:
        settings: All settings.
        overrides: The command line's overrides, in Hydra's grammar.

    Raises:
        SettingsError: If they do.
    """
    given = dict(override.lstrip("+").partition("=")[::2] for override in overrides)
    experiments = re.findall(r"\w+", given.get("experiment", ""))
    if "paper" in experiments:
        _check_papers_figures(settings)
    for name in TASKS_AS_EXPERIMENTS:
        if name in experiments and given.get("task", name) != name:
            raise SettingsError(
                f"experiment={name} is task={name}, but task={given['task']} is asked for, too: "
                "leave one of them out"
            )
    if (share := settings.fusion.of_dedicated) is None:
        return
    ignored = [
        f"{key}={value}"
        for key, value in given.items()
        if OWN_CONTRACT.fullmatch(key) and value not in ("null", "false")
    ]
    ignored += [f"experiment={name}" for name in CONTRACTS_AS_EXPERIMENTS if name in experiments]
    if ignored:
        raise SettingsError(
            f"fusion.of_dedicated={share:g} asks for that share of what each domain reaches in an "
            f"adapter of its own and nothing else, so that {ignored[0]} would be ignored: set "
            "fusion.of_dedicated=null, or leave the other one out"
        )


def _check_papers_figures(settings: Settings) -> None:
    for domain in settings.chosen():
        if domain.of_teacher is not None:
            raise SettingsError(
                "experiment=paper asks for the paper's figures alone, but domain "
                f"{domain.name} must also keep {domain.of_teacher:g} of its teacher's accuracy: "
                "leave one of them out, or take the paper's strategy alone (fusion=paper)"
            )


def _check_task(settings: Settings) -> None:
    name = settings.task.name
    if not NAME.fullmatch(name):
        raise SettingsError(
            f"task.name={name!r} names a folder and a model, so that it must be up to 100 letters, "
            "digits, dots, dashes and underscores: rename it"
        )
    for place, only in enumerate(settings.task.only):
        if only in settings.task.only[:place]:
            raise SettingsError(f"task.only lists {only} twice: list it once")
    names: dict[str, str] = {}
    for key, domain in settings.domains.items():
        other = names.setdefault(domain.name, key)
        if other != key:
            raise SettingsError(
                f"domains.{other} and domains.{key} have one name, {domain.name!r}: rename one"
            )
    for domain in settings.chosen():
        blank = [label for label in domain.labels if not label.strip()]
        if blank:
            raise SettingsError(
                f"domains.{domain.name}.labels has an empty label: name it, or leave it out"
            )


# --- folders --------------------------------------------------------------------------------------


def _check_dedicated(settings: Settings) -> None:
    several = settings.model.shard or int(os.environ.get("WORLD_SIZE", "1")) > 1
    if several and settings.fusion.of_dedicated is not None:
        raise SettingsError(
            "fusion.of_dedicated trains adapters side by side, each in one process: set "
            "model.shard=false, and start it without accelerate or torchrun (fusion.processes)"
        )


def _check_places(settings: Settings) -> None:
    _check_writable("paths.work", settings.paths.work)
    if settings.command == "export":
        _check_writable("paths.bundles", settings.paths.bundles)


def _check_writable(setting: str, place: str) -> None:
    """Check that a folder is there or can be made, and can be written to."""
    if not place.strip():
        raise SettingsError(f"{setting} is empty: name a folder")
    try:
        existing = _existing(expanded(place))
        is_folder = existing.is_dir()
    except OSError as error:
        raise SettingsError(
            f"{setting}={place} cannot be used ({error.strerror}): choose another folder"
        ) from error
    if not is_folder:
        raise SettingsError(f"{setting}={place}: {existing} is a file, choose another folder")
    if not os.access(existing, os.R_OK | os.W_OK | os.X_OK):
        raise SettingsError(
            f"{setting}={place}: {existing} is not writable, change its permissions or choose "
            "another folder"
        )


def _existing(path: Path) -> Path:
    """The path, or the nearest folder above it that exists."""
    path = Path(os.path.abspath(path))  # noqa: PTH100
    str(path).encode()  # raises for what is no UTF-8, which no report could name
    while not path.exists() and path != path.parent:
        path.lstat() if path.is_symlink() else None
        path = path.parent
    return path


# --- domains --------------------------------------------------------------------------------------


def _check_source(domain: DomainSettings) -> None:
    source = domain.source
    given = source.format
    if source.path is None and not given.drawn:
        raise SettingsError(
            f"domains.{domain.name}.source.path is missing: name the file or folder of the "
            f"{source.kind} data"
        )
    for name in ("path", "images", "annotations", "unlabelled"):
        place = getattr(source, name)
        if place is None or given.drawn or (given.remote and name == "path"):
            continue
        if not expanded(place).exists():
            raise SettingsError(
                f"data of domain {domain.name} not found: {place} does not exist, correct "
                f"domains.{domain.name}.source.{name}"
            )
    if source.fractions and sum(source.fractions.values()) <= 0:
        raise SettingsError(
            f"domains.{domain.name}.source.fractions are all zero: raise one of them"
        )


def _check_teacher(domain: DomainSettings, teacher: TeacherSettings) -> None:
    kind = KINDS[teacher.kind]
    if domain.teacher == LABELS:
        return
    if domain.teacher == "train":
        if not kind.trainable:
            trainable = " or ".join(name for name, one in KINDS.items() if one.trainable)
            raise TeacherError(
                f"a teacher of kind {teacher.kind} is not trained here: set "
                f"domains.{domain.name}.teacher to a trained one, or teacher.kind to {trainable}"
            )
        return
    _check_given(domain, teacher, kind)


def _check_given(domain: DomainSettings, teacher: TeacherSettings, kind: type[Teacher]) -> None:
    setting, weights = f"domains.{domain.name}.teacher", domain.teacher
    if teacher.kind == "function":
        module, colon, name = weights.partition(":")
        if not (module and colon and name):
            raise TeacherError(f"{setting}={weights!r} names no function: write module:function")
        if importlib.util.find_spec(module.partition(".")[0]) is None:
            raise TeacherError(
                f"{setting}={weights}: there is no module {module.partition('.')[0]}, check the "
                "name and that it is installed or in PYTHONPATH"
            )
        return
    exists = expanded(weights).exists()
    if kind.artefact is not None and not exists:
        raise TeacherError(
            f"teacher of domain {domain.name} not found: {weights} is no file; set {setting} to a "
            "trained model, `train` or `labels`"
        )
    if not exists and weights.startswith((".", "/", "~")):
        raise TeacherError(f"{setting}={weights} does not exist: check the path")


# --- the model ------------------------------------------------------------------------------------


def _check_lora(settings: Settings) -> None:
    lora = settings.train.lora
    if lora.rank not in RANKS:
        raise SettingsError(
            f"train.lora.rank must be one of {', '.join(map(str, RANKS))}, got {lora.rank}"
        )
    if not lora.targets or not all(name.strip() for name in lora.targets):
        raise SettingsError(
            "train.lora.targets is empty: name projections of the language model, such as q_proj"
        )
    if len(set(lora.targets)) < len(lora.targets):
        raise SettingsError("train.lora.targets lists a projection twice: list it once")


def _check_model(settings: Settings) -> None:
    base = settings.model.id
    if not base.strip():
        raise SettingsError(
            f"model.id is empty: set it to `{TINY}`, a folder, or a name on the hub"
        )
    if settings.model.attention == "flash_attention_2" and not _is_installed("flash_attn"):
        raise SettingsError(
            "model.attention=flash_attention_2 needs the package flash-attn: install it, or set "
            "model.attention=auto"
        )
    _check_quantize(settings)
    folder = Path(base_folder(base))
    if not folder.is_dir():
        if not hub_commit(base):
            raise SettingsError(
                f"model.id={base} is no folder, and no model of this name is in the local cache or "
                "on the hub: check the name, the network, and that HF_HUB_OFFLINE is not set"
            )
        return
    weights = sorted(folder.glob("model*.safetensors"))
    if not weights:
        raise SettingsError(
            f"model.id={base} holds no model*.safetensors: save the model as safetensors"
        )
    names = {name for file in weights for name in _tensors(file)}
    for target in settings.train.lora.targets:
        if not any(f".{target}." in name for name in names):
            raise SettingsError(
                f"train.lora.targets: model {base} has no projection {target}, check its name"
            )


def _check_quantize(settings: Settings) -> None:
    model = settings.model
    if model.quantize is None:
        return
    if not quantized.is_installed():
        raise SettingsError(
            f"model.quantize={model.quantize} needs the package {quantized.PACKAGE}: "
            f"{quantized.INSTALL}, or set model.quantize=null"
        )
    if model.shard:
        raise SettingsError(
            "model.shard=true cannot divide a base model in 4 bits among processes: set "
            "model.shard=false, or model.quantize=null"
        )


def _tensors(file: Path) -> Iterator[str]:
    """Names of the tensors of a safetensors file, read from its header."""
    try:
        with file.open("rb") as opened:
            header: Any = json.loads(opened.read(int.from_bytes(opened.read(8), "little")))
        yield from header
    except (OSError, ValueError, MemoryError, OverflowError, TypeError) as error:
        raise SettingsError(
            f"{file} of model.id is damaged: download or save the model again"
        ) from error


def _check_device(device: str) -> None:
    import torch

    if not DEVICE.fullmatch(device):
        raise SettingsError(
            f"model.device={device!r} is no device: set it to cpu, cuda, or cuda:1 and so on"
        )
    kind, _, number = device.partition(":")
    if kind == "cuda" and torch.cuda.device_count() <= int(number or 0):
        raise SettingsError(
            f"model.device={device}: this machine, or the installed torch, has no such GPU; set "
            "model.device=cpu"
        )


def _is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _check_parent(folder: Path) -> None:
    if not (expanded(folder) / "bundle.json").is_file():
        raise SettingsError(
            f"fusion.parent={folder} holds no bundle: name a bundle's folder, or set it to null"
        )


def _check_context(settings: Settings) -> None:
    """Check that an encoder is asked for where it is used, and memories to begin with are there."""
    context = settings.context
    if context.encoder_steps and context.form != "memory_tokens":
        raise SettingsError(
            f"context.encoder_steps={context.encoder_steps} trains an encoder of memory tokens, "
            f"but context.form={context.form}: set context.form=memory_tokens, or encoder_steps=0"
        )
    if context.start is not None and not expanded(context.start).is_dir():
        raise SettingsError(
            f"context.start={context.start} is no folder: name one with memories, or set it to null"
        )


def check_with_libraries(settings: Settings) -> None:
    """Check what only torch and the extensions can tell.

    Args:
        settings: Settings that `check` has passed.

    Raises:
        ValoraError: If the run cannot begin; the message names the setting and the remedy.
    """
    import torch

    from valora_teachers.registry import make_teacher
    from valora_train.tasks.registry import check_options

    check_options(settings.heads)
    for domain in settings.chosen():
        teacher = domain.taught_by or settings.teacher
        if domain.teacher != LABELS:
            make_teacher(teacher.kind, options=teacher.options)
    if settings.command in FUSING:
        device = settings.model.device
        _check_device(device)
        if settings.model.quantize is not None:
            base = settings.model.id
            quantized.loading_options(base, base_folder(base), torch.float32, device)
