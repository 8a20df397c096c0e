"""What a fusion tries, and what becomes of each attempt."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

MOST_NAMED = 3  # domains that the name of an attempt lists


class Verdict(StrEnum):
    """Outcome of an attempt."""

    COMMITTED = "committed"
    ROLLED_BACK = "rolled back"
    UNREACHABLE = "unreachable"


@dataclass(frozen=True, slots=True)
class Attempt:
    """Train `new` into `adapter`, which already holds `held`, then evaluate all of them.

    Attributes:
        number: Position of the attempt in the whole fusion, from 1.
        new: The domains to add, which are trained together.
        adapter: Name of the adapter to train.
        held: Domains that the adapter already holds; empty for a new adapter.
        rehearse: Whether training mixes in samples of `held` and also trains their heads.
        moved: Domains of `new` that another adapter holds, which they leave if they stay here.
    """

    number: int
    new: tuple[str, ...]
    adapter: str
    held: tuple[str, ...]
    rehearse: bool
    moved: tuple[str, ...] = ()

    @property
    def domains(self) -> tuple[str, ...]:
        """All domains whose accuracy decides: those held and the new ones."""
        return (*self.held, *self.new)

    @property
    def label(self) -> str:
        """The new domains for people: ``bicycle + person``, ``bicycle + person + 3 more``."""
        few = len(self.new) <= MOST_NAMED
        named = self.new if few else self.new[: MOST_NAMED - 1]
        more = () if few else (f"{len(self.new) - len(named)} more",)
        return " + ".join((*named, *more))

    @property
    def name(self) -> str:
        """Name for people, e.g. ``03 vegetation → adapter-1``."""
        return f"{self.number:02d} {self.label} → {self.adapter}"


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
        verdict: What becomes of the attempt. An attempt with several new domains is committed if
            one of them keeps its bar and no held domain misses it; the others are left out.
        below: The domains that missed what they must keep (see `Requirement.kept_from`).
        reason: One sentence for people.
        kept: The domains that the trained adapter holds; empty if it was restored or discarded.
    """

    attempt: Attempt
    accuracy: dict[str, float]
    verdict: Verdict
    below: tuple[str, ...]
    reason: str
    kept: tuple[str, ...] = ()

    @property
    def left_out(self) -> tuple[str, ...]:
        """New domains that a committed adapter does not hold: they missed their bar."""
        return tuple(name for name in self.attempt.new if self.kept and name not in self.kept)
