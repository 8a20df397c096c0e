"""Which domain goes into which adapter: the decisions of knowledge fusion, without any tensor.

VaLoRA §4.2.1 packs domains into the fewest adapters such that each keeps the accuracy that its
application requires: constrained bin packing without an oracle. The plan is a state machine. It
says what to train next (`FusionPlan.next`), is told the accuracies that came out
(`FusionPlan.tell`), and answers with a verdict. All of its state follows from what it was told,
so a fusion is resumed by telling it the same again.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

from valora_train.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence


class Verdict(StrEnum):
    """What becomes of an attempt."""

    COMMITTED = "committed"
    ROLLED_BACK = "rolled back"
    UNREACHABLE = "unreachable"


@dataclass(frozen=True, slots=True)
class Attempt:
    """Train `domain` into `adapter`, which holds `held` already; then evaluate all of them.

    Attributes:
        number: Counts from 1 over the whole fusion.
        domain: The domain to add.
        adapter: Name of the adapter to train.
        held: Domains committed to that adapter; empty for a new one.
        rehearse: Whether samples of `held` are mixed in and their heads trained on.
    """

    number: int
    domain: str
    adapter: str
    held: tuple[str, ...]
    rehearse: bool

    @property
    def domains(self) -> tuple[str, ...]:
        """Every domain whose accuracy decides."""
        return (*self.held, self.domain)

    @property
    def name(self) -> str:
        """For people, e.g. ``03 vegetation → adapter-1``."""
        return f"{self.number:02d} {self.domain} → {self.adapter}"


@dataclass(frozen=True, slots=True)
class Decision:
    """The verdict on an attempt.

    Attributes:
        attempt: What was tried.
        accuracy: What came out on the validation split, for each of `attempt.domains`.
        verdict: What follows.
        below: The domains that missed their bar.
        reason: One sentence for people.
    """

    attempt: Attempt
    accuracy: dict[str, float]
    verdict: Verdict
    below: tuple[str, ...]
    reason: str


class Strategy(Protocol):
    """Says which open adapters to try for a domain, before a new one is opened."""

    @property
    def rehearse(self) -> bool:
        """Whether samples of the domains held are mixed in."""
        ...

    def candidates(self, adapters: Mapping[str, tuple[str, ...]]) -> Sequence[str]:
        """Names of adapters to try in turn.

        Args:
            adapters: Open adapters with the domains that they hold, oldest first.
        """
        ...


@dataclass(frozen=True, slots=True)
class NextFit:
    """VaLoRA §4.2.1 as printed: only the latest adapter is tried, on the new data alone."""

    rehearse: bool = False

    def candidates(self, adapters: Mapping[str, tuple[str, ...]]) -> Sequence[str]:
        """The latest adapter."""
        return list(adapters)[-1:]


@dataclass(frozen=True, slots=True)
class FirstFit:
    """All open adapters are tried, oldest first; with rehearsal, earlier samples are mixed in."""

    rehearse: bool = False

    def candidates(self, adapters: Mapping[str, tuple[str, ...]]) -> Sequence[str]:
        """Every adapter, oldest first."""
        return list(adapters)


STRATEGIES: dict[str, Strategy] = {
    "paper": NextFit(),
    "first_fit": FirstFit(),
    "rehearsal": FirstFit(rehearse=True),
}


def order_domains(
    names: Sequence[str], order: str, seed: int, shortfall: Mapping[str, float] | None = None
) -> list[str]:
    """Put domains in the order of fusion.

    Args:
        names: Domains as they are listed.
        order: ``given``; ``random`` (the paper's; by `seed`); or ``probe`` (hardest first: by how
            far a head on the frozen base falls short of the requirement).
        seed: Seed of ``random``.
        shortfall: Required minus reached by the head alone, for ``probe``.

    Raises:
        SettingsError: If `order` is unknown, or ``probe`` is asked without probes.
    """
    match order:
        case "given":
            return list(names)
        case "random":
            return random.Random(seed).sample(list(names), len(names))
        case "probe" if shortfall is not None:
            return sorted(names, key=lambda name: -shortfall[name])
        case "probe":
            raise SettingsError(
                "fusion.order=probe needs the head-only probe: set fusion.probe=true"
            )
    raise SettingsError(f"unknown fusion.order {order!r}: choose given, random or probe")


class FusionPlan:
    """The state machine of a fusion.

    Args:
        required: Accuracy that each domain must keep, in the order of fusion.
        strategy: Which adapters to try.
        margin: Added to every requirement when deciding, so that what holds on the validation
            split also holds on the test split.
        keep_unreachable: Whether a domain that fails even alone keeps its own closed adapter, with
            a flag, instead of ending up in none.
        packed: Adapters of an earlier fusion with the domains that they hold already, oldest first.
        closed: Those of them that nothing may join.
        used: Adapters that were ever named; new ones are numbered from there on.
    """

    def __init__(
        self,
        required: Mapping[str, float],
        strategy: Strategy,
        margin: float = 0.0,
        keep_unreachable: bool = False,
        *,
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
        self._to_try: list[str] | None = None
        self.decisions: list[Decision] = []

    @property
    def closed(self) -> list[str]:
        """Adapters that nothing may join."""
        return sorted(self._closed)

    @property
    def packing(self) -> dict[str, tuple[str, ...]]:
        """Adapters with the domains that they hold, oldest first."""
        return dict(self._held)

    @property
    def unreachable(self) -> dict[str, float]:
        """Domains that failed even alone, with the accuracy that they did reach."""
        return {
            decision.attempt.domain: decision.accuracy[decision.attempt.domain]
            for decision in self.decisions
            if decision.verdict is Verdict.UNREACHABLE
        }

    def next(self) -> Attempt | None:
        """What to train and evaluate next, or None when every domain is dealt with.

        Idempotent until `tell` is called.
        """
        if not self._waiting:
            return None
        if self._to_try is None:
            still_open = {k: v for k, v in self._held.items() if k not in self._closed}
            self._to_try = list(self._strategy.candidates(still_open))
        fresh = f"adapter-{self.used + 1}"
        adapter = self._to_try[0] if self._to_try else fresh
        held = self._held.get(adapter, ())
        return Attempt(
            number=len(self.decisions) + 1,
            domain=self._waiting[0],
            adapter=adapter,
            held=held,
            rehearse=self._strategy.rehearse and bool(held),
        )

    def tell(self, accuracy: Mapping[str, float]) -> Decision:
        """Judge the attempt that `next` returned.

        Args:
            accuracy: Measured on the validation split, one for each of the attempt's domains.

        Raises:
            ValueError: If there is nothing to judge or the accuracies are of other domains.
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
        decision = Decision(
            attempt, dict(accuracy), verdict, below, self._reason(accuracy, below, verdict)
        )
        self.decisions.append(decision)
        return decision

    def _apply(self, attempt: Attempt, verdict: Verdict) -> None:
        if verdict is Verdict.ROLLED_BACK:
            assert self._to_try, "only an open adapter is rolled back"
            self._to_try.pop(0)
            return
        if verdict is Verdict.COMMITTED or self._keep_unreachable:
            self.used += attempt.adapter not in self._held
            self._held[attempt.adapter] = attempt.domains
            if verdict is Verdict.UNREACHABLE:
                self._closed.add(attempt.adapter)  # nothing may join a domain that is flagged
        self._waiting.pop(0)
        self._to_try = None

    def _reason(self, accuracy: Mapping[str, float], below: Sequence[str], verdict: Verdict) -> str:
        if not below:
            return "every domain keeps its requirement"
        misses = ", ".join(f"{name} {accuracy[name]:.3f} < {self._bar[name]:.3f}" for name in below)
        return misses if verdict is Verdict.ROLLED_BACK else f"{misses}, even alone"
