"""The attempts of a fusion as a history: what each changed, and where its domains went.

Values are ready for JSON: `fusion.json` holds them, and every text about attempts is made of them.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from valora_train.fusion.decision import Verdict

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from valora_train.fusion.decision import Attempt, AttemptDecision
    from valora_train.fusion.requirement import Requirement


class History:
    """Tells what attempts changed.

    Args:
        requirements: What each domain must reach.
        start: Accuracy on the validation split of each domain before the first attempt: without
            LoRA, or in the adapter of an earlier fusion.
        alone: What domains that an earlier fusion flagged reached alone.
    """

    def __init__(
        self,
        requirements: Mapping[str, Requirement],
        start: Mapping[str, float],
        alone: Mapping[str, float] | None = None,
    ) -> None:
        self._requirements = requirements
        self._start = start
        self._alone = dict(alone or {})

    def told(
        self,
        decisions: Sequence[AttemptDecision],
        packing: Mapping[str, Sequence[str]],
        head_only: Collection[str] = (),
        dedicated: Collection[int] = (),
    ) -> list[dict[str, Any]]:
        """One entry for each decision, in order.

        Args:
            decisions: All decisions so far.
            packing: Adapters with the domains that they hold now.
            head_only: Domains that take no adapter.
            dedicated: Numbers of the attempts that took a dedicated adapter (`Packing.taken`).

        Returns:
            The parts of the attempt and of its decision; `dedicated` (whether it took a dedicated
            adapter, so that nothing was trained); and by domain `before` (accuracy until then,
            where the domain was held or without LoRA), `floor` (accuracy that it must keep),
            `asked` (the same with its origin, as text) and `went` (for new domains: what became of
            them until now, as text).
        """
        reached, alone = dict(self._start), dict(self._alone)
        entries = []
        for decision in decisions:
            entry = _as_json(decision)
            entry["dedicated"] = decision.attempt.number in dedicated
            names = decision.attempt.domains
            entry["before"] = {name: reached.get(name) for name in names}
            entry["floor"] = {
                name: self._requirements[name].kept_from(alone.get(name)) for name in names
            }
            entry["asked"] = {name: self._asked(name, alone.get(name)) for name in names}
            entry["went"] = {
                name: _went(name, decision, decisions, packing, head_only)
                for name in decision.attempt.new
            }
            entries.append(entry)
            if decision.verdict is Verdict.UNREACHABLE:
                (name,) = decision.attempt.new
                alone[name] = decision.accuracy[name]
            for name in decision.kept:
                reached[name] = decision.accuracy[name]
                if self._requirements[name].met_by(reached[name]):
                    alone.pop(name, None)
        return entries

    def _asked(self, name: str, alone: float | None) -> str:
        """What a domain must keep, and why."""
        requirement = self._requirements[name]
        if alone is None:
            return f"its bar of {requirement.text}"
        least = requirement.kept_from(alone)
        return f"{least:.3f} (reached {alone:.3f} alone − margin {requirement.margin:.3f})"


def _went(
    name: str,
    decision: AttemptDecision,
    decisions: Sequence[AttemptDecision],
    packing: Mapping[str, Sequence[str]],
    head_only: Collection[str],
) -> str:
    """What became of a new domain of an attempt, without its name."""
    holder = next((adapter for adapter, held in packing.items() if name in held), None)
    if holder is None:
        return "takes no adapter" if name in head_only else "waits for its next attempt"
    number = decision.attempt.number
    placed = max(
        (one.attempt.number for one in decisions if name in one.kept and name in one.attempt.new),
        default=0,
    )
    if placed <= number:
        return f"{'is' if placed == number else 'stays'} in {holder}"
    return (
        f"{'moved on' if name in decision.kept else 'went'} to {holder} with attempt {placed:02d}"
    )


def attempt_as_json(attempt: Attempt) -> dict[str, Any]:
    """The parts of an attempt, ready for JSON."""
    return {
        "number": attempt.number,
        "name": attempt.name,
        "new": list(attempt.new),
        "adapter": attempt.adapter,
        "held": list(attempt.held),
        "moved": list(attempt.moved),
    }


def _as_json(decision: AttemptDecision) -> dict[str, Any]:
    return {
        **attempt_as_json(decision.attempt),
        # JSON knows no NaN, the accuracy of a training that diverged.
        "accuracy": {k: None if math.isnan(v) else v for k, v in decision.accuracy.items()},
        "verdict": str(decision.verdict),
        "below": list(decision.below),
        "kept": list(decision.kept),
        "reason": decision.reason,
    }
