"""Shutting down: new requests are refused, running ones finish or end with an error."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from valora_serve.errors import DrainingError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from starlette.types import Message, Receive

GRACE_SECONDS = 2.0
"""Time that requests have to send their error after the drain, before they are cancelled."""


class Drain:
    """Requests that the server answers, and whether it takes new ones.

    Attributes:
        begun: Whether new requests are refused.
    """

    def __init__(self) -> None:
        self.begun = False
        self._over = asyncio.Event()
        self._running: set[asyncio.Task[object]] = set()

    @property
    def over(self) -> bool:
        """Whether requests that still run are ended."""
        return self._over.is_set()

    @property
    def idle(self) -> bool:
        """Whether no request runs."""
        return not self._running

    def check(self) -> None:
        """Refuse a new request while the server is shutting down.

        Raises:
            DrainingError: The server is shutting down.
        """
        if self.begun:
            raise DrainingError("The server is shutting down: ask again in a moment")

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Context of a request that the drain waits for."""
        task = asyncio.current_task()
        assert task is not None
        self._running.add(task)
        try:
            yield
        finally:
            self._running.discard(task)

    def ended(self) -> DrainingError:
        """The error of a request that did not finish within the drain."""
        return DrainingError("The server shut down before the answer was complete: ask again")

    async def finish(self, seconds: float) -> None:
        """Refuse new requests, wait for running ones, and end those that are left.

        Args:
            seconds: Time that running requests have.
        """
        self.begun = True
        await self._until_idle(seconds)
        self._over.set()
        await self._until_idle(GRACE_SECONDS)
        for task in tuple(self._running):
            task.cancel()
        await self._until_idle(GRACE_SECONDS)

    def watched(self, receive: Receive) -> Receive:
        """A `receive` that raises `DrainingError` when the drain is over."""

        async def receiving() -> Message:
            message = asyncio.ensure_future(receive())
            over = asyncio.ensure_future(self._over.wait())
            try:
                await asyncio.wait({message, over}, return_when=asyncio.FIRST_COMPLETED)
                if message.done():
                    return message.result()
                raise self.ended()
            finally:
                message.cancel()
                over.cancel()

        return receiving

    async def _until_idle(self, seconds: float) -> None:
        end = asyncio.get_running_loop().time() + seconds
        while self._running and asyncio.get_running_loop().time() < end:
            await asyncio.sleep(0.02)
