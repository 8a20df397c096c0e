"""Shutting down: what finishes, what is refused, and how the rest ends."""

import io
import json
import signal
import socket
import sys
import threading
import time

import httpx
import pytest

from tests.support.fake_engine import FakeEngine
from tests.support.http_helpers import (
    CHAT,
    ask,
    begin,
    chat,
    encoded,
    own_logging,
    picture,
    serving,
    until,
)
from valora_serve.server import app
from valora_serve.server.settings import ServerSettings
from valora_serve.server.telemetry import logs

LONG = {"max_tokens": 100_000, "ignore_eos": True}


def stopping(server):
    """Stop the server as a signal does, in a thread."""
    server.server.should_exit = True
    until(lambda: server.app.state.context.drain.begun)


def rest(sock):
    """Everything that comes until the server closes the connection."""
    found = b""
    while piece := sock.recv(65536):
        found += piece
    return found


def events(found):
    return [line[6:] for line in found.decode().splitlines() if line.startswith("data: ")]


@pytest.mark.parametrize("path", ["chat/completions", "completions", "vision/person"])
def test_new_requests_get_a_503_while_running_ones_finish(path):
    engine = FakeEngine(last=(all_asked := threading.Event()))
    with serving(engine, drain_seconds=20) as server:
        answers = []
        body = chat(max_tokens=15, ignore_eos=True)
        thread = threading.Thread(
            target=lambda: answers.append(server.client.post(CHAT, json=body))
        )
        thread.start()
        until(lambda: engine.running)
        stopping(server)
        with httpx.Client(base_url=server.url, trust_env=False) as other:  # a new connection
            sent = {"messages": body["messages"]} if "chat" in path else {"prompt": "a"}
            refused = other.post(f"/v1/{path}", json=sent)
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "draining"
            assert int(refused.headers["retry-after"]) >= 1
        assert httpx.get(f"{server.url}/health").json() == {"status": "draining"}
        assert httpx.get(f"{server.url}/ready").status_code == 503
        assert "valora_num_requests_running 1" in httpx.get(f"{server.url}/metrics").text
        assert httpx.get(f"{server.url}/v1/status").json()["ready"] is False
        all_asked.set()
        thread.join()
        assert answers[0].json()["usage"]["completion_tokens"] == 15
        server.stop()
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{server.url}/health")
    assert engine.closed


def test_a_large_request_that_is_refused_gets_its_answer_and_no_reset():
    engine = FakeEngine(last=(all_asked := threading.Event()))
    with serving(engine, drain_seconds=20) as server:
        with begin(server, chat(stream=True, max_tokens=15, ignore_eos=True)) as sock:
            until(lambda: engine.running)
            stopping(server)
            body = json.dumps({"messages": [{"role": "user", "content": "a" * 8_000_000}]})
            for _ in range(5):
                refused = httpx.post(
                    f"{server.url}{CHAT}", content=body,
                    headers={"content-type": "application/json"}, trust_env=False,
                )  # fmt: skip
                assert refused.status_code == 503
                assert refused.json()["error"]["code"] == "draining"
            all_asked.set()
            assert events(rest(sock))[-1] == "[DONE]"
        server.stop()


@pytest.mark.parametrize("n", [1, 3])
def test_a_stream_that_does_not_finish_in_time_ends_with_an_error_event(n):
    engine = FakeEngine(step=0.02)
    with serving(engine, drain_seconds=0.3) as server:
        with begin(server, chat(stream=True, n=n, **LONG)) as sock:
            until(lambda: len(engine.running) == n)
            stopping(server)
            *_, error, done = events(rest(sock))
        assert done == "[DONE]"
        found = json.loads(error)["error"]
        assert (found["code"], found["type"]) == ("draining", "server_error")
        until(lambda: not engine.running)
        assert len(engine.cancelled) == n
        server.stop()


def test_a_request_that_does_not_finish_in_time_gets_a_503():
    engine = FakeEngine(step=0.02, slots=1)
    with serving(engine, drain_seconds=0.3) as server:
        with begin(server, chat(**LONG)) as running:
            until(lambda: engine.running)
            with begin(server, chat(**LONG)) as waiting:
                until(lambda: engine.waiting)
                stopping(server)
                for sock in (running, waiting):
                    found = rest(sock)
                    assert b" 503 " in found.split(b"\r\n")[0]
                    assert b'"draining"' in found
        server.stop()


def test_requests_that_have_not_reached_the_engine_end_as_well():
    with serving(drain_seconds=0.3) as server:
        with socket.create_connection(("127.0.0.1", server.port)) as slow:
            slow.settimeout(10)
            slow.sendall(
                b"POST " + CHAT.encode() + b" HTTP/1.1\r\nhost: localhost\r\n"
                b"content-type: application/json\r\ncontent-length: 1000\r\n\r\n{"
            )
            drain = server.app.state.context.drain
            until(lambda: not drain.idle)
            stopping(server)
            assert b" 503 " in rest(slow)
        server.stop()


def test_a_request_that_waits_for_something_else_is_cancelled(monkeypatch):
    import asyncio

    with serving(drain_seconds=0.2) as server:

        async def never(*_):
            await asyncio.sleep(1000)

        monkeypatch.setattr(server.app.state.context.media, "decode_image", never)
        answers = []
        files = {"image": encoded(picture())}
        thread = threading.Thread(
            target=lambda: answers.append(server.client.post("/v1/vision/person", files=files))
        )
        thread.start()
        until(lambda: not server.app.state.context.drain.idle)
        began = time.monotonic()
        stopping(server)
        thread.join()
        assert answers[0].status_code == 503
        assert answers[0].json()["error"]["code"] == "draining"
        assert time.monotonic() - began < 20
        server.stop()


def test_an_idle_server_stops_at_once_in_spite_of_open_connections():
    with serving(drain_seconds=60) as server:
        assert ask(server).status_code == 200  # leaves a connection open
        with socket.create_connection(("127.0.0.1", server.port)):
            began = time.monotonic()
            server.stop()
            assert time.monotonic() - began < 15


def raw(path=CHAT, body=b"", head=b"", method=b"POST"):
    """A request as bytes."""
    return (
        method + b" " + path.encode() + b" HTTP/1.1\r\nhost: localhost\r\n"
        b"content-type: application/json\r\n" + head
        + (b"" if b"chunked" in head else b"content-length: %d\r\n" % len(body)) + b"\r\n" + body
    )  # fmt: skip


def connect(server):
    sock = socket.create_connection(("127.0.0.1", server.port))
    sock.settimeout(20)
    return sock


def whole(found):
    """Whether an answer is complete: a 503, or a 200 whose request came before."""
    head, _, body = found.partition(b"\r\n\r\n")
    length = b"content-length: %d" % len(body)
    return drained(found) or (b" 200 " in head.split(b"\r\n")[0] and length in head.lower())


def drained(found):
    """Whether an answer is a whole 503 that closes the connection."""
    head, _, body = found.partition(b"\r\n\r\n")
    lines = head.lower().split(b"\r\n")
    return (
        b" 503 " in lines[0]
        and b"connection: close" in lines
        and (not body or json.loads(body)["error"]["code"] == "draining")
    )


@pytest.mark.slow
def test_requests_of_every_form_are_answered_while_the_server_drains():
    engine = FakeEngine(last=(all_asked := threading.Event()))
    with serving(engine, drain_seconds=20) as server:
        with begin(server, chat(stream=True, max_tokens=20, ignore_eos=True)) as running:
            until(lambda: engine.running)
            stopping(server)
            body = json.dumps(chat()).encode()
            chunked = b"transfer-encoding: chunked\r\n"
            pieces = b"%x\r\n" % len(body) + body + b"\r\n0\r\n\r\n"
            for sent in (raw(body=body), raw(body=pieces, head=chunked), raw(body=body) * 3):
                with connect(server) as sock:
                    for start in range(0, len(sent), 50):
                        sock.sendall(sent[start : start + 50])
                    assert drained(rest(sock))
            with connect(server) as sock:  # the chunks never end
                sock.sendall(raw(head=chunked) + b"5\r\n")
                sock.sendall(b"ab")
                assert drained(rest(sock))
            for method, path, status in (
                (b"HEAD", "/health", b" 200 "), (b"OPTIONS", CHAT, b" 204 "),
                (b"GET", "/health", b" 200 "), (b"GET", "/metrics", b" 200 "),
                (b"GET", "/ready", b" 503 "), (b"GET", "/v1/models", b" 200 "),
            ):  # fmt: skip
                with connect(server) as sock:
                    sock.sendall(raw(path, method=method))
                    found = rest(sock)
                    assert status in found.split(b"\r\n")[0], (method, path, found[:200])
                    assert b"connection: close" in found.lower()
            all_asked.set()
            assert events(rest(running))[-1] == "[DONE]"
        server.stop()


@pytest.mark.parametrize("cut", [1, 20, 90])
def test_a_request_that_is_still_arriving_when_the_server_ends_gets_an_answer(cut):
    """Its head is half sent; it is finished in time, or never."""
    body = json.dumps(chat()).encode()
    whole = raw(body=body)
    with serving(drain_seconds=0.1) as server:
        with connect(server) as finished, connect(server) as never, connect(server) as idle:
            for sock in (finished, never):
                sock.sendall(whole[:cut])
            time.sleep(0.1)
            stopping(server)
            time.sleep(0.4)  # the server listens no more
            finished.sendall(whole[cut:])
            for sock in (finished, never):
                assert drained(rest(sock))
            assert rest(idle) == b""
        server.stop()


def test_connections_that_wait_in_the_queue_are_answered_when_the_server_ends():
    """Closing the listening socket would reset them."""
    body = json.dumps(chat()).encode()
    with serving(drain_seconds=0.1) as server:
        found = []

        def client():
            while True:
                try:
                    with connect(server) as sock:
                        sock.sendall(raw(body=body, head=b"connection: close\r\n"))
                        found.append(rest(sock))
                except ConnectionRefusedError:
                    return
                except OSError as error:
                    found.append(error)

        threads = [threading.Thread(target=client) for _ in range(20)]
        for thread in threads:
            thread.start()
        until(lambda: len(found) > 40)
        stopping(server)
        for thread in threads:
            thread.join()
        server.stop()
    wrong = [item for item in found if not (isinstance(item, bytes) and whole(item))]
    assert not wrong


def test_a_large_request_that_is_refused_loses_no_answer():
    """Also when nobody drains: its client still sends when the answer is there."""
    with serving(max_body_bytes=10_000) as server:
        for _ in range(5):
            with connect(server) as sock:
                sock.sendall(raw(head=b"transfer-encoding: chunked\r\n"))
                piece = b"a" * 60_000
                for _ in range(20):
                    sock.sendall(b"%x\r\n" % len(piece) + piece + b"\r\n")
                assert b" 413 " in rest(sock).split(b"\r\n")[0]


def test_clients_that_connect_again_and_again_do_not_keep_the_server(monkeypatch):
    monkeypatch.setattr(app, "_MOST_LAST_SECONDS", 0.2)
    monkeypatch.setattr(app.select, "select", lambda *_: ([1], [], []))  # there is always one more
    with serving() as server:
        thread = threading.Thread(target=server.stop)
        thread.start()
        thread.join(20)
        assert not thread.is_alive()


class Interrupted(io.RawIOBase):
    """A file in which a signal arrives while its first bytes are being written."""

    def __init__(self):
        self.content = b""

    def writable(self):
        return True

    def write(self, content):
        if not self.content:
            signal.raise_signal(signal.SIGINT)
        self.content += content
        return len(content)


def test_a_signal_within_a_line_of_the_log_ends_the_server(monkeypatch):
    """`valora demo` went on refusing requests for ever: the line that its handler wrote failed."""
    raw = Interrupted()
    stream = io.TextIOWrapper(io.BufferedWriter(raw), write_through=True)
    chosen = ServerSettings(port=0)
    server = app.make_server(app.create_app(FakeEngine(), chosen), chosen)
    with own_logging(), server.capture_signals():
        logs.set_up("info", "text")
        monkeypatch.setattr(sys, "stderr", stream)
        logs.access({"path": "/"})
        monkeypatch.undo()
    assert server.should_exit
    assert b"path=/" in raw.content
    assert b"Error" not in raw.content
    for sock in server._sockets:
        sock.close()
