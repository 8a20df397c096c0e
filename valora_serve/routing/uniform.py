"""Sends requests to replicas at random: the baseline."""

from __future__ import annotations

from typing import TYPE_CHECKING

from valora_serve.routing.base import Router

if TYPE_CHECKING:
    from collections.abc import Sequence

    from valora_serve.routing.base import ReplicaState


class RandomRouter(Router):
    """All orders are equally likely."""

    def order(self, adapter: str | None, replicas: Sequence[ReplicaState]) -> list[ReplicaState]:
        """Order the available replicas, the best first."""
        return self.random.sample(replicas, len(replicas))
