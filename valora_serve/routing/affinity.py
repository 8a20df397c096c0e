"""Sends the requests of an adapter to few replicas, as long as these have no more load than others.

Rendezvous hashing gives each adapter an order of the replicas (Thaler and Ravishankar, "Using
Name-Based Mappings to Increase Hit Rates", 1998); when a replica joins or leaves, only the adapters
that it gains or had move. The load of a replica is bounded by a multiple of the mean (Mirrokni,
Thorup and Zadimoghaddam, "Consistent Hashing with Bounded Loads", 2018): where an adapter's first
replica has reached the bound, its requests go to the next. So an adapter that gets more requests
than one replica can take is served by several.
"""

from __future__ import annotations

from functools import lru_cache
from hashlib import blake2b
from typing import TYPE_CHECKING

from valora_serve.routing.base import Router

if TYPE_CHECKING:
    from collections.abc import Sequence

    from valora_serve.routing.base import ReplicaState


class AffinityRouter(Router):
    """Bounded load, then resident adapters, then rendezvous hashing.

    Replicas below the bound come before those that reach it, which are ordered by load. Below the
    bound, those come first that hold the adapter, then those to which it was sent lately. An
    adapter that is nowhere goes to the less loaded of the first `RouterSettings.choices` replicas
    of its own order, which spreads adapters more evenly than the first alone; otherwise that order
    decides among equals. Requests of the base model are spread by load (`Router.least_loaded`).
    """

    def order(self, adapter: str | None, replicas: Sequence[ReplicaState]) -> list[ReplicaState]:
        """Order the available replicas, the best first."""
        if adapter is None:
            return self.least_loaded(replicas)
        cap = self.cap(replicas)
        ranked = sorted(replicas, key=lambda r: weight(adapter, r.id), reverse=True)
        homes = ranked[: self.settings.choices]

        def place(replica: ReplicaState) -> tuple[float, int, float]:
            over = replica.load if replica.load >= cap else -1.0
            if adapter in replica.resident:
                return over, 0, 0.0
            if adapter in replica.recent:
                return over, 1, 0.0
            return (over, 2, replica.load) if replica in homes else (over, 3, 0.0)

        return sorted(ranked, key=place)  # stable: the adapter's own order decides among equals

    def cap(self, replicas: Sequence[ReplicaState]) -> float:
        """Load that a replica must be below to take one more request.

        There is always such a replica, as the least loaded has at most the mean.
        """
        mean = (sum(replica.load for replica in replicas) + 1) / max(1, len(replicas))
        s = self.settings
        return max(s.slack, min(s.bound * mean, mean + s.excess))


@lru_cache(maxsize=1 << 16)
def weight(adapter: str, replica: str) -> int:
    """Weight of a replica for an adapter, in [0, 2⁶⁴); the largest comes first.

    Processes must agree on it, which they would not on `hash` of a string.
    """
    text = f"{len(adapter)}:{adapter}{replica}".encode()
    return int.from_bytes(blake2b(text, digest_size=8).digest())
