"""Simulates replicas that share one stream of requests, each a machine (`simulator.Machine`).

A `Dispatch` chooses the replica of each request; `RouterDispatch` asks the routers that the real
replicas use (`valora_serve.routing`).
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING

import numpy as np

from valora_serve.errors import SettingsError
from valora_serve.types import Mode
from valora_serve.workloads.simulator import Machine, SimSettings, report
from valora_serve.workloads.traces import BASE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from valora_serve.orchestrator.cost_model import CostModel
    from valora_serve.orchestrator.decision import Policy
    from valora_serve.workloads.dispatch import Dispatch
    from valora_serve.workloads.simulator import Report, SimulatedRequest
    from valora_serve.workloads.traces import Workload


@dataclass(frozen=True, slots=True)
class ClusterReport:
    """Results of simulated replicas.

    Attributes:
        total: Results of all replicas together.
        replicas: Results of each replica, on the requests that it got (moved ones: in the end).
        busy: Share of the time in which each replica computed.
        balance: Jain's index of the replicas' busy seconds: 1 if all are equal, 1/n if one does
            everything.
        fairness: Jain's index of the adapters' mean times to the first token.
        migrations: Requests that were moved between replicas.
    """

    total: Report
    replicas: tuple[Report, ...]
    busy: tuple[float, ...]
    balance: float
    fairness: float
    migrations: int


def simulate_cluster(
    workload: Workload,
    replicas: int,
    dispatch: Dispatch,
    make_policy: Callable[[], Policy],
    cost_model: CostModel,
    settings: SimSettings | None = None,
) -> ClusterReport:
    """Simulate replicas that share one stream of requests.

    Args:
        workload: Requests to simulate.
        replicas: Number of replicas.
        dispatch: Chooses the replica of each request; a new one.
        make_policy: Makes the policy of one replica.
        cost_model: Predicts the seconds of steps, switches and loads on each replica.
        settings: Each simulated machine; the defaults if None.

    Raises:
        SettingsError: There is no replica.
        SimulationError: A request can never fit, or the policy breaks a rule.
    """
    if replicas < 1:
        raise SettingsError(f"A simulation needs at least 1 replica, not {replicas}.")
    return _Cluster(
        workload, replicas, dispatch, make_policy, cost_model, settings or SimSettings()
    ).run()


class _Cluster:
    """The state of a simulation."""

    def __init__(
        self,
        workload: Workload,
        replicas: int,
        dispatch: Dispatch,
        make_policy: Callable[[], Policy],
        cost: CostModel,
        settings: SimSettings,
    ) -> None:
        self.workload, self.dispatch = workload, dispatch
        self.first = np.full(len(workload), np.nan)
        self.end = np.full(len(workload), np.nan)
        self.owner = np.zeros(len(workload), dtype=np.intp)
        self.machines = [
            Machine(workload, make_policy(), cost, settings, self.first, self.end)
            for _ in range(replicas)
        ]
        self.migrations = 0

    def run(self) -> ClusterReport:
        """Simulate all requests."""
        for time, act in self._events():
            for machine in self.machines:
                machine.advance(time)
            act(time)
        return self._report()

    def _events(self) -> Iterator[tuple[float, Callable[[float], None]]]:
        """Yield what happens outside the machines, in order, until every request has ended."""
        arrivals = self.machines[0].arrivals
        order = count()  # events of one moment keep their order
        events: list[tuple[float, int, Callable[[float], None]]] = []
        interval = self.dispatch.interval

        def migrate(time: float) -> None:
            for key, source, target, seconds in self.dispatch.moves(self.machines, time):
                view = self.machines[source].remove(key)
                self.owner[int(key)] = target
                self.migrations += 1

                def arrive(_: float, view: SimulatedRequest = view, target: int = target) -> None:
                    self.machines[target].insert(view)

                # What the machine computes now is computed before the request leaves.
                there = max(time, self.machines[source].now) + seconds
                heapq.heappush(events, (there, next(order), arrive))

        upcoming = arrivals[0] + interval
        for index, arrival in enumerate(arrivals):
            heapq.heappush(events, (arrival, next(order), self._arrival(index)))
        while events or any(m.views for m in self.machines):
            if upcoming < math.inf and (not events or upcoming <= events[0][0]):
                yield upcoming, migrate
                upcoming += interval
            elif events:
                time, _, act = heapq.heappop(events)
                yield time, act
            else:
                yield math.inf, lambda _: None

    def _arrival(self, index: int) -> Callable[[float], None]:
        def submit(time: float) -> None:
            number = int(self.workload.adapter[index])
            adapter = None if number == BASE else self.workload.adapters[number]
            target = self.dispatch.choose(adapter, self.machines, time)
            self.owner[index] = target
            self.machines[target].submit(index)

        return submit

    def _report(self) -> ClusterReport:
        w, machines = self.workload, self.machines
        total = report(machines, w, np.arange(len(w)))
        busy = [float(sum(m.mode_time[mode] for mode in Mode)) for m in machines]
        waits = self.first - w.arrival
        chosen = [waits[(w.adapter == n) & ~np.isnan(waits)] for n in np.unique(w.adapter)]
        means = [float(values.mean()) for values in chosen if len(values)]
        return ClusterReport(
            total=total,
            replicas=tuple(
                report([m], w, np.flatnonzero(self.owner == n)) for n, m in enumerate(machines)
            ),
            busy=tuple(seconds / total.seconds for seconds in busy),
            balance=jain(busy),
            fairness=jain(means),
            migrations=self.migrations,
        )


def jain(values: Sequence[float] | NDArray[np.float64]) -> float:
    """Jain's fairness index: 1 for equal values, 1/n if all but one of n are 0; NaN for none."""
    array = np.asarray(values, dtype=np.float64)
    squares = len(array) * float((array**2).sum())
    return float(array.sum()) ** 2 / squares if squares else math.nan
