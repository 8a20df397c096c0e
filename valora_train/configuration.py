"""Reads settings from Hydra's configuration, and says in one sentence what is wrong with it."""

from __future__ import annotations

from dataclasses import is_dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, get_args, get_type_hints

from pydantic import TypeAdapter, ValidationError

from valora_data.contract.files import expanded
from valora_data.schema import Task
from valora_data.sources.shelf import read_shelf
from valora_train.errors import SettingsError
from valora_train.removed import refuse_removed
from valora_train.settings import LABELS, AugmentSettings, Settings, as_dict

if TYPE_CHECKING:
    from collections.abc import Mapping

    from omegaconf import DictConfig

SHELF_SHARE = 0.97
"""Share of its teacher's accuracy that a domain of a shelf must keep, unless it sets another."""
_SHELF_PROMPTS = {Task.DETECTION: "detect", Task.CLASSIFICATION: "classify"}


@cache  # building it takes 80 ms
def validator() -> TypeAdapter[Settings]:
    """Pydantic's validator of settings."""
    return TypeAdapter(Settings)


def from_config(config: DictConfig) -> Settings:
    """Turn Hydra's configuration into settings.

    Raises:
        SettingsError: For an unknown key, or a value of the wrong type or out of range.
        DataError: For a domain that cannot be, or an unknown source kind.
    """
    from omegaconf import OmegaConf

    values = OmegaConf.to_container(config, resolve=True)
    if isinstance(values, dict) and values.get("shelf"):
        share = (values.get("task") or {}).get("of_teacher") or SHELF_SHARE
        folder = expanded(str(values["shelf"]))
        values["domains"] = add_shelf(
            folder, values.get("domains") or {}, share, values.get("teacher") or {}
        )
    try:
        settings = validator().validate_python(values, extra="forbid")
    except ValidationError as error:
        first = error.errors()[0]
        refuse_removed(f"{'.'.join(map(str, first['loc']))}={first['input']}")
        raise SettingsError(_complaint(first)) from error
    refuse_removed(f"fusion.strategy={settings.fusion.strategy}")
    if (place := _stray_truth(values, as_dict(settings))) is not None:
        raise SettingsError(f"bad setting {place}: a number is needed, not true or false")
    _check_augment(settings.train.augment)
    if settings.train.lora.decode_only:
        _check_decode_only(settings)
    _check_contracts(settings)
    for domain in settings.chosen():
        domain.domain()  # raises for invalid values
        _ = domain.source.format  # raises for an unknown kind
    return settings


def add_shelf(
    folder: Path,
    domains: dict[str, Any],
    share: float = SHELF_SHARE,
    teacher: Mapping[str, Any] = MappingProxyType({}),
) -> dict[str, Any]:
    """Add the models of a shelf to the domains, as settings that have not been validated yet.

    Args:
        folder: Folder of the models (see `valora_data.sources.shelf`).
        domains: Settings of domains by name, which take precedence over those of the shelf.
        share: Share of its teacher's accuracy that each domain must keep.
        teacher: Settings of `teacher`, of which those that say what a model's answers are taken
            for hold for the shelf, too; its models are trained already.

    Raises:
        DataError: The folder holds no model that can be used.
    """
    taken = {key: teacher[key] for key in ("min_confidence", "threshold") if key in teacher}
    found: dict[str, Any] = {}
    for name, model in read_shelf(folder).models.items():
        found[name] = {
            "name": name,
            "task": str(model.task),
            "labels": list(model.labels),
            "prompt": f"{_SHELF_PROMPTS[model.task]} {name.replace('_', ' ')}",
            "required": None,
            "of_teacher": share,
            "teacher": str(model.weights),
            "taught_by": {"kind": "yolo", **taken},
            "source": {
                "kind": model.kind,
                "path": str(model.data),
                "fractions": {"train": 0.3, "unlabelled": 0.4, "val": 0.15, "test": 0.15},
            },
        }
    return _merged(found, domains)


def _merged(values: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """Nested settings, of which `over` takes precedence."""
    merged = dict(values)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merged(merged[key], value) if both else value
    return merged


def _check_contracts(settings: Settings) -> None:
    """Check that every domain has a contract, and none that contradicts itself."""
    for key, domain in settings.domains.items():
        place = f"domains.{key}"
        if not domain.name:
            raise SettingsError(
                f"{place} has settings but no name, because task {settings.task.name} has no such "
                f"domain: leave {place} out, or add the domain"
            )
        if domain.relative and domain.required is None:
            raise SettingsError(
                f"{place}.relative=true makes {place}.required a share of the teacher's accuracy, "
                f"but {place}.required is null: set it, or of_teacher instead of both"
            )
        if domain.relative and domain.of_teacher is not None:
            raise SettingsError(
                f"{place} asks for two shares of its teacher's accuracy, {domain.required:g} by "
                f"relative=true and of_teacher={domain.of_teacher:g}: leave one of them out"
            )
        if domain.relative and not 0.0 < (domain.required or 0.0) <= 1.0:
            raise SettingsError(
                f"{place}.required is a share of the teacher's accuracy by {place}.relative=true "
                f"and must lie in (0, 1], got {domain.required:g}"
            )
        if domain.teacher == LABELS and (domain.relative or domain.of_teacher is not None):
            share = "relative=true" if domain.relative else f"of_teacher={domain.of_teacher:g}"
            raise SettingsError(
                f"{place}.{share} asks for a share of the teacher's accuracy, but the domain "
                f"learns from labels, without a teacher: set {place}.required alone, or "
                f"{place}.teacher=train"
            )
    chosen = settings.chosen()
    least = settings.task.of_teacher
    if least is not None and all(domain.teacher == LABELS for domain in chosen):
        raise SettingsError(
            f"task.of_teacher={least:g} asks for nothing, because every domain of task "
            f"{settings.task.name} learns from labels, without a teacher: set "
            "domains.NAME.required, or task.of_teacher=null"
        )
    for domain in chosen:
        if domain.required is None and domain.of_teacher is None:
            raise SettingsError(
                f"domain {domain.name} has no contract: set domains.{domain.name}.required to the "
                "accuracy that it must keep"
            )


def _check_decode_only(settings: Settings) -> None:
    """Check that what adapters at decoding only change is all that answers are read from."""
    lora = settings.train.lora
    if lora.vision_tower or lora.projector:
        raise SettingsError(
            "train.lora.decode_only=true leaves prompts and their images as they are, but "
            "train.lora adapts how images are encoded: set vision_tower and projector to false "
            "(train=default)"
        )
    for domain in settings.chosen():
        assert domain.task is not None, "`Settings.chosen` fills it in"
        spec = domain.task.spec
        choice = spec.choice and bool(domain.labels)
        if spec.detects or (choice and settings.heads.pooling != "last"):
            remedy = " or heads.pooling=last" if choice else ""
            raise SettingsError(
                f"domain {domain.name} ({domain.task}) is answered by a head that reads the whole "
                "prompt, where an adapter at decoding only changes nothing: set "
                f"train.lora.decode_only=false{remedy}"
            )


def _check_augment(augment: AugmentSettings) -> None:
    limits = {
        "color": 1.0, "crop": 0.95, "rotate": 180.0, "shift": 0.95, "blur": 10.0, "noise": 1.0,
        "jpeg": 1.0, "least_visible": 1.0, "views": 100, "memory_gb": float("inf"),
    }  # fmt: skip
    for name, most in limits.items():
        if not 0 <= (value := getattr(augment, name)) <= most:
            raise SettingsError(f"train.augment.{name} must lie in [0, {most:g}], got {value}")
    strengths = ("color", "crop", "rotate", "shift", "blur", "noise", "jpeg")
    if augment.views and not any(getattr(augment, name) for name in strengths):
        raise SettingsError(
            f"train.augment.views={augment.views} asks for views that nothing changes: set "
            f"train/augment=light, or one of {', '.join(strengths)}"
        )
    if not augment.views and any(getattr(augment, name) for name in strengths):
        raise SettingsError(
            "train.augment changes nothing without views: set train.augment.views=2"
        )


_BOUNDS = {
    "greater_than": ("gt", "greater than"),
    "greater_than_equal": ("ge", "at least"),
    "less_than": ("lt", "less than"),
    "less_than_equal": ("le", "at most"),
}


def _complaint(error: Any) -> str:
    """One sentence of an error of pydantic."""
    *_, last = path = [str(part) for part in error["loc"]]
    where = ".".join(path)
    if error["type"] in _BOUNDS:
        key, words = _BOUNDS[error["type"]]
        most, given = error["ctx"][key], error["input"]
        percent = key == "le" and most == 1 and 2 <= given <= 100
        hint = f": {given:g} % is {given / 100:g}" if percent else ""
        return f"{where} must be {words} {most:g}, got {given}{hint}"
    if error["type"] == "finite_number":
        return f"{where} must be a number, got {error['input']}"
    message = error["msg"]
    text = f"bad setting {where}={error['input']!r}: {message[0].lower()}{message[1:]}"
    if error["type"] == "unexpected_keyword_argument":
        close = get_close_matches(last, {*_names(Settings), "experiment"})
        text += f"; did you mean {' or '.join(close)}?" if close else ""
    if error["type"] == "string_type" and isinstance(error["input"], int | float):
        text += f"; for this text, write '{where}=\"{error['input']}\"'"
    return text


def _names(kind: Any) -> set[str]:
    """Names of the settings of a dataclass and of those in it."""
    found: set[str] = set()
    for name, hint in get_type_hints(kind).items():
        found |= {name}.union(*map(_names, _dataclasses(hint)))
    return found


def _dataclasses(hint: Any) -> list[Any]:
    """The dataclasses that a type names, e.g. the values of a dict."""
    if is_dataclass(hint):
        return [hint]
    return [found for part in get_args(hint) for found in _dataclasses(part)]


def _stray_truth(given: Any, settings: Any, place: str = "") -> str | None:
    """The first setting that is a truth value where a number was made of it."""
    if isinstance(given, bool) and not isinstance(settings, bool):
        return f"{place}={given}"
    if isinstance(given, dict) and isinstance(settings, dict):
        for key, value in given.items():
            below = f"{place}.{key}".removeprefix(".")
            if key in settings and (found := _stray_truth(value, settings[key], below)):
                return found
    return None
