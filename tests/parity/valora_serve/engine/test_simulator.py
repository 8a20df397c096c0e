"""The simulator against the engine: about the same requests, both take the same decisions."""

from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest

from tests.support.cases import others_slow
from tests.support.engine_reference import finish, make_engine, question
from valora_serve.orchestrator.decision import PolicySettings
from valora_serve.orchestrator.registry import POLICIES, make_policy
from valora_serve.workloads.simulator import SimSettings, simulate
from valora_serve.workloads.traces import Workload

NAMES, COUNT = ("attention", "mlp", "patterns", "projector"), 20


def record(policy):
    """Note the time, view and decision of each step, with adapters by their names."""
    decide, noted = policy.decide, []

    def name(key):
        return key and key.partition("#")[0]

    def noting(view):
        found = decide(view)
        running = [(r.id, r.prompt_left, r.kv_tokens, r.pages, r.held) for r in view.running]
        waiting = [(r.id, r.prompt_left, r.pages, r.adapter_pages) for r in view.waiting]
        if running or waiting:
            noted.append((
                view.now, running, waiting, view.limits.free_pages, view.mode, name(view.merged),
                {*map(name, view.resident)}, {*map(name, view.loading)}, found.mode,
                name(found.merged), found.batch, [*map(name, found.prefetch)], found.preempt,
            ))  # fmt: skip
        return found

    policy.decide = noting
    return noted


@pytest.mark.parametrize(
    ("policy", "seed"),
    others_slow([("cost", 3), ("merge_only", 2), ("slora", 3)], product(POLICIES, [1, 2, 3])),
)
def test_decisions(base, adapters, monkeypatch, policy, seed):
    rng, shape = np.random.default_rng(seed), {"max_requests": 5, "max_tokens": 128, "chunk": 40}
    engine = make_engine(
        base, {name: adapters[name] for name in NAMES}, policy=policy, pages=40, slots=3,
        policy_settings=PolicySettings(patience=0.2), prefix_cache=False, **shape,
        share_by="adapter" if POLICIES[policy].shares and seed == 3 else "none",
    )  # fmt: skip
    # Loads begin behind a switch, whose time the engine's clock does not show.
    cost = replace(engine.cost, merge_seconds=(0.0, 0.0), unmerge_seconds=0.0)
    engine.use(cost)
    arrival = np.sort(rng.integers(0, 12, COUNT)) / 50  # several at once
    prompt, output = (rng.choice(sizes, COUNT).astype(np.int32)
                      for sizes in ([1, 7, 16, 33, 90, 180], [1, 2, 8, 30, 60]))  # fmt: skip
    chosen = rng.integers(-1, len(NAMES), COUNT).astype(np.int32)
    ranks = tuple(r for name in NAMES for k, r in engine.registry.ranks.items() if name in k)
    none = np.zeros_like(prompt), np.full(COUNT, np.nan)
    work = Workload(NAMES, ranks, arrival, chosen, prompt, output, *none)
    rules = make_policy(policy, cost, engine.settings.deciding)
    expected = record(rules)
    sizes = SimSettings(pages=39, slots=3, rank_pages=0.43, **shape)
    trace = SimpleNamespace(write=lambda *_: None)  # with one, every step is decided
    report = simulate(work, rules, cost, sizes, trace)

    clock = SimpleNamespace(now=0.0, free=0.0)
    for module in ("engine", "requests", "sequence"):
        timed = SimpleNamespace(monotonic=lambda: clock.now)
        monkeypatch.setattr(f"valora_serve.engine.{module}.time", timed)
    copy, found, coming = engine.adapters.copy, record(engine.policy), [*range(COUNT)]

    def copy_later(entry):
        copy(entry)
        clock.free = end = max(clock.now, clock.free) + cost.load(entry.packed.rank)
        return SimpleNamespace(query=lambda: end <= clock.now)

    engine.adapters.copy = copy_later
    for wanted in expected:
        clock.now = wanted[0]
        while coming and arrival[coming[0]] <= clock.now:
            index = coming.pop(0)
            asked = question(str(index), work.name(index), tokens=int(output[index]))
            asked = replace(asked, token_ids=rng.integers(10, 1500, prompt[index]).tolist())
            engine.add(engine.prepare(asked)).arrival = arrival[index]
        engine.step()
        assert found[-1] == wanted
    assert not finish(engine) and len(found) == len(expected)
    assert (report.finished, report.preempted) == (COUNT, engine.stats().preemptions)
