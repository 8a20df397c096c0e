"""The replicas as one engine."""

import asyncio
import time
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import ray

from tests.support.fake_engine import FakeEngine
from tests.support.fake_replicas import Replica, asynchronous, start
from tests.support.http_helpers import adapter, bundle
from valora_serve import errors, types
from valora_serve.replicas import client as module
from valora_serve.replicas.client import total
from valora_serve.replicas.wire import Report, localised
from valora_serve.server.constrain import Grammar, GrammarConstraint
from valora_serve.types import EngineStats, Finish, Mode, NewContext, Request, SamplingParams


async def ask(client, **options):
    request = Request(**({"id": "a", "text": "hello"} | options))
    return [output async for output in client.generate(request)]


def test_clocks_of_other_machines_are_corrected():
    """The replica's machine was started 1,000 s later than this one."""
    there = types.Output(
        "a", times=types.Times(arrival=5.0, started=7.0, first_token=8.0, finished=None)
    )
    here = localised(there, 1006.0, 1000.0).times
    assert (here.arrival, here.started, here.first_token) == (1006.0, 1007.0, 1008.0)
    assert here.finished is None
    assert localised(there, 1007.5, 1000.0).times.started == 1007.5  # not before its arrival


@asynchronous
async def test_a_request_whose_replica_dies_is_asked_once_more():
    slow = FakeEngine(slots=0)
    client, handle, _, (first, second) = await start(slow, FakeEngine())
    while handle.replicas[0] is not first:
        handle.replicas.rotate(1)
    task = asyncio.create_task(ask(client, deadline=20.0))
    await asyncio.sleep(0.05)
    first.dead = True
    outputs = await task
    assert "".join(output.text for output in outputs).startswith("a red star")
    assert (first.took, second.took) == (1, 1)
    assert 0 < handle.calls[1].request.deadline < handle.calls[0].request.deadline <= 20


@asynchronous
async def test_an_answer_that_has_begun_is_never_begun_again():
    client, _, _, replicas = await start(FakeEngine(step=0.02), FakeEngine(step=0.02))
    outputs = []
    async for output in client.generate(Request("a", text="hello")):
        outputs.append(output)
        if len(outputs) == 3:
            next(r for r in replicas if r.took).dead = True
    assert outputs[-1].finish is Finish.ERROR
    assert isinstance(outputs[-1].error, errors.StoppedError)
    assert "part of the answer was sent" in str(outputs[-1].error)
    assert sum(replica.took for replica in replicas) == 1


@asynchronous
async def test_errors_of_the_engine_arrive_and_are_not_asked_again():
    client, _, _, replicas = await start(FakeEngine(), FakeEngine())
    for replica in replicas:
        replica.engine.refuse = errors.FieldError("so not", "messages.0")
    (output,) = await ask(client)
    assert isinstance(output.error, errors.FieldError)
    assert output.error.param == "messages.0"
    assert sum(replica.took for replica in replicas) == 1


@pytest.mark.parametrize("taken", [True, False])
@asynchronous
async def test_deadlines_hold_with_and_without_a_replica(taken, monkeypatch):
    monkeypatch.setattr(module, "LATE_SECONDS", 0.1)
    client, handle, _, (replica,) = await start(FakeEngine(slots=0))
    replica.engine.generate = lambda request: _silence()
    replica.dead = not taken
    began = time.monotonic()
    (output,) = await ask(client, deadline=0.1)
    assert isinstance(output.error, errors.DeadlineError)
    assert time.monotonic() - began < 2
    assert handle.responses[0].cancelled
    (output,) = await ask(client, deadline=-1.0)
    assert isinstance(output.error, errors.DeadlineError)
    assert len(handle.responses) == 1


async def _silence():
    await asyncio.sleep(3600)
    yield


@asynchronous
async def test_without_replicas_requests_end_and_the_server_says_so(monkeypatch):
    monkeypatch.setattr(module, "TAKEN_SECONDS", 0.1)
    client, _, board, (replica,) = await start(FakeEngine())
    board.report(Report("r0", True, EngineStats()))
    await client._look()
    assert client.healthy
    replica.dead = True
    (output,) = await ask(client)
    assert isinstance(output.error, errors.StoppedError)
    assert "No replica takes requests now" in str(output.error)
    with pytest.raises(errors.StoppedError, match="No replica runs now"):
        await client.warm_up()
    board.leave("r0")
    await client._look()
    assert not client.healthy
    assert client.replicas() == {}
    await client.close()
    assert "shutting down" in str((await ask(client))[0].error)


@asynchronous
async def test_requests_carry_their_adapter_and_their_schema():
    client, handle, _, (replica,) = await start(FakeEngine())
    for model in ("person", "adapter-1", "tiny", None, "scene"):
        await ask(client, model=model, sampling=SamplingParams(max_tokens=1))
    assert [call.adapter for call in handle.calls] == [
        "adapter-1", "adapter-1", None, None, "adapter-1",
    ]  # fmt: skip
    grammars = [Grammar.json({"type": "integer"}), Grammar.json(True, strict=True)]
    for grammar in grammars:
        constraint = GrammarConstraint(Mock(), grammar)
        await ask(client, sampling=SamplingParams(max_tokens=1, constraint=constraint))
    # `Grammars` of the fakes return the grammar with a mark.
    made = [request.sampling.constraint for request in replica.engine.asked[-2:]]
    assert made == [("made here", grammar) for grammar in grammars]
    (output,) = await ask(client, sampling=SamplingParams(constraint=object()))
    assert isinstance(output.error, errors.RequestError)


@asynchronous
async def test_adapters_and_bundles_are_loaded_everywhere_or_nowhere(tmp_path):
    client, _, _, replicas = await start(FakeEngine(), FakeEngine())
    made = await client.load_adapter("mine", adapter(tmp_path / "mine"))
    assert (made.name, made.kind) == ("mine", "adapter")
    assert [
        model.name
        for model in await client.load_bundle(bundle(tmp_path / "more", ("signs",), "more"))
    ] == ["signs"]
    for replica in replicas:
        assert {"mine", "signs"} <= {model.name for model in replica.engine.models()}
    before = client.models()
    with pytest.raises(errors.AdapterError, match="llava"):
        await client.load_adapter("other", adapter(tmp_path / "other", base="llava"))
    # Only one of the replicas refuses it: the other one gives it up again.
    replicas[1].engine.load_adapter = _refuse
    with pytest.raises(errors.AdapterError, match="no room"):
        await client.load_adapter("third", adapter(tmp_path / "third"))
    assert client.models() == before
    for replica in replicas:
        assert "third" not in {model.name for model in replica.engine.models()}
    del replicas[1].engine.load_adapter
    for name, error in (("nobody", errors.UnknownModelError), ("adapter-1", errors.BusyError)):
        with pytest.raises(error):
            await client.unload("adapter", name)
    with pytest.raises(errors.UnknownModelError):
        await client.unload("bundle", "more@2")
    await client.unload("adapter", "mine")
    await client.unload("bundle", "more")
    for replica in replicas:
        assert not {"mine", "signs"} & {model.name for model in replica.engine.models()}
    assert not {"mine", "signs"} & {model.name for model in client.models()}
    with pytest.raises(errors.AdapterError, match="every machine"):
        await client.load_adapter("gone", tmp_path / "gone")
    with pytest.raises(errors.AdapterError, match="no bundle"):
        await client.load_bundle(tmp_path / "gone")


@asynchronous
async def test_a_context_is_made_by_one_replica_and_served_by_all(tmp_path):
    engines = FakeEngine(), FakeEngine()
    client, _, board, _ = await start(*engines)
    folder = tmp_path / "new-1"
    made = await client.make_context(NewContext("new", "Some text."), folder)
    assert (made.name, made.form, made.source_tokens) == ("new", "prefix", 2)
    for engine in engines:
        assert next(m for m in engine.models() if m.name == "new").root == str(folder)
    # One that starts later has it, too.
    late = Replica("late", board)
    await late._follow(board.state(), strict=False)
    assert "new" in {model.name for model in late.engine.models()}
    # Another document under the name, as `replace` asks for it.
    again = await client.make_context(NewContext("new", "A longer text."), tmp_path / "new-2")
    assert again.source_tokens == 3
    assert {next(m for m in engine.models() if m.name == "new").root for engine in engines} == {
        str(tmp_path / "new-2")
    }
    await client.load_context("old", folder)
    await client.unload("context", "new")
    for engine in engines:
        assert {m.name for m in engine.models() if m.form} == {"old"}
    of_bundle = replace(client._models[0], name="c", form="prefix", bundle="b@1")
    client._models = [*client.models(), of_bundle]
    for name, error, words in (
        ("new", errors.UnknownModelError, "no context is named new: known are old"),
        ("c", errors.BusyError, "context c belongs to bundle b@1"),
    ):
        with pytest.raises(error, match=words):
            await client.unload("context", name)


@asynchronous
async def test_a_context_that_cannot_be_made_or_served_changes_nothing(tmp_path):
    engines = FakeEngine(), FakeEngine()
    client, handle, _, _ = await start(*engines)
    with pytest.raises(errors.RequestError, match="context new: the document is empty"):
        await client.make_context(NewContext("new", " "), tmp_path / "none")
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(errors.StorageError, match="cannot be written"):
        await client.make_context(NewContext("new", "Text."), tmp_path / "file" / "new")
    with pytest.raises(errors.AdapterError, match="context /nowhere cannot be read"):
        await client.load_context("new", Path("/nowhere"))

    async def refuse(name, folder):
        raise errors.AdapterError(f"context {name}: no room")

    engines[1].load_context = refuse
    with pytest.raises(errors.AdapterError, match="no room"):
        await client.make_context(NewContext("new", "Text."), tmp_path / "half")
    for engine in engines:
        assert "new" not in {model.name for model in engine.models()}

    class Gone:
        async def control(self, *arguments):
            raise ray.exceptions.ActorDiedError()

    handle.next = Gone
    with pytest.raises(errors.StoppedError, match="has gone: ask again"):
        await client.make_context(NewContext("new", "Text."), tmp_path / "gone")


async def _refuse(name, folder, **_):
    raise errors.AdapterError("there is no room for it")


@asynchronous
async def test_a_replica_that_starts_late_learns_what_is_served(tmp_path):
    """It read the board before an adapter was loaded, and gets a request for the adapter."""
    client, handle, board, _ = await start(FakeEngine())
    late = Replica("late", board)
    await late._follow(board.state(), strict=False)
    await client.load_adapter("mine", adapter(tmp_path / "mine"))
    handle.replicas.appendleft(late)
    outputs = await ask(client, model="mine", sampling=SamplingParams(max_tokens=1))
    assert outputs[-1].finish is Finish.LENGTH
    assert late.took == 1
    # An adapter that it cannot load is an error of that adapter's requests alone.
    late.engine.load_adapter = _refuse
    await client.close()
    client, handle, board, _ = await start(FakeEngine())
    await client.load_adapter("third", adapter(tmp_path / "third"))
    late._board = Replica("late", board)._board
    handle.replicas.appendleft(late)
    (output,) = await ask(client, model="third")
    assert "no room" in str(output.error)
    handle.replicas.rotate(-1)
    assert (await ask(client))[-1].finish is not Finish.ERROR


def test_totals():
    first = EngineStats(
        running=2, waiting=3, mode=Mode.MERGED, merged_adapter="a", steps=10, pages_total=7,
        adapters_resident=("a", "b"), adapters_known=5, finished={"stop": 2},
        unmergeable=("x",), quarantined={"q": "NaN"}, adapter_loads=4,
    )  # fmt: skip
    second = EngineStats(
        running=1, mode=Mode.MIXTURE, merged_adapter="b", steps=20, pages_total=7,
        adapters_resident=("b", "c"), adapters_known=5, finished={"stop": 1, "head": 4},
    )  # fmt: skip
    both = total([first, second])
    assert (both.running, both.waiting, both.steps, both.pages_total) == (3, 3, 30, 14)
    assert (both.mode, both.merged_adapter) == (Mode.MERGED, "a")
    assert both.adapters_resident == ("a", "b", "c")
    assert (both.adapters_known, both.adapter_loads) == (5, 4)
    assert both.finished == {"stop": 3, "head": 4}
    assert both.quarantined == {"q": "NaN"}
    assert total([]) == EngineStats()
