"""Shutting down: what finishes, what is refused, and how the rest ends."""

import asyncio
import json
import socket
import threading
import time

from tests.support.fake_engine import FakeEngine
from tests.support.http_helpers import PNG, ask, begin, chat, head, serving, until
from valora_serve.server.app import SmallReads

LONG = {"max_tokens": 100_000, "ignore_eos": True}


def rest(sock):
    """Everything that comes until the server closes the connection."""
    found = b""
    while piece := sock.recv(65536):
        found += piece
    return found


def events(found):
    return [line[6:] for line in found.decode().splitlines() if line.startswith("data: ")]


def test_a_stream_that_does_not_finish_in_time_ends_with_an_error_event():
    n = 3
    engine = FakeEngine(step=0.02)
    with serving(engine, drain_seconds=0.2) as server:
        with begin(server, chat(stream=True, n=n, **LONG)) as sock:
            until(lambda: len(engine.running) == n)
            server.server.should_exit = True
            *_, error, done = events(rest(sock))
        assert done == "[DONE]"
        found = json.loads(error)["error"]
        assert (found["code"], found["type"]) == ("draining", "server_error")
        until(lambda: not engine.running)
        assert len(engine.cancelled) == n
        server.stop()


def test_requests_that_do_not_finish_in_time_get_a_503(monkeypatch):
    """Those that run, wait, send their body, or read their images."""

    async def never(*_):
        reading.set()
        await asyncio.sleep(1000)

    engine, reading = FakeEngine(step=0.02, slots=1), threading.Event()
    with serving(engine, drain_seconds=0.2) as server:
        monkeypatch.setattr(server.context.media, "image", never)
        socks = [begin(server, chat(**LONG))]
        until(lambda: engine.running)
        socks.append(begin(server, chat(**LONG)))
        until(lambda: engine.waiting)
        socks.append(begin(server, head(1000) + b"{"))
        socks.append(begin(server, chat(url=f"data:image/png;base64,{PNG.hex()}")))
        assert reading.wait(10)
        server.server.should_exit = True
        for sock in socks:
            sock.settimeout(10)
            found = b""
            while not found.endswith(b"}}"):
                found += sock.recv(65536)
            assert b" 503 " in found.split(b"\r\n")[0]
            assert json.loads(found.partition(b"\r\n\r\n")[2])["error"]["code"] == "draining"
            sock.close()
        server.stop()


def test_an_idle_server_stops_at_once_in_spite_of_open_connections():
    with serving(drain_seconds=60) as server:
        assert ask(server).status_code == 200  # leaves a connection open
        with socket.create_connection(("127.0.0.1", server.port)):
            began = time.monotonic()
            server.stop()
            assert time.monotonic() - began < 15


def test_a_connection_that_was_accepted_last_does_not_hold_a_server_that_stops(monkeypatch):
    made = SmallReads.connection_made

    def late(self, transport):
        self.loop.call_later(0.5, made, self, transport)

    engine = FakeEngine(step=0.02)
    with (
        serving(engine, drain_seconds=60) as server,
        begin(server, chat(stream=True, max_tokens=50, ignore_eos=True)) as sock,
    ):
        until(lambda: engine.running)
        monkeypatch.setattr(SmallReads, "connection_made", late)
        with socket.create_connection(("127.0.0.1", server.port)):
            began = time.monotonic()
            server.stop()
            assert time.monotonic() - began < 15
        assert events(rest(sock))[-1] == "[DONE]"
