"""The interface of a fusion strategy."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Sequence

    from valora_train.fusion.decision import AttemptDecision


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


class Strategy(ABC):
    """Chooses which open adapters to try for a domain before a new adapter is opened.

    A fusion that was interrupted is resumed by replaying its decisions, so the answer must depend
    on the arguments alone.

    Attributes:
        rehearse: Whether training on an adapter mixes in samples of the domains that it already
            holds, and also trains their heads.
    """

    rehearse: ClassVar[bool] = False

    @abstractmethod
    def candidates(
        self,
        domain: str,
        adapters: Mapping[str, tuple[str, ...]],
        history: Sequence[AttemptDecision],
        probes: Probes,
    ) -> Sequence[str]:
        """Names of the adapters to try, in order.

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
