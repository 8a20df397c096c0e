"""Any policy, any queue: limits hold, modes fit their batches, and every request is answered.

`Machine` is a second, plain implementation of what the engine does with a decision; it shares no
code with the simulator.
"""

import math
from collections import deque
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from io import StringIO
from itertools import product

import pytest
from hypothesis import HealthCheck, example, given, note
from hypothesis import strategies as st

from tests.support.random_tests import examples
from valora_serve.orchestrator.base import BasePolicy
from valora_serve.orchestrator.batching import BatchPlan
from valora_serve.orchestrator.cost_model import H200_7B, step_shape
from valora_serve.orchestrator.decision import (
    DecisionTrace,
    PolicySettings,
    RequestView,
    StepLimits,
    View,
)
from valora_serve.orchestrator.registry import POLICIES, make_policy
from valora_serve.types import Mode

PAGE = 4  # tokens


class Machine:
    """Carries decisions out and asserts every rule on the way."""

    def __init__(self, policy, requests, limits, *, load_steps=1, switchable=None):
        self.policy, self.limits, self.load_steps = policy, limits, load_steps
        self.switchable = switchable
        self.coming = sorted(requests, key=lambda r: r.arrival)
        self.running, self.waiting = [], []
        self.resident, self.loading = [], {}  # resident: least recently used first
        self.mode, self.merged, self.now = Mode.UNMERGED, None, 0.0
        self.ranks = {r.adapter: r.rank for r in requests if r.adapter}
        self.adapter_pages = {r.adapter: r.adapter_pages for r in requests if r.adapter}
        self.ended, self.aborted, self.steps = {}, {}, 0
        self.arrived = []
        self.story = deque(maxlen=30)  # the trace of the last decisions

    def pinned_adapters(self):
        names = {r.adapter for r in self.running} | {self.merged} | set(self.loading)
        return names - {None}

    def pinned(self):
        held = sum(r.held for r in self.running)
        return held + sum(self.adapter_pages[a] for a in self.pinned_adapters())

    def view(self):
        limits = replace(self.limits, free_pages=self.limits.free_pages - self.pinned())
        assert limits.free_pages >= 0
        arrived, self.arrived = self.arrived, []
        able = self.switchable
        if any(is_pair(adapter) for adapter in self.ranks):
            able = frozenset(self.resident if able is None else able)
            able = frozenset(adapter for adapter in able if not is_pair(adapter))
        return View(
            self.now, tuple(self.running), tuple(self.waiting), self.mode, self.merged,
            frozenset(self.resident), frozenset(self.loading), limits, able, arrived,
        )  # fmt: skip

    def step(self):
        while self.coming and self.coming[0].arrival <= self.now:
            self.waiting.append(self.coming.pop(0))
            self.arrived.append(self.waiting[-1].arrival)
        for adapter in [a for a, left in self.loading.items() if left <= 0]:
            del self.loading[adapter]
            self.resident.append(adapter)
        for adapter in self.loading:
            self.loading[adapter] -= 1
        view = self.view()
        before = {r.id: r.prompt_left for r in (*self.running, *self.waiting)}
        decision = self.policy.decide(view)
        line = StringIO()
        DecisionTrace(line).write(view, decision)
        batch = ", ".join(f"{k} {n} of {before[k] or 1}" for k, n in decision.batch)
        self.story.append(f"{line.getvalue().rstrip()}  [{batch}]")
        self.check(view, decision)
        self.apply(decision)
        self.steps += 1
        return decision

    def check(self, view, d):
        known = {r.id: r for r in (*view.running, *view.waiting)}
        limits = view.limits
        ids = [key for key, _ in d.batch]
        assert len(set(ids)) == len(ids) and set(ids) <= set(known)
        assert not set(ids) & (set(d.preempt) | {key for key, _ in d.abort})
        assert all(known[key].running for key in d.preempt)
        rows = [(known[key], tokens) for key, tokens in d.batch]
        preempted = set(d.preempt)
        kept = [r for r in view.running if r.id not in preempted]
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
        fresh = (adapters | in_weights) - self.pinned_adapters()
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

    def apply(self, d):
        for key, reason in d.abort:
            assert reason
            self.aborted[key] = reason
            self.waiting = [r for r in self.waiting if r.id != key]
            self.running = [r for r in self.running if r.id != key]
            self.policy.finished(key)
        for key in d.preempt:
            request = next(r for r in self.running if r.id == key)
            self.running.remove(request)
            request.running, request.held = False, 0
            request.prompt_left += request.kv_tokens
            request.kv_tokens = 0
            request.pages = -(-(request.prompt_left + 1) // PAGE)
            self.waiting.append(request)
            self.waiting.sort(key=lambda r: r.arrival)
        rows = [(r, n) for key, n in d.batch for r in (*self.running, *self.waiting) if r.id == key]
        shape = step_shape(d.mode, d.merged, rows, self.ranks)
        self.now += H200_7B.step(shape) or 0.01
        self.mode, self.merged = d.mode, d.merged
        for request, _ in rows:
            if not request.running:
                self.waiting.remove(request)
                self.running.append(request)
                request.running = True
            request.held += request.pages
            request.pages = 0
        for adapter in d.prefetch:
            self.loading[adapter] = self.load_steps
        self.evict()
        for request, tokens in rows:
            if request.prompt_left:
                request.prompt_left -= tokens
                request.kv_tokens += tokens
                if not request.prompt_left:
                    request.output_left = max(0, request.output_left - 1)
            else:
                request.kv_tokens += 1
                request.output_left -= 1
            if not request.prompt_left and request.output_left <= 0:
                self.running.remove(request)
                self.ended[request.id] = self.now
                self.policy.finished(request.id)
            else:
                full = request.kv_tokens >= request.held * PAGE
                request.pages = int(full and not request.prompt_left)

    def evict(self):
        """Idle adapters go while there are too few pages."""
        held = sum(r.held for r in self.running)
        wanted = {r.adapter for r in self.waiting}
        idle = [a for a in self.resident if a not in self.pinned_adapters()]
        for adapter in sorted(idle, key=lambda a: a in wanted):
            used = {*self.resident, *self.loading}
            if held + sum(self.adapter_pages[a] for a in used) <= self.limits.free_pages:
                break
            self.resident.remove(adapter)

    def run(self, most):
        while self.coming or self.running or self.waiting:
            if not self.running and not self.waiting:
                self.now = max(self.now, self.coming[0].arrival)
            self.step()
            assert self.steps <= most, f"{len(self.running)} run, {len(self.waiting)} wait"


def request(i, adapter, arrival=0.0, prompt=5, output=3, rank=8, adapter_pages=2, **more):
    rank, adapter_pages = (rank, adapter_pages) if adapter else (0, 0)
    more |= {"output_left": output, "pages": -(-(prompt + 1) // PAGE)}
    return RequestView(f"r{i}", adapter, rank, arrival, prompt, adapter_pages=adapter_pages, **more)


@dataclass(frozen=True)
class World:
    """A queue and limits that each request alone fits into; as it is printed, it can be repeated.

    Attributes:
        requests: Adapter, arrival, prompt tokens, tokens to generate and latency limit of each.
        limits: Most requests, tokens, pages, adapters and prompt tokens of one request.
        load_steps: Steps that loading an adapter takes.
        switchable: Adapters that can be merged, None for all.
        block: Tokens that a step computes all or none of: those of each image in longer prompts.
    """

    requests: list[tuple[str | None, float, int, int, float | None]]
    limits: tuple[int, int, int, int, int]
    load_steps: int
    switchable: frozenset[str] | None = None
    block: int = 0

    def blocks(self, prompt):
        size = self.block
        return [(at, at + size) for at in range(1, prompt - size + 1, size + 2)] if size else ()

    def views(self):
        found = []
        for i, (adapter, arrival, prompt, output, limit) in enumerate(self.requests):
            more = {"latency_limit": limit, "client": adapter, "pair": is_pair(adapter)}
            sizes = (arrival, prompt, output, *size(adapter))
            found.append(request(i, adapter, *sizes, blocks=self.blocks(prompt), **more))
        return found

    def machine(self, policy):
        return Machine(
            policy, self.views(), StepLimits(*self.limits), load_steps=self.load_steps,
            switchable=self.switchable,
        )  # fmt: skip

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
SLOW = (HealthCheck.too_slow,)


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
@examples(32, suppress_health_check=SLOW)
@given(world=worlds(limited=True), chosen=st.sampled_from(sorted(SETTINGS)))
def test_limits_hold_and_everybody_is_served_or_aborted_once(name, world, chosen):
    machine = world.machine(make_policy(name, H200_7B, SETTINGS[chosen]))
    with explained(machine):
        machine.run(most=world.bound)
        assert {*machine.ended, *machine.aborted} == {r.id for r in world.views()}
        assert not set(machine.ended) & set(machine.aborted)
        assert SETTINGS[chosen].early_abort or not machine.aborted
        # Nothing leaks; what was loaded for the aborted may still be on its way.
        left = {machine.merged, *(machine.loading if machine.aborted else ())} - {None}
        assert machine.pinned() == sum(machine.adapter_pages[adapter] for adapter in left)


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
            machine = shifted.machine(policy)
            machine.run(most=shifted.bound)
            assert len(machine.ended) + len(machine.aborted) == len(queue), shifted


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
    policy = policy_of(name, patience=1.0, clusters=clusters)
    popular = [request(i, "hot", i * gap, prompt=8, output=20) for i in range(2000)]
    rare = request(5000, "rare", 0.1, prompt=8, output=20)
    limits = StepLimits(most, 256, 2000, 8, 256)
    machine = Machine(policy, [*popular, rare], limits)
    while rare.id not in machine.ended:
        machine.step()
    # Patience and its own 20 steps; merge-only first ends what came before.
    assert machine.ended[rare.id] - rare.arrival < 3.0


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
