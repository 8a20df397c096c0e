"""Settings from a file, the environment and the command line, read by pydantic-settings.

The settings are frozen dataclasses (the engine has no pydantic), whose docstrings are the help.
"""

import argparse
import dataclasses
import difflib
import inspect
import os
import re
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, cast

import yaml
from pydantic import BeforeValidator, Field, ValidationError, create_model
from pydantic_settings import (
    BaseSettings,
    CliSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
    YamlConfigSettingsSource,
)

from valora_data.contract.files import expanded
from valora_serve.errors import SettingsError

ENVIRONMENT = "VALORA_"


class _OptionSettings(BaseSettings):
    """Syntax and precedence of all settings; `_model` adds the fields."""

    model_config = SettingsConfigDict(
        env_prefix=ENVIRONMENT,
        extra="forbid",
        enable_decoding=False,  # `a,b` and `name=value` instead of JSON
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_hide_none_type=True,
        cli_parse_none_str="none",
    )

    @classmethod
    def settings_customise_sources(  # type: ignore[override]
        cls, _: type[BaseSettings], *, init_settings: Any, env_settings: Any, **__: Any
    ) -> tuple[Any, ...]:
        """The environment takes precedence over the file, which is passed as arguments."""
        return env_settings, init_settings


PATHS = ("_folder", "_file", "_cache", "_trace", "tls_cert", "tls_key", "_socket")
"""Ends of the names of paths: ``~`` stands for the home folder, which no shell has put there in a
file, a variable or ``--option=~/path``."""


KEYS = ("api_key", "keys_file")
"""Settings that keep strangers out: an unset variable of a shell must not let them in."""

REMOVED = {
    "groups": "the policy cost runs as many requests at a time as fit",
    "max_pause": "the policy cost pauses no requests",
}
"""Settings of policies that were removed, and why nothing is lost by leaving them out."""


def load(
    parser: argparse.ArgumentParser,
    arguments: Sequence[str],
    classes: Sequence[type],
    content: Mapping[str, Any],  # of a file that has been read already
) -> tuple[list[str], list[Any]]:
    """Read settings; the command line takes precedence over the environment, that over the file.

    The parser has arguments ``bundles``, which the environment and the file may set as well, and an
    option ``--config`` for a YAML or TOML file; it gets an option for every field of the settings
    dataclasses `classes`, no two of which share a name. Returns the bundles, and one object of each
    of the classes.
    """
    model = _model(classes)
    groups: dict[str, Any] = {}
    for cls in classes:
        group = parser.add_argument_group((inspect.getdoc(cls) or "").splitlines()[0].rstrip("."))
        groups |= dict.fromkeys(helps(cls), group)

    def add_option(_: Any, *names: str, **option: Any) -> None:
        if (group := groups.get(option["dest"])) is not None:
            kind = _kind(model.model_fields[option["dest"]].annotation)
            if dataclasses.is_dataclass(kind) or typing.get_origin(kind) is dict:
                option |= {"action": "append", "metavar": "NAME=VALUE"}
            elif typing.get_origin(kind) is tuple:
                option["metavar"] = "A,B,..."
            empty = r" \(default(: none|: \(\)| factory: \w+)\)$"
            group.add_argument(*names, **option | {"help": re.sub(empty, "", option["help"])})

    source: Any = CliSettingsSource(model, root_parser=parser, add_argument_method=add_option)
    named = vars(parser.parse_args(list(arguments)))
    own = {name: named.pop(name) for name in list(named) if name not in groups}
    file = str(expanded(own.get("config") or "the configuration"))
    content = _read(model, file) if own.get("config") else content
    content = {str(name).replace("-", "_"): value for name, value in content.items()}
    for name in content:
        _check(name, model.model_fields, f"{file} sets {name}, which is not known")
    for name in os.environ:  # pydantic-settings ignores variables that it does not know
        if name.startswith(ENVIRONMENT):
            key = name.removeprefix(ENVIRONMENT).lower()
            _check(key, model.model_fields, f"environment variable {name} is not known")
    try:
        found = cast("Any", model)(_cli_settings_source=source(parsed_args=named), **content)
        made = [
            cls(**{item.name: getattr(found, item.name) for item in dataclasses.fields(cls)})
            for cls in classes
        ]
    except ValidationError as error:
        raise SettingsError(_sentence(error)) from error
    except ValueError as error:
        raise SettingsError(str(error)) from error
    return own["bundles"] or found.bundles, made


def helps(cls: type) -> dict[str, str]:
    """Help of every field by its name, from the docstring's section "Attributes"."""
    _, _, attributes = (inspect.getdoc(cls) or "").partition("Attributes:\n")
    parts = re.split(r"\n(?= {4}\w+:)", "\n" + attributes)
    found = (part.strip().partition(":") for part in parts)
    return {name: " ".join(text.replace("`", "").split()) for name, colon, text in found if colon}


def _model(classes: Sequence[type]) -> type[_OptionSettings]:
    read = BeforeValidator(partial(_parsed, "bundles", list[str]))
    fields: dict[str, Any] = {"bundles": (Annotated[list[str], read], [])}
    for cls in classes:
        hints, texts = typing.get_type_hints(cls), helps(cls)
        limited = typing.get_type_hints(cls, include_extras=True)
        for item in dataclasses.fields(cls):
            text, kind = texts.get(item.name, ""), _kind(hints[item.name])
            if dataclasses.is_dataclass(kind):
                names = ", ".join(part.name for part in dataclasses.fields(kind))
                text += f" (NAME is one of {names})"
            given: Any = {"default": item.default}
            if item.default is dataclasses.MISSING:
                given = {"default_factory": item.default_factory}
            field = Field(description=text, **given)
            read = BeforeValidator(partial(_parsed, item.name, hints[item.name]))
            fields[item.name] = (Annotated[limited[item.name], read], field)
    return create_model("Settings", __base__=_OptionSettings, **fields)


def _kind(annotation: Any) -> Any:
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        others = [item for item in typing.get_args(annotation) if item is not type(None)]
        return others[0] if len(others) == 1 else str
    return annotation


def _parsed(name: str, annotation: Any, value: Any) -> Any:
    """A value of an option or a variable, split into the items or pairs that its type holds."""
    kind = _kind(annotation)
    if name in KEYS and value == "":
        raise SettingsError(f"{name} is empty: set it, or leave it out to let everybody in")
    if kind is not annotation and value in ("", "none", "None"):
        return None
    nested, origin = dataclasses.is_dataclass(kind), typing.get_origin(kind)
    if isinstance(value, str) and name.endswith(PATHS):
        return str(expanded(value))
    if isinstance(value, str) and (nested or origin in (list, tuple, dict)):
        value = [part for item in value.split(",") if (part := item.strip())]
    if isinstance(value, list) and (nested or origin is dict):
        pairs = [str(item).partition("=") for item in value]
        if not all(equals for _, equals, _ in pairs):
            raise ValueError("write name=value")
        value = {key.strip(): text.strip() for key, _, text in pairs}
    if isinstance(value, dict) and nested:
        hints = typing.get_type_hints(kind)
        for key in value:
            if key in REMOVED:
                raise SettingsError(f"{name} has no {key} any more, leave it out: {REMOVED[key]}")
            _check(key, hints, f"{name} has no {key}")
        value = {key: _parsed(key, hints[key], item) for key, item in value.items()}
    return value


def _read(model: type[_OptionSettings], file: str) -> dict[str, Any]:
    source = TomlConfigSettingsSource if file.endswith(".toml") else YamlConfigSettingsSource
    try:
        with Path(file).open("rb"):  # pydantic-settings ignores a missing file
            return source(model, file)()
    except TypeError as error:
        raise SettingsError(f"configuration file {file} holds no names and values") from error
    except (OSError, ValueError, yaml.YAMLError) as error:
        reason = str(error).splitlines()[0]
        raise SettingsError(f"configuration file {file} cannot be read ({reason})") from error


def _check(name: str, known: Iterable[str], problem: str) -> None:
    if name not in known:
        close = difflib.get_close_matches(name, known, n=1)
        remedy = f"did you mean {close[0]}?" if close else "`valora-serve --help` lists the options"
        raise SettingsError(f"{problem}: {remedy}")


def _sentence(error: ValidationError) -> str:
    first = error.errors()[0]
    name = ".".join(str(part) for part in first["loc"])
    reason = str(first.get("ctx", {}).get("error", first["msg"]))
    return f"{name} cannot be {first['input']!r}: {reason[:1].lower()}{reason[1:]}"
