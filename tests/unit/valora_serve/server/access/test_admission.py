"""The bounded queue and deadlines, over HTTP."""

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor

from tests.support.fake_engine import FakeEngine
from tests.support.http_helpers import ask, refused, serving, until


@contextlib.contextmanager
def full(**settings):
    """A server with one request that runs and two that wait; gives what ends them, too."""
    free = threading.Event()
    engine = FakeEngine(slots=1, last=free)
    with serving(engine, max_waiting=2, **settings) as server, ThreadPoolExecutor() as pool:
        try:
            asked = []
            for _ in range(3):
                asked.append(pool.submit(ask, server, max_tokens=4))
                until(lambda: engine.running)
            until(lambda: len(engine.waiting) == 2)
            yield server, pool, free
        finally:
            free.set()
        assert [one.result().status_code for one in asked] == [200] * 3
        assert server.inside == 0
        assert ask(server).status_code == 200


def test_a_full_queue_is_a_429_with_retry_after():
    with full() as (server, *_):
        answer = ask(server, max_tokens=4)
        assert refused(answer, 429) == "overloaded"
        assert int(answer.headers["retry-after"]) >= 1
        assert ask(server, stream=True).status_code == 429
        assert ask(server, n=3).status_code == 429


def test_a_model_whose_requests_fill_the_queue_leaves_places_to_others_where_shares_are_kept():
    with full(share_by="adapter") as (server, pool, free):
        assert ask(server).status_code == 429
        other = pool.submit(ask, server, model="adapter-1")
        until(lambda: len(server.engine.waiting) == 3)
        free.set()
        assert other.result().status_code == 200


def test_deadlines_of_request_and_domain():
    free = threading.Event()
    free.set()
    engine = FakeEngine(slots=1, last=free)
    chosen = {"deadline": 20, "deadlines": {"caption": 12}, "deadline_admission": False}
    with serving(engine, **chosen) as server, ThreadPoolExecutor() as pool:
        ask(server)
        assert 19 < engine.asked[-1].deadline <= 20
        for model, asked, least, most in (
            ("tiny", 30, 19, 20), ("caption", 16, 11, 12), ("caption", 3, 2, 3), ("tiny", 3, 2, 3)
        ):  # fmt: skip
            ask(server, model=model, valora={"deadline": asked})
            assert least < engine.asked[-1].deadline <= most
        free.clear()
        running = pool.submit(ask, server, max_tokens=4)
        until(lambda: engine.running)
        late = ask(server, valora={"deadline": 0.05})
        free.set()
        assert refused(late, 504) == "deadline_exceeded"
        running.result()
        assert server.inside == 0
