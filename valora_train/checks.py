"""Checks of a run before any work: files, folders, the base model and the machine."""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Sequence
from pathlib import Path

from safetensors import SafetensorError, safe_open

from valora_data.contract import quantized
from valora_data.contract.base_model import base_family, base_folder
from valora_data.contract.files import expanded
from valora_data.hashing import hub_commit, hub_file
from valora_teachers.registry import KINDS, make_teacher
from valora_train.errors import SettingsError
from valora_train.fusion.strategies.registry import make_strategy
from valora_train.settings import LABELS, DomainSettings, ModelSettings, Settings, TeacherSettings

FUSING = ("fuse", "export")  # commands that need the base model
OWN_CONTRACT = re.compile(r"task\.of_teacher|domains\.[^.]+\.(required|of_teacher)")
CONTRACTS_AS_EXPERIMENTS = ("paper", "relative", "teacher97")


def check(settings: Settings) -> None:
    """Check that a run can begin, without a library that takes long to import."""
    fusion, start = settings.fusion, settings.context.start
    _check_writable("paths.work", settings.paths.work)
    if settings.command == "export":
        _check_writable("paths.bundles", settings.paths.bundles)
    names = [domain.name for domain in settings.domains.values()]
    if len(set(names)) < len(names):
        raise SettingsError(f"two domains have one name ({', '.join(names)}): rename one")
    for domain in settings.chosen():
        _check_source(domain)
        if domain.teacher != LABELS:
            _check_teacher(domain, domain.taught_by or settings.teacher)
    if start is not None and not Path(start).is_dir():
        raise SettingsError(
            f"context.start={start} is no folder: name one with memories, or set it to null"
        )
    if settings.command not in FUSING:
        return
    make_strategy(fusion.strategy)
    _check_model(settings.model)
    several = settings.model.shard or int(os.environ.get("WORLD_SIZE", "1")) > 1
    if fusion.of_dedicated is not None and several:
        raise SettingsError(
            "fusion.of_dedicated trains adapters side by side, each in one process: set "
            "model.shard=false, and start it without accelerate or torchrun (fusion.processes)"
        )
    if fusion.parent is not None and not (Path(fusion.parent) / "bundle.json").is_file():
        raise SettingsError(
            f"fusion.parent={fusion.parent} holds no bundle: name a bundle's folder, or set it to "
            "null"
        )


def check_with_libraries(settings: Settings) -> None:
    """Check what only torch and the extensions can tell."""
    import torch

    from valora_train.model.adapters import check_targets
    from valora_train.tasks.registry import TASK_TYPES

    for name, options in settings.heads.options.items():
        TASK_TYPES[name].read_options(name, options)
    for domain in settings.chosen():
        teacher = domain.taught_by or settings.teacher
        if domain.teacher != LABELS:
            make_teacher(teacher.kind, options=teacher.options)
    if settings.command not in FUSING:
        return
    model = settings.model
    try:
        device = torch.device(model.device)
    except RuntimeError:
        raise SettingsError(
            f"bad setting model.device={model.device!r}: set it to cpu, cuda, or cuda:1 and so on"
        ) from None
    if device.type == "cuda" and torch.cuda.device_count() <= (device.index or 0):
        raise SettingsError(
            f"model.device={device}: this machine, or the installed torch, has no such GPU; set "
            "model.device=cpu"
        )
    if not base_family(model.id).takes_images:
        for domain in settings.chosen():
            if not domain.source.format.texts or domain.domain().task.spec.answer == "boxes":
                raise SettingsError(
                    f"domain {domain.name} shows images (source.kind={domain.source.kind}), and "
                    f"model.id={model.id} reads text alone: choose a model of images, such as "
                    "model=photo or model=qwen2.5-vl-3b, or leave the domain out (task.only)"
                )
    empty = quantized.empty_base(model.id, base_folder(model.id))
    check_targets(settings.train.lora, model.id, empty)
    if model.quantize is not None:
        quantized.loading_options(model.id, base_folder(model.id), torch.float32, model.device)


def check_contracts_asked(settings: Settings, overrides: Sequence[str]) -> None:
    """Check that no override asks for a contract that another one would replace."""
    given = dict(override.lstrip("+").partition("=")[::2] for override in overrides)
    experiments = re.findall(r"\w+", given.get("experiment", ""))
    for domain in settings.chosen() if "paper" in experiments else ():
        if domain.of_teacher is not None:
            raise SettingsError(
                f"experiment=paper asks for the paper's figures alone, but domain {domain.name} "
                f"must also keep {domain.of_teacher} of its teacher's accuracy: leave one of them "
                "out, or take the paper's strategy alone (fusion=paper)"
            )
    asked = [
        f"{key}={value}"
        for key, value in given.items()
        if OWN_CONTRACT.fullmatch(key) and value != "null"
    ]
    asked += [f"experiment={name}" for name in CONTRACTS_AS_EXPERIMENTS if name in experiments]
    if asked and (share := settings.fusion.of_dedicated) is not None:
        raise SettingsError(
            f"fusion.of_dedicated={share} asks for that share of what each domain reaches in an "
            f"adapter of its own and nothing else, so that {asked[0]} would be ignored: set "
            "fusion.of_dedicated=null, or leave the other one out"
        )


def _check_writable(setting: str, place: str) -> None:
    folder = Path(os.path.abspath(place))  # noqa: PTH100 (keeps links)
    str(folder).encode()  # raises for what is no UTF-8, which no report could name
    try:
        while not (folder.exists() or folder.is_symlink()):
            folder = folder.parent
        usable = folder.is_dir() and os.access(folder, os.R_OK | os.W_OK | os.X_OK)
    except OSError as error:
        raise SettingsError(f"{setting}={place}: {error}: choose another folder") from error
    if not usable:
        raise SettingsError(
            f"{setting}={place}: {folder} is a file, or a folder that you cannot write to: choose "
            "another folder, or change its permissions"
        )


def _check_source(domain: DomainSettings) -> None:
    source, place = domain.source, f"domains.{domain.name}.source"
    if source.format.drawn:
        return
    if source.path is None:
        raise SettingsError(
            f"{place}.path is missing: name the file or folder of the {source.kind} data"
        )
    for name in ("path", "images", "unlabelled"):
        given = getattr(source, name)
        if given is None or (source.format.remote and name == "path"):
            continue
        if not expanded(given).exists():
            raise SettingsError(f"{place}.{name}={given} does not exist: correct it")


def _check_teacher(domain: DomainSettings, teacher: TeacherSettings) -> None:
    kind, given = KINDS[teacher.kind], domain.teacher
    place = f"domains.{domain.name}.teacher"
    if given == "train":
        if not kind.trainable:
            trainable = " or ".join(name for name, one in KINDS.items() if one.trainable)
            raise SettingsError(
                f"a teacher of kind {teacher.kind} is not trained here: set {place} to a trained "
                f"one, or teacher.kind to {trainable}"
            )
    elif teacher.kind == "function":
        module, _, name = given.partition(":")
        if not (module and name) or importlib.util.find_spec(module.partition(".")[0]) is None:
            raise SettingsError(
                f"{place}={given} names no function of a module that is installed or in "
                "PYTHONPATH: write module:function"
            )
    elif (kind.artefact or given.startswith((".", "/", "~"))) and not hub_file(given).exists():
        raise SettingsError(
            f"{place}={given} does not exist: name a trained model, `train` or `labels`; one of "
            "the hub needs the network once, without HF_HUB_OFFLINE"
        )


def _check_model(model: ModelSettings) -> None:
    if model.attention == "flash_attention_2" and importlib.util.find_spec("flash_attn") is None:
        raise SettingsError(
            "model.attention=flash_attention_2 needs the package flash-attn: install it, or set "
            "model.attention=auto"
        )
    folder = Path(base_folder(model.id))
    if not folder.is_dir():
        if hub_commit(model.id):
            return
        raise SettingsError(
            f"model.id={model.id} is no folder, and no model of this name is in the local cache or "
            "on the hub: check the name, the network, and that HF_HUB_OFFLINE is not set"
        )
    names: list[str] = []
    for file in folder.glob("model*.safetensors"):
        try:
            with safe_open(file, "np") as opened:
                names += opened.keys()
        except (OSError, SafetensorError) as error:
            raise SettingsError(
                f"{file} of model.id is damaged ({error}): download or save the model again"
            ) from error
    if not names:
        raise SettingsError(
            f"model.id={model.id} holds no model*.safetensors: save the model as safetensors"
        )
