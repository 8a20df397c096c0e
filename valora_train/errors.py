"""Errors of the factory. Each message is one sentence that names the cause and the remedy."""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import get_close_matches

from pydantic import ValidationError

from valora_data.errors import ValoraError


class SettingsError(ValoraError):
    """The configuration asks for something that does not exist or does not fit."""


class StageError(ValoraError):
    """A stage's output is damaged, or another process is working on it."""


class UnreachableError(ValoraError):
    """A domain misses its requirement even in an adapter of its own."""


class TrackingError(ValoraError):
    """MLflow's store cannot be used."""


def without_passwords(text: str) -> str:
    """A text in which stars stand for the names and passwords of URIs."""
    text = re.sub(r"://[^\s/]*(?::\S*)?@", "://***@", text)
    return re.sub(r"(?i)((?:password|pwd|token)(?:=|%3D))[^&;%\s'\"]+", r"\1***", text)


def explain(error: ValidationError, known: Iterable[str], *above: str) -> str:
    """One sentence on the first fault of settings, with `known` names like an unknown one."""
    first = error.errors()[0]
    kind, given, path = first["type"], first["input"], ".".join([*above, *map(str, first["loc"])])
    said = first["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
    bad = f"bad setting {path}={given!r}"
    if kind == "missing":
        return f"{path} is missing: set it, or leave {path.rpartition('.')[0]} out"
    if kind in ("extra_forbidden", "unexpected_keyword_argument"):
        places = {n.rpartition(".")[2]: n for n in sorted(known, key=lambda n: -n.count("."))}
        close = [places[name] for name in get_close_matches(str(first["loc"][-1]), places)]
        hint = f"did you mean {' or '.join(close)}?" if close else "leave it out"
        return f"{bad}: there is no such setting, {hint}"
    if kind.startswith(("greater_than", "less_than", "finite")):
        percent = first.get("ctx", {}).get("le") == 1 and 2 <= given <= 100
        hint = f": {given:g} % is {given / 100:g}" if percent else ""
        return f"{path} {said.replace('finite ', '')}, got {given}{hint}"
    if kind == "string_type" and isinstance(given, int | float):
        text = ("yes" if given else "no") if isinstance(given, bool) else given
        return f"{bad}: {said}; for this text, write '{path}=\"{text}\"'"
    return f"{path if isinstance(given, dict) else bad}: {said[0].lower()}{said[1:]}"
