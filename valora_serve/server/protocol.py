"""uvicorn's HTTP protocol with time limits for slow clients."""

from __future__ import annotations

import json
import socket
from typing import TYPE_CHECKING, Any, NoReturn

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

if TYPE_CHECKING:
    import asyncio


class PatientProtocol(HttpToolsProtocol):
    """uvicorn's protocol with limits on slow clients and on what costs more than its bytes.

    The parser calls Python for every header, every chunk and every pipelined request. Each of them
    may be a few bytes long, and a piece of 256 KB of them would hold up all other connections.

    Attributes:
        head_seconds: Time limit in seconds for a client to send the head of a request.
        message_seconds: Time limit in seconds for a client to send a request's body, read or not.
        stall_seconds: Time in seconds after which the kernel drops a client that reads nothing.
        most_head_bytes: Largest head of a request, in bytes.
        most_headers: Most headers of a request, trailers included.
        most_pipelined: Most requests that wait in one connection.
        free_chunks: Number of a body's chunks that may be as small as they like.
        least_chunk: Mean size of the chunks, in bytes, from then on.
        most_read: Most bytes of a connection that are read before others have their turn.
    """

    head_seconds = 20.0
    message_seconds = 65.0
    stall_seconds = 30.0
    most_head_bytes = 64 * 1024
    most_headers = 128
    most_pipelined = 16
    free_chunks = 1000
    least_chunk = 64
    most_read = 64 * 1024

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._head_timer: asyncio.TimerHandle | None = None
        self._body_timer: asyncio.TimerHandle | None = None
        self._head_bytes = 0
        self._chunks = self._body_bytes = 0
        self._problem = "The request is not valid HTTP: send HTTP/1.1"

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the time limit for the first request's head."""
        super().connection_made(transport)
        # asyncio's own 256 KB take as long as four of these: 50 senders would hold up all others.
        transport.max_size = self.most_read  # type: ignore[attr-defined]
        sock = transport.get_extra_info("socket")
        if (
            sock is not None
            and hasattr(socket, "TCP_USER_TIMEOUT")
            and sock.family != socket.AF_UNIX
        ):
            # The kernel drops a peer that reads nothing, even after the connection was closed here.
            milliseconds = int(self.stall_seconds * 1000)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the time limit."""
        self._head_arrived()
        self._body_arrived()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Close the connection if the head of a request is too long."""
        if self._head_timer is not None:
            self._head_bytes += len(data)
            if self._head_bytes > self.most_head_bytes and self._head_too_long(data):
                self.transport.abort()
                return
        super().data_received(data)

    def on_message_begin(self) -> None:
        """Start the time limit for the next request's head."""
        super().on_message_begin()
        self._chunks = self._body_bytes = 0
        if self._head_timer is None:
            self._expect_head()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Count the header."""
        if len(self.headers) >= self.most_headers:
            self._refuse(f"The request has more than {self.most_headers} headers: send fewer")
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Stop the time limit of the head, and start that of the body."""
        self._head_arrived()
        if len(self.pipeline) >= self.most_pipelined:
            self._refuse(f"More than {self.most_pipelined} requests wait: await their answers")
        self._body_arrived()
        self._body_timer = self.loop.call_later(self.message_seconds, self._give_up)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Count the chunk."""
        self._chunks += 1
        self._body_bytes += len(body)
        if self._chunks > self.free_chunks + self._body_bytes / self.least_chunk:
            self._refuse(
                f"The body comes in chunks of less than {self.least_chunk} bytes: send larger ones"
            )
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Stop the time limit of the body."""
        self._body_arrived()
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Answer what is not HTTP, or costs too much, in OpenAI's format; close the connection."""
        error = {"message": self._problem, "type": "invalid_request_error", "param": None,
                 "code": "invalid_request"}  # fmt: skip
        body = json.dumps({"error": error}).encode()
        head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
        self.transport.write(STATUS_LINE[400] + head % len(body) + body)
        self.transport.close()

    def _refuse(self, problem: str) -> NoReturn:
        """Stop the parser, which then calls `send_400_response`."""
        self._problem = problem
        raise ValueError(problem)

    def _head_too_long(self, data: bytes) -> bool:
        # A short head and the beginning of its body may arrive in one piece.
        return b"\r\n\r\n" not in data[: self.most_head_bytes]

    def _expect_head(self) -> None:
        self._head_bytes = 0
        self._head_timer = self.loop.call_later(self.head_seconds, self._give_up)

    def _head_arrived(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _body_arrived(self) -> None:
        if self._body_timer is not None:
            self._body_timer.cancel()
            self._body_timer = None

    def _give_up(self) -> None:
        self._head_timer = self._body_timer = None
        if not self.transport.is_closing():
            self.transport.abort()


def protocol(
    head_seconds: float, stall_seconds: float, body_seconds: float
) -> type[PatientProtocol]:
    """Protocol class with these time limits; uvicorn makes an object for each connection."""
    limits = {
        "head_seconds": head_seconds,
        "stall_seconds": stall_seconds,
        "message_seconds": body_seconds + 5,  # the server answers a slow body after body_seconds
    }
    return type("Protocol", (PatientProtocol,), limits)
