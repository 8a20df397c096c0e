"""Rules that routers keep for random replicas and requests."""

import subprocess
import sys
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.random_tests import examples
from valora_serve.routing import ROUTERS, ReplicaState, RouterSettings

ADAPTERS = [f"adapter-{i}" for i in range(30)]
names = st.sampled_from(ADAPTERS)
some = st.frozensets(names, max_size=8)
loads = st.integers(0, 200) | st.floats(0, 200)
recent = some.map(dict.fromkeys)
states = st.builds(ReplicaState, st.uuids().map(str), loads, resident=some, recent=recent)
fleets = st.lists(states, max_size=8, unique_by=lambda r: r.id)
settings = st.builds(
    RouterSettings, bound=st.floats(1.01, 3), excess=st.floats(0.1, 30), slack=st.floats(0, 20),
    choices=st.integers(1, 9), seed=st.integers(0, 9),
)  # fmt: skip
routers = pytest.mark.parametrize("name", ROUTERS)


@routers
@given(fleet=fleets, adapter=st.none() | names, settings=settings, data=st.data())
@examples(100)
def test_every_replica_is_ranked_once(name, fleet, adapter, settings, data):
    ranked = ROUTERS[name](settings).rank(adapter, fleet)
    assert sorted(ranked) == sorted(r.id for r in fleet)
    # The same seed and states: the same answer, in whatever order the replicas are listed.
    shuffled = data.draw(st.permutations(fleet))
    assert ROUTERS[name](settings).rank(adapter, shuffled) == ranked


@given(fleet=fleets, adapter=names, settings=settings)
@examples(150)
def test_affinity_keeps_the_bound_and_then_prefers_replicas_that_hold_the_adapter(
    fleet, adapter, settings
):
    by = {one.id: one for one in fleet}
    ranked = [by[key] for key in ROUTERS["affinity"](settings).rank(adapter, fleet)]
    mean = (sum(one.load for one in fleet) + 1) / max(1, len(fleet))
    cap = max(settings.slack, min(settings.bound * mean, mean + settings.excess))
    below = [one.load < cap for one in ranked]
    assert below[:1] in ([True], []) and below == sorted(below, reverse=True)
    free = ranked[: sum(below)]
    warm = [2 * (adapter in one.resident) or (adapter in one.recent) for one in free]
    assert warm == sorted(warm, reverse=True)


@given(
    requests=st.lists(st.none() | names, min_size=1, max_size=300),
    replicas=st.integers(1, 8),
    bound=st.floats(1.05, 2),
)
@examples(100)
def test_loads_stay_bounded_when_nothing_is_answered(requests, replicas, bound):
    router = ROUTERS["affinity"](RouterSettings(bound=bound, slack=0, choices=replicas))
    load = Counter({f"r{i}": 0 for i in range(replicas)})
    for sent, adapter in enumerate(requests):
        chosen = router.rank(adapter, [ReplicaState(key, n) for key, n in load.items()])[0]
        load[chosen] += 1
        mean = (sent + 1) / replicas
        assert load[chosen] <= min(bound * mean, mean + 16) + 1


def test_an_adapter_that_is_nowhere_goes_to_the_less_loaded_of_two():
    names = ["a", "b", "c", "d"]
    idle = ROUTERS["affinity"]().rank("x", [ReplicaState(name, 0) for name in names])
    for loads in ([3, 1, 0, 0], [1, 3, 0, 0], [2, 2, 0, 0]):
        fleet = [ReplicaState(name, load) for name, load in zip(idle, loads, strict=True)]
        best = idle[1] if loads[1] < loads[0] else idle[0]
        assert ROUTERS["affinity"]().rank("x", fleet)[0] == best
    assert ROUTERS["affinity"](RouterSettings(choices=1)).rank("x", fleet) == idle


@given(fleet=st.lists(st.uuids().map(str), min_size=1, max_size=12, unique=True), new=st.uuids())
@examples(50)
def test_few_adapters_move_when_a_replica_joins_or_leaves(fleet, new):
    router, new = ROUTERS["affinity"](), str(new)
    adapters = [f"a{i}" for i in range(200)]
    before = {a: router.rank(a, [ReplicaState(r, 0) for r in fleet]) for a in adapters}
    after = {a: router.rank(a, [ReplicaState(r, 0) for r in (*fleet, new)]) for a in adapters}
    moved = [a for a in adapters if before[a][0] != after[a][0]]
    if new in fleet:
        return
    assert all(after[a][0] == new for a in moved)  # to the new one only, never among the old ones
    # The others keep their order, so that a spilled request finds its adapter, too.
    assert all([r for r in after[a] if r != new] == before[a] for a in adapters)
    # Binomial: five standard deviations above the mean share.
    share = 1 / (len(fleet) + 1)
    assert len(moved) <= 200 * share + 5 * (200 * share * (1 - share)) ** 0.5


def route(router, requests, replicas, slots=8, backlog=40):
    """Send requests to replicas of one speed: each in turn answers its oldest."""
    queue = {f"r{i}": [] for i in range(replicas)}
    states = {key: ReplicaState(key, 0) for key in queue}
    sent, cold = Counter(), 0
    for number, adapter in enumerate(requests):
        for one in states.values():
            one.load = len(queue[one.id])
        chosen = router.rank(adapter, states.values())[0]
        cold += adapter is not None and adapter not in states[chosen].recent
        states[chosen].note_sent(adapter, slots)
        queue[chosen].append(adapter)
        sent[adapter, chosen] += 1
        if number >= backlog:
            del queue[f"r{number % replicas}"][:1]
    return sent, cold


def test_a_popular_adapter_is_spread_and_a_rare_one_is_not():
    requests = [f"rare-{i // 4 % 8}" if i % 4 == 0 else "popular" for i in range(2000)]
    sent, _ = route(ROUTERS["affinity"](), requests, replicas=4)
    popular = [sent["popular", f"r{i}"] for i in range(4)]
    assert sum(popular) == 1500 and max(popular) < 0.5 * sum(popular) and min(popular) > 100
    homes = [sum(sent[f"rare-{i}", f"r{k}"] > 0 for k in range(4)) for i in range(8)]
    assert sum(homes) < 8 * 2.5


def test_affinity_meets_cold_replicas_less_often_than_the_others():
    requests = [f"a{(i * i * 7 + i) % 31}" for i in range(3000)]
    cold = {name: route(ROUTERS[name](), requests, replicas=4)[1] for name in ROUTERS}
    assert cold["affinity"] < 0.2 * min(cold["random"], cold["least"])


def test_requests_of_the_base_model_go_where_little_is_outstanding():
    fleet = [ReplicaState("a", 9), ReplicaState("b", 1), ReplicaState("c", 5)]
    for name in ("affinity", "least"):
        exact = ROUTERS[name](RouterSettings(choices=3))
        assert exact.rank(None, fleet) == ["b", "c", "a"]
        two = Counter(ROUTERS[name](RouterSettings(seed=s)).rank(None, fleet)[0]
                      for s in range(300))  # fmt: skip
        assert two["a"] == 0 and two["b"] > two["c"] > 50  # c: where b is not drawn, a third


def test_random_is_uniform():
    fleet = [ReplicaState(key, load) for key, load in (("a", 0), ("b", 50), ("c", 7))]
    router = ROUTERS["random"]()
    got = Counter(router.rank("x", fleet)[0] for _ in range(3000))
    assert all(900 < n < 1100 for n in got.values()) and len(got) == 3


def test_processes_agree_on_the_order():
    code = (
        "from valora_serve.routing import ROUTERS, ReplicaState\n"
        "fleet = [ReplicaState(f'r{i}', 0) for i in range(5)]\n"
        "print([ROUTERS['affinity']().rank(f'a{i}', fleet) for i in range(20)])"
    )
    fleet = [ReplicaState(f"r{i}", 0) for i in range(5)]
    here = [ROUTERS["affinity"]().rank(f"a{i}", fleet) for i in range(20)]
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == str(here)
    assert len({order[0] for order in here}) == 5


def test_recent_adapters_are_the_last_ones():
    one = ReplicaState("r", 0)
    for adapter in ("a", "b", None, "a", "c"):
        one.note_sent(adapter, 2)
    assert list(one.recent) == ["a", "c"]
