"""What a router sees and answers. The request router of the replicas and the simulator call it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Annotated

from pydantic import Field


@dataclass(frozen=True, slots=True)
class ReplicaState:
    """What a router sees of a replica."""

    id: str  # the same in every process that routes
    load: float  # requests that are sent to it and not answered yet
    resident: Collection[str] = frozenset()  # adapters on its device
    recent: Collection[str] = frozenset()  # adapters of the last requests, see `note_sent`


@dataclass(frozen=True, slots=True)
class RouterSettings:
    """Settings of all routers."""

    # `affinity` sends no request to a replica whose load is at least `bound` times the mean load of
    # all replicas, counting the request, or `excess` above it, as where very many requests wait, a
    # share of the mean is more than an adapter is worth.
    bound: Annotated[float, Field(gt=1, allow_inf_nan=False)] = 1.25
    excess: Annotated[float, Field(gt=0)] = 16.0
    # Load below which `affinity` spreads nothing.
    slack: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 8.0
    # Replicas of which the one with the least load is taken: `least` draws them for each request,
    # `affinity` has them for each adapter.
    choices: Annotated[int, Field(ge=1)] = 2
    seed: int = 0  # of random choices


class Router(ABC):
    """Ranks the replicas for a request.

    Routers of several processes answer alike as far as they see the same states: nothing but
    random draws depends on what a router answered before.
    """

    def __init__(self, settings: RouterSettings | None = None) -> None:
        self.settings = settings or RouterSettings()
        self.random = Random(self.settings.seed)

    def rank(self, adapter: str | None, replicas: Sequence[ReplicaState]) -> list[str]:
        """Return the ids of the replicas for an adapter (None: the base), best first."""
        ordered = self.order(adapter, sorted(replicas, key=lambda r: r.id))
        return [replica.id for replica in ordered]

    @abstractmethod
    def order(
        self, adapter: str | None, replicas: Sequence[ReplicaState]
    ) -> Iterable[ReplicaState]:
        """Order the replicas, sorted by id, for an adapter (None: the base model)."""


def note_sent(recent: dict[str, None], adapter: str | None, limit: int) -> None:
    """Keep the adapters of the last requests to a replica, at most `limit`: it reports seldom."""
    if adapter is not None:
        recent.pop(adapter, None)
        recent[adapter] = None
        if len(recent) > limit:
            del recent[next(iter(recent))]
