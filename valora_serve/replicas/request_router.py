"""Lets Ray Serve route by `valora_serve.routing`: the routers that the simulator compares."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any

from ray.serve.request_router import RequestRouter

from valora_serve.routing.base import RecentAdapters, ReplicaState, RouterSettings
from valora_serve.routing.registry import make_router

if TYPE_CHECKING:
    from ray.serve.request_router import PendingRequest, ReplicaID, RunningReplica

RESIDENT = "resident"
"""Key of the routing statistics of a replica that holds the names of its resident adapters."""


class AdapterRequestRouter(RequestRouter):  # type: ignore[misc]
    """Sends each request to the best replica of a router that takes it.

    Ray Serve gives each process that holds a handle one of these. It counts the requests that this
    process has sent; the resident adapters come with Ray Serve's routing statistics.
    """

    def initialize_state(self, router: str, settings: dict[str, Any], slots: int) -> None:
        """Take the router's name, the fields of `RouterSettings` and a replica's most adapters."""
        self._router = make_router(router, RouterSettings(**settings))
        self._sent: Counter[ReplicaID] = Counter()
        self._recent: defaultdict[ReplicaID, RecentAdapters] = defaultdict(
            lambda: RecentAdapters(slots)
        )

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        call = pending_request.args[0] if pending_request and pending_request.args else None
        adapter = getattr(call, "adapter", None)  # none of what is no `Call`
        by_name = {str(replica.replica_id.unique_id): replica for replica in candidate_replicas}
        states = [
            ReplicaState(
                name,
                self._sent[replica.replica_id],
                frozenset((replica.routing_stats or {}).get(RESIDENT, ())),
                self._recent[replica.replica_id].names,
            )
            for name, replica in by_name.items()
        ]
        ranked = [by_name[name] for name in self._router.rank(adapter, states)]
        if ranked:  # it takes the request, as its queue has room for all
            self._recent[ranked[0].replica_id].add(adapter)
        return [[replica] for replica in ranked]

    def on_send_request(self, replica_id: ReplicaID) -> None:
        super().on_send_request(replica_id)
        self._sent[replica_id] += 1

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        super().on_request_completed(replica_id, internal_request_id)
        self._sent[replica_id] = max(0, self._sent[replica_id] - 1)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        for counts in (self._sent, self._recent):
            for gone in counts.keys() - self.curr_replicas.keys():
                del counts[gone]
