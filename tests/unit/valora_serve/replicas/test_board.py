"""The board: who may change what is served, what is recorded, and which replicas there are."""

import asyncio
from types import SimpleNamespace
from unittest.mock import patch

import pytest

from tests.support.replicas import awaited, report
from valora_serve.errors import StoppedError
from valora_serve.replicas.board import STALE, Board, wanted
from valora_serve.server.loading.state_file import SavedState, StateFile


@pytest.fixture
def clock():
    with patch("valora_serve.replicas.board.monotonic", return_value=100.0) as made:
        yield made


async def told(board, *reports):
    return [one[0] for one in await asyncio.gather(*map(board.report, reports))]


@awaited
async def test_one_replica_at_a_time_changes_what_is_served(tmp_path, clock):
    file = tmp_path / "s.json"
    board, old, new = Board(str(file)), SavedState(), SavedState(adapters={"a": "/a"})
    assert await told(board, report("x"), report("y"), report("z")) == [old] * 3
    assert await board.lock("y") == old
    waiting = asyncio.create_task(board.lock("z"))
    assert isinstance(await board.change("z", new), StoppedError)
    change = asyncio.create_task(board.change("y", new))
    await asyncio.sleep(0.1)
    assert await told(board, report("y"), report("x"), report("z")) == [None, new, new]
    assert not change.done()
    assert not file.exists()
    assert await told(board, report("x", state=new), report("new", state=new)) == [new, new]
    await asyncio.sleep(0.1)
    assert not change.done(), "z has not followed"
    assert not waiting.done()
    assert await told(board, report("z", state=new)) == [new]
    assert await change is None
    assert StateFile(file).read() == board.state() == new
    board.unlock("y")
    assert await waiting == new
    clock.return_value += STALE + 1  # z is silent
    assert await board.lock("x") == new
    assert await Board(str(file)).change("x", new) is None, "it is recorded, says one that is new"
    assert isinstance(await Board(str(file)).change("x", old), StoppedError)


@awaited
async def test_a_change_whose_replica_has_died_ends_before_the_next_one(clock):
    board, new = Board(None), SavedState(adapters={"a": "/a"})
    await told(board, report("x"), report("y"))
    await board.lock("x")
    change = asyncio.create_task(board.change("x", new))
    await asyncio.sleep(0.1)
    clock.return_value += STALE - 1
    await told(board, report("y"))
    clock.return_value += 2  # x is silent
    waiting = asyncio.create_task(board.lock("y"))
    await asyncio.sleep(0.2)
    assert not waiting.done(), "y would change what was before"
    await told(board, report("y", state=new))
    assert await change is None
    assert await waiting == new


@awaited
async def test_a_change_that_fails_ends_once_none_makes_it_any_more():
    board, old, new = Board(None), SavedState(), SavedState(adapters={"a": "/a"})
    await told(board, report("x"), report("y"), report("z"))
    await board.lock("x")
    change = asyncio.create_task(board.change("x", new))
    assert await told(board, report("y"), report("z")) == [new, new]
    failed = report("y", state=new, problem="no memory")
    assert await told(board, failed) == [new], "z may still be loading it"
    assert await told(board, failed, report("z", state=new)) == [old, old]
    assert await told(board, report("y")) == [old]
    await asyncio.sleep(0.1)
    assert not change.done(), "z serves it"
    assert await told(board, report("z")) == [old]
    assert str(await change) == "no memory"
    assert board.state() == old


@awaited
async def test_replicas_that_are_silent_or_leave_are_forgotten(clock):
    board = Board(None)
    await told(board, report("x"), report("y"))
    clock.return_value += STALE - 1
    await told(board, report("y"))
    for seconds, known in ((0, {"x", "y"}), (2, {"y"})):
        clock.return_value += seconds
        assert {one.replica for one in board.reports()} == known
    board.leave("y")
    assert board.reports() == []


@awaited
async def test_each_replica_hears_once_what_the_others_have_let_in():
    board = Board(None)
    both = {"key a": 3, "key b": 1}
    for name, taken, heard in (
        ("x", {}, {}), ("y", {}, {}), ("z", {}, {}),
        ("x", {"key a": 2}, {}), ("x", {"key a": 1, "key b": 1}, {}),
        ("y", {}, both), ("y", {}, {}), ("x", {}, {}), ("z", {}, both),
    ):  # fmt: skip
        assert (await board.report(report(name, taken=taken)))[2] == heard


@pytest.mark.parametrize(("inside", "count"), [([], 0), ([8, 8], 2), ([20, 9], 3.625)])
def test_autoscaling_follows_requests_in_progress(inside, count):
    context = SimpleNamespace(
        aggregated_metrics={"inside": dict(enumerate(inside))},
        config=SimpleNamespace(get_target_ongoing_requests=lambda: 8),
    )
    assert wanted(context) == (count, {})
