"""What every place that adapters are fetched from has in common."""

from __future__ import annotations

import contextlib
import hashlib
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from valora_serve.errors import pickle_error

Look = Callable[[str], tuple[int | None, object] | None]
"""Returns the size of a file, and what changes with its content."""
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
FILES = (CONFIG, WEIGHTS)  # files of an adapter in PEFT's format
LABELS = "config.json"
"""Names a classifier's labels; it may be absent."""
FETCHED = (*FILES, LABELS)  # files that are fetched
PICKLE = "adapter_model.bin"
"""What older versions of PEFT write in place of `WEIGHTS`; it is never opened."""


@dataclass(frozen=True, slots=True)
class Found:
    """An adapter at its source."""

    version: str  # changes whenever its files do, e.g. a commit, or a hash of their ETags
    sizes: Mapping[str, int | None]  # bytes of each of `FETCHED` that is there, if known


def leads_inside(folder: Path, target: Path, root: Path) -> bool:
    """Return whether the file `target` of an adapter's folder may be read; paths have no links."""
    # Files of a Hugging Face cache are links from ``models--…/snapshots/<revision>/`` to
    # ``models--…/blobs/``, which belong to it, too.
    blobs = (
        one.parent / "blobs" for one in (folder, *folder.parents)
        if one.name == "snapshots" and one.parent.name.startswith("models--")
    )  # fmt: skip
    return any(target.is_relative_to(path) for path in (root, *blobs))


def without_password(said: object) -> str:
    """What an error says, without user and password of the URLs in it."""
    return re.sub(r"(?<=//)[^/@\s]*@", "", str(said))


@contextlib.contextmanager
def denials() -> Iterator[None]:
    """Context in which a service's refusals are `PermissionError`s, as they are for S3."""
    try:
        yield
    except PermissionError:
        raise
    except Exception as error:
        refused = status_of(error) in (401, 403) or "Credentials" in type(error).__name__
        if refused or str(error).startswith("Forbidden"):
            raise PermissionError(without_password(error)) from error
        raise


def status_of(error: BaseException) -> int | None:
    """The status of HTTP that an error of a client has, as their packages name it."""
    for name in ("status", "status_code", "code"):
        status = getattr(error, name, getattr(getattr(error, "response", None), name, None))
        if isinstance(status, int | str) and str(status).isdecimal():
            return int(status)
    return None


class Stream(Protocol):
    """A file that is being read."""

    def read(self, size: int, /) -> bytes:
        """Return up to `size` bytes; none at the end."""


class Resolver(ABC):
    """Finds adapters by name at one place; its methods are called in threads.

    They may raise `PermissionError` if the source denies access, any other `OSError` if it cannot
    be reached, and a `ServeError` that says what else is wrong.
    """

    remedy = "put it there"  # what whoever asks for an adapter that it does not have may do

    def __init__(self, scheme: str, location: str) -> None:
        self.scheme, self.location = scheme, location

    @property
    def url(self) -> str:
        """The place with its scheme."""
        return f"{self.scheme}://{self.location}"

    @abstractmethod
    def find(self, name: str) -> Found | None:
        """Look an adapter up without reading it; None if the place has none of this name.

        Names have letters, digits, ``.``, ``_``, ``-`` and slashes; no part begins with a dot.
        """

    def _found(self, name: str, look: Look) -> Found | None:
        """Make what `find` returns; `look` says what a file is, None if it is absent."""
        known = {}
        for file in FETCHED:
            if (one := look(file)) is not None:
                known[file] = one
            elif file in FILES:
                if file == WEIGHTS and look(PICKLE) is not None:
                    raise pickle_error(name, PICKLE)
                return None
        facts = [fact for _, fact in known.values()]
        version = hashlib.sha256(repr(facts).encode()).hexdigest()
        return Found(version, {file: size for file, (size, _) in known.items()})

    @abstractmethod
    def open(self, name: str, file: str, found: Found) -> AbstractContextManager[Stream]:
        """Open one of `FETCHED` of an adapter that was found."""
