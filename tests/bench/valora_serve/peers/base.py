"""What a server is to `bench_peers`: a peer answers requests offline, in a process of its own.

Nothing here imports ours or theirs, so that a peer's process has only the packages of the peer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from PIL.Image import Image

PICTURE = (480, 640, 3)
"""Height, width and channels of the pictures in requests."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One request; greedy decoding that ignores stop tokens.

    Attributes:
        prompt: Token ids, or a text with the placeholder of its picture.
        tokens: Tokens to generate.
        adapter: Name of the adapter; None for the base model.
        picture: Seed of the picture; None for none.
    """

    prompt: list[int] | str
    tokens: int
    adapter: str | None = None
    picture: int | None = None


@dataclass(frozen=True, slots=True)
class Job:
    """What one process measures.

    Attributes:
        peer: Name in the registry.
        base: Folder of the base model.
        adapters: Folders of the adapters, by name.
        rank: Their rank.
        modules: Names of the linears that they change.
        options: Further settings of the peer, beside those that all share.
        rounds: Requests that are submitted at once, by label.
        device: ``cuda`` or ``cpu``.
        context: Longest prompt and answer together, in tokens.
        most_requests: Most requests that run at a time.
        most_tokens: Most tokens computed in a step.
        repeats: How often each round is measured.
    """

    peer: str
    base: str
    adapters: dict[str, str]
    rank: int
    modules: list[str]
    options: dict[str, Any]
    rounds: dict[str, list[Ask]]
    device: str = "cuda"
    context: int = 2048
    most_requests: int = 512
    most_tokens: int = 8192
    repeats: int = 3

    @property
    def pictures(self) -> bool:
        """Whether any request has a picture."""
        return any(ask.picture is not None for asks in self.rounds.values() for ask in asks)

    def as_json(self) -> dict[str, Any]:
        """Plain data that `of_json` reads."""
        return asdict(self)

    @classmethod
    def of_json(cls, data: dict[str, Any]) -> Job:
        """The job that `as_json` gave."""
        rounds = {label: [Ask(**ask) for ask in asks] for label, asks in data["rounds"].items()}
        return cls(**data | {"rounds": rounds})


@dataclass(frozen=True, slots=True)
class Answer:
    """What the process of a job reports.

    Attributes:
        error: Why nothing was measured, in one line; None if all was.
        version: Version of the peer's package.
        torch: Version of torch in the process.
        flags: Settings that the peer was started with.
        ready: Seconds from the start of the peer until it was ready, loading included.
        seconds: Seconds of each repeat, by the label of the round.
        counters: What the peer counted in the last repeat, by the label of the round.
    """

    error: str | None = None
    version: str | None = None
    torch: str | None = None
    flags: dict[str, Any] = field(default_factory=dict)
    ready: float | None = None
    seconds: dict[str, list[float]] = field(default_factory=dict)
    counters: dict[str, dict[str, float]] = field(default_factory=dict)


class Peer(ABC):
    """A server's engine, with a base model and adapters loaded."""

    title: ClassVar[str]
    """Name in tables."""
    package: ClassVar[str]
    """Distribution whose version is printed."""
    requirement: ClassVar[str | None]
    """What pip installs; None for what is here already."""
    pins: ClassVar[tuple[str, ...]] = ()
    """Further constraints for pip, where the newest release of a dependency breaks the peer."""
    text_only: ClassVar[bool] = False
    """Whether text is measured on the language model as a base model of its own."""

    flags: dict[str, Any]
    """Settings that it was started with, for the table."""

    @staticmethod
    @abstractmethod
    def variants(adapters: int, modules: Sequence[str]) -> list[dict[str, Any]]:
        """Documented settings for so many adapters on these linears; the fastest is reported."""

    @abstractmethod
    def __init__(self, job: Job) -> None:
        """Start the engine and load the base model and the adapters."""

    @abstractmethod
    def prepare(self, asks: Sequence[Ask]) -> Any:
        """Requests as the peer takes them; not measured."""

    @abstractmethod
    def run(self, prepared: Any) -> list[int]:
        """Answer requests that are submitted at once.

        Returns:
            Tokens generated for each request.
        """

    def counters(self) -> dict[str, float]:
        """What was counted since the start, to explain figures; nothing by default."""
        return {}

    @abstractmethod
    def close(self) -> None:
        """Stop the engine."""


def picture_of(seed: int) -> Image:
    """An RGB picture of noise, the same in every process."""
    from PIL import Image

    noise = np.random.default_rng(seed).integers(0, 256, PICTURE, dtype=np.uint8)
    return Image.fromarray(noise)
