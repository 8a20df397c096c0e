"""Errors of the factory. Each message is one sentence that names the cause and the remedy."""

from __future__ import annotations

import errno
import os
import re
from typing import NamedTuple

from valora_data.errors import ValoraError


class SettingsError(ValoraError):
    """The configuration asks for something that does not exist or does not fit."""


class StrategyError(ValoraError):
    """A fusion strategy asks for something that a fusion cannot do."""


class StageError(ValoraError):
    """A stage cannot write its output, or another process is working on it."""


class UnreachableError(ValoraError):
    """A domain misses its requirement even in an adapter of its own."""


class GateError(ValoraError):
    """A bundle does not reproduce the answers or the accuracy measured in training."""


class PushError(ValoraError):
    """A bundle could not be uploaded."""


class SweepError(ValoraError):
    """Jobs of a sweep failed, or cannot be started."""


class TrackingError(ValoraError):
    """MLflow's store cannot be used."""


def without_passwords(text: str) -> str:
    """A text in which stars stand for the names and passwords of URIs."""
    text = re.sub(r"://[^\s/]*(?::\S*)?@", "://***@", text)
    return re.sub(r"(?i)((?:password|pwd|token)(?:=|%3D))[^&;%\s'\"]+", r"\1***", text)


class Fault(NamedTuple):
    """A failure of the machine, not of the code.

    Attributes:
        cause: What is wrong, as the beginning of a sentence.
        remedy: What to do, as an imperative.
    """

    cause: str
    remedy: str


_ELSEWHERE = "choose other folders (paths.work, paths.bundles, paths.tracking)"
_LOCKS = "mount it with locks (NFSv4)"
_FAULTS = {
    errno.ENOSPC: ("no space left on the disk", "free some space"),
    errno.EDQUOT: ("the disk quota is used up", "free some space"),
    errno.EFBIG: ("a file is too large for the disk or for this user", "raise `ulimit -f`"),
    errno.EACCES: ("permission denied", f"change the permissions, or {_ELSEWHERE}"),
    errno.EPERM: ("permission denied", f"change the permissions, or {_ELSEWHERE}"),
    errno.EROFS: ("the disk is read-only", f"make it writable, or {_ELSEWHERE}"),
    errno.ENOTDIR: ("a file is where a folder should be", f"move it away, or {_ELSEWHERE}"),
    errno.EEXIST: ("a file is where a folder should be", f"move it away, or {_ELSEWHERE}"),
    errno.EISDIR: ("a folder is where a file should be", f"move it away, or {_ELSEWHERE}"),
    errno.ENOTEMPTY: ("a folder was written to by another program", "stop that program"),
    errno.ENOENT: ("a file or folder disappeared", "leave the folders alone while this runs"),
    errno.ENAMETOOLONG: ("a name is too long", "shorten the names of the task and its domains"),
    errno.ELOOP: ("a link leads to itself", "remove the link"),
    errno.EMFILE: ("too many files are open", "raise `ulimit -n`"),
    errno.ENFILE: ("too many files are open", "stop other programs"),
    errno.ENOMEM: ("the memory is used up", "stop other programs, or lower the batch sizes"),
    errno.EIO: ("the disk failed", "check it"),
    errno.ESTALE: ("a network folder is gone", "mount it again"),
    errno.ENOLCK: (
        "the file system gives no locks",
        f"mount it with locks (NFSv4), or {_ELSEWHERE}",
    ),
    errno.EOPNOTSUPP: (
        "the file system lacks what is needed",
        f"mount it with locks (NFSv4), or {_ELSEWHERE}",
    ),
    errno.ETXTBSY: ("a file is in use", "stop the program that uses it"),
}
_SAYINGS = {
    r"os error (\d+)": None,  # safetensors, tokenizers: the number of the error
    r"no space left|disk is full|PytorchStreamWriter|unexpected pos": errno.ENOSPC,
    r"readonly database|read-only file system": errno.EROFS,
    r"permission denied|unable to open database file": errno.EACCES,
    r"too many open files": errno.EMFILE,
    r"out of memory|can't allocate memory|DefaultCPUAllocator": errno.ENOMEM,
}
"""How libraries that raise no OSError tell its number."""


def describe_fault(error: BaseException) -> Fault | None:
    """What failed if an error comes from the machine (disk, permissions, memory), else None.

    Args:
        error: Any error; what it was raised from counts, too.
    """
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, ValoraError):
            return None  # has a sentence of its own
        if isinstance(seen, UnicodeEncodeError) and seen.encoding == "utf-8":
            return Fault(f"a name is no UTF-8 ({os.fsencode(seen.object)!r})", "change it")
        number = _error_number(seen)
        if number in _FAULTS:
            cause, remedy = _FAULTS[number]
            file = getattr(seen, "filename", None)
            return Fault(cause if file is None else f"{cause} ({file})", remedy)
        if number is not None and isinstance(seen, OSError) and seen.filename is not None:
            return Fault(f"{os.strerror(number).lower()} ({seen.filename})", "check the file")
        seen = seen.__cause__
    return None


def _error_number(error: BaseException) -> int | None:
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno
    if isinstance(error, MemoryError):
        return errno.ENOMEM
    for saying, number in _SAYINGS.items():
        found = re.search(saying, str(error), re.IGNORECASE)
        if found:
            return int(found[1]) if number is None else number
    return None
