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
    """Train `new` into `adapter`, which already holds `held`, then evaluate all of them."""

    number: int  # position in the whole fusion, from 1
    new: tuple[str, ...]  # domains to add, which are trained together
    adapter: str
    held: tuple[str, ...]  # empty for a new adapter
    rehearse: bool  # whether samples of `held` are mixed in, and their heads trained, too
    moved: tuple[str, ...] = ()  # of `new`, held by another adapter, which they leave for this one

    @property
    def domains(self) -> tuple[str, ...]:
        """All domains whose accuracy decides: those held and the new ones."""
        return (*self.held, *self.new)

    @property
    def label(self) -> str:
        """The new domains for people: ``bicycle + person``, ``bicycle + person + 3 more``."""
        if len(self.new) <= MOST_NAMED:
            return " + ".join(self.new)
        named = self.new[: MOST_NAMED - 1]
        return " + ".join([*named, f"{len(self.new) - len(named)} more"])

    @property
    def name(self) -> str:
        """Name for people, e.g. ``03 vegetation → adapter-1``."""
        return f"{self.number:02d} {self.label} → {self.adapter}"


@dataclass(frozen=True, slots=True)
class HeadOnlyDecision:
    """A domain takes no adapter: its head on the frozen base model answers, or the model itself."""

    domain: str
    accuracy: float  # on the validation split, without LoRA
    met: bool  # whether that keeps the bar; otherwise an adapter of its own reaches no more
    reason: str  # one sentence for people


@dataclass(frozen=True, slots=True)
class AttemptDecision:
    """The verdict on an attempt.

    An attempt with several new domains is committed if one of them keeps its bar and no held domain
    misses it; the others are left out.
    """

    attempt: Attempt
    accuracy: dict[str, float]  # of all its domains on validation; NaN if training diverged
    verdict: Verdict
    below: tuple[str, ...]  # domains that missed what they must keep
    reason: str  # one sentence for people
    kept: tuple[str, ...] = ()  # domains that the trained adapter holds; empty if it is discarded

    @property
    def left_out(self) -> tuple[str, ...]:
        """New domains that a committed adapter does not hold: they missed their bar."""
        return tuple(name for name in self.attempt.new if self.kept and name not in self.kept)
