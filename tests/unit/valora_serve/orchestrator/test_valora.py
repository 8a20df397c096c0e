"""Valora: what Algorithm 1 decides in situations that can be worked out by hand."""

from dataclasses import replace

import pytest

from tests.support.policy_views import COSTS, policy, running, taken, view, waiting
from valora_serve.orchestrator.registry import make_policy
from valora_serve.types import Mode


def test_the_adapter_of_most_requests_is_merged():
    run = [running(i, "a") for i in range(5)]
    decision = policy("valora").decide(view(run))
    assert (decision.mode, decision.merged) == (Mode.MERGED, "a")
    assert len(decision.batch) == 5


def test_running_requests_of_others_are_never_paused():
    run = [running(i, "a", left=200) for i in range(5)] + [running(9, "b"), running(10, None)]
    decision = policy("valora").decide(view(run))
    assert (decision.mode, decision.merged) == (Mode.MIXTURE, "a")
    assert len(decision.batch) == 7


def test_unmerged_where_second_terms_cost_more_than_they_save():
    run = [running(i, "a", left=200) for i in range(5)] + [running(9, "b"), running(10, None)]
    dear = replace(COSTS, decode_seconds=(*COSTS.decode_seconds[:-1], 0.1e-3))
    decision = make_policy("valora", dear).decide(view(run))
    assert (decision.mode, decision.merged) == (Mode.UNMERGED, None)
    assert len(decision.batch) == 7
    # Long prompts of the adapter in the weights have no term at all.
    coming = [waiting(i, "a", prompt=4000) for i in range(20, 24)]
    cheap = replace(
        COSTS,
        prefill_seconds=(*COSTS.prefill_seconds[:-2], 4e-6, 0.0),
        decode_seconds=dear.decode_seconds,
    )
    decision = make_policy("valora", cheap).decide(view(run, coming))
    assert (decision.mode, decision.merged) == (Mode.MIXTURE, "a")


def test_others_are_kept_back_up_to_theta_only():
    run = [running(i, "a") for i in range(5)]
    other = waiting(1, "b", arrival=1.0)
    chooser = policy("valora", theta=0.1)
    decision = chooser.decide(view(run, [other], now=1.01, merged="a"))
    assert decision.mode is Mode.MERGED and "w1" not in taken(decision)
    # Credit counts the step, too, so θ is crossed a little before 0.1 s of waiting.
    assert 1.08 < decision.until < 1.1
    decision = chooser.decide(view(run, [other], now=1.1, merged="a"))
    assert decision.mode is Mode.MIXTURE and "w1" in taken(decision)


def test_unmerged_when_more_than_half_starve():
    run = [running(i, "a") for i in range(4)]
    wait = [waiting(i, "bcdef"[i], arrival=0.0) for i in range(5)]
    decision = policy("valora", hysteresis=0.4).decide(view(run, wait, now=5.0, merged="a"))
    assert (decision.mode, decision.merged) == (Mode.UNMERGED, None)
    assert len(decision.batch) == 9


def test_no_merge_for_a_request_about_to_end():
    assert policy("valora").decide(view([running(0, "a", left=1)])).merged is None
    assert policy("valora").decide(view([running(0, "a", left=100)])).merged == "a"


def test_hysteresis():
    """At 6 of 11 a new adapter is not merged, but one in the weights stays at 5 of 10."""
    even = [running(i, "a") for i in range(6)] + [running(i, "b") for i in range(10, 15)]
    assert policy("valora", hysteresis=0.1).decide(view(even, merged="b")).merged != "a"
    half = [running(i, "a") for i in range(5)] + [
        running(i, "bcdef"[i - 10]) for i in range(10, 15)
    ]
    decision = policy("valora", hysteresis=0.1).decide(view(half, merged="a"))
    assert decision.merged == "a"


def test_ties_go_to_the_merged_adapter():
    run = [running(i, "a" if i % 2 else "b") for i in range(8)]
    for merged in "ab":
        assert policy("valora", hysteresis=0.2).decide(view(run, merged=merged)).merged == merged


def test_credit_is_waiting_plus_execution_plus_switch():
    chooser = policy("valora", theta=10.0)
    other = waiting(1, "b", arrival=0.75)
    chooser.decide(view([running(i, "a") for i in range(5)], [other], now=1.0))
    with_switch = other.credit
    chooser.decide(view([running(i, "a") for i in range(5)], [other], now=1.0, merged="a"))
    without = other.credit
    assert with_switch - without == pytest.approx(COSTS.switch(None, "a", 64))
    assert 0.25 + 0.004 < without < 0.25 + 0.01


def test_running_requests_do_not_starve_while_decisions_are_repeated():
    """Skipped decisions do not make running requests look as if they had starved."""
    chooser = policy("valora", theta=0.05)
    run = [running(i, "a") for i in range(6)]
    decision = chooser.decide(view(run, now=1.0, merged="a"))
    assert decision.until > 1e6
    chooser.decide(view(run, now=3.0, merged="a"))
    assert all(r.served == 3.0 for r in run)
