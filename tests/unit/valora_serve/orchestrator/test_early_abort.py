"""Early abort: which requests are aborted, and the order under overload."""

from dataclasses import replace

from tests.support.policy_views import LIMITS, policy, running, taken, view, waiting


def test_only_requests_that_are_too_late_are_aborted():
    wait = [waiting(1, "a", arrival=0.0), waiting(2, "a", arrival=9.0)]
    decision = policy("slora", early_abort=True, slo=6.0).decide(view([], wait, now=10.0))
    assert [key for key, _ in decision.abort] == ["w1"]
    assert "6 s" in decision.abort[0][1]
    assert taken(decision) == {"w2"}


def overloaded(chooser, **more):
    """Let ten requests of `a` come a second for five seconds, none of which can be taken in."""
    limits = replace(LIMITS, max_requests=1)
    wait = []
    for second in range(5):
        new = [waiting(100 * second + i, "a", arrival=second + i / 10) for i in range(10)]
        wait += new
        now = view(
            [running(0, "a")], wait, now=second + 1.0, limits=limits,
            arrived=[r.arrival for r in new], **more,
        )  # fmt: skip
        chooser.decide(now)
    return wait


def test_the_newest_go_first_under_overload():
    chooser = policy("slora", early_abort=True, slo=100.0)
    wait = overloaded(chooser)
    limits = replace(LIMITS, max_requests=1)
    decision = chooser.decide(view([], wait, now=5.5, limits=limits))
    assert taken(decision) == {"w409"}


def test_the_adapter_of_the_newest_is_loaded_first_under_overload():
    """There is room for one adapter beside the one that runs."""
    for order, wanted in (("overload", ("z",)), ("calm", ("p",))):
        chooser = policy("slora", early_abort=True, slo=100.0)
        wait = overloaded(chooser) if order == "overload" else []
        wait = [waiting(900, "p", arrival=-0.5), *wait, waiting(901, "z", arrival=5.2)]
        limits = replace(LIMITS, max_requests=1, free_pages=16 + 1)
        now = view([running(0, "a")], wait, now=5.5, limits=limits, resident="a", arrived=[5.2])
        assert chooser.decide(now).prefetch == wanted, order


def test_preempted_requests_go_before_the_newest():
    chooser = policy("slora", early_abort=True, slo=1.0)
    wait = overloaded(chooser)
    again = waiting(800, "a", arrival=-3.0, served=4.0)
    limits = replace(LIMITS, max_requests=1)
    decision = chooser.decide(view([], [again, *wait], now=5.5, limits=limits))
    assert taken(decision) == {"w800"} and "w800" not in dict(decision.abort)


def test_nothing_is_loaded_or_reserved_for_aborted_requests():
    late = [waiting(1, "x", arrival=0.0), waiting(2, "y", arrival=9.0)]
    chooser = policy("slora", early_abort=True, slo=6.0)
    decision = chooser.decide(view([], late, now=10.0, resident=""))
    assert [key for key, _ in decision.abort] == ["w1"] and decision.prefetch == ("y",)
    # Nor does it keep pages from the others, although it has starved.
    limits = replace(LIMITS, free_pages=20)
    late[1] = waiting(2, "a", arrival=9.0)
    chooser = policy("slora", early_abort=True, slo=6.0, patience=5.0)
    decision = chooser.decide(view([], late, now=10.0, resident="a", limits=limits))
    assert taken(decision) == {"w2"} and decision.prefetch == ()
    alone = policy("slora", early_abort=True, slo=6.0).decide(view([], late[:1], now=10.0))
    assert (alone.batch, alone.prefetch, len(alone.abort)) == ((), (), 1)


def test_arrivals_count_that_the_view_leaves_out():
    """Of 100 a second the view shows the 10 oldest; 20 a second are taken in."""
    for told, first in ((range(100), "w9"), (range(10), "w0")):
        chooser = policy("slora", early_abort=True, slo=100.0)
        shown = [waiting(i, "a", arrival=i / 1000, output=1) for i in range(10)]
        for second in range(4):
            arrived = [second + i / 100 for i in told]
            new = [waiting(1000 * second + 100 + i, "a", arrival=0.0) for i in range(20)]
            limits = replace(LIMITS, max_requests=20, max_tokens=20 * 32)
            chooser.decide(view([], new, now=second + 1.0, limits=limits, arrived=arrived))
        limits = replace(LIMITS, max_requests=1)
        assert taken(chooser.decide(view([], shown, now=4.5, limits=limits))) == {first}


def test_the_time_of_a_prefill_is_learnt_from_requests_with_one_token_too():
    chooser = policy("slora", early_abort=True, slo=6.0)
    beside = running(0, None)
    for number in range(3):
        new = waiting(number, "a", arrival=2.0 * number)
        chooser.decide(view([beside], [new], now=2.0 * number))
        chooser.finished(f"w{number}")
    chooser.decide(view([beside], now=6.0))
    wait = [waiting(7, "a", arrival=5.0), waiting(8, "a", arrival=8.5)]
    decision = chooser.decide(view([beside], wait, now=10.0))
    assert [key for key, _ in decision.abort] == ["w7"]  # 5 s of waiting and 2 s of prefill
    assert not chooser._early_abort._admitted_at.keys() - {"w8"}
