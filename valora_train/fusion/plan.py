"""Which domain goes into which adapter: the decisions of knowledge fusion, without any tensor.

VaLoRA §4.2.1 packs domains into the fewest adapters such that each keeps the accuracy that it must:
bin packing without an oracle. A strategy proposes attempts (`FusionPlan.next`), and the plan judges
them by the accuracies that come out (`FusionPlan.tell`). Its state depends on these alone, so that
an interrupted fusion is resumed by telling a new plan the same.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from valora_data.errors import ValoraError
from valora_data.wording import joined
from valora_train.errors import SettingsError
from valora_train.fusion.decision import Attempt, AttemptDecision, HeadOnlyDecision, Verdict
from valora_train.fusion.requirement import ROUNDING, Requirement
from valora_train.fusion.strategies.base import Probes, Proposal, Strategy, View

MAX_ATTEMPTS = 100  # for each domain; a strategy that does not end is stopped


def order_domains(names: Sequence[str], order: str, seed: int, probes: Probes) -> list[str]:
    """Put domains in the order of fusion (`fusion.order`); ``probe`` is the hardest first."""
    match order:
        case "given":
            return list(names)
        case "random":  # as in the paper
            return random.Random(seed).sample(list(names), len(names))
        case "probe":
            return sorted(names, key=lambda name: -probes[name].shortfall)
    raise SettingsError(f"unknown fusion.order {order!r}: choose given, random or probe")


class FusionPlan:
    """The state machine of a fusion.

    An attempt is

    - **committed** if every domain that the adapter held keeps what it must, and at least one new
      domain does; new domains that do not are rolled back and wait;
    - **rolled back** if a held domain would lose too much, or no new one keeps its target;
    - **unreachable** if a domain misses its target even alone in a new adapter. It is flagged and
      keeps that adapter, or takes none if it reaches as much without LoRA. In that adapter or in
      another, it must keep what it reached alone, less the margin.

    The domains come in the order of fusion. With `head_only`, one that keeps its requirement
    without LoRA takes no adapter. The other arguments are what an earlier fusion left.
    """

    def __init__(
        self,
        requirements: Mapping[str, Requirement],
        strategy: Strategy,
        *,
        probes: Probes | None = None,
        head_only: bool = True,
        packed: Mapping[str, tuple[str, ...]] | None = None,  # oldest first
        unpacked: Iterable[str] = (),  # domains that take no adapter
        alone: Mapping[str, float] | None = None,  # what flagged domains reached alone
        reached: Mapping[str, float] | None = None,  # by domains that were placed
        used: int = 0,  # number of adapters that were ever named
    ) -> None:
        self._requirements = dict(requirements)
        self._strategy = strategy
        self._may_do_without = head_only
        self._probes = probes or {}
        self._without = {name: probe.head_only for name, probe in self._probes.items()}
        self._held = dict(packed or {})
        self._reached = dict(reached or {})  # in the last attempt that was kept, by domain
        self.alone = dict(alone or {})
        self._inherited = frozenset(self.alone)
        self.used = max(used, len(self._held))
        self._attempt: Attempt | None = None
        self._finished = False
        self.decisions: list[AttemptDecision] = []
        self.head_only: dict[str, HeadOnlyDecision] = {}  # of domains that take no adapter
        placed = {name for names in self._held.values() for name in names} | set(unpacked)
        self.waiting = tuple(name for name in requirements if name not in placed)
        for name in self.waiting if head_only else ():
            without, asked = self._without.get(name, math.nan), self._requirements[name]
            if asked.met_by(without):
                reason = f"without LoRA {without:.3f} ≥ {asked.text}: takes no adapter"
                self._place_without_adapter(HeadOnlyDecision(name, without, True, reason))

    def _place_without_adapter(self, decision: HeadOnlyDecision) -> None:
        self.head_only[decision.domain] = decision
        self.waiting = tuple(name for name in self.waiting if name != decision.domain)

    @property
    def packing(self) -> dict[str, tuple[str, ...]]:
        """Adapters with the domains that they hold, oldest first."""
        return dict(self._held)

    @property
    def unreachable(self) -> dict[str, float]:
        """Domains that this fusion flagged, with the accuracy that they keep now."""
        return {
            name: self.head_only[name].accuracy if name in self.head_only else self._reached[name]
            for name in self.alone
            if name not in self._inherited
        }

    def _view(self) -> View:
        return View(
            self.waiting, self.packing, tuple(self.decisions), self._probes, self._requirements,
            {name: self._floor(name) for name in self._requirements},
            dict(self.alone), self._may_do_without,
        )  # fmt: skip

    def _floor(self, domain: str) -> float:
        """Accuracy on validation that a domain must keep."""
        without = self._without.get(domain) if self._may_do_without else None
        return self._requirements[domain].kept_from(self.alone.get(domain), without)

    def _holder(self, domain: str) -> str | None:
        return next((adapter for adapter, held in self._held.items() if domain in held), None)

    def next(self) -> Attempt | None:
        """What to train and evaluate next, until `tell` is called; None when all is packed."""
        if self._attempt is None and not self._finished:
            idle = not self.waiting and len(self._held) < 2  # nothing to place, nothing to move
            proposal = None if idle else self._strategy.propose(self._view())
            if proposal is None and self.waiting:
                raise self._error(f"proposes nothing, but {', '.join(self.waiting)} must be placed")
            self._finished = proposal is None
            self._attempt = None if proposal is None else self._check(proposal)
        return self._attempt

    def _check(self, proposal: Proposal) -> Attempt:
        """The attempt that a proposal asks for."""
        new, adapter = tuple(proposal.new), proposal.adapter
        moved = tuple(name for name in new if self._holder(name) not in (None, adapter))
        if adapter is not None and adapter not in self._held:
            known = ", ".join(self._held) or "none"
            raise self._error(
                f"wants to try {adapter!r} for {', '.join(new)}, which is no open adapter ({known})"
            )
        most, wrong = MAX_ATTEMPTS * len(self._requirements), ""
        if not new or len(set(new)) < len(new) or not {*self.waiting, *moved}.issuperset(new):
            waiting = ", ".join(self.waiting) or "none"
            wrong = f": domains must wait ({waiting}) or be held by another adapter"
        elif self._view().failed(proposal):
            wrong = " again: what failed may be repeated once one of the domains is flagged"
        elif len(self.decisions) >= most:
            wrong = f" after {most} attempts: it must end"
        if wrong:
            where = adapter or "a new adapter"
            raise self._error(f"wants to try {', '.join(new) or 'nothing'} → {where}{wrong}")
        held = self._held[adapter] if adapter else ()
        rehearse, name = self._strategy.rehearse and bool(held), f"adapter-{self.used + 1}"
        return Attempt(len(self.decisions) + 1, new, adapter or name, held, rehearse, moved)

    def _error(self, what: str) -> ValoraError:
        return ValoraError(f"fusion strategy {type(self._strategy).__name__} {what}")

    def tell(self, accuracy: Mapping[str, float]) -> AttemptDecision:
        """Judge the attempt that `next` returned, by the accuracy of its domains on validation."""
        attempt = self.next()
        assert attempt is not None, "a finished plan has nothing to judge"
        if set(accuracy) != set(attempt.domains):
            raise ValueError(f"expected accuracies of {attempt.domains}, got {sorted(accuracy)}")
        below = tuple(n for n in attempt.domains if not accuracy[n] >= self._floor(n))
        fitting = tuple(name for name in attempt.new if name not in below)
        kept: tuple[str, ...] = ()
        if fitting and not set(below) & set(attempt.held):
            verdict, kept = Verdict.COMMITTED, (*attempt.held, *fitting)
        elif attempt.held or attempt.moved or len(attempt.new) > 1:
            verdict = Verdict.ROLLED_BACK
        else:
            verdict, (name,) = Verdict.UNREACHABLE, attempt.new
            gains = not accuracy[name] <= self._without.get(name, math.nan)
            if not math.isnan(accuracy[name]) and (gains or not self._may_do_without):
                kept = attempt.new
        names = attempt.domains
        decision = AttemptDecision(
            attempt, dict(accuracy), verdict, below, "", kept,
            {name: self._reached.get(name, self._without.get(name)) for name in names},
            {name: self._floor(name) for name in names},
            {n: ("" if n in self.alone else "its target of ") + self._asked(n) for n in names},
        )  # fmt: skip
        decision = replace(decision, reason=self._reason(decision))
        self._apply(decision)
        self.decisions.append(decision)
        return decision

    def _apply(self, decision: AttemptDecision) -> None:
        self._attempt = None
        attempt, kept = decision.attempt, decision.kept
        if decision.verdict is Verdict.UNREACHABLE:
            (name,) = attempt.new
            self.alone[name] = decision.accuracy[name]
            if not kept:
                without = self._without.get(name, math.nan)
                self._place_without_adapter(HeadOnlyDecision(name, without, False, decision.reason))
        if not kept:
            return
        for name in set(attempt.moved) & set(kept):
            left = str(self._holder(name))
            self._held[left] = tuple(one for one in self._held[left] if one != name)
            if not self._held[left]:
                del self._held[left]
        self.used += attempt.adapter not in self._held
        self._held[attempt.adapter] = kept
        self.waiting = tuple(name for name in self.waiting if name not in kept)
        for name in kept:
            self._reached[name] = decision.accuracy[name]
            if self._requirements[name].met_by(decision.accuracy[name]):
                self.alone.pop(name, None)  # beside others, it reaches more than alone

    def _reason(self, decision: AttemptDecision) -> str:
        """Who misses what, by how much, and where the new domains go."""
        attempt, accuracy, floor = decision.attempt, decision.accuracy, decision.floor
        adapter, new, kept = attempt.adapter, joined(attempt.new), decision.kept
        if any(math.isnan(value) for value in accuracy.values()):
            return "training diverged (loss or weights infinite or NaN): lower train.lr"
        if not decision.below:
            closest = min(attempt.domains, key=lambda name: accuracy[name] - floor[name])
            return (
                f"every domain keeps what it must, most narrowly {closest} "
                f"({accuracy[closest]:.3f} ≥ {self._asked(closest)}): {new} → {adapter}"
            )
        misses = ", ".join(
            f"{name} {accuracy[name]:.3f} < {self._asked(name)}, {floor[name] - accuracy[name]:.3f}"
            " below"
            for name in decision.below
        )
        if decision.verdict is Verdict.COMMITTED:
            fitting = joined([name for name in attempt.new if name in kept])
            return f"{misses}: rolled back, {fitting} → {adapter}"
        if decision.verdict is Verdict.ROLLED_BACK:
            return f"{misses}: {new} not in {adapter}"
        if kept:
            return f"{misses}, even alone: flagged, {new} → {adapter}"
        without = self._without.get(attempt.new[0], math.nan)
        return f"{misses}, even alone, and {without:.3f} without LoRA: takes no adapter"

    def _asked(self, domain: str) -> str:
        """What a domain must keep, and why."""
        requirement, alone = self._requirements[domain], self.alone.get(domain)
        if alone is None:
            return requirement.text
        floor = self._floor(domain)
        if alone - requirement.margin < floor - ROUNDING:
            return f"{floor:.3f} (reached without LoRA)"
        return f"{floor:.3f} (reached {alone:.3f} alone − margin {requirement.margin:.3f})"
