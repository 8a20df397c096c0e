"""What all policies share: adapter clustering, the base model, the way out when nothing fits."""

from dataclasses import replace

import pytest

from tests.support.policy_views import LIMITS, policy, running, taken, view, waiting
from valora_serve.orchestrator.registry import POLICIES


@pytest.mark.parametrize("name", POLICIES)
def test_running_requests_continue_while_pages_are_reserved_for_a_starved_one(name):
    # A starved one waits for its adapter, and for more pages than are free, so that nobody is taken
    # in; the oldest of the others asks the bare model, and whoever runs does not.
    limits = replace(LIMITS, free_pages=10)
    wait = [waiting(1, "z", arrival=-1000.0), waiting(2, None, arrival=0.0)]
    run = [running(number, "a", arrival=0.5 + number / 10, served=0.9) for number in range(2)]
    decision = policy(name).decide(view(run, wait, limits=limits))
    assert taken(decision) >= {"r0", "r1"} - set(decision.preempt)
    assert decision.batch or decision.preempt


def test_clustering_prefers_adapters_in_the_batch():
    limits = replace(LIMITS, max_requests=4)
    run = [running(0, "a"), running(1, "b")]
    wait = [
        waiting(1, "c", arrival=0.1),
        waiting(2, "a", arrival=0.2),
        waiting(3, "b", arrival=0.3),
    ]
    plain = policy("slora").decide(view(run, wait, limits=limits))
    assert taken(plain) == {"r0", "r1", "w1", "w2"}
    clustered = policy("slora", clusters=2).decide(view(run, wait, limits=limits))
    assert taken(clustered) == {"r0", "r1", "w2", "w3"}
