"""Which domain goes into which adapter: the decisions of knowledge fusion, without any tensor.

VaLoRA §4.2.1 packs domains into the fewest adapters such that each domain keeps the accuracy that
its application requires: constrained bin packing without an oracle. Domains that keep it on the
frozen base model take no adapter. The plan is a state machine.
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

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from valora_train.fusion.requirement import Requirement
    from valora_train.fusion.strategies.base import Probes, Strategy


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

    A domain that misses its requirement even alone is flagged: it keeps that adapter, which is
    closed, or takes none if it reaches as much without LoRA.

    Args:
        requirements: What each domain must reach, in the order of fusion.
        strategy: Chooses the adapters to try.
        probes: What is known of each domain before training; passed to the strategy.
        head_only: Whether a domain that keeps its requirement without LoRA takes no adapter.
        packed: Adapters of an earlier fusion with the domains that they hold, oldest first.
        unpacked: Domains of an earlier fusion that take no adapter.
        closed: Adapters of `packed` that no further domain may join.
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
        closed: Iterable[str] = (),
        used: int = 0,
    ) -> None:
        self._requirements = dict(requirements)
        self._strategy = strategy
        self._head_only_allowed = head_only
        self._held = dict(packed or {})
        self._closed = set(closed)
        self._probes = probes or {}
        placed = {name for names in self._held.values() for name in names} | set(unpacked)
        self._waiting = [name for name in requirements if name not in placed]
        self.head_only: dict[str, HeadOnlyDecision] = {}
        if head_only:
            self._place_without_adapters()
        self.used = max(used, len(self._held))
        self._tried: set[str] = set()  # adapters that were tried for the first waiting domain
        self._attempt: Attempt | None = None
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

    @property
    def closed(self) -> list[str]:
        """Adapters that no further domain may join."""
        return sorted(self._closed)

    @property
    def packing(self) -> dict[str, tuple[str, ...]]:
        """Adapters with the domains that they hold, oldest first."""
        return dict(self._held)

    @property
    def waiting(self) -> tuple[str, ...]:
        """Domains that are not placed yet, in the order of fusion."""
        return tuple(self._waiting)

    @property
    def unreachable(self) -> dict[str, float]:
        """Domains that failed even alone, with the accuracy that they keep now."""
        return {
            name: self.head_only[name].accuracy
            if name in self.head_only
            else decision.accuracy[name]
            for decision in self.decisions
            if decision.verdict is Verdict.UNREACHABLE
            for name in (decision.attempt.domain,)
        }

    def next(self) -> Attempt | None:
        """What to train and evaluate next, or None when every domain is placed.

        Returns the same attempt until `tell` is called.

        Raises:
            StrategyError: If the strategy names an adapter that is not open.
        """
        if self._attempt is None and self._waiting:
            adapter = self._choose_adapter(self._waiting[0])
            held = self._held.get(adapter, ())
            self._attempt = Attempt(
                number=len(self.decisions) + 1,
                domain=self._waiting[0],
                adapter=adapter,
                held=held,
                rehearse=self._strategy.rehearse and bool(held),
            )
        return self._attempt

    def _choose_adapter(self, domain: str) -> str:
        """The first candidate that was not tried for the domain yet, or a new adapter."""
        still_open = {k: v for k, v in self._held.items() if k not in self._closed}
        candidates = self._strategy.candidates(
            domain, still_open, tuple(self.decisions), self._probes
        )
        for adapter in candidates:
            if adapter not in still_open:
                raise StrategyError(
                    f"fusion strategy {type(self._strategy).__name__} wants to try {adapter!r} for "
                    f"{domain}, which is not among the open adapters "
                    f"({', '.join(still_open) or 'none'}): it must return names from `adapters`"
                )
            if adapter not in self._tried:
                return adapter
        return f"adapter-{self.used + 1}"

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
        below = tuple(
            name for name in attempt.domains if not self._requirements[name].met_by(accuracy[name])
        )
        if not below:
            verdict = Verdict.COMMITTED
        elif attempt.held:
            verdict = Verdict.ROLLED_BACK
        else:
            verdict = Verdict.UNREACHABLE
        reason = self._reason(accuracy, below, verdict)
        self._apply(attempt, verdict, accuracy[attempt.domain], reason)
        decision = AttemptDecision(attempt, dict(accuracy), verdict, below, reason)
        self.decisions.append(decision)
        return decision

    def _apply(self, attempt: Attempt, verdict: Verdict, reached: float, reason: str) -> None:
        self._attempt = None
        if verdict is Verdict.ROLLED_BACK:
            self._tried.add(attempt.adapter)
            return
        name = attempt.domain
        if verdict is Verdict.UNREACHABLE and not self._gains(name, reached):
            without = self._without_lora(name)
            self.head_only[name] = HeadOnlyDecision(name, without, False, reason)
        else:
            self.used += attempt.adapter not in self._held
            self._held[attempt.adapter] = attempt.domains
            if verdict is Verdict.UNREACHABLE:
                self._closed.add(attempt.adapter)  # no domain may join one that is flagged
        self._waiting.pop(0)
        self._tried.clear()

    def _without_lora(self, domain: str) -> float:
        return self._probes[domain].head_only if domain in self._probes else math.nan

    def _gains(self, domain: str, reached: float) -> bool:
        """Whether an adapter of its own is worth keeping for a domain that misses its bar."""
        if math.isnan(reached):  # training diverged: there is nothing to keep
            return False
        return not self._head_only_allowed or not reached <= self._without_lora(domain)

    def _reason(self, accuracy: Mapping[str, float], below: Sequence[str], verdict: Verdict) -> str:
        if not below:
            return "every domain keeps its requirement"
        if any(math.isnan(value) for value in accuracy.values()):
            return "training diverged (loss or weights infinite or NaN): lower train.lr"
        misses = ", ".join(
            f"{name} {accuracy[name]:.3f} < {self._requirements[name].text}" for name in below
        )
        if verdict is Verdict.ROLLED_BACK:
            return misses
        (name,) = below
        if self._gains(name, accuracy[name]):
            return f"{misses}, even alone"
        without = self._without_lora(name)
        return f"{misses}, even alone, and {without:.3f} without LoRA: takes no adapter"
