"""Connections: garbage, how many there may be, and framing that others may read otherwise."""

import contextlib
import json
import re
import socket
import time

import pytest

from tests.support.http_helpers import chat, serving, talk, until


def test_connections_are_bounded():
    with serving(max_connections=5) as server:
        held = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(8)]
        until(lambda: len(server.server.server_state.connections) == 8)
        held[0].sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
        held[0].settimeout(5)
        assert b" 503 " in held[0].recv(4096)
        for sock in held:
            sock.close()


@pytest.mark.parametrize("end", [b"", b"\r\n\r\n"])
def test_a_head_is_bounded(plain, end):
    """Without an end it is refused at 16 kB; as a whole, in what is read at a time."""
    head = b"GET /health HTTP/1.1\r\nhost: x\r\n" + b"a: %s\r\n" % (b"y" * 100) * 50_000
    with socket.create_connection(("127.0.0.1", plain.port)) as sock:
        sock.settimeout(10)
        found = b""
        with contextlib.suppress(OSError):
            sock.sendall(head + end)
            while piece := sock.recv(65536):
                found += piece
    assert b" 400 " in found or not found
    assert plain.client.get("/health").status_code == 200


def chunked(body):
    pieces = [body[start : start + 50] for start in range(0, len(body), 50)]
    return b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in [*pieces, b""])


def post(*headers, body=None, version=b"1.1", method=b"POST"):
    line = method + b" /v1/chat/completions HTTP/" + version
    named = (b"host: localhost", b"content-type: application/json", *headers)
    return b"\r\n".join([line, *named, b"", ASKED if body is None else body])


def statuses(server, *pieces):
    """Statuses of the answers on a connection to which pieces are sent one by one."""
    with socket.create_connection(("127.0.0.1", server.port)) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.settimeout(10)
        found = b""
        with contextlib.suppress(ConnectionError):
            for piece in pieces:
                sock.sendall(piece)
                time.sleep(0.002)
            while piece := sock.recv(65536):
                found += piece
    return [int(status) for status in re.findall(rb"HTTP/1\.1 ([2-5]\d\d) ", found)]


ASKED = json.dumps(chat(max_tokens=1)).encode()
INNER = b"GET /v1/status HTTP/1.1\r\nhost: localhost\r\n\r\n"
LAST = b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
LENGTH = b"content-length: %d" % len(ASKED)
WITHIN = b"content-length: %d" % len(INNER)
JDK = (b"connection: Upgrade, HTTP2-Settings", b"http2-settings: AAEAAEAAAAIAAA", b"upgrade: h2c")
WEBSOCKET = (b"connection: keep-alive, Upgrade", b"upgrade: websocket")


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (post(LENGTH, *JDK), 200),
        (post(WITHIN, *JDK, body=INNER), 400),
        (post(WITHIN, *WEBSOCKET, body=INNER), 400),
        (post(b"transfer-encoding: chunked", *WEBSOCKET, body=chunked(INNER)), 400),
        (post(LENGTH, *WEBSOCKET, b"expect: 100-continue"), 200),
    ],
    ids=["jdk", "jdk-request", "websocket", "chunked", "expect"],
)  # fmt: skip
def test_an_offer_to_upgrade_is_ignored_and_its_body_is_no_request(plain, data, status):
    for place in range(1, len(data), 17):
        assert statuses(plain, data[:place], data[place:] + LAST) == [status, 200], place
    assert "/v1/status" not in plain.client.get("/metrics").text


@pytest.mark.parametrize(
    ("data", "found"),
    [
        (b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n", [400]),
        (b"GET\r\n\r\n", [400]),
        (post(LENGTH, b"content-length: 3"), [400]),
        (post(b"content-length: +%d" % len(ASKED)), [400]),
        (post(b"transfer-encoding: chunked, identity", body=chunked(ASKED)), [400]),
        (post(b"transfer-encoding: gzip, chunked", body=chunked(ASKED)), [400]),
        (post(b"transfer-encoding: chunked", body=b"2;\nxx\r\n" + chunked(ASKED)), [400]),
        (post(LENGTH, b"host: evil.example"), [400]),
        (post(LENGTH) + b"junk" * 9 + b"\r\n\r\n", [200, 400]),
        (post(LENGTH) + post(b"transfer-encoding: x"), [200, 400]),
        (post(LENGTH, b"connection: close") + INNER, [200]),
        (post(LENGTH, b"connection: keep-alive", version=b"1.0") + INNER, [200]),
    ],
)  # fmt: skip
def test_what_a_proxy_may_read_otherwise_is_refused_or_read_once(plain, data, found):
    middle = len(data) // 2
    assert statuses(plain, data) == statuses(plain, data[:middle], data[middle:]) == found
    assert "/v1/status" not in plain.client.get("/metrics").text


def test_trailers_are_no_headers():
    """A proxy checks headers: who sends them after the body would go past it."""
    key = "a key for the tests"
    end = b"0\r\nauthorization: Bearer %b\r\nx-forwarded-for: 203.0.113.9\r\n\r\n" % key.encode()
    data = post(b"transfer-encoding: chunked", body=chunked(ASKED)[: -len(b"0\r\n\r\n")] + end)
    with serving(api_key=key) as server:
        assert statuses(server, data + LAST) == [401, 200]


def test_a_slow_body_gets_a_408_and_holds_nothing():
    with serving(body_seconds=0.4) as server:
        began = time.monotonic()
        assert b" 408 " in talk(server, post(b"content-length: 100", body=b"{"))
        assert time.monotonic() - began < 5
        assert server.inside == 0
