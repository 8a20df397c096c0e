"""The interface of a fusion strategy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Sequence

    from valora_train.fusion.decision import AttemptDecision
    from valora_train.fusion.requirement import Requirement


@dataclass(frozen=True, slots=True)
class Probe:
    """What is known of a domain before an adapter is trained on it.

    Attributes:
        required: Accuracy that the domain must keep, without the margin.
        head_only: Accuracy on the validation split of a head trained on the frozen base model; of
            the frozen base model itself where it writes the answers.
    """

    required: float
    head_only: float

    @property
    def shortfall(self) -> float:
        """How far the frozen base model falls short of the requirement; negative if it does not."""
        return self.required - self.head_only


Probes: TypeAlias = Mapping[str, Probe]
"""The probe of every domain of the fusion, by name."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """What a strategy wants to try next.

    Attributes:
        new: Domains to train together into one adapter: waiting ones, or such that another adapter
            holds, which they leave if they keep what they must here.
        adapter: The open adapter that they join; None for a new one.
    """

    new: tuple[str, ...]
    adapter: str | None = None


@dataclass(frozen=True, slots=True)
class View:
    """What a strategy is told.

    Attributes:
        waiting: Domains that are not placed yet, in the order of fusion.
        adapters: Adapters with the domains that they hold, oldest first.
        history: All decisions so far, with the accuracies that were measured.
        probes: What is known of each domain before training.
        requirements: What each domain must reach.
        floors: Accuracy on validation that every domain must keep: its bar, or less if it is
            flagged.
        alone: What the domains reached alone that missed their bar even so; they are flagged.
        head_only: Whether a domain that gains nothing by an adapter takes none.
    """

    waiting: tuple[str, ...]
    adapters: Mapping[str, tuple[str, ...]]
    history: tuple[AttemptDecision, ...]
    probes: Probes
    requirements: Mapping[str, Requirement]
    floors: Mapping[str, float]
    alone: Mapping[str, float]
    head_only: bool

    def keeps(self, accuracy: Mapping[str, float]) -> bool:
        """Whether every domain keeps what it must."""
        return all(value >= self.floors[name] for name, value in accuracy.items())

    def tries(self, proposal: Proposal) -> list[AttemptDecision]:
        """Decisions on attempts at the same: same adapter and domains."""
        held = self.adapters.get(proposal.adapter or "", ())
        found = []
        for decision in self.history:
            attempt = decision.attempt
            same = attempt.adapter == proposal.adapter if proposal.adapter else not attempt.held
            domains = set(attempt.held) == set(held) and set(attempt.new) == set(proposal.new)
            if same and domains:
                found.append(decision)
        return found

    def failed(self, proposal: Proposal) -> bool:
        """Whether an attempt at the same has failed, and would fail by what is asked now, too.

        A domain that was flagged since must keep less than before.
        """
        return any(not self.keeps(decision.accuracy) for decision in self.tries(proposal))


class Strategy:
    """Chooses what a fusion tries next.

    Override `candidates` to place one domain after the other, in order, into an open adapter or a
    new one; override `propose` for anything else. As it is, the class tries every open adapter.

    A fusion that was interrupted is resumed by replaying its decisions, so the answer must depend
    on the arguments alone.

    Attributes:
        rehearse: Whether training on an adapter mixes in samples of the domains that it already
            holds, and also trains their heads.
    """

    rehearse: bool = False

    def propose(self, view: View) -> Proposal | None:
        """What to try next.

        What has failed may not be proposed again (`View.failed`).
        Called before every attempt, also when no domain waits any more: domains may then be moved.

        Args:
            view: What is known.

        Returns:
            A proposal; None to end the fusion, once no domain waits.
        """
        room: Sequence[str] = ()
        if view.waiting:
            domain = view.waiting[0]
            room = self.candidates(domain, view.adapters, view.history, view.probes)
        return self.first_that_may_fit(view, room)

    def first_that_may_fit(self, view: View, adapters: Sequence[str]) -> Proposal | None:
        """The first waiting domain into the first adapter where it has not failed, or a new one.

        Args:
            view: What is known.
            adapters: Adapters to try, in order.
        """
        if (moved := shared_again(view)) is not None or not view.waiting:
            return moved
        domain = view.waiting[0]
        for adapter in adapters:
            proposal = Proposal((domain,), adapter)
            if not view.failed(proposal):
                return proposal
        return Proposal((domain,))

    def candidates(
        self,
        domain: str,
        adapters: Mapping[str, tuple[str, ...]],
        history: Sequence[AttemptDecision],
        probes: Probes,
    ) -> Sequence[str]:
        """Names of the adapters to try for a domain, in order.

        Called before every attempt. Adapters that were already tried for this domain are skipped;
        when none is left, a new adapter is opened.

        Args:
            domain: The domain to place.
            adapters: Open adapters with the domains that they hold, oldest first.
            history: All decisions so far, with the accuracies that were measured.
            probes: What is known of each domain before training.

        Returns:
            Keys of `adapters`; may be empty.
        """
        return list(adapters)


def shared_again(view: View) -> Proposal | None:
    """Move a domain that turned out to be unreachable to an adapter that has room for it.

    It was tried there at its full bar before it was tried alone. What was measured then shows
    whether all domains of that adapter keep what they must, now that less is asked of this one.
    """
    for adapter, held in view.adapters.items():
        if len(held) != 1 or held[0] not in view.alone:
            continue
        for other in view.adapters:
            proposal = Proposal(held, other)
            if other != adapter and view.tries(proposal) and not view.failed(proposal):
                return proposal
    return None
