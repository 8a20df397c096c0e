"""Runs coroutines of a request together."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Coroutine


async def gathered(*work: Coroutine[Any, Any, Any]) -> list[Any]:
    """Results of several coroutines, in order; if one fails, the others are cancelled.

    `asyncio.TaskGroup` would do the same, but in Python 3.11 its error group refers to itself, and
    keeps what the failed functions held (images, files) until the garbage collector runs.

    Raises:
        Exception: The error of the first coroutine that failed; all have ended then.
    """
    tasks = [asyncio.ensure_future(item) for item in work]
    try:
        if tasks:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        # The tasks that have ended first: one of them has failed, or all of them have succeeded.
        return [task.result() for task in sorted(tasks, key=lambda task: not task.done())]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        del tasks  # an error refers to this frame, which must not refer to it
