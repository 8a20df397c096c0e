"""uvicorn's HTTP protocol with time limits for slow clients."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING, Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

if TYPE_CHECKING:
    import asyncio


class PatientProtocol(HttpToolsProtocol):
    """uvicorn's protocol with limits on a request's head and on clients that do not read.

    Attributes:
        head_seconds: Time limit in seconds for a client to send the head of a request.
        stall_seconds: Time in seconds after which the kernel drops a client that reads nothing.
        most_head_bytes: Largest head of a request, in bytes.
    """

    head_seconds = 20.0
    stall_seconds = 30.0
    most_head_bytes = 64 * 1024

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._head_timer: asyncio.TimerHandle | None = None
        self._head_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the time limit for the first request's head."""
        super().connection_made(transport)
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
        if self._head_timer is None:
            self._expect_head()

    def on_headers_complete(self) -> None:
        """Stop the time limit: the head is complete."""
        self._head_arrived()
        super().on_headers_complete()

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

    def _give_up(self) -> None:
        self._head_timer = None
        if not self.transport.is_closing():
            self.transport.abort()


def protocol(head_seconds: float, stall_seconds: float) -> type[PatientProtocol]:
    """Protocol class with these time limits; uvicorn makes an object for each connection."""
    limits = {"head_seconds": head_seconds, "stall_seconds": stall_seconds}
    return type("Protocol", (PatientProtocol,), limits)
