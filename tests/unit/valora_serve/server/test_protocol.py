"""Connections: garbage, slow heads, and how many there may be."""

import socket
import time

import pytest

from tests.support.http_helpers import ask, serving, talk, until


def test_garbage_instead_of_http():
    with serving() as server:
        for data in (b"\x16\x03\x01\x02\x00\x01\x00", b"GET\r\n\r\n", b"hello\r\n\r\n"):
            assert b" 400 " in talk(server, data)
        smuggled = (
            b"POST /health HTTP/1.1\r\nhost: localhost\r\ncontent-length: 4\r\n"
            b"transfer-encoding: chunked\r\n\r\n0\r\n\r\n"
        )
        assert b" 200 " not in talk(server, smuggled)
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
