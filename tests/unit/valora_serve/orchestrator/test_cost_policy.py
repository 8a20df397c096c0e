"""`cost`: its decisions in situations that can be worked out by hand."""

from dataclasses import replace

import pytest

from tests.support.policy_views import LIMITS, policy, running, taken, view, waiting
from valora_serve.orchestrator.cost_model import H200_7B
from valora_serve.orchestrator.registry import make_policy
from valora_serve.workloads import traces
from valora_serve.workloads.simulator import SimSettings, simulate


def test_merges_when_the_next_steps_pay_for_the_switch():
    long = [running(i, "a", left=100) for i in range(4)]
    short = [running(i, "a", left=1) for i in range(4)]
    assert policy("cost").decide(view(long)).merged == "a"
    assert policy("cost").decide(view(short)).merged is None


def test_the_shortest_go_first_when_not_all_fit():
    limits = replace(LIMITS, max_requests=2)
    wait = [waiting(1, "a", output=400), waiting(2, "a", output=5), waiting(3, "b", output=90)]
    decision = policy("cost").decide(view([], wait, now=0.1, limits=limits))
    assert taken(decision) == {"w2", "w3"}


@pytest.mark.parametrize("answer_limit", [None, 512])
def test_the_throughput_at_saturation_is_that_of_first_come_first_served(answer_limit):
    work = traces.at_once(150, adapters=5, skew=None, ranks=(8, 16, 64))
    machine = SimSettings(answer_limit=answer_limit)
    found = {
        name: simulate(work, make_policy(name, H200_7B), H200_7B, machine).throughput
        for name in ("cost", "slora", "valora")
    }
    assert found["cost"] >= 0.98 * max(found.values())


def test_requests_that_waited_for_patience_go_first():
    limits = replace(LIMITS, max_requests=1)
    wait = [waiting(1, "a", output=400), waiting(2, "a", arrival=29.9, output=5)]
    decision = policy("cost", patience=20.0).decide(view([], wait, now=30.0, limits=limits))
    assert taken(decision) == {"w1"}


def test_urgent_requests_go_before_short_ones():
    limits = replace(LIMITS, max_requests=1)
    wait = [waiting(1, "a", output=100, latency_limit=1.0), waiting(2, "a", output=5)]
    step = 0.006
    now = 1.0 - 100 * step
    decision = policy("cost").decide(view([], wait, now=now, limits=limits))
    assert taken(decision) == {"w1"}
    early = policy("cost").decide(view([], wait, now=0.0, limits=limits))
    assert taken(early) == {"w2"}


def test_prompts_are_collected_only_while_others_decode():
    """With many decoding and arrivals every 10 ms, one prompt waits for the next; alone not."""
    chooser = policy("cost")
    run = [running(i, "a", left=100) for i in range(60)]
    limits = replace(LIMITS, max_requests=100)
    for i in range(40):  # learns the rate
        now = i * 0.01
        new = [waiting(i, "a", arrival=now)]
        chooser.decide(view(run, new, now=now, limits=limits, arrived=[now]))
    late = waiting(99, "a", arrival=0.4)
    more = {"merged": "a", "limits": limits, "arrived": [0.4]}
    held = chooser.decide(view(run, [late], now=0.4, **more))
    assert "w99" not in taken(held) and len(held.batch) == 60 and held.until > 0.4
    freed = chooser.decide(view(run, [late], now=held.until + 1e-6, merged="a", limits=limits))
    assert "w99" in taken(freed)
    assert "w99" in taken(chooser.decide(view([], [late], now=0.4, merged="a")))


def test_prompts_stay_within_the_captured_sizes():
    """Four prompts of 256 fit into 1,024 rows, but not beside 60 that decode."""
    limits = replace(LIMITS, max_requests=100, max_tokens=8192, chunk=8192, free_pages=10**4)
    run = [running(i, "a", left=100) for i in range(60)]
    wait = [waiting(i, "b", arrival=0.1 * i, prompt=256, output=100) for i in range(4)]
    tokens = {}
    for most in (1024, 1280):
        costs = replace(H200_7B, captured_rows=(most,), uncaptured_seconds=0.08)
        decision = make_policy("cost", costs).decide(view(run, wait, limits=limits))
        tokens[most] = sum(count for _, count in decision.batch)
    assert tokens[1280] == 60 + 4 * 256
    assert 60 < tokens[1024] <= 1024


def test_prompts_are_cut_to_fill_a_graph():
    """128 prompt tokens beside 8 rows would be computed as 192 rows."""
    limits = replace(LIMITS, max_requests=100, max_tokens=8192, chunk=8192, free_pages=10**4)
    run = [running(i, "a", left=100) for i in range(8)]
    costs = replace(H200_7B, captured_rows=(64, 128, 192, 2048), uncaptured_seconds=0.06)
    late = [waiting(i, "b", prompt=300, output=100) for i in range(2)]
    step = make_policy("cost", costs).decide(view(run, late, now=5.0, limits=limits))
    assert sum(count for _, count in step.batch) in costs.captured_rows[:3]


@pytest.mark.parametrize("name", ["cost", "valora"])
class TestLatencyLimits:
    """What `cost` and `valora` do so that requests with a latency limit are answered in time."""

    def test_the_one_with_the_earliest_due_time_goes_first(self, name):
        limits = replace(LIMITS, max_requests=1)
        wait = [waiting(1, "a", output=5), waiting(2, "a", output=5, deadline=1.06),
                waiting(3, "b", output=5, latency_limit=1.04)]  # fmt: skip
        decision = policy(name).decide(view([], wait, now=1.0, limits=limits))
        assert taken(decision) == {"w3"}

    def test_many_with_one_due_time_start_before_it_is_late(self, name):
        """Each takes 0.1 s and is due in 1 s; all twenty, one after the other, take 2 s."""
        limits = replace(LIMITS, max_requests=1)
        wait = [waiting(50, "a", output=2)]
        wait += [waiting(i, "a", output=20, latency_limit=2.0) for i in range(20)]
        assert taken(policy(name).decide(view([], wait, now=1.0, limits=limits))) == {"w0"}

    def test_who_cannot_be_in_time_takes_no_precedence(self, name):
        limits = replace(LIMITS, max_requests=1)
        wait = [waiting(1, "a", output=5), waiting(2, "a", output=5, latency_limit=1.001)]
        assert taken(policy(name).decide(view([], wait, now=1.0, limits=limits))) == {"w1"}

    def test_an_answer_of_unknown_length_is_not_given_up(self, name):
        """It may have 4,000 tokens, which takes too long, but most answers are shorter."""
        limits = replace(LIMITS, max_requests=1)
        wait = [waiting(1, "a", output=5), waiting(2, "a", output=4000, latency_limit=2.0)]
        assert taken(policy(name).decide(view([], wait, now=1.0, limits=limits))) == {"w2"}

    def test_the_youngest_without_a_limit_makes_room(self, name):
        limits = replace(LIMITS, max_requests=3)
        run = [running(0, "a", arrival=0.1), running(1, "b", arrival=0.9),
               running(2, "b", arrival=0.95, latency_limit=50.0)]  # fmt: skip
        urgent = waiting(7, "a", arrival=0.99, output=0, latency_limit=0.03)
        free = waiting(8, "a", arrival=0.98, output=0)
        decision = policy(name).decide(view(run, [free, urgent], limits=limits))
        assert decision.preempt == ("r1",)
        assert taken(decision) == {"r0", "r2", "w7"}
        # Who has waited for long is not preempted.
        patient = policy(name, patience=0.01).decide(view(run, [free, urgent], limits=limits))
        assert patient.preempt == () and "w7" not in taken(patient)
        # Nor is anybody while there is room.
        assert policy(name).decide(view(run, [free, urgent])).preempt == ()

    def test_its_adapter_is_loaded_first(self, name):
        limits = replace(LIMITS, free_pages=3 + 16)
        wait = [waiting(1, "x"), waiting(2, "y", arrival=0.99, output=0, latency_limit=0.03)]
        decision = policy(name).decide(view([], wait, limits=limits, resident=""))
        assert decision.prefetch == ("y",)

    def test_others_are_preempted_first_if_pages_run_out(self, name):
        limits = replace(LIMITS, free_pages=1)
        run = [running(0, "a", arrival=0.1, pages=1), running(1, "a", arrival=0.2, pages=1),
               running(2, "a", arrival=0.3, pages=1, deadline=9.0)]  # fmt: skip
        decision = policy(name).decide(view(run, limits=limits))
        assert decision.preempt == ("r1",)
