"""Any policy, any queue: limits hold, modes fit their batches, and every request is answered."""

import math
from collections import deque
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from io import StringIO
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, note
from hypothesis import strategies as st

from tests.support.random_tests import examples
from valora_serve.memory.block_manager import Owner
from valora_serve.orchestrator.base import BasePolicy
from valora_serve.orchestrator.batching import BatchPlan
from valora_serve.orchestrator.cost_model import H200_7B
from valora_serve.orchestrator.decision import (
    DecisionTrace,
    PolicySettings,
    RequestView,
    StepLimits,
    View,
)
from valora_serve.orchestrator.registry import POLICIES, make_policy
from valora_serve.types import Mode
from valora_serve.workloads import simulator
from valora_serve.workloads.traces import BASE, Workload

PAGE = 4  # tokens


class Machine(simulator.Machine):
    """Simulates a world, and asserts every rule of the decisions on the way."""

    def __init__(self, policy, world, most=math.inf):
        self.world, self.most, self.decided = world, most, 0
        self.requests, self.gone = [], []
        self.story = deque(maxlen=30)  # the trace of the last decisions
        rows = sorted(world.requests, key=lambda row: row[1])
        names = sorted({adapter for adapter, *_ in rows if adapter})
        numbers = [names.index(row[0]) if row[0] else BASE for row in rows]
        arrival, prompt, output, limit = (np.array(one) for one in [*zip(*rows, strict=True)][1:])
        work = Workload(
            tuple(names), tuple(size(name)[0] for name in names), arrival, np.array(numbers),
            prompt, output, np.zeros_like(prompt), limit.astype(float),
        )  # fmt: skip
        unknown, (runs, tokens, pages, adapters, chunk) = np.full(len(rows), np.nan), world.limits
        shape = simulator.SimSettings(runs, tokens, chunk, adapters, pages, PAGE, 0, adapters + 1)
        cost = replace(H200_7B, load_seconds=(0.005 * world.load_steps, 0.0))
        trace = SimpleNamespace(write=self.check)
        super().__init__(work, policy, cost, shape, unknown, unknown.copy(), trace)
        for name in names:
            self.adapter_pages[name] = self.adapters[name].page_count = size(name)[1]

    def submit(self, index):
        super().submit(index)
        view = self.views[str(index)]
        view.pair, view.blocks = is_pair(view.adapter), self.world.blocks(view.prompt_left)
        view.client = self.world.clients[index] if self.world.clients else view.client
        self.requests.append(view)

    def remove(self, key):
        self.gone.append(int(key))
        return super().remove(key)

    def _view(self):
        view, able = super()._view(), self.world.switchable
        if any(map(is_pair, self.ranks)):
            able = {a for a in (view.resident if able is None else able) if not is_pair(a)}
        return replace(view, switchable=able)

    def run(self):
        for index, at in enumerate(self.arrivals):
            self.advance(at)
            self.submit(index)
        self.advance(math.inf)

    def check(self, view, d):
        self.decided += 1
        DecisionTrace(line := StringIO()).write(view, d)
        self.story.append(f"{line.getvalue().rstrip()}  {d.batch}")
        assert self.decided <= self.most and view.limits.free_pages >= 0
        assert len({*view.resident, *view.loading}) <= self.settings.slots
        assert all(reason for _, reason in d.abort)
        known = {r.id: r for r in (*view.running, *view.waiting)}
        limits = view.limits
        ids = [key for key, _ in d.batch]
        assert len(set(ids)) == len(ids) and set(ids) <= set(known)
        assert not set(ids) & (set(d.preempt) | {key for key, _ in d.abort})
        assert all(known[key].running for key in d.preempt)
        rows = [(known[key], tokens) for key, tokens in d.batch]
        kept = [r for r in view.running if r.id not in d.preempt]
        admitted = [r for r, _ in rows if not r.running]
        # Requests and tokens.
        assert len(kept) + len(admitted) <= limits.max_requests
        assert sum(tokens for _, tokens in rows) <= limits.max_tokens
        for request, tokens in rows:
            if request.prompt_left:
                blocks = [stop - start for start, stop in request.blocks]
                assert 1 <= tokens <= min(max(limits.chunk, *blocks, 0), request.prompt_left)
                end = request.kv_tokens + tokens
                assert not any(start < end < stop for start, stop in request.blocks)
            else:
                assert tokens == 1
        # Nothing is loaded for requests that are aborted.
        gone = {key for key, _ in d.abort}
        assert set(d.prefetch) <= {r.adapter for r in view.waiting if r.id not in gone}
        # Adapters: on the device, not too many, not loaded twice.
        adapters = {r.adapter for r, _ in rows} - {None}
        assert adapters <= set(view.resident)
        in_weights = {d.merged} - {None}
        assert len(adapters | in_weights) <= limits.max_adapters
        assert not set(d.prefetch) & (set(view.resident) | set(view.loading))
        assert len(set(d.prefetch)) == len(d.prefetch)
        # Pages: of rows, of adapters that now cannot be evicted, of adapters to be loaded.
        need = sum(r.pages for r, _ in rows)
        fresh = (adapters | in_weights) - {r.adapter for r in view.running} - {view.merged}
        need += sum(self.adapter_pages[a] for a in {*fresh, *d.prefetch})
        assert need <= limits.free_pages + sum(known[key].held for key in d.preempt)
        # Modes.
        assert d.mode in self.policy.modes
        assert (d.mode is Mode.UNMERGED) == (d.merged is None)
        assert d.merged is None or not any(r.pair for r, _ in rows)
        if d.mode is Mode.MERGED and rows:
            assert adapters == {d.merged} and all(r.adapter == d.merged for r, _ in rows)
        if d.mode is Mode.MIXTURE and rows:
            assert any(r.adapter != d.merged for r, _ in rows)
        if d.merged is not None and d.merged != view.merged:
            assert d.merged in view.resident
            assert view.switchable is None or d.merged in view.switchable


def request(i, adapter, arrival=0.0):
    rank, pages = (8, 2) if adapter else (0, 0)
    return RequestView(f"r{i}", adapter, rank, arrival, 5, 0, 3, pages=2, adapter_pages=pages)


@dataclass(frozen=True)
class World:
    """A queue and limits that each request alone fits into; as it is printed, it can be repeated.

    Attributes:
        requests: Adapter, arrival, prompt tokens, tokens to generate and latency limit of each.
        limits: Most requests, tokens, pages, adapters and prompt tokens of one request.
        load_steps: Steps that loading an adapter takes.
        switchable: Adapters that can be merged, None for all.
        block: Tokens that a step computes all or none of: those of each image in longer prompts.
        clients: Client of each request, in the order of arrival; none where adapters are charged.
    """

    requests: list[tuple[str | None, float, int, int, float | None]]
    limits: tuple[int, int, int, int, int]
    load_steps: int
    switchable: frozenset[str] | None = None
    block: int = 0
    clients: tuple[str, ...] = ()

    def blocks(self, prompt):
        size = self.block
        return [(at, at + size) for at in range(1, prompt - size + 1, size + 2)] if size else ()

    @property
    def bound(self):
        """Steps within which every request has ended, whatever the policy.

        One request at least makes progress in each step but those that only wait for an adapter,
        switch or preempt; and a request is preempted only for an older one, or for one that misses
        its latency limit otherwise, so that each costs the others their work at most once.
        """
        tokens = sum(prompt + output + 1 for _, _, prompt, output, _ in self.requests)
        return (len(self.requests) + 1) * (tokens + self.load_steps + 3)


def is_pair(adapter):
    """Return whether two adapters are meant, which only unmerged steps compute."""
    return adapter is not None and adapter.startswith("p")


def size(adapter):
    """Rank and pages of an adapter ``a0``, ``a1``, …: neighbours differ."""
    if adapter is None:
        return 0, 0
    number = int(adapter[1:]) % 3
    return 2 ** (3 + number), (1, 2, 9)[number]


@contextmanager
def explained(machine):
    """Print the last decisions if something is wrong with them."""
    try:
        yield
    except AssertionError:
        note("\n".join(["the last decisions:", *machine.story]))
        raise


@st.composite
def worlds(draw, limited=False):
    names = [f"{draw(st.sampled_from('aaap'))}{i}" for i in range(draw(st.integers(1, 6)))]
    requests = [
        (
            draw(st.sampled_from([None, *names, names[0], names[0]])),
            draw(st.sampled_from([0.0, 0.0, 0.005, 0.02, 0.5])),
            draw(st.integers(1, 30)),
            draw(st.sampled_from([0, 1, 2, 9, 25])),
            draw(st.sampled_from([None, None, 0.01, 0.1, 1.0])) if limited else None,
        )
        for _ in range(draw(st.integers(1, 14)))
    ]
    largest = max(-(-(prompt + output + 2) // PAGE) for _, _, prompt, output, _ in requests)
    most, block = draw(st.integers(1, 12)), draw(st.sampled_from([0, 0, 2, 7]))
    tokens = draw(st.integers(1, 40)) + (most - 1 + block if block else 0)
    pages = largest + 2 * 9 + draw(st.integers(0, 40))  # its adapter and a merged one
    limits = (most, tokens, pages, draw(st.integers(1, 5)), draw(st.integers(1, 30)))
    switchable = draw(st.sampled_from([None, frozenset(), frozenset(names[:1])]))
    return World(requests, limits, draw(st.integers(0, 3)), switchable, block)


ABORT = partial(PolicySettings, early_abort=True)
SETTINGS = {
    "default": PolicySettings(),
    "patient": PolicySettings(patience=math.inf),
    "impatient": PolicySettings(theta=0.0, hysteresis=0.0, patience=0.05),
    "shares": PolicySettings(fair=True, shares={"a0": 3.0, "a1": 0.5}, patience=0.5),
    "clusters": PolicySettings(theta=5.0, clusters=2, patience=0.5),
    "abort": ABORT(slo=1.0),
    "abort early": ABORT(slo=0.05),
    "abort soon": ABORT(slo=0.001),
}


PREEMPTED_FOR_EVER = World(
    [
        ("a1", 0.0, 2, 2, None), (None, 0.0, 1, 2, None), ("a1", 0.0, 1, 2, None),
        ("a1", 0.005, 1, 2, None), ("a0", 0.005, 2, 1, None), ("a1", 0.0, 1, 1, None),
        (None, 0.5, 2, 1, None), ("a1", 0.0, 2, 2, None), (None, 0.0, 1, 2, None),
        ("a1", 0.02, 2, 2, None), (None, 0.005, 2, 2, None), ("a0", 0.005, 1, 1, None),
        ("a1", 0.0, 1, 1, None),
    ],
    (1, 1, 30, 1, 1), 3,
)  # fmt: skip
"""Under `dlora` the older of the last two was merged for, and preempted the younger one; under
early abort the younger one was admitted first, and so on for ever."""


@pytest.mark.parametrize("name", POLICIES)
@example(PREEMPTED_FOR_EVER, "abort")
@examples(32, suppress_health_check=(HealthCheck.too_slow,))
@given(world=worlds(limited=True), chosen=st.sampled_from(sorted(SETTINGS)))
def test_limits_hold_and_everybody_is_served_or_aborted_once(name, world, chosen):
    machine = Machine(make_policy(name, H200_7B, SETTINGS[chosen]), world, world.bound)
    with explained(machine):
        machine.run()
        ended = np.flatnonzero(~np.isnan(machine.end)).tolist()
        assert sorted(ended + machine.gone) == [*range(len(world.requests))]
        assert SETTINGS[chosen].early_abort or not machine.gone
        # Nothing leaks.
        assert not machine.pool.count(Owner.KV) and not machine.adapters.wanted
        pins = {key: one.users for key, one in machine.adapters._entries.items() if one.users}
        assert pins == ({machine.merged: 1} if machine.merged else {})


SMALLEST = [
    World([(a, 0.0, p, o, None) for a, p, o in queue], (n, t, 40, adapters, chunk), load)
    for queue in (
        [("a0", 2, 2), ("a1", 2, 2)],
        [("a0", 1, 2), (None, 3, 9), ("a1", 2, 0), ("a0", 2, 25)],
        [("a2", 2, 9), ("a1", 1, 2), ("a0", 3, 1), ("a1", 2, 2), (None, 1, 1)],
    )
    for n, t, adapters, chunk, load in product((1, 2), (1, 2), (1, 2), (1, 2), (0, 1, 3))
]


@pytest.mark.parametrize("abort", [False, True])
@pytest.mark.parametrize("name", POLICIES)
def test_everybody_is_served_within_the_smallest_limits(name, abort):
    """All combinations of one or two requests, tokens, adapters and prompt tokens in a step."""
    for world in SMALLEST:
        for later in (0.0, 0.004):  # one after the other, or all at once
            queue = [(a, i * later, p, o, d) for i, (a, _, p, o, d) in enumerate(world.requests)]
            shifted = replace(world, requests=queue)
            policy = make_policy(name, H200_7B, PolicySettings(early_abort=abort, slo=1.0))
            machine = Machine(policy, shifted, shifted.bound)
            machine.run()
            assert np.isfinite(machine.end).sum() + len(machine.gone) == len(queue), shifted


class ByName(BasePolicy):
    """Orders as it likes: shares and patience are kept for it."""

    modes = frozenset({Mode.UNMERGED})

    def plan(self, view, waiting):
        ordered = sorted(waiting, key=lambda r: r.adapter or "")
        return BatchPlan(Mode.UNMERGED, None, view.running, ordered, "by name")


def policy_of(name, **settings):
    make = ByName if name == "by_name" else partial(make_policy, name)
    return make(H200_7B, PolicySettings(**settings))


@pytest.mark.parametrize(("most", "gap", "clusters"), [(64, 0.02, 0), (4, 0.01, 0), (4, 0.01, 1)])
@pytest.mark.parametrize("name", ["by_name", *(p for p in POLICIES if p != "dlora")])
def test_a_stream_of_the_popular_adapter_starves_nobody(name, most, gap, clusters):
    """One request for another adapter, then the popular one's keep coming for 20 s."""
    requests = [("a0", i * gap, 8, 20, None) for i in range(2000)] + [("a1", 0.1, 8, 20, None)]
    world = World(requests, (most, 256, 2000, 8, 256), 1)
    machine = Machine(policy_of(name, patience=1.0, clusters=clusters), world)
    rare = machine.workload.adapter.tolist().index(1)
    for index, at in enumerate(machine.arrivals):
        machine.advance(at)
        machine.submit(index)
        if not math.isnan(machine.end[rare]):
            break
    # Patience and its own 20 steps; merge-only first ends what came before.
    assert machine.end[rare] - 0.1 < 3.0


@pytest.mark.parametrize("name", POLICIES)
def test_idle(name):
    policy = make_policy(name, H200_7B)
    view = View(1.0, (), (), Mode.MERGED, "a", {"a"}, frozenset(), StepLimits(8, 64, 100, 4, 64))
    decision = policy.decide(view)
    assert decision.batch == () and decision.merged == "a" and decision.mode is Mode.MERGED


@pytest.mark.parametrize("name", POLICIES)
def test_a_loading_adapter_holds_up_only_its_own(name):
    policy = make_policy(name, H200_7B)
    waiting = (request(1, "slow"), request(2, "there", arrival=0.001), request(3, None, 0.002))
    limits = StepLimits(8, 64, 100, 4, 64)
    view = View(0.01, (), waiting, Mode.UNMERGED, None, {"there"}, {"slow"}, limits)
    decision = policy.decide(view)
    taken = {key for key, _ in decision.batch}
    assert taken and "r1" not in taken and decision.prefetch == ()
