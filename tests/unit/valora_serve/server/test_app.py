"""The application: its pages, https, and the end of its life."""

import asyncio
import threading
import time

from starlette.concurrency import run_in_threadpool

from tests.support.fake_engine import FakeEngine
from tests.support.http_helpers import ask, serving
from valora_serve.server.app import WORKERS, create_app
from valora_serve.server.settings import ServerSettings


def test_an_engine_that_has_failed_is_said():
    engine = FakeEngine()
    with serving(engine) as server:
        engine.healthy = False
        assert server.client.get("/health").status_code == 503
        assert server.client.get("/ready").json() == {"status": "failed"}
        assert ask(server).status_code == 503


def test_other_threads_are_few():
    def work():
        with lock:
            seen.add(threading.current_thread().name)
        time.sleep(0.02)

    async def several():
        await asyncio.gather(*(asyncio.to_thread(work) for _ in range(30)))
        await asyncio.gather(*(run_in_threadpool(work) for _ in range(30)))

    lock, seen = threading.Lock(), set()
    app = create_app(FakeEngine(), ServerSettings())

    async def live():
        async with app.router.lifespan_context(app):
            await several()

    asyncio.run(live())
    assert 2 <= len(seen) <= 2 * WORKERS
