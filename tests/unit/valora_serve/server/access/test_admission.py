"""The bounded queue and deadlines, over HTTP."""

import concurrent.futures
import threading

from tests.support.fake_engine import FakeEngine
from tests.support.http_helpers import ask, serving, until


def test_a_full_queue_is_a_429_with_retry_after():
    free = threading.Event()
    engine = FakeEngine(slots=1, last=free)
    with serving(engine, max_waiting=2) as server:
        answers = []
        threads = [
            threading.Thread(target=lambda: answers.append(ask(server, max_tokens=4)))
            for _ in range(3)
        ]
        for thread in threads:
            thread.start()
            until(lambda: engine.running)
        until(lambda: len(engine.waiting) == 2)
        refused = ask(server, max_tokens=4)
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["code"] == "overloaded"
        streamed = ask(server, stream=True)
        assert streamed.status_code == 429
        assert ask(server, n=3).status_code == 429
        free.set()
        for thread in threads:
            thread.join()
        assert [answer.status_code for answer in answers] == [200] * 3
        assert server.inside == 0
        assert ask(server).status_code == 200


def test_deadlines_of_request_and_domain():
    free = threading.Event()
    free.set()
    engine = FakeEngine(slots=1, last=free)
    with serving(
        engine, deadline=20, deadlines={"caption": 12}, deadline_admission=False
    ) as server:
        ask(server)
        assert 19 < engine.asked[-1].deadline <= 20
        ask(server, model="caption", valora={"deadline": 16})
        assert 2 < engine.asked[-1].deadline <= 12
        ask(server, valora={"deadline": 3})
        assert 2 < engine.asked[-1].deadline <= 3
        free.clear()
        thread = threading.Thread(target=lambda: ask(server, max_tokens=4))
        thread.start()
        until(lambda: engine.running)
        late = ask(server, valora={"deadline": 0.05})
        assert late.status_code == 504
        assert late.json()["error"]["code"] == "deadline_exceeded"
        free.set()
        thread.join()
        assert server.inside == 0


def test_a_model_whose_requests_fill_the_queue_leaves_places_to_others_where_shares_are_kept():
    free = threading.Event()
    engine = FakeEngine(slots=1, last=free)
    with serving(engine, max_waiting=2, share_by="adapter") as server:
        flood = [threading.Thread(target=lambda: ask(server, max_tokens=4)) for _ in range(3)]
        for thread in flood:
            thread.start()
            until(lambda: engine.running)
        until(lambda: len(engine.waiting) == 2)
        assert ask(server).status_code == 429
        with concurrent.futures.ThreadPoolExecutor() as pool:
            other = pool.submit(ask, server, model="adapter-1")
            until(lambda: len(engine.waiting) == 3)
            free.set()
            assert other.result().status_code == 200
        for thread in flood:
            thread.join()
        assert server.inside == 0
