"""The engine behind an event loop: errors are outputs, cancelling, failing, closing, loading."""

import asyncio
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from tests.support.engine_reference import (
    all_of,
    ask,
    assert_empty,
    make_engine,
    outputs_of,
    question,
    until,
    with_client,
)
from valora_serve.engine import async_engine
from valora_serve.engine.async_engine import AsyncEngine
from valora_serve.errors import (
    AdapterError,
    RequestError,
    ServeError,
    StoppedError,
    UnknownModelError,
)
from valora_serve.types import Finish, Request


def served(base, adapters, body, **settings):
    """Run a coroutine with an engine behind an event loop, then close the engine."""
    inner = make_engine(base, adapters, **settings)
    with_client(inner, lambda engine: body(engine, inner))
    assert not inner.busy


def test_an_answer_that_is_not_streamed_comes_at_its_end(base, adapters, monkeypatch):
    calls, put = [], async_engine._put

    def counted(news):
        calls.append([output.id for _, output in news])
        put(news)

    monkeypatch.setattr(async_engine, "_put", counted)

    async def body(engine, inner):
        streamed = question("streamed", "a", tokens=6)
        whole = replace(streamed, id="whole", stream=False)
        one, other = await asyncio.gather(outputs_of(engine, streamed), outputs_of(engine, whole))
        assert (one.tokens, one.text) == (other.tokens, other.text) and len(one.tokens) == 6
        assert one.last.finish == other.last.finish == Finish.LENGTH
        assert [call.count("whole") for call in calls if "whole" in call] == [1]
        assert len([call for call in calls if "streamed" in call]) > 1
        # What ends early is told as well: with the outputs until then.
        long = replace(question("long", "a", tokens=200), stream=False)
        asked = asyncio.create_task(outputs_of(engine, long))
        while not await engine._do(partial(inner.cancel, "long")):  # not begun
            await asyncio.sleep(0.01)
        assert (await asked).last.finish is Finish.CANCELLED

    served(base, adapters, body)


def test_errors_come_as_outputs(base, adapters):
    async def body(engine, inner):
        for kind, wrong in (
            (UnknownModelError, question("x", "nobody")), (RequestError, question("x", tokens=0)),
            (ServeError, Request("x", messages=ask("y"), images=["no image"])),
        ):  # fmt: skip
            assert isinstance((await outputs_of(engine, wrong)).error, kind)
        both = await asyncio.gather(*(outputs_of(engine, question("same")) for _ in range(2)))
        assert sorted(str(one.finish) for one in both) == ["error", "length"]
        with pytest.raises(UnknownModelError):
            await engine.unload("adapter", "nobody")
        with pytest.raises(AdapterError):
            await engine.load("adapter", Path("/nowhere"), "x")
        assert_empty(inner)

    served(base, adapters, body)


def test_what_is_replaced_while_a_request_is_prepared_is_prepared_again(
    base, adapters, reference, monkeypatch
):
    """Beside another that needs no second preparation; what is gone for good is told so."""
    inner = make_engine(base, {"a": adapters["a"]})
    replacing, add_all = [adapters["c"], adapters["b"]], inner.add_all
    monkeypatch.setattr(inner, "add_all", lambda ready: change() or add_all(ready))
    prepare_all, gone = inner.prepare_all, {}
    monkeypatch.setattr(inner, "prepare_all", lambda asked: prepare_all(asked) | gone)

    def change():
        gone["other"] = UnknownModelError("unloaded since it was put in the queue")
        if replacing:
            inner.registry.unregister("adapter", "a")
            if (folder := replacing.pop(0)) is not None:
                inner.registry.register(inner.registry.read("adapter", folder, "a"))

    async def body(engine):
        mine = question("mine", "a")
        other = replace(mine, id="other", model=None)
        found = await all_of(engine, replace(mine, also=(other,)))
        assert found["mine"].tokens == reference(replace(mine, model="b")).tokens
        assert found["other"].tokens == reference(other).tokens
        replacing.append(None)
        got = await outputs_of(engine, mine)
        assert isinstance(got.error, UnknownModelError)

    with_client(inner, body)


def test_closing_the_iterator_cancels(base, adapters):
    async def body(engine, inner):
        long = question("long", "a", tokens=500)
        stream = engine.generate(long)
        first = await anext(stream)
        assert first.token_ids
        await stream.aclose()
        # Its id is taken until it has ended, and nothing of it reaches the next of this id.
        for _ in range(500):
            got = await outputs_of(engine, replace(question("other"), id="long"))
            if got.error is None:
                break
            assert "in use" in str(got.error)
            await asyncio.sleep(0.002)
        assert (got.finish, len(got.tokens)) == (Finish.LENGTH, 6)
        assert inner.stats().finished["cancelled"] == 1
        task = asyncio.create_task(outputs_of(engine, replace(long, id="task")))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        # The engine's thread counts it first, and frees the id when its output is delivered.
        await until(lambda: not engine._queues)
        assert inner.stats().finished["cancelled"] == 2
        assert_empty(inner)

    served(base, adapters, body, overlap=True)


@pytest.mark.parametrize("books", [False, True])
def test_a_failure_of_the_engine_fails_everybody(base, adapters, books):
    """Also if the engine cannot even end its requests (`books`)."""

    async def body(engine, inner):
        streams = [engine.generate(question(f"{n}", tokens=400)) for n in range(3)]
        for stream in streams:
            await anext(stream)

        def fails(*_, **__):
            raise RuntimeError("device lost")

        if books:
            inner._end = fails
        inner.runner.step = fails
        for stream in streams:
            last = [output async for output in stream][-1]
            assert last.finish is Finish.ERROR and isinstance(last.error, StoppedError)
            assert "device lost" in str(last.error)
        await until(lambda: not engine.healthy)
        got = await outputs_of(engine, question("late"))
        assert isinstance(got.error, StoppedError)
        with pytest.raises(StoppedError):
            await engine.load("adapter", adapters["a"], "x")
        with pytest.raises(StoppedError):
            await engine.unload("adapter", "x")
        inner.requests.waiting.clear()
        inner.requests.running.clear()
        inner._take()

    served(base, {}, body)


def test_closing_lets_running_requests_finish(base, reference):
    async def main():
        engine = AsyncEngine(make_engine(base))
        task = asyncio.create_task(outputs_of(engine, one := question("one", tokens=30)))
        await asyncio.sleep(0.02)
        closing = asyncio.create_task(engine.close(drain=20.0))
        await asyncio.sleep(0)
        got = await outputs_of(engine, question("late"))
        assert isinstance(got.error, StoppedError)
        assert (await task).tokens == reference(one).tokens
        await closing
        assert not engine.healthy
        engine = AsyncEngine(make_engine(base))
        task = asyncio.create_task(outputs_of(engine, question("one", tokens=800)))
        await asyncio.sleep(0.05)
        await engine.close()
        assert isinstance((await task).error, StoppedError)

    asyncio.run(main())


def test_closing_tells_what_waits_to_be_prepared(base, adapters, monkeypatch):
    made = make_engine(base)
    begun, go_on = threading.Event(), threading.Event()

    def wait(*_, **__):
        begun.set()
        go_on.wait()

    monkeypatch.setattr(made, "prepare", wait)
    monkeypatch.setattr(made.registry, "read", wait)

    async def serve():
        engine = AsyncEngine(made)
        asked = [asyncio.create_task(outputs_of(engine, question(name))) for name in "xyz"]
        loads = [asyncio.create_task(engine.load("adapter", adapters[a], a)) for a in "ab"]
        await asyncio.to_thread(begun.wait)
        await engine.close()
        go_on.set()
        for task in asked:
            assert isinstance((await task).error, StoppedError)
        for load in (*loads, engine.load("adapter", adapters["c"], "c")):
            with pytest.raises(StoppedError, match="the engine is stopped"):
                await load

    asyncio.run(serve())
