"""Which domain goes into which adapter: the decisions of knowledge fusion, without any tensor.

VaLoRA §4.2.1 packs domains into the fewest adapters such that each domain keeps the accuracy that
its application requires: constrained bin packing without an oracle. The plan is a state machine.
`FusionPlan.next` says what to train next; `FusionPlan.tell` is given the accuracies that came out
and returns the verdict. The state depends on these accuracies alone, so an interrupted fusion is
resumed by telling a new plan the same accuracies again.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from valora_train.errors import SettingsError, StrategyError
from valora_train.fusion.decision import Attempt, AttemptDecision, Verdict

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

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

    Args:
        required: Accuracy that each domain must keep, in the order of fusion.
        strategy: Chooses the adapters to try.
        margin: Added to every requirement when deciding, so that a domain that meets it on the
            validation split also meets its requirement on the test split.
        keep_unreachable: Whether a domain that fails even alone keeps its own closed adapter and is
            flagged, instead of ending up in no adapter.
        probes: What is known of each domain before training; passed to the strategy.
        packed: Adapters of an earlier fusion with the domains that they hold, oldest first.
        closed: Adapters of `packed` that no further domain may join.
        used: Number of adapters that were ever named; new ones are numbered from there.

    Attributes:
        used: Number of adapters that were ever named.
        decisions: All decisions so far.
    """

    def __init__(
        self,
        required: Mapping[str, float],
        strategy: Strategy,
        margin: float = 0.0,
        keep_unreachable: bool = False,
        *,
        probes: Probes | None = None,
        packed: Mapping[str, tuple[str, ...]] | None = None,
        closed: Iterable[str] = (),
        used: int = 0,
    ) -> None:
        self._bar = {name: bar + margin for name, bar in required.items()}
        self._strategy = strategy
        self._keep_unreachable = keep_unreachable
        self._held = dict(packed or {})
        self._closed = set(closed)
        held = {name for names in self._held.values() for name in names}
        self._waiting = [name for name in required if name not in held]
        self.used = max(used, len(self._held))
        self._probes = probes or {}
        self._tried: set[str] = set()  # adapters that were tried for the first waiting domain
        self._attempt: Attempt | None = None
        self.decisions: list[AttemptDecision] = []

    @property
    def closed(self) -> list[str]:
        """Adapters that no further domain may join."""
        return sorted(self._closed)

    @property
    def packing(self) -> dict[str, tuple[str, ...]]:
        """Adapters with the domains that they hold, oldest first."""
        return dict(self._held)

    @property
    def unreachable(self) -> dict[str, float]:
        """Domains that failed even alone, with the accuracy that they reached."""
        return {
            decision.attempt.domain: decision.accuracy[decision.attempt.domain]
            for decision in self.decisions
            if decision.verdict is Verdict.UNREACHABLE
        }

    def next(self) -> Attempt | None:
        """What to train and evaluate next, or None when every domain is placed or unreachable.

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
        # `not >=` rather than `<`: a NaN is a miss.
        below = tuple(name for name in attempt.domains if not accuracy[name] >= self._bar[name])
        if not below:
            verdict = Verdict.COMMITTED
        elif attempt.held:
            verdict = Verdict.ROLLED_BACK
        else:
            verdict = Verdict.UNREACHABLE
        self._apply(attempt, verdict)
        decision = AttemptDecision(
            attempt, dict(accuracy), verdict, below, self._reason(accuracy, below, verdict)
        )
        self.decisions.append(decision)
        return decision

    def _apply(self, attempt: Attempt, verdict: Verdict) -> None:
        self._attempt = None
        if verdict is Verdict.ROLLED_BACK:
            self._tried.add(attempt.adapter)
            return
        if verdict is Verdict.COMMITTED or self._keep_unreachable:
            self.used += attempt.adapter not in self._held
            self._held[attempt.adapter] = attempt.domains
            if verdict is Verdict.UNREACHABLE:
                self._closed.add(attempt.adapter)  # no domain may join one that is flagged
        self._waiting.pop(0)
        self._tried.clear()

    def _reason(self, accuracy: Mapping[str, float], below: Sequence[str], verdict: Verdict) -> str:
        if not below:
            return "every domain keeps its requirement"
        misses = ", ".join(f"{name} {accuracy[name]:.3f} < {self._bar[name]:.3f}" for name in below)
        return misses if verdict is Verdict.ROLLED_BACK else f"{misses}, even alone"
