"""What a fusion tries, and what becomes of each attempt."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Verdict(StrEnum):
    """Outcome of an attempt."""

    COMMITTED = "committed"
    ROLLED_BACK = "rolled back"
    UNREACHABLE = "unreachable"


@dataclass(frozen=True, slots=True)
class Attempt:
    """Train `domain` into `adapter`, which already holds `held`, then evaluate all of them.

    Attributes:
        number: Position of the attempt in the whole fusion, from 1.
        domain: The domain to add.
        adapter: Name of the adapter to train.
        held: Domains that the adapter already holds; empty for a new adapter.
        rehearse: Whether training mixes in samples of `held` and also trains their heads.
    """

    number: int
    domain: str
    adapter: str
    held: tuple[str, ...]
    rehearse: bool

    @property
    def domains(self) -> tuple[str, ...]:
        """All domains whose accuracy decides: those held and the new one."""
        return (*self.held, self.domain)

    @property
    def name(self) -> str:
        """Name for people, e.g. ``03 vegetation → adapter-1``."""
        return f"{self.number:02d} {self.domain} → {self.adapter}"


@dataclass(frozen=True, slots=True)
class HeadOnlyDecision:
    """A domain takes no adapter: its head on the frozen base model answers, or the model itself.

    Attributes:
        domain: The domain.
        accuracy: Accuracy on the validation split without LoRA.
        met: Whether that keeps the requirement plus the margin; otherwise an adapter of its own
            reaches no more.
        reason: One sentence for people.
    """

    domain: str
    accuracy: float
    met: bool
    reason: str


@dataclass(frozen=True, slots=True)
class AttemptDecision:
    """The verdict on an attempt.

    Attributes:
        attempt: The attempt.
        accuracy: Accuracy on the validation split of each domain in `attempt.domains`; NaN if
            training diverged.
        verdict: What becomes of the attempt.
        below: The domains that missed their bar (see `Requirement`).
        reason: One sentence for people.
    """

    attempt: Attempt
    accuracy: dict[str, float]
    verdict: Verdict
    below: tuple[str, ...]
    reason: str
