"""The routers by name; other packages add theirs with an entry point.

`affinity` sends the requests of an adapter to few replicas. Rendezvous hashing gives each adapter
an order of the replicas (Thaler and Ravishankar, "Using Name-Based Mappings to Increase Hit Rates",
1998); when a replica joins or leaves, only the adapters that it gains or had move. The load of a
replica is bounded by a multiple of the mean (Mirrokni, Thorup and Zadimoghaddam, "Consistent
Hashing with Bounded Loads", 2018), so that popular adapters are served by several.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b

from valora_data.registry import Registry
from valora_serve.errors import SettingsError
from valora_serve.routing.base import ReplicaState, Router


class RandomRouter(Router):
    """All orders are equally likely: the baseline."""

    def order(self, adapter: str | None, replicas: Sequence[ReplicaState]) -> list[ReplicaState]:
        return self.random.sample(replicas, len(replicas))


class LeastRouter(Router):
    """The power of two choices, whatever the adapter.

    Of `RouterSettings.choices` replicas that are drawn at random, the one with the least load comes
    first. The load that a router sees is a little old, and the one replica with the least load
    would get the requests of all routers at once (Mitzenmacher, "The Power of Two Choices in
    Randomized Load Balancing", 2001).
    """

    def order(self, adapter: str | None, replicas: Sequence[ReplicaState]) -> list[ReplicaState]:
        shuffled = self.random.sample(replicas, len(replicas))
        drawn, others = shuffled[: self.settings.choices], shuffled[self.settings.choices :]
        return sorted(drawn, key=lambda r: r.load) + others


class AffinityRouter(LeastRouter):
    """Bounded load, then resident adapters, then rendezvous hashing.

    Replicas below the bound come before those that reach it, which are ordered by load. Below the
    bound, those come first that hold the adapter, then those to which it was sent lately. An
    adapter that is nowhere goes to the less loaded of the first `RouterSettings.choices` replicas
    of its own order, which spreads adapters more evenly than the first alone; otherwise that order
    decides among equals. Requests of the base model are spread by load.
    """

    def order(self, adapter: str | None, replicas: Sequence[ReplicaState]) -> list[ReplicaState]:
        if adapter is None:
            return super().order(adapter, replicas)
        s, mean = self.settings, (sum(r.load for r in replicas) + 1) / max(1, len(replicas))
        cap = max(s.slack, min(s.bound * mean, mean + s.excess))  # the least loaded is below it
        ranked = sorted(replicas, key=lambda r: _weight(adapter, r.id), reverse=True)
        homes = ranked[: s.choices]

        def rank(replica: ReplicaState) -> tuple[float, int, float]:
            over = replica.load if replica.load >= cap else -1.0
            if adapter in replica.resident:
                return over, 0, 0.0
            if adapter in replica.recent:
                return over, 1, 0.0
            return (over, 2, replica.load) if replica in homes else (over, 3, 0.0)

        return sorted(ranked, key=rank)  # stable: the adapter's own order decides among equals


ROUTERS: Registry[type[Router]] = Registry(
    "valora.routers",
    "router",
    {name: f"{__name__}:{name.title()}Router" for name in ("affinity", "random", "least")},
    SettingsError,
)


@lru_cache(maxsize=1 << 16)
def _weight(adapter: str, replica: str) -> int:
    """Weight of a replica for an adapter, on which processes agree; the largest comes first."""
    text = f"{len(adapter)}:{adapter}{replica}".encode()
    return int.from_bytes(blake2b(text, digest_size=8).digest())
