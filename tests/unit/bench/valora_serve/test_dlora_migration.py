"""dLoRA's integer program against trying everything, and what its migration is good for."""

import itertools
import math
from functools import partial

import numpy as np
import pytest

from tests.bench.valora_serve import dlora_migration
from tests.bench.valora_serve.dlora_migration import DLoraDispatch, insert, solve
from tests.unit.valora_serve.workloads.test_simulator import PLAIN, workload
from valora_serve.orchestrator.cost_model import H200_7B
from valora_serve.orchestrator.registry import make_policy
from valora_serve.workloads import traces
from valora_serve.workloads.cluster import simulate_cluster
from valora_serve.workloads.simulator import SimSettings


def time_of(pair, counts, pages, seconds, memory, flow):
    """Time of the replica that needs the longest; the objective, from its definition."""
    longest = 0.0
    for n in pair:
        spent = swapped = 0.0
        for (adapter, source), number in counts.items():
            other = pair[1] if source == pair[0] else pair[0]
            gone = flow.get((adapter, source, other), 0)
            here = number - gone if source == n else gone
            spent += here * (
                seconds[adapter] + (dlora_migration.MOVE_SECONDS if source != n else 0)
            )
            swapped += here * pages[adapter, source]
        longest = max(longest, spent + max(0.0, swapped - memory[n]) / dlora_migration.SWAP_PAGES)
    return longest


@pytest.mark.parametrize("seed", range(8))
def test_the_program_against_trying_everything(seed):
    rng = np.random.default_rng(seed)
    pair, names = (2, 5), ["a", "b", "c"]
    kinds = [("a", 2), ("b", 2), ("b", 5), ("c", 5), (None, 2)]
    counts = {key: int(rng.integers(1, 5)) for key in kinds}
    pages = {key: float(rng.integers(1, 9)) for key in kinds}
    seconds = {name: float(rng.uniform(0.5, 4)) for name in ("a", "b", "c", None)}
    capacity = {2: 2, 5: int(rng.integers(1, 4))}
    memory = {2: 10, 5: 8}
    flow, placed = solve(names, pair, counts, pages, seconds, capacity, memory)
    best = math.inf
    for numbers in itertools.product(*(range(counts[key] + 1) for key in kinds)):
        tried = {(a, s, 7 - s): n for (a, s), n in zip(kinds, numbers, strict=True)}
        used = {n: set() for n in pair}
        for (adapter, source, target), number in tried.items():
            used[target] |= {adapter} if number else set()
            used[source] |= {adapter} if number < counts[adapter, source] else set()
        if all(len(used[n] - {None}) <= capacity[n] for n in pair):
            best = min(best, time_of(pair, counts, pages, seconds, memory, tried))
    found = time_of(pair, counts, pages, seconds, memory, flow)
    assert found <= 1.02 * best + max(seconds.values())  # numbers of requests are rounded
    for (adapter, _, target), number in flow.items():
        assert number > 0 and (adapter is None or adapter in placed[target])
    assert all(len(placed[n]) <= capacity[n] for n in pair)


class Staying(DLoraDispatch):
    def start(self, machines):
        pass


def test_migration_balances_what_the_placement_got_wrong():
    """All requests are of four adapters that lie on the same replica."""
    work = traces.at_once(300, adapters=16, skew=None, lengths=(100, 400), seed=2)
    alike = np.where(work.adapter % 4 == 1, work.adapter, (work.adapter // 4) * 4 + 1)
    work = traces.Workload(
        work.adapters, work.ranks, np.sort(np.random.default_rng(0).uniform(0, 15, 300)),
        alike.astype(np.int32), work.prompt, work.output, work.images, work.latency_limit,
    )  # fmt: skip
    settings = SimSettings(max_requests=24)
    moves = DLoraDispatch()
    moving, staying = (
        simulate_cluster(work, 4, way, partial(make_policy, "slora", H200_7B), H200_7B, settings)
        for way in (moves, Staying())
    )
    assert moving.total.finished == staying.total.finished == 300
    assert moves.migrations > 0
    assert moving.total.end_to_end[3] < 0.8 * staying.total.end_to_end[3]
    assert moving.balance > staying.balance + 0.1


def test_every_adapter_has_a_replica_and_one_has_all():
    work = traces.poisson(40, 4, adapters=10, skew=None, seed=1)
    dispatch = DLoraDispatch(seed=3)
    report = simulate_cluster(work, 3, dispatch, partial(make_policy, "slora", H200_7B), H200_7B)
    homes = [sum(name in placed for placed in dispatch._placed) for name in work.adapters]
    assert sorted(homes) == [1] * 9 + [3]
    assert report.total.finished == len(work) and report.total.loads == 12


class Moving(DLoraDispatch):
    """Moves the first request from the first to the second replica at 45 ms."""

    def start(self, machines):
        old, new = machines

        def move(time):
            view, self.owner[0] = old.remove("0"), 1
            self.at(max(time, old.now) + 0.05, lambda _: insert(new, view))

        self.at(0.045, move)

    def choose(self, adapter, machines, time):
        return 0


def test_a_moved_request_takes_its_keys_and_values_along():
    """4 of 10 tokens until 50 ms, 50 ms on the way, then a step with a prompt token and 5 more."""
    work = workload([(0.0, None, 5, 10)])
    policy = partial(make_policy, "unmerge_only", PLAIN)
    report = simulate_cluster(work, 2, Moving(), policy, PLAIN)
    assert report.total.end_to_end[0] == pytest.approx(0.05 + 0.05 + 0.02 + 0.05)
    assert report.total.first_token[0] == pytest.approx(0.02)
    assert [one.requests for one in report.replicas] == [0, 1]
