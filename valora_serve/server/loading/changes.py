"""Changes of what is served that are made to their end, also if their client leaves meanwhile."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from valora_serve.server.service import Service

T = TypeVar("T")


class Changes:
    """The changes under way."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._tasks: set[asyncio.Task[Any]] = set()

    async def whole(self, change: Coroutine[Any, Any, T]) -> T:
        """Make a change to its end."""

        async def made() -> T:
            try:
                return await change
            finally:
                self._service.refresh()

        task = asyncio.create_task(made())
        self._tasks.add(task)  # the event loop itself holds tasks weakly
        task.add_done_callback(self._tasks.discard)
        return await asyncio.shield(task)
