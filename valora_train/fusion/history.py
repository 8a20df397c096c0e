"""The attempts of a fusion as a history: what each changed, and where its domains went.

Values are ready for JSON: `fusion.json` holds them, and every text about attempts is made of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from valora_train.fusion.decision import Verdict

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from valora_train.fusion.decision import Attempt, AttemptDecision
    from valora_train.fusion.requirement import Requirement


@dataclass(frozen=True)
class History:
    """Tells what attempts changed."""

    requirements: Mapping[str, Requirement]
    start: Mapping[str, float]  # accuracy on validation, without LoRA or in an earlier fusion
    alone: Mapping[str, float] = field(default_factory=dict)  # of domains that it flagged

    def told(
        self,
        decisions: Sequence[AttemptDecision],
        packing: Mapping[str, Sequence[str]],
        head_only: Collection[str] = (),
        dedicated: Collection[int] = (),
    ) -> list[dict[str, Any]]:
        """One entry for each decision: its parts, and by domain what was before and came after.

        That is `before` (accuracy until then), `floor` (accuracy that it must keep), `asked` (the
        same with its origin) and `went` (for new domains: what became of them until now).
        `dedicated` are the numbers of the attempts that took a dedicated adapter.
        """
        reached, alone = dict(self.start), dict(self.alone)
        holders = {name: adapter for adapter, held in packing.items() for name in held}
        entries = []
        for decision in decisions:
            attempt, kept, names = decision.attempt, decision.kept, decision.attempt.domains
            asked = {name: self._asked(name, alone.get(name)) for name in names}
            entries.append({
                **attempt_as_json(attempt),
                # JSON knows no NaN, the accuracy of a training that diverged.
                "accuracy": {k: None if math.isnan(v) else v for k, v in decision.accuracy.items()},
                "verdict": str(decision.verdict), "below": list(decision.below),
                "kept": list(kept), "reason": decision.reason,
                "dedicated": attempt.number in dedicated,
                "before": {name: reached.get(name) for name in names},
                "floor": {n: self.requirements[n].kept_from(alone.get(n)) for n in names},
                "asked": asked,
                "went": {
                    name: _went(name, decision, decisions, holders.get(name), name in head_only)
                    for name in attempt.new
                },
            })  # fmt: skip
            if decision.verdict is Verdict.UNREACHABLE:
                alone[attempt.new[0]] = decision.accuracy[attempt.new[0]]
            for name in kept:
                reached[name] = decision.accuracy[name]
                if self.requirements[name].met_by(reached[name]):
                    alone.pop(name, None)
        return entries

    def _asked(self, name: str, alone: float | None) -> str:
        requirement = self.requirements[name]
        if alone is None:
            return f"its bar of {requirement.text}"
        least = requirement.kept_from(alone)
        return f"{least:.3f} (reached {alone:.3f} alone − margin {requirement.margin:.3f})"


def _went(
    name: str,
    decision: AttemptDecision,
    decisions: Sequence[AttemptDecision],
    holder: str | None,
    head_only: bool,
) -> str:
    """What became of a new domain of an attempt, without its name."""
    if holder is None:
        return "takes no adapter" if head_only else "waits for its next attempt"
    number = decision.attempt.number
    placed = max(
        (one.attempt.number for one in decisions if name in one.kept and name in one.attempt.new),
        default=0,
    )
    if placed <= number:
        return f"{'is' if placed == number else 'stays'} in {holder}"
    verb = "moved on" if name in decision.kept else "went"
    return f"{verb} to {holder} with attempt {placed:02d}"


def attempt_as_json(attempt: Attempt) -> dict[str, Any]:
    """The parts of an attempt, ready for JSON."""
    return {
        "number": attempt.number, "name": attempt.name, "new": list(attempt.new),
        "adapter": attempt.adapter, "held": list(attempt.held), "moved": list(attempt.moved),
    }  # fmt: skip
