"""Connections: garbage, slow heads, and how many there may be."""

import contextlib
import json
import queue
import re
import socket
import time

import pytest

from tests.support.http_helpers import CHAT, ask, chat, serving, talk, until
from valora_serve.server.protocol import PatientProtocol


def test_garbage_instead_of_http():
    with serving() as server:
        for data in (b"\x16\x03\x01\x02\x00\x01\x00", b"GET\r\n\r\n", b"hello\r\n\r\n"):
            assert b" 400 " in talk(server, data)
        assert server.client.get("/health").status_code == 200


def test_a_slow_head_is_hung_up_on():
    with serving(body_seconds=0.4) as server:
        for begun in (b"", b"GET /health HT", b"GET /health HTTP/1.1\r\nhost: localhost\r\n"):
            with socket.create_connection(("127.0.0.1", server.port)) as sock:
                sock.settimeout(5)
                sock.sendall(begun)
                with pytest.raises((ConnectionResetError, AssertionError)):
                    assert sock.recv(100) != b""


def test_a_head_without_end_is_hung_up_on():
    with serving() as server, socket.create_connection(("127.0.0.1", server.port)) as sock:
        sock.settimeout(5)
        sock.sendall(b"GET /health HTTP/1.1\r\n")
        with pytest.raises(OSError):
            for number in range(200):
                sock.sendall(b"x-%d: %s\r\n" % (number, b"y" * 1000))
                time.sleep(0.001)
            assert not sock.recv(100)
            raise ConnectionResetError
        assert server.client.get("/health").status_code == 200


def test_many_connections_at_once():
    with serving(body_seconds=30) as server:
        held = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(300)]
        assert ask(server).status_code == 200
        for sock in held:
            sock.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
        for sock in held:
            sock.settimeout(10)
            assert b" 200 " in sock.recv(4096)
            sock.close()


def test_connections_are_bounded():
    with serving(max_connections=5, body_seconds=30) as server:
        held = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(8)]
        until(lambda: len(server.server.server_state.connections) == 8)
        held[0].sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
        held[0].settimeout(5)
        assert b" 503 " in held[0].recv(4096)
        for sock in held:
            sock.close()


HEAD = (
    b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (HEAD + b"transfer-encoding: chunked\r\n\r\n" + b"1\r\n \r\n" * 50_000, b"chunks of less"),
        (HEAD + b"transfer-encoding: chunked\r\n\r\n0\r\n" + b"a: b\r\n" * 5_000, b"128 headers"),
        (b"GET /health HTTP/1.1\r\nhost: x\r\n" + b"a: b\r\n" * 5_000 + b"\r\n", b"128 headers"),
        (b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n\r\n" * 500, b"requests wait"),
        (b"\x16\x03\x01\x02\x00", b"not valid HTTP"),
    ],
    ids=["chunks", "trailers", "headers", "pipelined", "tls"],
)
def test_what_costs_more_than_its_bytes_is_refused_in_a_sentence(data, said):
    with serving() as server, socket.create_connection(("127.0.0.1", server.port)) as sock:
        sock.settimeout(10)
        found = b""
        try:
            sock.sendall(data)
            while piece := sock.recv(65536):
                found += piece
        except OSError:
            pass
        assert b" 400 " in found
        assert said in found
        assert b'"invalid_request_error"' in found


def test_chunks_of_a_usual_size_are_read():
    def pieces():
        yield b'{"messages": [{"role": "user", "content": "'
        for _ in range(3_000):
            yield b"x" * 100
        for _ in range(300):
            yield b"y"
        yield b'"}]}'

    with serving(max_prompt_chars=200_000) as server:
        headers = {"content-type": "application/json"}
        answer = server.client.post("/v1/chat/completions", content=pieces(), headers=headers)
        assert answer.status_code == 400
        assert "300300 characters" in answer.json()["error"]["message"]


def test_the_rest_of_a_refused_body_has_to_arrive_in_time():
    with serving(api_key="a key for the tests", body_seconds=0.3) as server:
        server.server.config.http_protocol_class.message_seconds = 0.5
        with socket.create_connection(("127.0.0.1", server.port)) as sock:
            sock.settimeout(10)
            sock.sendall(HEAD + b"content-length: 100\r\n\r\n{")
            found = b""
            with contextlib.suppress(ConnectionResetError):  # or it ends with an empty piece
                while piece := sock.recv(65536):  # the answer may come in several
                    found += piece
            assert b" 401 " in found


def test_a_connection_is_read_in_small_pieces(monkeypatch):
    """Many senders of large bodies together leave the others their turns."""
    sizes = []
    old = PatientProtocol.data_received

    def received(self, data):
        sizes.append(len(data))
        old(self, data)

    monkeypatch.setattr(PatientProtocol, "data_received", received)
    content = b" " * 2_000_000 + b"{}"
    with serving() as server:
        server.client.post(CHAT, content=content, headers={"content-type": "application/json"})
    assert sum(sizes) > 2_000_000
    assert max(sizes) <= PatientProtocol.most_read


INNER = b"GET /v1/status HTTP/1.1\r\nhost: localhost\r\n\r\n"
LAST = b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
JDK = (  # as java.net.http.HttpClient of Java 17 sends it
    b"POST /v1/chat/completions HTTP/1.1\r\nConnection: Upgrade, HTTP2-Settings\r\n"
    b"Content-Length: %d\r\nHost: localhost\r\n"
    b"HTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABkAAQBAAAAAAUAAEAA\r\nUpgrade: h2c\r\n"
    b"User-Agent: Java-http-client/17.0.15\r\nContent-Type: application/json\r\n\r\n"
)
WEBSOCKET = HEAD + b"connection: keep-alive, Upgrade\r\nupgrade: websocket\r\n"
EXPECT = WEBSOCKET + b"expect: 100-continue\r\ncontent-length: %d\r\n\r\n"
ASKED = json.dumps(chat(max_tokens=1)).encode()


def chunked(body):
    pieces = [body[start : start + 50] for start in range(0, len(body), 50)]
    return b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in [*pieces, b""])


def statuses(server, *pieces):
    """Statuses of the answers on a connection; a piece is sent when the last one has been read."""
    read = queue.SimpleQueue()

    def received(self, data):
        PatientProtocol.data_received(self, data)
        read.put(len(data))

    with socket.create_connection(("127.0.0.1", server.port)) as sock:
        server.server.config.http_protocol_class.data_received = received
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.settimeout(10)
        found = b""
        with contextlib.suppress(ConnectionError):
            for piece in pieces:
                sock.sendall(piece)
                left = len(piece)
                while left:
                    left -= read.get(timeout=10)
            while piece := sock.recv(65536):
                found += piece
    return [int(status) for status in re.findall(rb"HTTP/1\.1 ([2-5]\d\d) ", found)]


@pytest.mark.parametrize(
    ("head", "body", "status"),
    [
        (JDK % len(ASKED), ASKED, 200),
        (JDK % len(INNER), INNER, 400),
        (WEBSOCKET + b"content-length: %d\r\n\r\n" % len(INNER), INNER, 400),
        (WEBSOCKET + b"transfer-encoding: chunked\r\n\r\n", chunked(INNER), 400),
        (EXPECT % len(ASKED), ASKED, 200),
    ],
    ids=["jdk", "jdk-request", "websocket", "chunked", "expect"],
)  # fmt: skip
def test_an_offer_to_upgrade_is_ignored_and_its_body_is_no_request(head, body, status):
    data = head + body
    with serving() as server:
        for place in range(1, len(data)):
            assert statuses(server, data[:place], data[place:] + LAST) == [status, 200], place
        assert statuses(server, data + data + LAST) == [status, status, 200]
        assert "/v1/status" not in server.client.get("/metrics").text


def post(*headers, body=ASKED, version=b"1.1", method=b"POST"):
    line = method + b" /v1/chat/completions HTTP/" + version
    named = (b"host: localhost", b"content-type: application/json", *headers)
    return b"\r\n".join([line, *named, b"", body])


LENGTH = b"content-length: %d" % len(ASKED)


@pytest.mark.parametrize(
    ("data", "found"),
    [
        (post(LENGTH, b"transfer-encoding: chunked", body=chunked(INNER)), [400]),
        (post(b"transfer-encoding: chunked", b"content-length: 4", body=chunked(INNER)), [400]),
        (post(LENGTH, b"content-length: 3"), [400]),
        (post(LENGTH, LENGTH), [400]),
        (post(b"content-length: +%d" % len(ASKED)), [400]),
        (post(LENGTH).replace(b"\r\n", b"\n"), [400]),
        (post(LENGTH, b"x: y\ntransfer-encoding: chunked"), [400]),
        (post(LENGTH, b"x: y\r\n z"), [400]),
        (post(b"transfer-encoding:\r\n chunked", body=chunked(ASKED)), [400]),
        (post(b"transfer-encoding: chunked, identity", body=chunked(ASKED)), [400]),
        (post(b"transfer-encoding: gzip, chunked", body=chunked(ASKED)), [400]),
        (post(b"transfer-encoding: chunked", body=b"2;\nxx\r\n" + chunked(ASKED)), [400]),
        (post(LENGTH, version=b"2.0"), [400]),
        (post(b"content-length: %d" % len(INNER), body=INNER, method=b"CONNECT"), [400]),
        (b"GET http://localhost HTTP/1.1\r\nhost: localhost\r\n\r\n", [400]),
        (post(LENGTH) + b"junk" * 9, [200, 400]),
        (post(LENGTH) + post(LENGTH) + post(LENGTH, b"transfer-encoding: x"), [200, 200, 400]),
        (post(LENGTH) + post(b"transfer-encoding: chunked", body=b"x"), [200, 400]),
        (post(LENGTH, b"connection: close") + INNER, [200]),
        (post(LENGTH, b"connection: close, upgrade", b"upgrade: h2c") + INNER, [200]),
        (post(LENGTH, b"connection: keep-alive", version=b"1.0") + INNER, [200]),
        (post(LENGTH) + b"\r\n" + post(LENGTH, b"connection: close"), [200, 200]),
    ],
)  # fmt: skip
def test_what_a_proxy_may_read_otherwise_is_refused_or_read_once(data, found):
    with serving() as server:
        middle = len(data) // 2
        assert statuses(server, data) == statuses(server, data[:middle], data[middle:]) == found
        assert "/v1/status" not in server.client.get("/metrics").text


def test_a_body_that_may_not_come_ends_the_connection():
    with serving(api_key="a key for the tests") as server:
        assert statuses(server, post(LENGTH, b"expect: 100-continue", body=b"") + INNER) == [401]


def test_trailers_are_no_headers():
    """A proxy checks headers: who sends them after the body would go past it."""
    key = "a key for the tests"
    end = b"0\r\nauthorization: Bearer %b\r\nx-forwarded-for: 203.0.113.9\r\n\r\n" % key.encode()
    data = post(b"transfer-encoding: chunked", body=chunked(ASKED)[: -len(b"0\r\n\r\n")] + end)
    with serving(api_key=key) as server:
        assert statuses(server, data + LAST) == [401, 200]
