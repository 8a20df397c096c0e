"""What all replicas serve, so that each answers as the others do."""

from __future__ import annotations

import hashlib
import socket
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from valora_data.contract.base_model import file_hash
from valora_data.contract.bundle import MANIFEST
from valora_serve.catalogue.contexts import FACTS_FILE, MEMORY_FILE
from valora_serve.errors import AdapterError

if TYPE_CHECKING:
    from collections.abc import Mapping

FILES = {
    "bundle": (MANIFEST,),
    "adapter": ("adapter_config.json", "adapter_model.safetensors"),
    "context": (FACTS_FILE, MEMORY_FILE),
}
"""Files of each kind of part by which its content is known."""


@dataclass(frozen=True, slots=True)
class Part:
    """A bundle, an adapter or a context that was made at run time.

    Attributes:
        folder: Its folder, the same on every machine.
        sha256: Hash of its content: of a bundle's manifest, which has the hashes of all its files,
            or of an adapter's configuration and weights, or of a context's facts and memory.
        decode_only: Whether the adapter is applied at decoding only.
    """

    folder: str
    sha256: str
    decode_only: bool = False


@dataclass(frozen=True, slots=True)
class Revision:
    """Names a state of what is served.

    Attributes:
        front: Id of the server that decides what is served.
        number: Counts its changes.
    """

    front: str
    number: int

    def covers(self, other: Revision) -> bool:
        """Whether a replica of this revision has all that the other one names."""
        return self.front == other.front and self.number >= other.number


@dataclass(frozen=True, slots=True)
class ServedState:
    """All that every replica serves.

    Attributes:
        revision: Its revision.
        bundles: Bundles by name.
        adapters: Adapters that belong to no bundle, by name.
        contexts: Contexts that belong to no bundle, by name.
    """

    revision: Revision
    bundles: Mapping[str, Part] = field(default_factory=dict)
    adapters: Mapping[str, Part] = field(default_factory=dict)
    contexts: Mapping[str, Part] = field(default_factory=dict)


def find_part(folder: Path, what: str) -> Part:
    """Return a folder with the hash of its content.

    Args:
        folder: Folder of a bundle, adapter or context.
        what: Which of them, a key of `FILES`.

    Raises:
        AdapterError: The folder, or a file of it, is missing.
    """
    try:
        hashes = [file_hash(folder / name) for name in FILES[what]]
        if what == "adapter" and (labels := folder / "config.json").exists():
            hashes.append(file_hash(labels))
    except OSError as error:
        raise AdapterError(
            f"{what} {folder} cannot be read on {socket.gethostname()} ({error.strerror}): put it "
            "at the same path on every machine of the Ray cluster"
        ) from error
    return Part(str(folder), hashlib.sha256("".join(hashes).encode()).hexdigest())


def check_part(part: Part, what: str) -> None:
    """Check that a folder has the same content on this machine as on the server.

    Raises:
        AdapterError: It is missing, or another one.
    """
    if find_part(Path(part.folder), what).sha256 != part.sha256:
        raise AdapterError(
            f"{what} {part.folder} on {socket.gethostname()} is not the one that the server has, "
            "as its sha256 differs: copy the same one to every machine of the Ray cluster"
        )
