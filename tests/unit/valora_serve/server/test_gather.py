"""Coroutines of a request: in order, few at a time, and all ended when one fails."""

import asyncio
import gc
import weakref

import pytest

from valora_serve.server.gather import AT_ONCE, gathered


class Held:
    """Something large."""


def test_results_are_in_order_and_few_run_at_a_time():
    running, most = 0, 0

    async def work(number):
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.001 * (7 - number % 8))
        running -= 1
        return number * number

    async def ask():
        return await gathered(*(work(number) for number in range(50)))

    assert asyncio.run(ask()) == [number * number for number in range(50)]
    assert most == AT_ONCE
    assert asyncio.run(gathered()) == []


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
