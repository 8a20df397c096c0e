"""Sends requests where little is outstanding, whatever their adapters."""

from __future__ import annotations

from typing import TYPE_CHECKING

from valora_serve.routing.base import Router

if TYPE_CHECKING:
    from collections.abc import Sequence

    from valora_serve.routing.base import ReplicaState


class LeastRouter(Router):
    """The power of two choices (`Router.least_loaded`)."""

    def order(self, adapter: str | None, replicas: Sequence[ReplicaState]) -> list[ReplicaState]:
        """Order the available replicas, the best first."""
        return self.least_loaded(replicas)
