"""What the server, the board and the replicas send each other; all of it can be pickled."""

from __future__ import annotations

import dataclasses
import hashlib
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from valora_data.contract.bundle import MANIFEST
from valora_data.hashing import file_hash
from valora_serve.catalogue.contexts import FACTS_FILE, MEMORY_FILE
from valora_serve.errors import AdapterError, RequestError
from valora_serve.server.constrain import Grammar, GrammarConstraint
from valora_serve.types import EngineStats, Output, Request, Times

FILES = {
    "bundle": (MANIFEST,),
    "adapter": ("adapter_config.json", "adapter_model.safetensors"),
    "context": (FACTS_FILE, MEMORY_FILE),
}
"""Kinds of parts in the order in which they are loaded, with the files that have their content (a
bundle's manifest has the hashes of all its files)."""


@dataclass(frozen=True, slots=True)
class Part:
    """A bundle, or an adapter or a context of none: its folder and the hash of its content."""

    folder: str  # the same on every machine
    sha256: str
    decode_only: bool = False  # whether the adapter is applied at decoding only


def find_part(folder: Path, what: str) -> Part:
    """Return a folder of a kind, a key of `FILES`, with the hash of its content."""
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
    """Check that a folder has the same content on this machine as on the server."""
    if find_part(Path(part.folder), what).sha256 != part.sha256:
        raise AdapterError(
            f"{what} {part.folder} on {socket.gethostname()} is not the one that the server has, "
            "as its sha256 differs: copy the same one to every machine of the Ray cluster"
        )


@dataclass(frozen=True, slots=True)
class Revision:
    """Names a state of what is served: the server that decides it, and a count of its changes."""

    front: str
    number: int

    def covers(self, other: Revision) -> bool:
        """Whether a replica of this revision has all that the other one names."""
        return self.front == other.front and self.number >= other.number


@dataclass(frozen=True, slots=True)
class ServedState:
    """All that every replica serves: parts by kind and name."""

    revision: Revision
    parts: Mapping[tuple[str, str], Part] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Report:
    """State of a replica, and counters of its engine."""

    replica: str
    healthy: bool
    stats: EngineStats


@dataclass(frozen=True, slots=True)
class Call:
    """A request on its way to a replica: without its constraint, which is made there."""

    request: Request
    adapter: str | None  # by which it is routed; None for the base model
    revision: Revision  # what the server served when it sent the request
    grammar: Grammar | None = None


@dataclass(frozen=True, slots=True)
class Batch:
    """Outputs of a request; none in the first batch, which says that the replica has it."""

    sent: float  # seconds of the replica's `time.monotonic`
    outputs: tuple[Output, ...] = ()


def packed(request: Request, adapter: str | None, revision: Revision) -> Call:
    """Return what is sent to a replica for a request."""
    constraint = request.sampling.constraint
    if constraint is None:
        return Call(request, adapter, revision)
    if not isinstance(constraint, GrammarConstraint):
        raise RequestError(
            f"request {request.id} is constrained by {type(constraint).__name__}, which replicas "
            "cannot make: use a JSON schema"
        )
    bare = dataclasses.replace(request.sampling, constraint=None)
    bare_request = dataclasses.replace(request, sampling=bare)
    return Call(bare_request, adapter, revision, constraint.grammar)


def localised(output: Output, arrival: float, later: float) -> Output:
    """An output with the times of this machine, whose clock is `later`, and `arrival` here."""
    times = output.times
    if times is None:
        return output
    moments = (times.started, times.first_token, times.finished)
    here = (None if one is None else max(arrival, one + later) for one in moments)
    return dataclasses.replace(output, times=Times(arrival, *here))
