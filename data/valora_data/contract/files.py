"""Reads files that cannot be trusted: of bounded size and depth, and never a pipe or a device."""

from __future__ import annotations

import itertools
import json
import os
import reprlib
import stat
from collections.abc import Mapping
from io import BufferedReader
from pathlib import Path
from typing import TYPE_CHECKING, Any

from valora_data.errors import BundleError

if TYPE_CHECKING:
    from torch import Tensor

JSON_BYTES = 8 << 20  # most of a JSON file: a manifest of thousands of domains is smaller
JSON_DEPTH = 64  # most levels of nested objects and lists
JSON_DIGITS = 18  # most digits of a whole number
HEADER_BYTES = 4 << 20  # most of a safetensors header: room for 20,000 tensors
NAME_LENGTH = 512  # most characters of a tensor's name
_short = reprlib.Repr()
_short.maxstring = _short.maxother = 100
_short.maxlevel = 3


def shown(value: object) -> str:
    """Return a value as Python writes it, cut to what a message may hold."""
    return _short.repr(value)


def expanded(path: str | Path) -> Path:
    """Return a path with the home folder in place of ``~``; unchanged if there is no such home."""
    return Path(os.path.expanduser(path))  # noqa: PTH111 - `Path.expanduser` raises then


class UnreadableError(BundleError):
    """A file is missing, too large or damaged; `reason` says which, after "… as it"."""

    def __init__(self, reason: str, file: Path | None = None) -> None:
        super().__init__(f"{file or 'the text'} cannot be used, as it {reason}: copy it again")
        self.reason = reason


def open_regular(file: Path, max_bytes: int) -> BufferedReader:
    """Open a regular file of at most so many bytes; pipes and devices do not block."""
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError) as error:  # ValueError: a null character in the path
        reason = getattr(error, "strerror", None) or error
        raise UnreadableError(f"cannot be read ({reason})", file) from error
    facts = os.fstat(descriptor)
    if stat.S_ISREG(facts.st_mode) and facts.st_size <= max_bytes:
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    if stat.S_ISREG(facts.st_mode):
        raise UnreadableError(f"has {facts.st_size} bytes, more than {max_bytes}", file)
    raise UnreadableError("is no regular file", file)


def read_bytes(file: Path, max_bytes: int) -> bytes:
    """Read a regular file of at most so many bytes, and no more than it has now."""
    with open_regular(file, max_bytes) as opened:
        try:
            return opened.read(os.fstat(opened.fileno()).st_size)
        except OSError as error:
            raise UnreadableError(f"cannot be read ({error.strerror})", file) from error


def read_json(file: Path, max_bytes: int = JSON_BYTES) -> Any:
    """Read a JSON file of at most so many bytes, see `parse_json`."""
    content = read_bytes(file, max_bytes)
    try:
        return parse_json(content)
    except UnreadableError as error:
        raise UnreadableError(error.reason, file) from error


def parse_json(content: str | bytes) -> Any:
    """Parse JSON in UTF-8 without twice the same key, within `JSON_DEPTH` and `JSON_DIGITS`."""
    deep = UnreadableError(f"is nested more than {JSON_DEPTH} levels deep")
    try:
        text = content.decode("utf-8") if isinstance(content, bytes) else content
        value = json.loads(text, object_pairs_hook=_unique, parse_int=_integer)
        json.dumps(value, ensure_ascii=False).encode("utf-8")  # escapes can make lone surrogates
    except RecursionError as error:
        raise deep from error
    except (UnicodeDecodeError, UnicodeEncodeError) as error:
        raise UnreadableError(f"holds text that is not Unicode ({error.reason})") from error
    except ValueError as error:
        raise UnreadableError(f"is no JSON ({error})") from error
    level: list[Any] = [[value]]
    for _ in range(JSON_DEPTH + 1):
        inside = (outer.values() if isinstance(outer, dict) else outer for outer in level)
        level = [inner for inner in itertools.chain(*inside) if isinstance(inner, dict | list)]
    if level:
        raise deep
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for key, value in pairs:
        if key in made:
            raise UnreadableError(f"holds the key {shown(key)} twice")
        made[key] = value
    return made


def _integer(digits: str) -> int:
    if len(digits) > JSON_DIGITS:
        raise UnreadableError(f"holds a number of {len(digits)} digits")
    return int(digits)


def first_fault(error: Exception) -> str:
    """Return what is wrong; of several things that pydantic finds the first one, and where."""
    if not hasattr(error, "errors"):
        return str(error)
    fault: dict[str, Any] = error.errors(include_url=False)[0]
    if fault["type"] == "value_error":  # of `expect`, which names field and value itself
        return str(fault["msg"])
    field = ".".join(shown(str(part))[1:-1] for part in fault["loc"]) or "all of it"
    return f"{field}: {fault['msg'].partition(' or instance of ')[0]}, got {shown(fault['input'])}"


def expect(fits: object, field: str, expected: str, value: object) -> None:
    """Raise a `ValueError` that names a value, and where it stands, unless it fits."""
    if not fits:
        raise ValueError(f"{field}: expected {expected}, got {shown(value)}")


def read_safetensors(file: Path, max_bytes: int) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Read metadata and tensors of a safetensors file into memory: it may be replaced meanwhile."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    content = read_bytes(file, max_bytes)
    length = min(int.from_bytes(content[:8], "little"), HEADER_BYTES)
    try:
        header = dict(parse_json(content[8 : 8 + length]))
        tensors = load(content)
    except KeyError as error:
        name = next(name for name in header if header[name].get("dtype") == error.args[0])
        raise UnreadableError(f"holds tensor {shown(name)[1:-1]} of dtype {error}", file) from error
    except (SafetensorError, UnreadableError, ValueError, TypeError, RuntimeError) as error:
        reason = getattr(error, "reason", None) or shown(str(error))
        raise UnreadableError(f"is truncated or damaged ({reason})", file) from error
    for name in header:
        if len(name) > NAME_LENGTH or not name.isprintable():
            what = f"the name {shown(name)} is too long or not printable"
            raise UnreadableError(f"is truncated or damaged ({what})", file)
    return header.get("__metadata__") or {}, tensors


def write_safetensors(file: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, str]) -> None:
    """Write tensors of any device, with metadata, as safetensors."""
    from safetensors.torch import save_file

    plain = {name: part.detach().cpu().contiguous() for name, part in tensors.items()}
    save_file(plain, file, dict(facts) or None)
