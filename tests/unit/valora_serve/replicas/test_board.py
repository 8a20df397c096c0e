"""The board: who may change what is served, what is recorded, and which replicas there are."""

import asyncio
from types import SimpleNamespace

import pytest

from tests.support.replicas import report
from valora_serve.errors import StoppedError
from valora_serve.replicas.board import HELD_SECONDS, STALE, Board, wanted
from valora_serve.server.loading.state_file import SavedState, StateFile


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def test_one_replica_at_a_time_changes_what_is_served(tmp_path):
    file, clock = tmp_path / "s.json", Clock()
    board, new = Board(str(file), clock), SavedState(adapters={"a": "/a"})

    async def case():
        board.report(report("x"))
        state, others = await board.lock("y")
        assert (state, [one.replica for one in others]) == (SavedState(), ["x"])
        assert board.report(report("y"))[0] is None, "it changes"
        waiting = asyncio.create_task(board.lock("z"))
        joining = asyncio.create_task(board.join(report("z"), None))
        await asyncio.sleep(0.1)
        assert not waiting.done()
        assert isinstance(board.record("z", new), StoppedError)
        assert board.record("y", new) is None
        assert StateFile(file).read() == board.state() == new
        board.unlock("y")
        assert (await waiting)[0] == new
        clock.now += HELD_SECONDS + 1  # z is silent
        assert await joining == new, "another state: it is not taken in"
        assert [one.replica for one in board.look()] == []
        assert (await board.lock("x"))[0] == new

    asyncio.run(case())
    assert Board(str(file)).state() == new, "a board that starts anew"
    assert isinstance(Board(str(file)).record("x", new), StoppedError)


def test_a_state_that_cannot_be_written_is_not_taken(tmp_path):
    board = Board(str(tmp_path / "f" / "s.json"))
    (tmp_path / "f").write_text("no folder")
    asyncio.run(board.lock("x"))
    assert isinstance(board.record("x", SavedState(adapters={"a": "/a"})), OSError)
    assert board.state() == SavedState()


def test_replicas_that_are_silent_or_leave_are_forgotten():
    clock = Clock()
    board = Board(None, clock)
    assert not board.is_used()
    assert asyncio.run(board.join(report("x"), "what it serves")) is None
    board.report(report("y"))
    clock.now += STALE - 1
    board.report(report("y"))
    assert {one.replica for one in board.look()} == {"x", "y"}
    assert board.is_used()
    assert board.served() == "what it serves"
    clock.now += 2
    assert {one.replica for one in board.look()} == {"y"}
    board.leave("y")
    assert board.look() == []
    clock.now += STALE
    assert not board.is_used()


def test_each_replica_hears_once_what_the_others_have_let_in():
    board = Board(None, Clock())
    for name in "xyz":
        board.report(report(name))
    board.report(report("x", taken={"key a": 2}))
    board.report(report("x", taken={"key a": 1, "key b": 1}))
    assert board.report(report("y"))[2] == {"key a": 3, "key b": 1}
    assert board.report(report("y"))[2] == {}
    assert board.report(report("x"))[2] == {}
    assert board.report(report("z"))[2] == {"key a": 3, "key b": 1}


@pytest.mark.parametrize(("inside", "count"), [([], 0), ([8, 8], 2), ([20, 9], 3.625)])
def test_autoscaling_follows_requests_in_progress(inside, count):
    context = SimpleNamespace(
        aggregated_metrics={"inside": dict(enumerate(inside))},
        config=SimpleNamespace(get_target_ongoing_requests=lambda: 8),
    )
    assert wanted(context) == (count, {})
