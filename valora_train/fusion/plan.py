"""Which domain goes into which adapter: the decisions of knowledge fusion, without any tensor.

VaLoRA §4.2.1 packs domains into the fewest adapters such that each domain keeps the accuracy that
its application requires: constrained bin packing without an oracle. Domains that keep it on the
frozen base model take no adapter. A strategy proposes attempts and the plan judges them, as a state
machine.
`FusionPlan.next` says what to train next; `FusionPlan.tell` is given the accuracies that came out
and returns the verdict. The state depends on these accuracies alone, so an interrupted fusion is
resumed by telling a new plan the same accuracies again.
"""

from __future__ import annotations

import math
import random
from typing import TYPE_CHECKING

from valora_train.errors import SettingsError, StrategyError
from valora_train.fusion.decision import Attempt, AttemptDecision, HeadOnlyDecision, Verdict
from valora_train.fusion.requirement import ROUNDING
from valora_train.fusion.strategies.base import View

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from valora_train.fusion.requirement import Requirement
    from valora_train.fusion.strategies.base import Probes, Proposal, Strategy

MOST_ATTEMPTS = 100  # for each domain; a strategy that does not end is stopped


def order_domains(names: Sequence[str], order: str, seed: int, probes: Probes) -> list[str]:
    """Put domains in the order of fusion.

    Args:
        names: Domains in the order of the configuration.
        order: ``given`` (as in `names`), ``random`` (as in the paper), or ``probe`` (hardest first:
            by how far the frozen base model falls short of the requirement).
        seed: Seed of ``random``.
        probes: What is known of each domain before training; read by ``probe`` alone.

    Raises:
        SettingsError: If `order` is unknown.
    """
    match order:
        case "given":
            return list(names)
        case "random":
            return random.Random(seed).sample(list(names), len(names))
        case "probe":
            return sorted(names, key=lambda name: -probes[name].shortfall)
    raise SettingsError(f"unknown fusion.order {order!r}: choose given, random or probe")


class FusionPlan:
    """The state machine of a fusion.

    An attempt is

    - **committed** if every domain that the adapter held keeps what it must, and at least one new
      domain does; new domains that do not are left out and wait;
    - **rolled back** if a held domain would lose too much, or no new one keeps its bar;
    - **unreachable** if a domain misses its bar even alone in a new adapter. It is flagged and
      keeps that adapter, or takes none if it reaches as much without LoRA. Other domains may join
      the adapter, and the flagged one may move to another, as long as it keeps what it reached
      alone, less the margin.

    Args:
        requirements: What each domain must reach, in the order of fusion.
        strategy: Proposes what to try.
        probes: What is known of each domain before training; passed to the strategy.
        head_only: Whether a domain that keeps its requirement without LoRA takes no adapter.
        packed: Adapters of an earlier fusion with the domains that they hold, oldest first.
        unpacked: Domains of an earlier fusion that take no adapter.
        alone: What domains that an earlier fusion flagged reached alone.
        used: Number of adapters that were ever named; new ones are numbered from there.

    Attributes:
        used: Number of adapters that were ever named.
        decisions: The decisions on all attempts so far.
        head_only: The decisions on domains that take no adapter, by domain.
    """

    def __init__(
        self,
        requirements: Mapping[str, Requirement],
        strategy: Strategy,
        *,
        probes: Probes | None = None,
        head_only: bool = True,
        packed: Mapping[str, tuple[str, ...]] | None = None,
        unpacked: Iterable[str] = (),
        alone: Mapping[str, float] | None = None,
        used: int = 0,
    ) -> None:
        self._requirements = dict(requirements)
        self._strategy = strategy
        self._head_only_allowed = head_only
        self._held = dict(packed or {})
        self._probes = probes or {}
        self._alone = dict(alone or {})
        self._inherited = frozenset(self._alone)
        self._reached: dict[str, float] = {}  # in the last attempt that was kept, by domain
        placed = {name for names in self._held.values() for name in names} | set(unpacked)
        self._waiting = [name for name in requirements if name not in placed]
        self.head_only: dict[str, HeadOnlyDecision] = {}
        if head_only:
            self._place_without_adapters()
        self.used = max(used, len(self._held))
        self._attempt: Attempt | None = None
        self._finished = False
        self.decisions: list[AttemptDecision] = []

    def _place_without_adapters(self) -> None:
        """Decide, before any attempt, which domains need no LoRA."""
        for name in self._waiting:
            requirement = self._requirements[name]
            if name in self._probes and requirement.met_by(self._probes[name].head_only):
                reached = self._probes[name].head_only
                reason = f"without LoRA {reached:.3f} ≥ {requirement.text}: takes no adapter"
                self.head_only[name] = HeadOnlyDecision(name, reached, True, reason)
        self._waiting = [name for name in self._waiting if name not in self.head_only]

    # --- state --------------------------------------------------------------------------------

    @property
    def packing(self) -> dict[str, tuple[str, ...]]:
        """Adapters with the domains that they hold, oldest first."""
        return dict(self._held)

    @property
    def waiting(self) -> tuple[str, ...]:
        """Domains that are not placed yet, in the order of fusion."""
        return tuple(self._waiting)

    @property
    def alone(self) -> dict[str, float]:
        """What flagged domains reached in an adapter of their own, also in an earlier fusion."""
        return dict(self._alone)

    @property
    def unreachable(self) -> dict[str, float]:
        """Domains that this fusion flagged, with the accuracy that they keep now."""
        return {
            name: self.head_only[name].accuracy if name in self.head_only else self._reached[name]
            for name in self._alone
            if name not in self._inherited
        }

    def _view(self) -> View:
        return View(
            self.waiting, self.packing, tuple(self.decisions), self._probes, self._requirements,
            {name: self._floor(name) for name in self._requirements},
            self.alone, self._head_only_allowed,
        )  # fmt: skip

    def _floor(self, domain: str) -> float:
        """Accuracy on validation that a domain must keep."""
        may_do_without = self._head_only_allowed and domain in self._probes
        return self._requirements[domain].kept_from(
            self._alone.get(domain), self._probes[domain].head_only if may_do_without else None
        )

    def _holder(self, domain: str) -> str | None:
        """The adapter that holds a domain."""
        return next((adapter for adapter, held in self._held.items() if domain in held), None)

    # --- the next attempt ---------------------------------------------------------------------

    def next(self) -> Attempt | None:
        """What to train and evaluate next, or None when the fusion is finished.

        Returns the same attempt until `tell` is called.

        Raises:
            StrategyError: If the strategy proposes what cannot be tried.
        """
        if self._attempt is None and not self._finished:
            idle = not self._waiting and len(self._held) < 2  # nothing to place, nothing to move
            proposal = None if idle else self._strategy.propose(self._view())
            if proposal is not None:
                self._attempt = self._check(proposal)
            elif self._waiting:
                raise self._error(
                    f"proposes nothing, but {', '.join(self._waiting)} must be placed"
                )
            else:
                self._finished = True
        return self._attempt

    def _check(self, proposal: Proposal) -> Attempt:
        """The attempt that a proposal asks for."""
        new, adapter = tuple(proposal.new), proposal.adapter
        asked, where = ", ".join(new), adapter or "a new adapter"
        if adapter is not None and adapter not in self._held:
            raise self._error(
                f"wants to try {adapter!r} for {asked}, which is not among the open adapters "
                f"({', '.join(self._held) or 'none'}): it must return names from `adapters`"
            )
        held = self._held[adapter] if adapter else ()
        moved = tuple(name for name in new if self._holder(name) not in (None, adapter))
        if not new or len(set(new)) < len(new) or not {*self._waiting, *moved}.issuperset(new):
            raise self._error(
                f"wants to add ({asked}) to {where}: it must propose different domains that wait "
                f"({', '.join(self._waiting) or 'none'}) or that another adapter holds"
            )
        if self._view().failed(proposal):
            raise self._error(
                f"wants to try {asked} → {where} again: what failed may only be repeated after one "
                "of the domains was flagged"
            )
        most = MOST_ATTEMPTS * len(self._requirements)
        if len(self.decisions) >= most:
            raise self._error(f"wants to try {asked} → {where} after {most} attempts: it must end")
        return Attempt(
            number=len(self.decisions) + 1,
            new=new,
            adapter=adapter or f"adapter-{self.used + 1}",
            held=held,
            rehearse=self._strategy.rehearse and bool(held),
            moved=moved,
        )

    def _error(self, what: str) -> StrategyError:
        return StrategyError(f"fusion strategy {type(self._strategy).__name__} {what}")

    # --- its verdict --------------------------------------------------------------------------

    def tell(self, accuracy: Mapping[str, float]) -> AttemptDecision:
        """Judge the attempt that `next` returned.

        Args:
            accuracy: Accuracy on the validation split of each domain in `Attempt.domains`.

        Raises:
            ValueError: If there is no attempt to judge, or the accuracies are of other domains.
        """
        attempt = self.next()
        if attempt is None:
            raise ValueError("expected an attempt to judge, got a finished plan")
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
            verdict = Verdict.UNREACHABLE
            (name,) = attempt.new
            kept = attempt.new if self._gains(name, accuracy[name]) else ()
        reason = self._reason(attempt, accuracy, verdict, below, kept)
        decision = AttemptDecision(attempt, dict(accuracy), verdict, below, reason, kept)
        self._apply(decision)
        self.decisions.append(decision)
        return decision

    def _apply(self, decision: AttemptDecision) -> None:
        self._attempt = None
        attempt, kept = decision.attempt, decision.kept
        if decision.verdict is Verdict.UNREACHABLE:
            (name,) = attempt.new
            self._alone[name] = decision.accuracy[name]
            self._waiting.remove(name)
            if not kept:
                without = self._without_lora(name)
                self.head_only[name] = HeadOnlyDecision(name, without, False, decision.reason)
        if not kept:
            return
        for name in set(attempt.moved) & set(kept):
            self._leave(name)
        if attempt.adapter not in self._held:
            self.used += 1
        self._held[attempt.adapter] = kept
        self._waiting = [name for name in self._waiting if name not in kept]
        for name in kept:
            self._reached[name] = decision.accuracy[name]
            if self._requirements[name].met_by(decision.accuracy[name]):
                self._alone.pop(name, None)  # beside others, it reaches more than alone

    def _leave(self, domain: str) -> None:
        """Take a domain out of its adapter; an adapter that holds nothing any more is dropped."""
        adapter = next(name for name, held in self._held.items() if domain in held)
        self._held[adapter] = tuple(name for name in self._held[adapter] if name != domain)
        if not self._held[adapter]:
            del self._held[adapter]

    def _without_lora(self, domain: str) -> float:
        return self._probes[domain].head_only if domain in self._probes else math.nan

    def _gains(self, domain: str, reached: float) -> bool:
        """Whether an adapter of its own is worth keeping for a domain that misses its bar."""
        if math.isnan(reached):  # training diverged: there is nothing to keep
            return False
        return not self._head_only_allowed or not reached <= self._without_lora(domain)

    def _reason(
        self,
        attempt: Attempt,
        accuracy: Mapping[str, float],
        verdict: Verdict,
        below: Sequence[str],
        kept: Sequence[str],
    ) -> str:
        """Who misses what, by how much, and where the new domains go."""
        adapter, new = attempt.adapter, _and(attempt.new)
        if any(math.isnan(value) for value in accuracy.values()):
            return "training diverged (loss or weights infinite or NaN): lower train.lr"
        floor = self._floor
        if not below:
            closest = min(attempt.domains, key=lambda name: accuracy[name] - floor(name))
            return (
                f"every domain keeps what it must, most narrowly {closest} "
                f"({accuracy[closest]:.3f} ≥ {self._asked(closest)}): {new} → {adapter}"
            )
        misses = ", ".join(
            f"{name} {accuracy[name]:.3f} < {self._asked(name)}, {floor(name) - accuracy[name]:.3f}"
            " below"
            for name in below
        )
        match verdict:
            case Verdict.COMMITTED:
                fitting = _and([name for name in attempt.new if name in kept])
                return f"{misses}: left out, {fitting} → {adapter}"
            case Verdict.ROLLED_BACK:
                homes = [f"{name} stays in {self._holder(name)}" for name in attempt.moved]
                waits = [name for name in attempt.new if name not in attempt.moved]
                homes += [
                    f"{_and(waits)} waits" if len(waits) == 1 else f"{_and(waits)} wait"
                ] * bool(waits)
                return f"{misses}: {new} not in {adapter}, {', '.join(homes)}"
            case Verdict.UNREACHABLE:
                if kept:
                    return f"{misses}, even alone: flagged, {new} → {adapter}"
        without = self._without_lora(attempt.new[0])
        return f"{misses}, even alone, and {without:.3f} without LoRA: takes no adapter"

    def _asked(self, domain: str) -> str:
        """What a domain must keep, and why."""
        if domain not in self._alone:
            return self._requirements[domain].text
        alone, margin = self._alone[domain], self._requirements[domain].margin
        if alone - margin < (floor := self._floor(domain)) - ROUNDING:
            return f"{floor:.3f} (reached without LoRA)"
        return f"{floor:.3f} (reached {alone:.3f} alone − margin {margin:.3f})"


def _and(names: Sequence[str]) -> str:
    """``a, b and c``."""
    return " and ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))
