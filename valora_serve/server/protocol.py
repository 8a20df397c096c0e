"""uvicorn's HTTP protocol with time limits for slow clients."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import TYPE_CHECKING, Any, NoReturn

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

if TYPE_CHECKING:
    from collections.abc import Callable


LINGER_SECONDS = 2.0
"""Time that a client has to stop sending, before its connection is closed."""
FIRST_SECONDS = 1.0
"""Time that a new connection has to send its first byte, when the server stops."""


class LingeringTransport:
    """A transport that does not cut a client off while it sends.

    The kernel resets a connection that is closed with bytes unread, and the client loses the
    answer that it has not read yet. Here `close` ends the answer, and the connection is closed
    once the client has closed its side, or after `LINGER_SECONDS`.

    Args:
        transport: The connection.
        arriving: Tells whether the client is sending a request.

    Attributes:
        ending: Whether the answer has ended, and what still arrives is ignored.
    """

    def __init__(self, transport: asyncio.Transport, arriving: Callable[[], bool]) -> None:
        self.ending = False
        self._transport = transport
        self._arriving = arriving

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def is_closing(self) -> bool:
        """Whether nothing can be written any more."""
        return self.ending or self._transport.is_closing()

    def write(self, data: bytes) -> None:
        """Write a part of an answer, unless it has ended."""
        if not self.ending:
            self._transport.write(data)

    def close(self) -> None:
        """End the answer, and close the connection when the client has stopped sending."""
        if self.is_closing():
            return
        if not (self._arriving() and self._transport.can_write_eof()):  # TLS cannot end one side
            self._transport.close()
            return
        self.ending = True
        self._transport.write_eof()
        self._transport.resume_reading()
        asyncio.get_running_loop().call_later(LINGER_SECONDS, self._transport.close)


class PatientProtocol(HttpToolsProtocol):
    """uvicorn's protocol with limits on slow clients and on what costs more than its bytes.

    The parser calls Python for every header, every chunk and every pipelined request. Each of them
    may be a few bytes long, and a piece of 256 KB of them would hold up all other connections.

    Attributes:
        head_seconds: Time limit in seconds for a client to send the head of a request.
        message_seconds: Time limit in seconds for a client to send a request's body, read or not.
        stall_seconds: Time in seconds after which the kernel drops a client that reads nothing.
        most_head_bytes: Largest head of a request, in bytes.
        most_headers: Most headers of a request, and most trailers.
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
        self._timer: asyncio.TimerHandle | None = None
        self._head_bytes = 0
        self._begun = False  # a part of a request's head has come
        self._in_body = False
        self._refused = False
        self._chunks = self._body_bytes = 0
        self._problem = "The request is not valid HTTP: send HTTP/1.1"

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the time limit for the first request's head."""
        lingering: Any = LingeringTransport(transport, lambda: self._begun or self._in_body)
        super().connection_made(lingering)
        self.client = self.client or ("unix", 0)
        # asyncio's own 256 KB take as long as four of these: 50 senders would hold up all others.
        transport.max_size = self.most_read  # type: ignore[attr-defined]
        sock = transport.get_extra_info("socket")
        if sock.family != socket.AF_UNIX and hasattr(socket, "TCP_USER_TIMEOUT"):
            # The kernel drops a peer that reads nothing, even after the connection was closed here.
            milliseconds = int(self.stall_seconds * 1000)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)
        self._limit(self.head_seconds)

    def shutdown(self, wait: float = FIRST_SECONDS) -> None:
        """End the connection: after its answer, or after the request that is arriving.

        A request whose head does not arrive within `LINGER_SECONDS` is answered all the same.

        Args:
            wait: Time in seconds that a new connection has to send its first byte.
        """
        cycle: Any = self.cycle  # None before the first request
        if cycle is not None and not cycle.response_complete:
            super().shutdown()
        elif self._begun:
            self.loop.call_later(LINGER_SECONDS, self._answer_end)
        elif cycle is None and wait:
            self.loop.call_later(wait, self.shutdown, 0.0)
        else:
            self.transport.close()

    def _answer_end(self) -> None:
        """Answer a request of which the server has not seen enough."""
        if self._begun and not self.transport.is_closing():
            message = "The server is shutting down: ask again in a moment"
            self._answer(503, {"message": message, "type": "server_error", "code": "draining"})

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the time limit."""
        self._limit(None)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse what has come; close the connection if the head of a request is too long."""
        if self.transport.is_closing() or self._refused:
            return
        if not self._in_body:
            self._head_bytes += len(data)
            # A short head and the beginning of its body may arrive in one piece.
            long = self._head_bytes > self.most_head_bytes
            if long and b"\r\n\r\n" not in data[: self.most_head_bytes]:
                self.transport.abort()
                return
        self._unset_keepalive_if_required()
        try:
            while data:
                data = self._parse(data)
        except httptools.HttpParserError:
            self._refused = True
            self._answer_refused()

    def _parse(self, data: bytes) -> bytes:
        """Parse what has come; returns what is to be parsed next.

        The parser takes what follows an offer of another protocol (`Upgrade`) for that protocol:
        it gets the head once more, without the offer.
        """
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as offer:
            method, version = self.parser.get_method(), self.parser.get_http_version().encode()
            headers = [item for item in self.headers if item[0] != b"upgrade"]
            lines = [b"%s %s HTTP/%s" % (method, self.url, version), *map(b": ".join, headers)]
            self.parser = httptools.HttpRequestParser(self)
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
            return b"\r\n".join([*lines, b"", data[offer.args[0] :]])
        return b""

    def on_response_complete(self) -> None:
        """Answer the next request, or what was refused after this one."""
        super().on_response_complete()
        if self._refused and not self.transport.is_closing():
            self._answer_refused()

    def _answer_refused(self) -> None:
        """Answer what is not HTTP, or costs too much, once what came before has been answered."""
        cycle: Any = self.cycle
        if cycle is not None and not cycle.response_complete:
            if self.pipeline or not self._in_body or cycle.response_started:
                return
        elif self._in_body:  # of a request that has been answered
            self.transport.close()
            return
        kind = "invalid_request_error"
        self._answer(400, {"message": self._problem, "type": kind, "code": "invalid_request"})

    def on_message_begin(self) -> None:
        """Start the time limit for the next request's head."""
        super().on_message_begin()
        self._begun = True
        self._chunks = self._body_bytes = 0
        if self._timer is None:  # that of the first request runs since it connected
            self._limit(self.head_seconds)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Count the header."""
        if len(self.headers) >= self.most_headers:
            self._refuse(f"The request has more than {self.most_headers} headers: send fewer")
        if name.lower() == b"transfer-encoding" and value.strip().lower() != b"chunked":
            self._refuse("The body has a transfer coding besides chunked: send it without")
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Stop the time limit of the head, and start that of the body."""
        if self.parser.get_http_version() not in ("1.0", "1.1"):
            self._refuse(self._problem)
        if self.parser.get_method() == b"CONNECT":
            self._refuse("CONNECT is for proxies: send requests to this server itself")
        if self.parser.should_upgrade():
            return  # the head is parsed once more
        if len(self.pipeline) >= self.most_pipelined:
            self._refuse(f"More than {self.most_pipelined} requests wait: await their answers")
        super().on_headers_complete()
        self.headers = []  # of the trailers, which are no headers
        self._begun, self._in_body, self._head_bytes = False, True, 0
        self._limit(self.message_seconds)

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
        if self.parser.should_upgrade():
            return
        self._in_body = False
        self._limit(None)
        super().on_message_complete()

    def _answer(self, status: int, error: dict[str, str]) -> None:
        """Write an error, in OpenAI's format, of which the application does not know; close."""
        body = json.dumps({"error": error | {"param": None}}).encode()
        head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n"
        if status == 503:
            head += b"retry-after: 1\r\n"
        self.transport.write(STATUS_LINE[status] + head % len(body) + b"\r\n" + body)
        self.transport.close()

    def _refuse(self, problem: str) -> NoReturn:
        """Stop the parser; the problem is answered."""
        self._problem = problem
        raise ValueError(problem)

    def _limit(self, seconds: float | None) -> None:
        """Time that the client has for what it is sending; None for no limit."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if seconds is None else self.loop.call_later(seconds, self._give_up)

    def _give_up(self) -> None:
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
