"""Runs coroutines of a request: several together, or as long as its client stays."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

from valora_serve.errors import CancelledRequestError

T = TypeVar("T")
AT_ONCE = 8
"""Coroutines that run at a time: the first steps of thousands would hold up the event loop."""


async def gathered(*work: Coroutine[Any, Any, Any], at_once: int = AT_ONCE) -> list[Any]:
    """Results of several coroutines, in order; if one fails, the others are cancelled.

    At most `at_once` run at a time. `asyncio.TaskGroup` would start all of them, and in Python 3.11
    its error group refers to itself, and keeps what the failed functions held (images, files) until
    the garbage collector runs.
    """
    limit = asyncio.Semaphore(at_once)

    async def limited(item: Coroutine[Any, Any, Any]) -> Any:
        async with limit:
            return await item

    task: asyncio.Future[Any] | None
    running = [asyncio.ensure_future(limited(item)) for item in work]
    try:
        return await asyncio.gather(*running)
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        for item in work:
            item.close()  # if it has not begun
        # An error refers to this frame, which must not refer to it.
        task = None
        running.clear()


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine, and cancel it if the client disconnects."""
    doing = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({doing, gone}, return_when=asyncio.FIRST_COMPLETED)
        if doing.done():
            return doing.result()
        raise CancelledRequestError("The client went away")
    finally:
        for task in (doing, gone):
            task.cancel()
        await asyncio.gather(doing, gone, return_exceptions=True)
        # An error refers to this frame, which must not refer to it.
        del doing, gone


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
