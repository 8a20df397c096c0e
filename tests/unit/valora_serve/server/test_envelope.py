"""Limits on size and time, odd requests, clients that go away, and errors."""

import json
import socket
import time

import pytest

from tests.support.fake_engine import FakeEngine
from tests.support.http_helpers import (
    CHAT,
    ask,
    begin,
    chat,
    encoded,
    picture,
    serving,
    talk,
    until,
)
from valora_serve.errors import OverloadedError


def test_a_large_body_is_refused_with_and_without_a_length():
    with serving(max_body_bytes=10_000) as server:
        answer = server.client.post(CHAT, content=b"x" * 10_001)
        assert answer.status_code == 413
        assert answer.headers["connection"] == "close"

        def pieces():
            for _ in range(20):
                yield b"x" * 1000

        assert server.client.post(CHAT, content=pieces()).status_code == 413
        raw = (
            b"POST "
            + CHAT.encode()
            + b" HTTP/1.1\r\nhost: localhost\r\ncontent-length: "
            + b"9" * 30
        )
        assert b" 413 " in (said := talk(server, raw + b"\r\n\r\n")) or b" 400 " in said


@pytest.mark.parametrize(
    "body",
    [
        b"[" * 100_000, b'{"a":' * 50_000, b'{"messages": ' + b"9" * 10_000 + b"}", b"{", b"",
        b"\xff\xfe", b'{"messages": NaN}', b'{"temperature": 1e999}', b'"\\ud800"', b"null",
        b'{"messages": [{"role": "user", "content": "' + b"x" * 500_000 + b'"}]}',
        b'{"messages": {}, "messages": 1}',
        b'{"model": "' + b"\\ud800" * 50 + b'", "messages": []}',
    ],
)  # fmt: skip
def test_odd_json_is_400(body):
    with serving() as server:
        answer = server.client.post(
            CHAT, content=body, headers={"content-type": "application/json"}
        )
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["message"]
        assert len(answer.content) < 3000


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("completions", b'{"prompt": [' + b"1," * 2_000_000 + b"1]}"),
        ("completions", b'{"prompt": [' + b"[]," * 1_000_000 + b"[]]}"),
        ("completions", b'{"prompt": [' + b'"a",' * 1_000_000 + b'"a"]}'),
        ("completions", b'{"prompt": [' + b"{}," * 1_000_000 + b"{}]}"),
        ("chat/completions", b'{"messages": [' + b'{"role":1},' * 400_000 + b"{}]}"),
        ("vision/person", b'{"images": [' + b'"data:",' * 400_000 + b'"x"]}'),
    ],
    ids=["tokens", "lists", "texts", "objects", "messages", "images"],
)
def test_long_lists_are_refused_in_a_few_words(path, body):
    with serving() as server:
        answer = server.client.post(
            f"/v1/{path}", content=body, headers={"content-type": "application/json"}
        )
        # Bodies of texts alone may be smaller than those with images.
        too_large = path == "completions" and len(body) > 3_500_000
        assert answer.status_code == (413 if too_large else 400)
        assert len(answer.content) < 1000
        assert server.client.get("/health").status_code == 200


@pytest.mark.parametrize(
    "kind", ["text/plain", "", "application/x-www-form-urlencoded", "image/png"]
)
def test_wrong_content_types(kind):
    with serving() as server:
        for path in (CHAT, "/v1/completions"):
            answer = server.client.post(
                path, content=json.dumps(chat()), headers={"content-type": kind}
            )
            assert answer.status_code in (400, 415)
            assert answer.json()["error"]["message"]


def test_wrong_methods_and_paths():
    with serving() as server:
        assert server.client.get(CHAT).status_code == 405
        assert server.client.request("BREW", CHAT).status_code in (400, 405)
        answer = server.client.get("/nothing")
        assert answer.status_code == 404
        assert answer.json()["error"]["type"] == "invalid_request_error"


def test_a_slow_body_gets_a_408():
    with serving(body_seconds=0.4) as server:
        head = b"POST " + CHAT.encode() + b" HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n"
        began = time.monotonic()
        assert b" 408 " in talk(server, head + b"content-type: application/json\r\n\r\n{")
        assert time.monotonic() - began < 5
        assert server.inside == 0


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("half", [False, True])
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


def test_a_client_that_goes_away_while_it_waits_is_cancelled():
    engine = FakeEngine(slots=1, step=0.02)
    with serving(engine) as server:
        first = begin(server, chat(max_tokens=2000, ignore_eos=True))
        until(lambda: engine.running)
        second = begin(server, chat(max_tokens=5))
        until(lambda: engine.waiting)
        second.close()
        until(lambda: not engine.waiting and server.inside == 1, 3)
        first.close()
        until(lambda: server.inside == 0, 3)


def test_a_client_that_takes_nothing_is_cancelled():
    engine = FakeEngine(step=0.0)
    with serving(engine, send_seconds=0.5, answer_tokens=10_000_000) as server:
        body = chat(max_tokens=5_000_000, ignore_eos=True, stream=True)
        sock = begin(server, body)
        until(lambda: engine.running)
        until(lambda: not engine.running, 10)
        until(lambda: server.inside == 0, 3)
        sock.close()


def test_errors_of_the_engine_keep_their_status():
    engine = FakeEngine()
    with serving(engine) as server:
        engine.refuse = OverloadedError("full", 7.2)
        for stream in (False, True):
            answer = ask(server, stream=stream)
            assert answer.status_code == 429
            assert answer.headers["retry-after"] == "8"
        files = {"image": encoded(picture())}
        assert server.client.post("/v1/vision/person", files=files).status_code == 429
        assert server.inside == 0


def test_an_unexpected_failure_is_a_500_that_tells_nothing():
    class Broken(FakeEngine):
        def stats(self):
            raise RuntimeError("a secret of the inside")

    with serving(Broken()) as server:
        answer = ask(server)
        assert answer.status_code == 500
        assert "secret" not in answer.text
        assert answer.json()["error"]["code"] == "internal_error"
