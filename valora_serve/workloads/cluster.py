"""Simulates replicas that share one stream of requests, each a machine (`simulator.Machine`)."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from valora_serve.errors import SettingsError
from valora_serve.routing.base import RecentAdapters, ReplicaState, Router
from valora_serve.workloads.simulator import Machine, Report, SimSettings, report
from valora_serve.workloads.traces import BASE, Workload

if TYPE_CHECKING:
    from valora_serve.orchestrator.base import BasePolicy
    from valora_serve.orchestrator.cost_model import CostModel

REPORT_SECONDS = 1.0  # between two reports of a replica's resident adapters


class Dispatch:
    """Chooses the replica of each request by a router, which sees what real ones report."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._recent: list[RecentAdapters] = []
        self._resident: list[frozenset[str]] = []
        self._next_report = -math.inf

    def start(self, cluster: Cluster) -> None:
        """Begin; a study may plan events of its own (`Cluster.at`)."""
        self._recent = [RecentAdapters(m.settings.slots) for m in cluster.machines]

    def choose(self, adapter: str | None, machines: Sequence[Machine], time: float) -> int:
        """Return the index of the replica for a request that arrives at a time in seconds."""
        if time >= self._next_report:
            self._next_report = time + REPORT_SECONDS
            self._resident = [frozenset(m.adapters.resident) for m in machines]
        seen = enumerate(zip(machines, self._resident, self._recent, strict=True))
        states = [
            ReplicaState(f"replica-{n}", machine.outstanding(time), resident, recent.names)
            for n, (machine, resident, recent) in seen
        ]
        chosen = int(self._router.rank(adapter, states)[0].removeprefix("replica-"))
        self._recent[chosen].add(adapter)
        return chosen


WAYS: dict[str, Callable[[int], Dispatch]] = {}
"""Ways to choose replicas besides the routers, by name, each made with a random seed; programs in
`tests/bench` add theirs."""


@dataclass(frozen=True, slots=True)
class ClusterReport:
    """Results of simulated replicas, in total and of each, on the requests that it got."""

    total: Report
    replicas: tuple[Report, ...]
    busy: tuple[float, ...]  # share of the time in which each computed
    balance: float  # Jain's index of their busy seconds
    fairness: float  # that of the adapters' mean times to the first token


class Cluster:
    """Replicas that share one stream of requests, and their arrays of times."""

    def __init__(self, workload: Workload, machines: list[Machine], dispatch: Dispatch) -> None:
        self.workload, self.machines, self.dispatch = workload, machines, dispatch
        self.owner = np.zeros(len(workload), dtype=np.intp)  # replica of each request
        self._order = count()  # events of one moment keep their order
        self._events: list[tuple[float, int, Callable[[float], None]]] = []

    def at(self, time: float, act: Callable[[float], None]) -> None:
        """Plan something for a time in seconds, to which all machines are advanced before."""
        heapq.heappush(self._events, (time, next(self._order), act))

    @property
    def working(self) -> bool:
        """Whether requests are to come or unfinished."""
        return bool(self._events) or any(m.views for m in self.machines)

    def run(self) -> ClusterReport:
        """Simulate all requests."""
        self.dispatch.start(self)
        for index, arrival in enumerate(self.machines[0].arrivals):
            self.at(arrival, partial(self._submit, index))
        while self.working:
            time, act = math.inf, None
            if self._events:
                time, _, act = heapq.heappop(self._events)
            for machine in self.machines:
                machine.advance(time)
            if act is not None:
                act(time)
        return self._report()

    def _submit(self, index: int, time: float) -> None:
        number = int(self.workload.adapter[index])
        adapter = None if number == BASE else self.workload.adapters[number]
        target = self.owner[index] = self.dispatch.choose(adapter, self.machines, time)
        self.machines[target].submit(index)

    def _report(self) -> ClusterReport:
        w, machines = self.workload, self.machines
        total = report(machines, w, np.arange(len(w)))
        busy = [sum(m.mode_time.values()) for m in machines]
        waits = machines[0].first - w.arrival
        chosen = [waits[(w.adapter == n) & ~np.isnan(waits)] for n in np.unique(w.adapter)]
        return ClusterReport(
            total=total,
            replicas=tuple(
                report([m], w, np.flatnonzero(self.owner == n)) for n, m in enumerate(machines)
            ),
            busy=tuple(seconds / total.seconds for seconds in busy),
            balance=jain(busy),
            fairness=jain([float(values.mean()) for values in chosen if len(values)]),
        )


def simulate_cluster(
    workload: Workload,
    replicas: int,
    dispatch: Dispatch,
    make_policy: Callable[[], BasePolicy],
    cost_model: CostModel,
    settings: SimSettings | None = None,
) -> ClusterReport:
    """Simulate replicas that share one stream of requests; each gets a new policy."""
    if replicas < 1:
        raise SettingsError(f"A simulation needs at least 1 replica, not {replicas}.")
    first, end = np.full(len(workload), np.nan), np.full(len(workload), np.nan)
    machines = [
        Machine(workload, make_policy(), cost_model, settings or SimSettings(), first, end)
        for _ in range(replicas)
    ]
    return Cluster(workload, machines, dispatch).run()


def jain(values: Sequence[float] | NDArray[np.float64]) -> float:
    """Jain's fairness index: 1 for equal values, 1/n if all but one of n are 0; NaN for none."""
    array = np.asarray(values, dtype=np.float64)
    squares = len(array) * float((array**2).sum())
    return float(array.sum()) ** 2 / squares if squares else math.nan
