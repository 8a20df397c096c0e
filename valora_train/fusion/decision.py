"""What a fusion tries, what becomes of each attempt, and both as JSON."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

MAX_NAMED = 3  # domains that the name of an attempt lists


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
        more = len(self.new) - MAX_NAMED + 1
        named = self.new if more < 2 else (*self.new[: MAX_NAMED - 1], f"{more} more")
        return " + ".join(named)

    @property
    def name(self) -> str:
        """Name for people, e.g. ``03 vegetation → adapter-1``."""
        return f"{self.number:02d} {self.label} → {self.adapter}"

    def as_json(self) -> dict[str, Any]:
        """Its parts."""
        return {
            "number": self.number, "name": self.name, "new": list(self.new),
            "adapter": self.adapter, "held": list(self.held), "moved": list(self.moved),
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class HeadOnlyDecision:
    """A domain takes no adapter: its head on the frozen base model answers, or the model itself."""

    domain: str
    accuracy: float  # on the validation split, without LoRA
    met: bool  # whether that keeps the target; otherwise an adapter of its own reaches no more
    reason: str  # one sentence for people


@dataclass(frozen=True, slots=True)
class AttemptDecision:
    """The verdict: committed if a new domain keeps its target and no held one misses it."""

    attempt: Attempt
    accuracy: Mapping[str, float]  # of all its domains on validation; NaN if training diverged
    verdict: Verdict
    below: tuple[str, ...]  # domains that missed what they must keep
    reason: str  # one sentence for people
    kept: tuple[str, ...]  # domains that the trained adapter holds; empty if it is discarded
    before: Mapping[str, float | None]  # accuracy of its domains until then
    floor: Mapping[str, float]  # accuracy that they must keep
    asked: Mapping[str, str]  # the same in words

    @property
    def left_out(self) -> tuple[str, ...]:
        """New domains that a committed adapter does not hold: they missed their target."""
        return tuple(name for name in self.attempt.new if self.kept and name not in self.kept)


def attempts_as_json(
    decisions: Sequence[AttemptDecision],
    packing: Mapping[str, Sequence[str]],
    head_only: Collection[str] = (),
    dedicated: Collection[int] = (),
) -> list[dict[str, Any]]:
    """The attempts of `fusion.json`: `went` is where new domains are, `dedicated` numbers."""
    holders = {name: adapter for adapter, held in packing.items() for name in held}
    placed: dict[str, int] = {}  # number of the attempt that placed a domain last
    for one in decisions:
        placed |= {n: one.attempt.number for n in one.kept if n in one.attempt.new}

    def consequences(name: str, decision: AttemptDecision) -> str:
        if (holder := holders.get(name)) is None:
            return "takes no adapter" if name in head_only else "waits for its next attempt"
        number, last = decision.attempt.number, placed.get(name, 0)
        if last <= number:
            return f"{'is' if last == number else 'stays'} in {holder}"
        verb = "moved on" if name in decision.kept else "went"
        return f"{verb} to {holder} with attempt {last:02d}"

    return [
        {
            **one.attempt.as_json(),
            # JSON knows no NaN, the accuracy of a training that diverged.
            "accuracy": {k: None if math.isnan(v) else v for k, v in one.accuracy.items()},
            "verdict": str(one.verdict), "below": list(one.below), "kept": list(one.kept),
            "reason": one.reason, "dedicated": one.attempt.number in dedicated,
            "before": dict(one.before), "floor": dict(one.floor), "asked": dict(one.asked),
            "went": {name: consequences(name, one) for name in one.attempt.new},
        }
        for one in decisions
    ]  # fmt: skip
