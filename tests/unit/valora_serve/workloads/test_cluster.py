"""Simulated replicas: against one machine and schedules worked out by hand, and their figures."""

import math
from functools import partial

import numpy as np
import pytest

from tests.support.cases import others_slow
from tests.unit.valora_serve.workloads.test_simulator import PLAIN, run, workload
from valora_serve.orchestrator.cost_model import H200_7B
from valora_serve.orchestrator.registry import POLICIES, make_policy
from valora_serve.routing.registry import ROUTERS, make_router
from valora_serve.workloads import traces
from valora_serve.workloads.cluster import Dispatch, simulate_cluster
from valora_serve.workloads.simulator import Machine, SimSettings


class InTurn(Dispatch):
    """Every replica in turn; moves the first request to the second replica at a time, if any."""

    def __init__(self, moves_at=None):
        self._moves_at, self._sent = moves_at, 0

    def start(self, cluster):
        old, new = cluster.machines[0], cluster.machines[-1]

        def move(time):
            view, cluster.owner[0] = old.remove("0"), 1
            cluster.at(max(time, old.now) + 0.05, lambda _: new.insert(view))

        if self._moves_at is not None:
            cluster.at(self._moves_at, move)

    def choose(self, adapter, machines, time):
        self._sent += 1
        return (self._sent - 1) % len(machines)


def replicas(work, count, dispatch, policy="unmerge_only", cost=PLAIN, settings=None):
    return simulate_cluster(
        work, count, dispatch, partial(make_policy, policy, cost), cost, settings
    )


@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize("policy", ["cost", "valora"])
def test_one_replica_is_one_machine(router, policy):
    work = traces.slora(12, 5, adapters=9, alpha=0.5, lengths=(8, 90), ranks=(64, 8), seed=3)
    dispatch = Dispatch(make_router(router))
    report = replicas(work, 1, dispatch, policy, H200_7B)
    assert report.total == report.replicas[0] == run(policy, work, H200_7B)
    assert report.balance == 1


def test_a_schedule_by_hand():
    """Alone, a request of 3 tokens takes 20 + 10 + 10 ms; together the first is held up."""
    work = workload([(0.0, None, 5, 3), (0.015, None, 4, 3)])
    report = replicas(work, 2, InTurn())
    assert report.total.end_to_end[0] == pytest.approx(0.04)
    assert [one.requests for one in report.replicas] == [1, 1]
    assert report.total.seconds == pytest.approx(0.055)
    assert report.total.throughput == pytest.approx(2 / 0.055)
    assert report.busy == pytest.approx((0.04 / 0.055,) * 2)
    assert report.balance == pytest.approx(1)


def test_a_moved_request_takes_its_keys_and_values_along():
    """4 of 10 tokens until 50 ms, 50 ms on the way, then a step with a prompt token and 5 more."""
    work = workload([(0.0, None, 5, 10)])
    report = replicas(work, 2, InTurn(0.045))
    assert report.total.end_to_end[0] == pytest.approx(0.05 + 0.05 + 0.02 + 0.05)
    assert report.total.first_token[0] == pytest.approx(0.02)
    assert [one.requests for one in report.replicas] == [0, 1]


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("slots", [2, 3])
def test_few_slots_are_never_exceeded_and_everything_ends(name, slots):
    work = traces.at_once(40, adapters=9, skew=0.3, lengths=(4, 40), seed=5)
    settings = SimSettings(slots=slots)
    most = []
    policy = make_policy(name, H200_7B)
    decide = policy.decide

    def watch(view):
        most.append(len(view.resident) + len(view.loading))
        return decide(view)

    policy.decide = watch
    first, end = np.full(40, np.nan), np.full(40, np.nan)
    machine = Machine(work, policy, H200_7B, settings, first, end)
    for index in range(40):
        machine.submit(index)
    machine.advance(math.inf)
    assert not np.isnan(end).any() and max(most) == slots
    assert machine.adapters.started >= 9


def test_the_router_sees_what_it_would_see_of_real_replicas():
    seen = []

    class Watching:
        def rank(self, adapter, states):
            seen.append([(s.load, set(s.resident), set(s.recent)) for s in states])
            return ["replica-1", "replica-0"]

    # a: loads to 7, first token at 28, ends at 36.5 or 38 ms. b at 20 and 30 ms; at 2 s.
    rows = [(0.0, "a", 5, 2), (0.02, "b", 5, 1), (0.03, "b", 5, 1), (2.0, None, 5, 1)]
    replicas(workload(rows), 2, Dispatch(Watching()), "slora")
    idle = (0, set(), set())
    assert seen == [
        [idle, idle],
        [idle, (1, set(), {"a"})],  # resident by now, but not reported yet
        [idle, (2, set(), {"a", "b"})],
        [idle, (0, {"a", "b"}, {"a", "b"})],
    ]


@pytest.mark.parametrize(("seed", "alpha"), others_slow([(2, 0.5)], [(1, 1.0), (2, 0.5)]))
def test_affinity_against_random_with_more_adapters_than_slots(seed, alpha):
    """200 adapters of rank 64, 32 slots on each of 4 replicas."""
    work = traces.slora(64, 12, adapters=200, alpha=alpha, ranks=(64,), seed=seed)
    settings = SimSettings(slots=32)
    affinity, other = (
        replicas(work, 4, Dispatch(make_router(name)), "cost", H200_7B, settings).total
        for name in ("affinity", "random")
    )
    assert affinity.finished == other.finished == len(work)
    assert affinity.loads < 0.7 * other.loads
    assert affinity.first_token[3] < 0.7 * other.first_token[3]


@pytest.mark.parametrize("router", others_slow(["affinity"], ["affinity", "least"]))
def test_four_replicas_at_saturation(router):
    """Four replicas do what four machines of their own do, less what they wait at the end."""
    total = {
        count: replicas(
            traces.poisson(60 * count, 10, adapters=16, output=100, seed=4),
            count, Dispatch(make_router(router)), "slora", H200_7B,
        )
        for count in (1, 4)
    }  # fmt: skip
    assert total[4].total.throughput > 3.95 * total[1].total.throughput
    assert total[4].balance > 0.999
