"""Rate limits and admission, over random sequences of events."""

import math
from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.support.random_tests import examples
from valora_serve.errors import OverloadedError, RateLimitError
from valora_serve.server.access.admission import REMEMBERED, Admission, RateLimiter
from valora_serve.server.settings import ServerSettings
from valora_serve.types import Times


@examples(100)
@given(
    rate=st.integers(1, 6000),
    burst=st.integers(1, 50),
    gaps=st.lists(st.integers(0, 30_000), min_size=1, max_size=200),
)
@example(rate=60, burst=1, gaps=[0, 1000, 999, 1])
@example(rate=60, burst=3, gaps=[0, 0, 0, 0, 1000, 0])
def test_exactly_burst_and_rate_get_through(rate, burst, gaps):
    """As an exact bucket does; `gaps` are milliseconds."""
    limiter = RateLimiter(rate, burst)
    now, left = Fraction(1000), Fraction(burst)
    for gap in gaps:
        now += Fraction(gap, 1000)
        left = min(Fraction(burst), left + Fraction(gap, 1000) * rate / 60)
        try:
            limiter.take("a", float(now))
        except RateLimitError as error:
            assert left < 1 + Fraction(1, 10**6)
            assert error.retry_after == pytest.approx((1 - left) * 60 / rate, rel=1e-6, abs=1e-6)
        else:
            assert left > 1 - Fraction(1, 10**6)
            left -= 1


def test_replicas_count_together_what_they_let_in():
    one, two = RateLimiter(60, 4), RateLimiter(60, 4)
    one.taken = Counter()
    for _ in range(3):
        one.take("a", 0.0)
    assert one.taken == {"a": 3}
    two.share(one.taken, 0.0)
    two.take("a", 0.0)
    with pytest.raises(RateLimitError):
        two.take("a", 0.0)
    two.take("a", 1.0)
    two.share({f"caller {number}": 1 for number in range(REMEMBERED + 50)}, 1.0)
    assert len(two._buckets) == REMEMBERED


def test_callers_do_not_share_and_are_forgotten_in_bounds():
    limiter, unlimited = RateLimiter(1, 1), RateLimiter(0, 1)
    for number in range(REMEMBERED + 50):
        limiter.take(f"caller {number}", 0.0)
        unlimited.take("a", 0.0)
    assert len(limiter._buckets) == REMEMBERED and not unlimited._buckets
    with pytest.raises(RateLimitError):
        limiter.take(f"caller {REMEMBERED + 49}", 0.0)


def admission(most=10, *, late=True, **more):
    return Admission(ServerSettings(max_waiting=most, deadline_admission=late), **more)


def enter(gate, model, running, deadline, count=1, client=""):
    gate.check(model, running, deadline, count, client)
    gate.enter(count, client)


@examples(100)
@example(most=1, slots=1, events=[1, 1, 1, "end", 1, 1])
@example(most=3, slots=2, events=[4, 1, 2, 1, "end", 1])
@given(
    most=st.integers(1, 8),
    slots=st.integers(1, 4),
    events=st.lists(st.one_of(st.integers(1, 4), st.just("end")), max_size=80),
)
def test_the_queue_is_bounded_and_nothing_is_lost(most, slots, events):
    gate = admission(most, late=False)
    inside = 0
    for event in events:
        running = min(inside, slots)
        if event == "end":
            if inside:
                gate.leave("m", None, 0.0)
                inside -= 1
        else:
            waiting = inside - running
            if waiting + event > most:
                with pytest.raises(OverloadedError, match=f"no more than {most} may") as caught:
                    enter(gate, "m", running, None, event)
                assert 1 <= caught.value.retry_after <= 60
            else:
                enter(gate, "m", running, None, event)
                inside += event
        assert gate.inside == inside
        # What the engine does not run never exceeds the bound.
        assert gate.waiting(min(inside, slots)) == inside - min(inside, slots) <= most


def run(gate, service, gap, count=20):
    """Let requests that take `service` seconds end every `gap` seconds, always some inside."""
    now = 0.0
    enter(gate, "m", 0, None)
    for _ in range(count):
        enter(gate, "m", 1, None)
        now += gap
        gate.leave("m", Times(now - service, now - service, now, now), now)
    gate.leave("m", None, now)


@examples(100)
@given(
    service=st.floats(0.01, 10), gap=st.floats(0.01, 2), waiting=st.integers(1, 9),
    deadline=st.floats(0.01, 60),
)  # fmt: skip
def test_exactly_what_is_predicted_to_be_late_is_refused(service, gap, waiting, deadline):
    gate = admission(100)
    run(gate, service, gap)
    assert gate.inside == 0
    for _ in range(waiting + 1):
        enter(gate, "m", 1, None)
    predicted = waiting * gap + service
    assert gate.predicted("m", 1) == pytest.approx(predicted)
    if math.isclose(predicted, deadline, rel_tol=1e-6):
        return
    if predicted > deadline:
        with pytest.raises(OverloadedError, match="deadline"):
            enter(gate, "m", 1, deadline)
        assert gate.inside == waiting + 1
    else:
        enter(gate, "m", 1, deadline)


def test_nothing_is_refused_before_anything_is_known_or_while_nobody_waits():
    gate = admission()
    enter(gate, "m", 0, 1e-6)
    gate.leave("m", None, 0.0)
    run(gate, 5.0, 1.0)
    enter(gate, "m", 0, 1e-6)  # nobody waits: the engine decides


def flooded(**more):
    """Eleven requests of `flood`, one of which runs; ten may wait."""
    gate = admission(**more)
    run(gate, 1.0, 0.5)
    enter(gate, "m", 0, None, 1, "flood")
    enter(gate, "m", 1, None, 10, "flood")
    return gate


def test_who_fills_the_queue_does_not_keep_others_out_where_shares_are_kept():
    with pytest.raises(OverloadedError, match="no more than 10 may"):
        enter(flooded(), "m", 1, None, 1, "quiet")
    gate = flooded(shares={})
    with pytest.raises(OverloadedError, match="10 requests are waiting, and no more than 10 may"):
        enter(gate, "m", 1, None, 1, "flood")
    for _ in range(5):  # half of the queue
        enter(gate, "m", 1, None, 1, "quiet")
    for client in ("flood", "quiet"):
        with pytest.raises(OverloadedError, match="no more than 10 may"):
            enter(gate, "m", 1, None, 1, client)
    gate.leave("m", None, 0.0, "quiet")
    enter(gate, "m", 1, None, 1, "quiet")
    gate = flooded(shares={"gold": 4.0})
    enter(gate, "m", 1, None, 8, "gold")  # four fifths
    with pytest.raises(OverloadedError, match="no more than 10 may"):
        enter(gate, "m", 1, None, 1, "gold")


def test_who_fills_the_queue_does_not_make_others_late_where_shares_are_kept():
    gate = flooded(shares={"gold": 3.0})
    assert gate.predicted("m", 1, "flood") == pytest.approx(1.0 + 10 * 0.5)
    assert gate.predicted("m", 1, "quiet") == pytest.approx(1.0)
    enter(gate, "m", 1, 1.5, 1, "quiet")
    assert gate.predicted("m", 1, "quiet") == pytest.approx(1.0 + 2 * 0.5)
    enter(gate, "m", 1, 1.5, 3, "gold")
    assert gate.predicted("m", 1, "gold") == pytest.approx(1.0 + 5 * 0.5)
    with pytest.raises(OverloadedError, match="later than the deadline of 3"):
        enter(gate, "m", 1, 3.0, 1, "gold")


@examples(100)
@given(
    most=st.integers(1, 8),
    events=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 3)), max_size=120),
)
def test_a_queue_with_shares_is_bounded_too(most, events):
    """However many clients there are; and it is empty when all have left."""
    gate = admission(most, late=False, shares={})
    inside = []
    for client, count in events:
        try:
            enter(gate, "m", 0, None, count, str(client))
        except OverloadedError:
            assert len(inside) + count > most
        else:
            inside += [str(client)] * count
        assert gate.inside == len(inside) <= 2 * most
    for client in inside:
        gate.leave("m", None, 0.0, client)
    assert not gate.inside
    assert not gate._clients
