"""Coroutines of a request: in order, few at a time, and all ended when one fails."""

import asyncio
import gc
import weakref

import pytest

from valora_serve.server.gather import AT_ONCE, gathered


class Held:
    """Something large."""


@pytest.mark.parametrize("fails", [0, 5, AT_ONCE, 29])
def test_an_error_ends_the_others_and_leaves_nothing(fails):
    ended, started = [], []
    held = []

    async def work(number):
        large = Held()
        held.append(weakref.ref(large))
        started.append(number)
        try:
            await asyncio.sleep(0 if number <= fails else 60)
            if number == fails:
                raise ValueError(f"number {number}")
        finally:
            ended.append(number)

    async def ask():
        with pytest.raises(ValueError, match=f"number {fails}"):
            await gathered(*(work(number) for number in range(30)))
        assert sorted(ended) == sorted(started)
        assert len(asyncio.all_tasks()) == 1

    gc.disable()
    try:
        asyncio.run(ask())
        assert [one() for one in held] == [None] * len(held)  # without the garbage collector
    finally:
        gc.enable()


def test_cancelling_ends_all():
    ended = []

    async def work():
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(1)

    async def ask():
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(gathered(*(work() for _ in range(20))), 0.01)

    asyncio.run(ask())
    assert len(ended) == AT_ONCE
