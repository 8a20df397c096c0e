"""Settings from a file, the environment and the command line, in rising order of precedence.

Both settings classes are read by their fields and docstrings, so that an option, its default and
its help stand in one place.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import inspect
import os
import re
import tomllib
import types
import typing
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from valora_serve.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

T = TypeVar("T")
ENVIRONMENT = "VALORA_"


def helps(cls: type) -> dict[str, str]:
    """What a settings class says of its fields, from its docstring's Attributes."""
    text = inspect.getdoc(cls) or ""
    _, _, attributes = text.partition("Attributes:\n")
    found: dict[str, str] = {}
    for part in re.split(r"\n(?= {4}\w+:)", "\n" + attributes):
        name, colon, said = part.strip().partition(":")
        if colon:
            found[name.strip()] = " ".join(said.split())
    return found


def kind_of(annotation: Any) -> tuple[Any, bool]:
    """The type itself, and whether None is one of its values."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        others = [item for item in typing.get_args(annotation) if item is not type(None)]
        return (others[0] if len(others) == 1 else str), True
    return annotation, False


def add_options(parser: argparse.ArgumentParser, classes: Iterable[type]) -> None:
    """Give a parser one option for every field of the classes; what is not named stays absent."""
    for cls in classes:
        title = (inspect.getdoc(cls) or cls.__name__).splitlines()[0]
        group = parser.add_argument_group(title.rstrip("."))
        said, hints = helps(cls), typing.get_type_hints(cls)
        for item in dataclasses.fields(cls):
            kind, _ = kind_of(hints[item.name])
            default = _default(item)
            text = said.get(item.name, "").replace("%", "%%")
            if default not in (None, (), {}) and not dataclasses.is_dataclass(default):
                text += f" (default: {_shown(default)})"
            if dataclasses.is_dataclass(kind):
                known = ", ".join(part.name for part in dataclasses.fields(kind))
                text += f" (NAME is one of {known})"
            option = "--" + item.name.replace("_", "-")
            if kind is bool:
                group.add_argument(
                    option, dest=item.name, action=argparse.BooleanOptionalAction,
                    default=argparse.SUPPRESS, help=text,
                )  # fmt: skip
                continue
            origin = typing.get_origin(kind)
            pairs = origin is dict or dataclasses.is_dataclass(kind)
            group.add_argument(
                option, dest=item.name, help=text, default=argparse.SUPPRESS,
                action="append" if pairs or origin in (tuple, list) else "store",
                metavar="NAME=VALUE" if pairs else item.name.split("_")[-1].upper(),
            )  # fmt: skip


def gather(
    classes: Iterable[type],
    named: Mapping[str, Any],
    file: str | None = None,
    environment: Mapping[str, str] | None = None,
    also: Iterable[str] = (),
) -> dict[str, Any]:
    """Put together what file, environment and command line say.

    Args:
        classes: Settings classes whose fields are known.
        named: What the command line named.
        file: YAML or TOML file.
        environment: ``VALORA_<FIELD>`` variables; those of this process if None.
        also: Further names that file and environment may hold.

    Returns:
        Values by name, as they were given.

    Raises:
        SettingsError: A name is not known, or the file cannot be read.
    """
    known = {item.name: cls for cls in classes for item in dataclasses.fields(cls)}
    known |= dict.fromkeys(also, str)
    merged: dict[str, Any] = {}
    if file is not None:
        for name, value in read_file(file).items():
            key = str(name).replace("-", "_")
            if key not in known:
                raise SettingsError(f"{file} sets {name}, which is not known{_near(key, known)}")
            merged[key] = value
    for name, value in (os.environ if environment is None else environment).items():
        if not name.startswith(ENVIRONMENT):
            continue
        key = name.removeprefix(ENVIRONMENT).lower()
        if key not in known:
            raise SettingsError(f"environment variable {name} is not known{_near(key, known)}")
        merged[key] = value
    return merged | dict(named)


def read_file(file: str) -> dict[str, Any]:
    """Content of a YAML or TOML file of settings.

    Raises:
        SettingsError: It cannot be read, or holds no names and values.
    """
    import yaml

    path = Path(file)
    try:
        text = path.read_text(encoding="utf-8")
        content = tomllib.loads(text) if path.suffix == ".toml" else yaml.safe_load(text)
    except (OSError, ValueError, yaml.YAMLError) as error:
        reason = str(error).splitlines()[0]
        raise SettingsError(f"configuration file {file} cannot be read ({reason})") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise SettingsError(f"configuration file {file} holds no names and values")
    return content


def build(cls: type[T], values: Mapping[str, Any]) -> T:
    """Make a settings object from those of the values that are its own.

    Raises:
        SettingsError: A value is not of its field's type, or two do not go together.
    """
    from pydantic import TypeAdapter, ValidationError

    hints = typing.get_type_hints(cls)
    made: dict[str, Any] = {}
    for item in dataclasses.fields(typing.cast("Any", cls)):
        if item.name not in values:
            continue
        value = _parsed(item.name, values[item.name], hints[item.name])
        if dataclasses.is_dataclass(inner := kind_of(hints[item.name])[0]) and value is not None:
            made[item.name] = _nested(typing.cast("type", inner), item.name, value)
            continue
        try:
            made[item.name] = TypeAdapter(hints[item.name]).validate_python(value)
        except ValidationError as error:
            reason = error.errors()[0]["msg"]
            raise SettingsError(f"{item.name} cannot be {value!r}: {reason}") from error
    try:
        return cls(**made)
    except ValueError as error:
        raise SettingsError(str(error)) from error


def _nested(cls: type[T], name: str, value: Mapping[str, Any]) -> T:
    known = {item.name: None for item in dataclasses.fields(typing.cast("Any", cls))}
    for key in value:
        if key not in known:
            raise SettingsError(f"{name} has no {key}{_near(key, known)}")
    return build(cls, value)


def _parsed(name: str, value: Any, annotation: Any) -> Any:
    """A value as the command line or the environment gives it, in its field's shape."""
    kind, optional = kind_of(annotation)
    origin = typing.get_origin(kind)
    if optional and value in ("", "none", "None"):
        return None
    if origin in (tuple, list) and isinstance(value, (str, list, tuple)):
        split: list[Any] = []
        for item in [value] if isinstance(value, str) else value:
            split += item.split(",") if isinstance(item, str) else [item]
        return tuple(
            item.strip() if isinstance(item, str) else item for item in split if item != ""
        )
    if (origin is dict or dataclasses.is_dataclass(kind)) and not isinstance(value, dict):
        texts = [value] if isinstance(value, str) else value
        found = [pair.partition("=") for text in texts for pair in str(text).split(",") if pair]
        if not all(equals for _, equals, _ in found):
            raise SettingsError(f"{name} cannot be {value!r}: write name=value")
        return {key.strip(): said.strip() for key, _, said in found}
    return value


def _default(item: dataclasses.Field[Any]) -> Any:
    if item.default is not dataclasses.MISSING:
        return item.default
    if item.default_factory is not dataclasses.MISSING:
        return item.default_factory()
    return None


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return ",".join(str(item) for item in value)
    return str(value)


def _near(name: str, known: Mapping[str, Any]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f": did you mean {close[0]}?" if close else ": `valora-serve --help` says what there is"
