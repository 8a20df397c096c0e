"""Limits on size and time, odd requests, clients that go away, and errors."""

import asyncio
import json
import re
import select
import socket
import threading
import time

import pytest
from starlette.concurrency import run_in_threadpool

from tests.support.fake_engine import FakeEngine
from tests.support.http_helpers import (
    CHAT,
    ask,
    begin,
    chat,
    data_url,
    encoded,
    head,
    picture,
    refused,
    serving,
    talk,
    until,
)
from valora_serve.errors import OverloadedError
from valora_serve.server.app import WORKERS, create_app
from valora_serve.server.settings import ServerSettings


def test_a_large_body_is_refused_with_and_without_a_length():
    with serving(max_body_bytes=10_000) as server:
        json_type = {"content-type": "application/json"}
        answer = server.client.post(CHAT, content=b"x" * 10_001, headers=json_type)
        assert answer.status_code == 413
        assert answer.headers["connection"] == "close"

        def pieces():
            for _ in range(20):
                yield b"x" * 1000

        assert server.client.post(CHAT, content=pieces(), headers=json_type).status_code == 413
        assert b" 413 " in (said := talk(server, head("9" * 30))) or b" 400 " in said


def test_json_has_a_limit_of_its_own_and_forms_do_not():
    picture_file = encoded(picture(400, 300))
    with serving(max_json_bytes=len(picture_file), max_body_bytes=10 * len(picture_file)) as server:
        path = "/v1/vision/person"
        assert server.client.post(path, files={"image": picture_file}).status_code == 200
        answer = server.client.post(path, json={"images": [data_url(picture_file)]})
        refused(answer, 413, "as a form")
    with serving(max_body_bytes=1000) as server:  # the lower one of the two counts
        answer = server.client.post(CHAT, json=chat("x" * 1000))
        assert answer.json()["error"]["message"].endswith("1000 bytes: send less at once")


@pytest.mark.parametrize(
    ("stream", "n", "half"),
    [(False, 1, False), (True, 3, False), (False, 3, True), (True, 1, True)],
)
def test_a_client_that_goes_away_is_cancelled(stream, n, half):
    engine = FakeEngine(step=0.02)
    with serving(engine) as server:
        sock = begin(server, chat(max_tokens=2000, ignore_eos=True, stream=stream, n=n))
        until(lambda: len(engine.running) == n)
        if stream:
            assert b"200 OK" in sock.recv(4096)
        if half:
            sock.shutdown(socket.SHUT_WR)
        else:
            sock.close()
        until(lambda: not engine.running, 3)
        until(lambda: len(engine.cancelled) == n, 3)
        until(lambda: server.inside == 0, 3)
        sock.close()
        assert ask(server).status_code == 200


def test_a_client_that_takes_nothing_is_cancelled():
    engine = FakeEngine(step=0.0)
    with serving(engine, send_seconds=0.5, answer_tokens=10_000_000) as server:
        body = chat(max_tokens=5_000_000, ignore_eos=True, stream=True)
        sock = begin(server, body)
        until(lambda: engine.running)
        until(lambda: not engine.running, 10)
        until(lambda: server.inside == 0, 3)
        sock.close()


def test_an_unexpected_failure_is_a_500_that_tells_nothing():
    class Broken(FakeEngine):
        def stats(self):
            raise RuntimeError("a secret of the inside")

    with serving(Broken()) as server:
        answer = ask(server)
        assert refused(answer, 500) == "internal_error"
        assert "secret" not in answer.text


@pytest.mark.parametrize(
    ("headers", "status", "said"),
    [
        ({}, 415, "no content type, .*-H 'content-type: application/json'"),
        ({"content-type": "text/plain"}, 415, "'text/plain', .*-H 'content-type"),
        ({"content-type": "application/x-www-form-urlencoded"}, 415, "-H 'content-type: appl"),
        ({"content-type": "application/vnd.api+json"}, 415, "reads application/json"),
        ({"content-type": "application/jsonx"}, 415, "reads application/json"),
        ({"content-type": "application/json", "content-encoding": "gzip"}, 415, "uncompressed"),
        ({"content-type": "application/json", "content-encoding": "identity"}, 200, ""),
        ({"content-type": "application/json; charset=UTF-8"}, 200, ""),
        ({"content-type": 'Application/JSON ;x=1; charset="utf-8"'}, 200, ""),
        ({"content-type": "application/json;"}, 200, ""),
    ],
)
def test_content_types_of_a_json_route(plain, headers, status, said):
    answer = plain.client.post(CHAT, content=json.dumps(chat()), headers=headers)
    assert answer.status_code == status, answer.text
    if status == 415:
        assert refused(answer, 415) == "unsupported_media_type"
        assert re.search(said, answer.json()["error"]["message"])


def test_messages_name_files_without_their_folders_and_quote_requests_as_they_are(tokenizer):
    engine = FakeEngine(tokenizer=tokenizer)
    with serving(engine) as server:
        said = "adapter /srv/secret/place/a.bin: see /v1/models and /docs"
        engine.refuse = OverloadedError(said, 7.2)
        for stream in (False, True):
            answer = ask(server, stream=stream)
            assert (answer.status_code, answer.headers["retry-after"]) == (429, "8")
            assert answer.json()["error"]["message"] == "adapter a.bin: see /v1/models and /docs"
        engine.refuse = None
        form = {"type": "json_schema", "json_schema": {"schema": {"$ref": "#/$defs/Missing"}}}
        for sent, part in (
            ({"response_format": form}, "Pointer '/$defs/Missing'"),
            ({"model": "/models/Qwen"}, "no model '/models/Qwen'"),
            ({"valora": {"adapters": [{"name": "tiny"}, {"name": "/a/b"}]}}, "no model '/a/b'"),
        ):
            assert part in ask(server, **sent).json()["error"]["message"]


def test_bodies_in_progress_are_bounded_together():
    sent = head(60_000) + json.dumps(chat("x" * 50_000)).encode()
    with serving(max_held_bytes=120_000, body_seconds=30) as server:
        held = [begin(server, sent) for _ in range(3)]
        # Which of the three is refused depends on the order in which their parts are read.
        answered, _, _ = select.select(held, [], [], 10)
        assert answered and all(b" 429 " in sock.recv(4096) for sock in answered)
        for sock in held:
            sock.close()
        until(lambda: ask(server, text="y" * 30_000).status_code != 429)


def test_a_proxy_may_show_the_server_below_a_path_and_take_it_off_or_not():
    with serving(root_path="/valora") as server:
        client = server.client
        for prefix in ("", "/valora"):
            for path in ("/", "/v1/models", "/console/app.js"):
                assert client.get(prefix + path).status_code == 200, path
            assert client.post(prefix + CHAT, json=chat(max_tokens=1)).status_code == 200
            assert client.get(f"{prefix}/v1/models/none").status_code == 404
            page = client.get(f"{prefix}/docs").text
            links = re.findall(r"(?:(?:src|href)=\"|url: ')([^\"']+)[\"']", page)
            assert len(links) >= 4
            assert "/valora/openapi.json" in links
            for link in links:  # none leads elsewhere
                assert link.startswith("/valora/")
                assert client.get(link).status_code == 200
        assert client.get("/openapi.json").json()["servers"] == [{"url": "/valora"}]
        for path in ("/valora2/v1/models", "/valora/valora/v1/models"):
            assert client.get(path).status_code == 404


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
