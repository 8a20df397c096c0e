"""One replica over a fake engine: batches of outputs, calls, health; and the board of all."""

import asyncio
from dataclasses import replace

import pytest

from tests.support.fake_engine import FakeEngine
from tests.support.fake_replicas import Replica, asynchronous
from valora_serve.errors import StoppedError
from valora_serve.replicas.board import STALE, Board
from valora_serve.replicas.request_router import RESIDENT
from valora_serve.replicas.wire import Call, Report, Revision, ServedState
from valora_serve.types import EngineStats, Finish, Request, SamplingParams

NOW = Revision("f", 1)


async def ready(engine=None):
    board = Board()
    board.pin(ServedState(NOW))
    made = Replica("r", board, engine)
    await made._follow(board.state(), strict=True)
    return made


def call(count, revision=NOW):
    sampling = SamplingParams(max_tokens=count, ignore_eos=True)
    return Call(Request("a", text="hello", sampling=sampling), None, revision)


@pytest.mark.parametrize("running", [0, 400])
@asynchronous
async def test_outputs_are_sent_together_when_many_requests_run(running):
    """One request alone gets a message a token; 400 share the messages of a second."""
    engine = FakeEngine(step=0.01)
    engine.stats = lambda: EngineStats(running=running)
    batches = [batch async for batch in (await ready(engine)).generate(call(40))]
    assert batches[0].outputs == ()
    outputs = [output for batch in batches for output in batch.outputs]
    assert [output.token_ids for output in outputs[:-1]] == [(n,) for n in range(40)]
    assert outputs[-1].finish is Finish.LENGTH
    assert len(batches) < 8 if running else len(batches) > 20


@asynchronous
async def test_an_answer_that_is_not_streamed_is_one_message():
    whole = replace(call(20), request=replace(call(20).request, stream=False))
    batches = [b async for b in (await ready(FakeEngine(step=0.005))).generate(whole)]
    assert [len(batch.outputs) for batch in batches] == [0, 21]


@asynchronous
async def test_errors_in_the_engine_end_the_request():
    async def broken(request):
        yield (await asyncio.sleep(0, FakeEngine) and None) or _raise()

    async def silent(request):
        return
        yield

    for generate, words in ((broken, "failed: out of luck"), (silent, "engine stopped")):
        engine = FakeEngine()
        engine.generate = generate
        batches = [batch async for batch in (await ready(engine)).generate(call(4))]
        (output,) = batches[-1].outputs
        assert output.finish is Finish.ERROR
        assert words in str(output.error)


def _raise():
    raise OSError("out of luck")


@asynchronous
async def test_a_closed_answer_is_cancelled():
    engine = FakeEngine(step=0.01)
    stream = (await ready(engine)).generate(call(10_000))
    await anext(stream)
    await anext(stream)
    assert engine.running
    await stream.aclose()
    assert not engine.running
    assert engine.cancelled == ["a"]


@asynchronous
async def test_health_and_what_routers_are_told():
    made = await ready()
    await made.check_health()
    assert made.record_routing_stats() == {RESIDENT: ["adapter-1"]}
    made.engine.healthy = False
    with pytest.raises(StoppedError, match="has failed"):
        await made.check_health()
    assert "replica r failed" in str(await made.control("nothing"))


def report(name, running=0):
    return Report(name, True, EngineStats(running=running))


def test_reports_and_servers_grow_old():
    now = 100.0
    board = Board(lambda: now)
    state = ServedState(Revision("f", 3))
    assert board.state() is None
    assert not board.is_used()
    board.report(report("a", 1))
    board.report(report("b"))
    board.report(report("a", 2))
    assert [(one.replica, one.stats.running) for one in board.pin(state)] == [("a", 2), ("b", 0)]
    assert board.is_used()
    assert board.state() == state
    now += STALE / 2
    board.report(report("b"))
    board.leave("nobody")
    now += STALE / 2 + 0.1
    assert not board.is_used()
    assert board.state() == state  # which the next server takes over
    assert [one.replica for one in board.pin(state)] == ["b"]
    board.leave("b")
    assert board.pin(state) == []
