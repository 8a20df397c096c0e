"""The board of an application."""

from valora_serve.replicas.board import STALE, Board
from valora_serve.replicas.served import Revision, ServedState
from valora_serve.replicas.wire import Report
from valora_serve.types import EngineStats


def report(name, running=0):
    return Report(name, "host", 1, True, None, EngineStats(running=running))


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
    assert [one.replica for one in board.reports()] == ["b"]
    assert not board.is_used()
    assert board.state() == state  # which the next server takes over
    board.leave("b")
    assert board.reports() == []


def test_revisions_of_another_server_cover_nothing():
    first = Revision("f", 3)
    assert first.covers(Revision("f", 2))
    assert first.covers(first)
    assert not first.covers(Revision("f", 4))
    assert not first.covers(Revision("g", 0))
