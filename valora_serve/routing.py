"""Routers decide which replica answers a request; this imports no torch.

Rendezvous hashing: Thaler and Ravishankar, "Using Name-Based Mappings to Increase Hit Rates", 1998.
Bounded load: Mirrokni, Thorup and Zadimoghaddam, "Consistent Hashing with Bounded Loads", 2018.
Two choices: Mitzenmacher, "The Power of Two Choices in Randomized Load Balancing", 2001.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import blake2b
from random import Random
from typing import Annotated

from pydantic import Field

from valora_data.registry import Registry
from valora_serve.errors import SettingsError


@dataclass(slots=True, eq=False)
class ReplicaState:
    """What a router sees of a replica."""

    id: str  # the same in every process that routes
    load: float  # requests that are sent to it and not answered yet
    resident: Collection[str] = frozenset()  # adapters on its device
    recent: dict[str, None] = field(default_factory=dict)  # adapters of its last requests

    def note_sent(self, adapter: str | None, limit: int) -> None:
        """Note the adapter of a request to it, in `recent` with at most `limit` others."""
        if adapter is not None:
            self.recent.pop(adapter, None)
            self.recent[adapter] = None
            if len(self.recent) > limit:
                del self.recent[next(iter(self.recent))]


@dataclass(frozen=True, slots=True)
class RouterSettings:
    """Settings of all routers."""

    # `affinity` sends no request to a replica with `bound` times the mean load, counting the
    # request, or `excess` more than the mean, unless its load is below `slack`.
    bound: Annotated[float, Field(gt=1, allow_inf_nan=False)] = 1.25
    excess: Annotated[float, Field(gt=0)] = 16.0
    slack: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 8.0
    # Replicas of which the least loaded is taken: any of a request, or the first of an adapter.
    choices: Annotated[int, Field(ge=1)] = 2
    seed: int = 0  # of random choices


class Router:
    """Ranks the replicas for a request, here at random: the baseline.

    Only random draws depend on what it answered before.
    """

    def __init__(self, settings: RouterSettings | None = None) -> None:
        self.settings = settings or RouterSettings()
        self.random = Random(self.settings.seed)

    def rank(self, adapter: str | None, replicas: Sequence[ReplicaState]) -> list[str]:
        """Return the ids of the replicas for an adapter (None: the base model), best first."""
        return [one.id for one in self.order(adapter, sorted(replicas, key=lambda r: r.id))]

    def order(self, adapter: str | None, replicas: Sequence[ReplicaState]) -> list[ReplicaState]:
        """Order the replicas, which come sorted by id, as `rank` does."""
        return self.random.sample(replicas, len(replicas))


class LeastRouter(Router):
    """The least loaded of `RouterSettings.choices` that are drawn at random, whatever the adapter.

    Loads are a little old: the least loaded of all would get the requests of all routers at once.
    """

    def order(self, adapter: str | None, replicas: Sequence[ReplicaState]) -> list[ReplicaState]:
        shuffled, count = super().order(adapter, replicas), self.settings.choices
        return sorted(shuffled[:count], key=lambda r: r.load) + shuffled[count:]


class AffinityRouter(LeastRouter):
    """Bounded load, then resident adapters, then rendezvous hashing.

    Replicas that reach the bound come last, by load. Of the others, those that hold the adapter
    come first, then those to which it was sent lately, then by load the first
    `RouterSettings.choices` of its own order, which spreads adapters more evenly than one alone.
    That order, which changes little when a replica joins or leaves, decides among equals.
    """

    def order(self, adapter: str | None, replicas: Sequence[ReplicaState]) -> list[ReplicaState]:
        if adapter is None:
            return super().order(adapter, replicas)
        s, mean = self.settings, (sum(r.load for r in replicas) + 1) / max(1, len(replicas))
        cap = max(s.slack, min(s.bound * mean, mean + s.excess))  # the least loaded is below it
        ranked = sorted(replicas, key=lambda r: _weight(adapter, r.id), reverse=True)
        homes = {r.id for r in ranked[: s.choices]}

        def rank(r: ReplicaState) -> tuple[float, bool, bool, float]:
            over, cold = r.load if r.load >= cap else -1.0, adapter not in r.resident
            nowhere = cold and adapter not in r.recent
            home = r.load if r.id in homes else math.inf
            return over, cold, nowhere, home if nowhere else 0.0

        return sorted(ranked, key=rank)  # stable: the adapter's own order decides among equals


_KINDS = {"affinity": "Affinity", "random": "", "least": "Least"}
ROUTERS: Registry[type[Router]] = Registry(
    "valora.routers",
    "router",
    {name: f"{__name__}:{kind}Router" for name, kind in _KINDS.items()},
    SettingsError,
)


@lru_cache(maxsize=1 << 16)
def _weight(adapter: str, replica: str) -> bytes:
    """Weight of a replica for an adapter, on which processes agree; the largest comes first."""
    return blake2b(f"{len(adapter)}:{adapter}{replica}".encode(), digest_size=8).digest()
