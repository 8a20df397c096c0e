"""Chooses which simulated replica answers a request: by a router, or in a way of its own."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from valora_serve.routing.base import RecentAdapters, ReplicaState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from valora_serve.routing.base import Router
    from valora_serve.workloads.simulator import Machine

REPORT_SECONDS = 1.0
"""Seconds between two reports of a replica's resident adapters."""

WAYS: dict[str, Callable[[int], Dispatch]] = {}
"""Ways to choose replicas besides the routers, by name, each made with a random seed; programs in
`tests/bench` add theirs."""

Move = tuple[str, int, int, float]
"""A request to move: its id, the replica that has it, its new one, and seconds on the way."""


class Dispatch(ABC):
    """Chooses the replica of a request on arrival, and may move requests later.

    Attributes:
        interval: Seconds between two rounds of moves; infinity for none.
    """

    interval: float = math.inf

    @abstractmethod
    def choose(self, adapter: str | None, machines: Sequence[Machine], time: float) -> int:
        """Choose the replica of a request that arrives.

        Args:
            adapter: The request's adapter, None for the base model.
            machines: The replicas.
            time: Time in seconds, to which all replicas were advanced.

        Returns:
            Index of the replica.
        """

    def moves(self, machines: Sequence[Machine], time: float) -> Iterable[Move]:
        """Choose requests to move; called every `interval` seconds."""
        del machines, time
        return ()


class RouterDispatch(Dispatch):
    """Asks a router, which sees what it would see of real replicas.

    These are the requests that are not answered, the resident adapters as of a replica's last
    report, and the adapters that were sent since.

    Args:
        router: The router.
    """

    def __init__(self, router: Router) -> None:
        self._router = router
        self._recent: list[RecentAdapters] = []
        self._resident: list[frozenset[str]] = []
        self._next_report = -math.inf

    def choose(self, adapter: str | None, machines: Sequence[Machine], time: float) -> int:
        """Choose the replica of a request that arrives."""
        if not self._recent:
            self._recent = [RecentAdapters(m.settings.slots) for m in machines]
        if time >= self._next_report:
            self._next_report = time + REPORT_SECONDS
            self._resident = [frozenset(m.adapters.resident) for m in machines]
        states = [
            ReplicaState(f"replica-{n}", machine.outstanding(time), resident, recent.names)
            for n, (machine, resident, recent) in enumerate(
                zip(machines, self._resident, self._recent, strict=True)
            )
        ]
        chosen = int(self._router.rank(adapter, states)[0].removeprefix("replica-"))
        self._recent[chosen].add(adapter)
        return chosen
