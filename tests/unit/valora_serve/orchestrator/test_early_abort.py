"""Early abort: which requests are aborted, and the order under overload."""

from dataclasses import replace

from tests.support.policy_views import LIMITS, policy, running, taken, view, waiting


def test_only_requests_that_are_too_late_are_aborted():
    wait = [waiting(1, "a", arrival=0.0), waiting(2, "a", arrival=9.0)]
    decision = policy("slora", early_abort=True, slo=6.0).decide(view([], wait, now=10.0))
    assert [key for key, _ in decision.abort] == ["w1"]
    assert "6 s" in decision.abort[0][1]
    assert taken(decision) == {"w2"}


def test_the_newest_go_first_under_overload():
    limits = replace(LIMITS, max_requests=1)
    chooser = policy("slora", early_abort=True, slo=100.0)
    wait = []
    for second in range(5):  # ten come a second, none can be taken in
        wait += [waiting(100 * second + i, "a", arrival=second + i / 10) for i in range(10)]
        decision = chooser.decide(view([running(0, "a")], wait, now=second + 1.0, limits=limits))
    decision = chooser.decide(view([], wait, now=5.5, limits=limits))
    assert taken(decision) == {"w409"}
