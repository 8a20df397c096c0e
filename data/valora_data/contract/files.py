"""Reads files that cannot be trusted: of bounded size and depth, and never a pipe or a device."""

from __future__ import annotations

import json
import os
import re
import reprlib
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from valora_data.errors import BundleError

if TYPE_CHECKING:
    from io import BufferedReader

    from torch import Tensor

JSON_BYTES = 8 << 20
"""Most bytes of a JSON file: a manifest of thousands of domains is smaller."""
JSON_DEPTH = 64
"""Most levels of nested objects and lists."""
JSON_VALUES = 300_000
"""Most values and keys of a JSON file."""
HEADER_BYTES = 4 << 20
"""Most bytes of a safetensors header: room for 20,000 tensors."""
NAME_LENGTH = 512
"""Most characters of a tensor's name."""
DIGITS = 18
"""Most digits of a whole number in JSON."""
PACKED = {"F4", "F6_E2M3", "F6_E3M2", "F8_E8M0"}
"""Dtypes of safetensors that PyTorch's tensors have not: parts of bytes, and exponents alone."""

# Whatever opens or closes nothing: strings, and what is neither a bracket nor a quotation mark.
_NO_BRACKET = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?+|[^"\[\]{}]++', re.DOTALL)

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
    """A file is missing, no regular file, too large or damaged.

    Args:
        reason: What is wrong, as the end of "… cannot be used: it".
        file: The file; None for a text that came out of one.

    Attributes:
        reason: What is wrong, e.g. ``has 900 bytes, more than 500``.
    """

    def __init__(self, reason: str, file: Path | None = None) -> None:
        super().__init__(f"{file or 'the text'} cannot be used, as it {reason}: copy it again")
        self.reason = reason


def read_bytes(file: Path, most: int) -> bytes:
    """Read a regular file.

    Args:
        file: The file.
        most: Most bytes that it may have.

    Raises:
        UnreadableError: It is missing, no regular file, larger, or changed while it was read.
    """
    with open_regular(file, most) as opened:
        size = os.fstat(opened.fileno()).st_size
        try:
            content = opened.read(size + 1)
        except OSError as error:
            raise UnreadableError(f"cannot be read ({error.strerror})", file) from error
    if len(content) != size:
        raise UnreadableError("changed while it was read", file)
    return content


def open_regular(file: Path, most: int) -> BufferedReader:
    """Open a regular file for reading; pipes and devices in its place do not block.

    Args:
        file: The file.
        most: Most bytes that it may have.

    Raises:
        UnreadableError: It is missing, no regular file, or larger.
    """
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError) as error:  # ValueError: a null character in the path
        reason = getattr(error, "strerror", None) or error
        raise UnreadableError(f"cannot be read ({reason})", file) from error
    facts = os.fstat(descriptor)
    if stat.S_ISREG(facts.st_mode) and facts.st_size <= most:
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    if stat.S_ISREG(facts.st_mode):
        raise UnreadableError(f"has {facts.st_size} bytes, more than {most}", file)
    raise UnreadableError("is no regular file", file)


def read_json(file: Path, most: int = JSON_BYTES) -> Any:
    """Read a JSON file, see `parse_json`.

    Args:
        file: The file.
        most: Most bytes that it may have.

    Raises:
        UnreadableError: It cannot be read, or is beyond a limit.
    """
    content = read_bytes(file, most)
    try:
        return parse_json(content)
    except UnreadableError as error:
        raise UnreadableError(error.reason, file) from error


def parse_json(content: bytes | str) -> Any:
    """Parse JSON within limits; numbers may be infinite or NaN, which callers must check.

    Objects with a key twice are refused, because readers differ in which value counts.

    Args:
        content: The text, in UTF-8 if it is bytes.

    Raises:
        UnreadableError: It is no JSON, or is beyond a limit on depth, values or digits.
    """
    raw = content if isinstance(content, bytes) else content.encode("utf-8", "surrogatepass")
    # Before anything is parsed, as parsing is recursive.
    if raw.count(b",") + raw.count(b"[") + raw.count(b"{") > JSON_VALUES:
        raise UnreadableError(f"holds more than {JSON_VALUES} values")
    depth = deepest = 0
    for bracket in _NO_BRACKET.sub(b"", raw):
        depth += 1 if bracket in b"[{" else -1
        deepest = max(deepest, depth)
    if deepest > JSON_DEPTH:
        raise UnreadableError(f"is nested more than {JSON_DEPTH} levels deep")
    try:
        value = json.loads(raw.decode("utf-8"), object_pairs_hook=_unique, parse_int=_integer)
        if b"\\u" in raw:  # only escapes can make lone surrogates
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnreadableError:
        raise
    except (UnicodeDecodeError, UnicodeEncodeError) as error:
        raise UnreadableError(f"holds text that is not Unicode ({error.reason})") from error
    except (ValueError, RecursionError) as error:
        raise UnreadableError(f"is no JSON ({error})") from error
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the object of these pairs, if no key is there twice."""
    made: dict[str, Any] = {}
    for key, value in pairs:
        if key in made:
            raise UnreadableError(f"holds the key {shown(key)} twice")
        made[key] = value
    return made


def _integer(digits: str) -> int:
    if len(digits) > DIGITS:
        raise UnreadableError(f"holds a number of {len(digits)} digits")
    return int(digits)


def read_safetensors(file: Path, most: int) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Read a safetensors file into memory; it may be replaced or truncated meanwhile.

    Args:
        file: The file.
        most: Most bytes that it may have.

    Returns:
        Its metadata, and its tensors on the CPU by name.

    Raises:
        UnreadableError: It cannot be read or is damaged.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load

    content = read_bytes(file, most)

    def damaged(reason: str) -> NoReturn:
        raise UnreadableError(f"is truncated or damaged ({reason})", file)

    length = int.from_bytes(content[:8], "little")
    if len(content) < 8 or length > min(len(content) - 8, HEADER_BYTES):
        damaged("its header is cut off or too long")
    try:
        header = parse_json(content[8 : 8 + length])
    except UnreadableError as error:
        damaged(f"its header {error.reason}")
    if not isinstance(header, dict):
        damaged("its header is no object")
    for name, facts in header.items():
        if len(name) > NAME_LENGTH or not name.isprintable():
            damaged(f"the name {shown(name)} is too long or not printable")
        dtype = facts.get("dtype") if isinstance(facts, dict) else None
        if isinstance(dtype, str) and dtype in PACKED and name != "__metadata__":
            raise UnreadableError(f"holds tensor {name} of dtype {dtype}", file)
    metadata = header.get("__metadata__") or {}
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        damaged("its metadata are no texts")
    try:
        return metadata, load(content)
    except (SafetensorError, ValueError, KeyError, TypeError, RuntimeError, OverflowError) as error:
        damaged(shown(str(error)).strip("'\""))
