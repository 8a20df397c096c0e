"""What a policy sees of a long queue, and when a request is due."""

from dataclasses import replace

import pytest

from tests.support.policy_views import LIMITS, policy, running, taken, view, waiting
from valora_serve.orchestrator.decision import PolicySettings, window


def test_a_long_queue_is_shown_by_its_ends_and_its_most_urgent():
    queue = [waiting(i, "a", arrival=float(i)) for i in range(100)]
    for number, limit in ((50, 9.0), (40, 30.0), (60, 1.0), (99, 2.0), (2, 500.0)):
        queue[number].latency_limit = limit
    assert window(queue, 100) is queue
    shown = [int(r.id[1:]) for r in window(queue, 12)]
    # Six of the oldest, the three newest, and of those with a limit 50, 60 and 40: due at 59 to 70.
    assert shown == [0, 1, 2, 3, 4, 5, 40, 50, 60, 97, 98, 99]


@pytest.mark.parametrize(
    ("deadline", "own", "domain", "due"),
    [(None, None, None, None), (7.0, None, None, 7.0), (7.0, 1.0, None, 3.0), (2.5, 1.0, None, 2.5),
     (None, 9.0, "plates", 6.0), (None, 1.0, "plates", 3.0), (5.0, None, "plates", 5.0),
     (None, None, "other", None)],
)  # fmt: skip
def test_the_earliest_limit_counts(deadline, own, domain, due):
    request = waiting(1, "a", arrival=2.0, deadline=deadline, latency_limit=own, domain=domain)
    assert PolicySettings(latency_limits={"plates": 4.0}).due(request) == due


def test_a_prompt_whose_adapter_has_no_place_beside_the_others_takes_turns():
    """Rows of one adapter decode in every step; the prompt of another is computed all the same."""
    limits = replace(LIMITS, max_adapters=1)
    chooser = policy("unmerge_only")
    prompt = running(9, "b", served=0.0)
    prompt.prompt_left = 100
    decoding = running(1, "a", served=0.0)
    seen = [
        taken(chooser.decide(view([decoding, prompt], now=n, limits=limits))) for n in (1.0, 2.0)
    ]
    assert sorted(map(sorted, seen)) == [["r1"], ["r9"]]


def test_nothing_is_preempted_for_a_younger_request():
    """Merging for the younger one would leave the older one out, which holds the only place."""
    limits = replace(LIMITS, max_requests=1)
    for arrival, preempted in ((0.1, ()), (0.9, ("r0",))):
        run = [running(0, "b", arrival=arrival)]
        chooser = policy("merge_only")
        decision = chooser.decide(view(run, [waiting(1, "a", arrival=0.5)], limits=limits))
        assert decision.preempt == preempted
        # Whoever others are preempted for is computed in the same step.
        assert taken(decision) == ({"w1"} if preempted else {"r0"})
