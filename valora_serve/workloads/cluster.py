"""Simulates replicas that share one stream of requests, each a machine (`simulator.Machine`)."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from valora_serve.errors import SettingsError
from valora_serve.orchestrator.base import BasePolicy
from valora_serve.orchestrator.cost_model import CostModel
from valora_serve.routing import ROUTERS, ReplicaState, Router, RouterSettings
from valora_serve.workloads.simulator import Machine, Report, SimSettings, report
from valora_serve.workloads.traces import Workload

REPORT_SECONDS = 1.0  # between two reports of a replica's resident adapters


class Dispatch:
    """Chooses the replica of each request by a router, which sees what real ones report."""

    owner: NDArray[np.intp]  # [requests], the replica of each

    def __init__(self, router: Router) -> None:
        self._router = router
        self._recent: list[dict[str, None]] = []
        self._resident: list[frozenset[str]] = []
        self._next_report = -math.inf

    def advance(self, machines: Sequence[Machine], until: float) -> None:
        """Advance all replicas to a time in seconds; a study may have events of its own before."""
        for machine in machines:
            machine.advance(until)

    def choose(self, adapter: str | None, machines: Sequence[Machine], time: float) -> int:
        """Return the index of the replica for a request that arrives at a time in seconds."""
        if time >= self._next_report:
            self._next_report = time + REPORT_SECONDS
            self._resident = [frozenset(m.adapters.resident) for m in machines]
        self._recent = self._recent or [{} for _ in machines]
        seen = enumerate(zip(machines, self._resident, self._recent, strict=True))
        states = [
            ReplicaState(f"replica-{n}", machine.outstanding(time), resident, recent)
            for n, (machine, resident, recent) in seen
        ]
        chosen = int(self._router.rank(adapter, states)[0].removeprefix("replica-"))
        states[chosen].note_sent(adapter, machines[chosen].settings.slots)
        return chosen


WAYS: dict[str, Callable[[int], Dispatch]] = {}
"""Ways to choose replicas besides the routers, by name, each made with a random seed; programs in
`tests/bench` add theirs."""


def make_dispatch(name: str, seed: int) -> Dispatch:
    """Make one of the `WAYS`, or of a router; SettingsError if there is none of this name."""
    if name in WAYS:
        return WAYS[name](seed)
    return Dispatch(ROUTERS[name](RouterSettings(seed=seed)))


@dataclass(frozen=True, slots=True)
class ClusterReport:
    """Results of simulated replicas, in total and of each, on the requests that it got."""

    total: Report
    replicas: tuple[Report, ...]
    busy: tuple[float, ...]  # share of the time in which each computed
    balance: float  # Jain's index of their busy seconds
    fairness: float  # that of the adapters' mean times to the first token


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
    w = workload
    first, end = np.full(len(w), np.nan), np.full(len(w), np.nan)
    machines = [
        Machine(w, make_policy(), cost_model, settings or SimSettings(), first, end)
        for _ in range(replicas)
    ]
    dispatch.owner = owner = np.zeros(len(w), dtype=np.intp)
    for index, arrival in enumerate(machines[0].arrivals):
        dispatch.advance(machines, arrival)
        owner[index] = dispatch.choose(w.name(index), machines, arrival)
        machines[owner[index]].submit(index)
    dispatch.advance(machines, math.inf)
    total = report(machines, w, np.arange(len(w)))
    busy = [sum(m.mode_time.values()) for m in machines]
    waits = first - w.arrival
    chosen = [waits[(w.adapter == n) & ~np.isnan(waits)] for n in np.unique(w.adapter)]
    return ClusterReport(
        total=total,
        replicas=tuple(report([m], w, np.flatnonzero(owner == n)) for n, m in enumerate(machines)),
        busy=tuple(seconds / total.seconds for seconds in busy),
        balance=jain(busy),
        fairness=jain([float(values.mean()) for values in chosen if len(values)]),
    )


def jain(values: Sequence[float] | NDArray[np.float64]) -> float:
    """Jain's fairness index: 1 for equal values, 1/n if all but one of n are 0; NaN for none."""
    array = np.asarray(values, dtype=np.float64)
    squares = len(array) * float((array**2).sum())
    return float(array.sum()) ** 2 / squares if squares else math.nan
