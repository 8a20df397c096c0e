"""Algorithm 1, as printed and as published: each branch, worked out by hand."""

from dataclasses import replace
from functools import partial

from tests.support import policy_views
from tests.support.policy_views import COSTS, view, waiting
from valora_serve.orchestrator.decision import PolicySettings
from valora_serve.orchestrator.registry import make_policy
from valora_serve.types import Mode

running = partial(policy_views.running, served=0.99)
"""A request that was computed 10 ms ago."""


def decide(run, coming=(), *, most=8, theta=0.5, policy="algorithm1", **more):
    found = view(run, coming, **more)
    found = replace(found, limits=replace(found.limits, max_requests=most))
    return make_policy(policy, COSTS, PolicySettings(theta=theta)).decide(found)


def test_merged_while_the_adapter_has_more_than_half_of_the_largest_batch():
    run = [running(i, "a") for i in range(5)] + [running(9, "b")]
    decision = decide(run)
    assert (decision.mode, decision.merged) == (Mode.MERGED, "a")
    assert {key for key, _ in decision.batch} == {f"r{i}" for i in range(5)}  # b pauses
    # MaxBS, not the number of requests, is what the share refers to; 4 of 8 are no more than half.
    assert decide(run[1:]).mode is Mode.UNMERGED
    assert len(decide(run[1:]).batch) == 5


def test_mixture_for_those_that_starve():
    run = [running(i, "a") for i in range(5)] + [replace(running(9, "b"), served=-1.0)]
    decision = decide(run)
    assert (decision.mode, decision.merged) == (Mode.MIXTURE, "a")
    assert len(decision.batch) == 6
    assert "starving: 1" in decision.reason


def test_unmerged_when_more_than_half_of_the_largest_batch_starves():
    run = [replace(running(i, "ab"[i % 2]), served=-1.0) for i in range(5)]
    run += [running(10 + i, "a") for i in range(3)]
    decision = decide(run)
    assert (decision.mode, decision.merged) == (Mode.UNMERGED, None)
    assert len(decision.batch) == 8


def test_the_step_and_the_switch_count_as_waiting():
    run = [running(i, "a") for i in range(5)]
    assert decide(run).mode is Mode.MERGED
    decision = decide(run, theta=1e-6)  # all starve at once, more than half of the batch
    assert decision.mode is Mode.UNMERGED


def test_an_adapter_that_is_not_on_the_device_is_not_merged():
    coming = [waiting(i, "z") for i in range(6)]
    decision = decide([running(20, "a")], coming)
    assert decision.mode is Mode.UNMERGED
    assert "z" in decision.prefetch


def published(run, coming, **more):
    decision = decide(run, coming, policy="algorithm1_published", **more)
    return decision.mode, decision.merged, {key for key, _ in decision.batch}


def test_the_published_scheduler_looks_at_waiting_requests_only():
    coming = [waiting(i, "ab"[i == 2], arrival=0.9) for i in range(3)]  # two of three are of a
    run = [running(20 + i, "b") for i in range(4)]
    going = {one.id for one in run}
    mode, merged, batch = published(run, coming)
    assert (mode, merged) == (Mode.MIXTURE, "a")  # running requests go on, that of b waits
    assert batch == going | {"w0", "w1"}
    starving = [*coming[:2], waiting(2, "b", arrival=0.0)]
    assert published(run, starving)[1:] == ("a", going | {"w0", "w1", "w2"})
    assert published(run, [waiting(i, "a", arrival=0.0) for i in range(3)])[0] is Mode.UNMERGED
    assert published(run, coming[1:])[0] is Mode.UNMERGED  # one of two is no more than half
    assert published(run, coming, most=4)[2] == going  # nobody may join: nothing is switched
    assert published([running(20, "a")], [], merged="a")[:2] == (Mode.MERGED, "a")
