"""Filling the batch: limits, turns, preemption, prefetching and reservations."""

from dataclasses import replace

import pytest

from tests.support.policy_views import LIMITS, policy, running, taken, view, waiting
from valora_serve.orchestrator.registry import POLICIES


def test_more_adapters_running_than_a_step_takes_rotate():
    limits = replace(LIMITS, max_adapters=2)
    run = [running(i, "abcde"[i], arrival=0.0) for i in range(5)]
    chooser = policy("unmerge_only")
    seen = set()
    for step in range(3):
        decision = chooser.decide(view(run, now=1.0 + step, limits=limits))
        assert len(decision.batch) == 2 and decision.until == 0
        seen |= taken(decision)
    assert seen == {f"r{i}" for i in range(5)}


def test_the_youngest_is_preempted_if_pages_run_out():
    limits = replace(LIMITS, free_pages=1)
    run = [running(i, "a", arrival=i / 10, pages=1, held=6) for i in range(3)]
    decision = policy("slora").decide(view(run, [waiting(1, "a", arrival=0.9)], limits=limits))
    assert decision.preempt == ("r2",) and taken(decision) == {"r0", "r1"}


def test_adapters_are_prefetched_oldest_first_as_memory_allows():
    wait = [waiting(i, name, arrival=i / 10) for i, name in enumerate("axyz")]
    limits = replace(LIMITS, free_pages=3 + 16 + 2 * 16 + 1)
    decision = policy("slora").decide(view([], wait, resident="a", limits=limits))
    assert decision.prefetch == ("x", "y")


def test_pages_are_reserved_for_a_starved_request_without_its_adapter():
    """Younger requests whose adapter is there may not take the last pages for ever."""
    limits = replace(LIMITS, free_pages=30)
    late = [waiting(i, "a", arrival=50.0) for i in range(4)]
    for request in late:
        request.pages = 10
    starved = waiting(9, "x", arrival=0.0)
    decision = policy("unmerge_only", patience=10.0).decide(
        view([running(0, "a")], [starved, *late], now=50.1, resident="a", limits=limits)
    )
    assert decision.prefetch == ("x",)
    assert taken(decision) <= {"r0", "w0"}


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize(("free", "admitted"), [(12, set()), (13, {"w7"}), (27, {"w7", "w8"})])
def test_admission_leaves_a_page_for_every_running_request(name, free, admitted):
    # w7 takes 10 pages beside three that grow, w8 10 beside four.
    run = [running(i, "a") for i in range(3)]
    wait = [waiting(7, "a", arrival=0.1), waiting(8, "a", arrival=0.2)]
    for request in wait:
        request.pages = 10
    decision = policy(name).decide(
        view(run, wait, now=0.3, limits=replace(LIMITS, free_pages=free))
    )
    assert {key for key in taken(decision) if key.startswith("w")} <= admitted
    if name in ("slora", "unmerge_only"):
        assert taken(decision) == {"r0", "r1", "r2"} | admitted


def test_where_nothing_runs_a_request_may_take_the_last_page():
    wait = [waiting(0, None)]
    wait[0].pages = 10
    decision = policy("slora").decide(view([], wait, limits=replace(LIMITS, free_pages=10)))
    assert taken(decision) == {"w0"}
