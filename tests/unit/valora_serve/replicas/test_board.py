"""The board of an application."""

from valora_serve.replicas.board import STALE, Board
from valora_serve.replicas.wire import Report, Revision, ServedState
from valora_serve.types import EngineStats


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
