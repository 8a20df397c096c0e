"""The interface of a fusion strategy, and those that place the waiting domains as they come."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from valora_train.fusion.decision import AttemptDecision
from valora_train.fusion.requirement import Requirement


@dataclass(frozen=True, slots=True)
class Probe:
    """What is known of a domain before an adapter is trained on it."""

    required: float  # accuracy that it must keep, without the margin
    head_only: float  # accuracy on validation of a head on the frozen base model, or of the latter

    @property
    def shortfall(self) -> float:
        """How far the frozen base model falls short of the requirement; negative if it does not."""
        return self.required - self.head_only


Probes: TypeAlias = Mapping[str, Probe]


@dataclass(frozen=True, slots=True)
class Proposal:
    """What a strategy wants to try next."""

    new: tuple[str, ...]  # domains to train together, waiting or held by another adapter
    adapter: str | None = None  # an open one; None for a new one


@dataclass(frozen=True, slots=True)
class View:
    """What a strategy decides by."""

    waiting: tuple[str, ...]  # domains that are not placed yet, in the order of fusion
    adapters: Mapping[str, tuple[str, ...]]  # with the domains that they hold, oldest first
    history: tuple[AttemptDecision, ...]  # all decisions, with the accuracies that were measured
    probes: Probes  # what is known of each domain before training
    requirements: Mapping[str, Requirement]  # what each domain must reach
    floors: Mapping[str, float]  # on validation to keep: the target, or less of a flagged domain
    alone: Mapping[str, float]  # what flagged domains reached alone, below their target
    head_only: bool  # whether a domain that gains nothing by an adapter takes none

    def keeps(self, accuracy: Mapping[str, float]) -> bool:
        """Whether every domain keeps what it must."""
        return all(value >= self.floors[name] for name, value in accuracy.items())

    def tries(self, proposal: Proposal) -> list[AttemptDecision]:
        """Decisions on attempts at the same: same adapter and domains."""
        adapter, held = proposal.adapter, set(self.adapters.get(proposal.adapter or "", ()))
        return [
            decision
            for decision in self.history
            if (decision.attempt.adapter == adapter if adapter else not decision.attempt.held)
            and set(decision.attempt.held) == held
            and set(decision.attempt.new) == set(proposal.new)
        ]

    def failed(self, proposal: Proposal) -> bool:
        """Whether an attempt at the same failed, and would by what is asked now."""
        return any(not self.keeps(decision.accuracy) for decision in self.tries(proposal))


class Strategy:
    """Chooses what a fusion tries next.

    Override `candidates` to place one domain after the other, in order, into an open adapter or a
    new one; override `propose` for anything else. As it is, the class tries every open adapter. A
    fusion that was interrupted is resumed by replaying its decisions, so the answer must depend on
    the arguments alone.
    """

    rehearse: bool = False  # whether training mixes in samples of held domains, heads included

    def propose(self, view: View) -> Proposal | None:
        """What to try next, also when no domain waits; None ends the fusion once none does.

        What has failed may not be proposed again (`View.failed`).
        """
        if (moved := shared_again(view)) is not None or not view.waiting:
            return moved
        domain = view.waiting[0]
        for adapter in self.candidates(domain, view.adapters, view.history, view.probes):
            if not view.failed(proposal := Proposal((domain,), adapter)):
                return proposal
        return Proposal((domain,))

    def candidates(
        self,
        domain: str,
        adapters: Mapping[str, tuple[str, ...]],
        history: Sequence[AttemptDecision],
        probes: Probes,
    ) -> Sequence[str]:
        """Names of the adapters to try for a domain, in order, of those that are open.

        Those that failed are skipped; when none is left, a new one is opened. See `View`.
        """
        return list(adapters)


def shared_again(view: View) -> Proposal | None:
    """Move an unreachable domain to an adapter whose domains keep what they must beside it."""
    for adapter, held in view.adapters.items():
        if len(held) != 1 or held[0] not in view.alone:
            continue
        for other in view.adapters:
            proposal = Proposal(held, other)
            if other != adapter and view.tries(proposal) and not view.failed(proposal):
                return proposal
    return None


class FirstFit(Strategy):
    """Tries every open adapter, oldest first, and trains it on the new domain alone."""


class Rehearsal(FirstFit):
    """Tries every open adapter, oldest first; training mixes in samples of the domains it holds."""

    rehearse = True


class NextFit(Strategy):
    """Tries only the latest adapter and trains it on the new domain alone (VaLoRA §4.2.1)."""

    def candidates(self, domain: str, adapters: Mapping[str, Any], *_: Any) -> Sequence[str]:
        """The latest adapter, if there is one."""
        return list(adapters)[-1:]


class Joint(Strategy):
    """Trains all waiting domains together; those that miss are packed next, or the best half."""

    def propose(self, view: View) -> Proposal | None:
        """All waiting domains, or as many of them as did not fail together."""
        if not view.waiting:
            return shared_again(view)
        group = view.waiting
        while len(group) > 1 and (tries := view.tries(Proposal(group))):
            reached = tries[-1].accuracy
            # NaN, of training that diverged, comes last.
            closest = sorted(group, key=lambda name: -(reached[name] - view.floors[name] or 0.0))
            half = closest[: len(group) // 2]
            group = tuple(name for name in group if name in half)
        return Proposal(group)
