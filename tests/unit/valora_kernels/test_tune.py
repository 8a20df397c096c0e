"""Tilings measured piece by piece, with a made-up clock; kernels compiled by another process."""

import threading
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.support.cases import others_slow
from valora_kernels.arrangements import ALL, default_tiling, fits
from valora_kernels.gpus import H200, generic
from valora_kernels.lookup import TilingTable, table_of
from valora_kernels.search import Job
from valora_kernels.tiling import Case, ProjectionGroup, Shape, Tiling
from valora_kernels.tune import ADAPTERS, ROWS, Compiler, Piece, Tuner, candidates, cases

pytestmark = pytest.mark.usefixtures("few_inputs")

CPU = torch.device("cpu")
SMALL = generic("a small GPU", processors=20, shared_memory=88 << 10, capability=(8, 9))
GROUP = ProjectionGroup(64, (32, 16), 16)
LIKE = TilingTable(
    H200,
    [
        (Shape(64, 48, 2, 16, 16, 4.0), Tiling("shrink_expand", outputs=64)),
        (Shape(64, 48, 2, 16, 64, 4.0), Tiling("shrink_expand", outputs=128)),
        (Shape(64, 48, 2, 16, 900, 4.0), Tiling("fused", 32, outputs=128)),
    ],
)


@pytest.fixture
def few_inputs(monkeypatch):
    monkeypatch.setattr("valora_kernels.tune.MAX_SETS", 2)


class Compiled:
    """A compiler that refuses some tilings, and does the others when it is told."""

    def __init__(self, refuses=()):
        self.refuses, self.failed = refuses, set[Job]()
        self.ready, self.lost, self.closed = True, False, 0

    def compile(self, jobs):
        self.failed |= {job for job in jobs if job.tiling in self.refuses}
        return self.ready

    def close(self):
        self.closed += 1


def clock(fastest):
    """A clock by which one tiling takes half as long as each of the others."""

    def times(calls, **_):
        return {name: np.array([1.0 if name == str(fastest) else 2.0]) for name in calls}

    return times


def tuner(compiler, time, like=LIKE):
    return Tuner(TilingTable(SMALL, []), like, compiler, CPU, time)


def test_the_fastest_candidate_of_every_shape_is_entered():
    compiler, wanted = Compiled(), [(GROUP, case) for case in cases(256, 4, SMALL)]
    assert (GROUP, Case(256, 2, first=True)) in wanted
    best = Tiling("shrink_expand", outputs=128)
    made = tuner(compiler, clock(best))
    assert made.left(wanted) == [group.shape(*case) for group, case in wanted]
    pieces = 0
    while made.go_on(wanted) is Piece.MEASURED:
        pieces += 1
        made.pause()  # a request comes after every piece
    assert pieces > 3 * len(wanted)  # no piece takes long
    assert set(made.table.entries.values()) == {best}
    assert made.left(wanted) == []
    assert made.go_on(wanted) is Piece.NONE_LEFT
    made.close()
    made.close()
    assert compiler.closed == 1


def test_what_cannot_be_compiled_or_has_no_room_is_left_out():
    best = Tiling("shrink_expand", outputs=128)
    wanted = [(GROUP, Case(16, 4)), (GROUP, Case(64, 4))]
    made = tuner(Compiled(refuses=[best]), clock(best))
    while made.go_on(wanted) is Piece.MEASURED:
        pass
    assert len(made.table.entries) == 2
    assert best not in made.table.entries.values()

    def no_room(*_, **__):
        raise torch.OutOfMemoryError

    made = tuner(Compiled(), no_room)
    while made.go_on(wanted) is Piece.MEASURED:
        pass
    assert made.skipped == {group.shape(*case) for group, case in wanted}
    assert not made.left(wanted)


def test_nothing_is_timed_before_it_is_compiled():
    compiler, wanted = Compiled(), [(GROUP, Case(16, 4))]
    compiler.ready = False
    made = tuner(compiler, clock(Tiling("fused")))
    assert [made.go_on(wanted) for _ in range(3)] == [Piece.WAITS] * 3
    compiler.lost = True
    assert made.go_on(wanted) is Piece.MEASURED
    assert (made.go_on(wanted), len(made.skipped)) == (Piece.NONE_LEFT, 1)


@pytest.mark.parametrize("rank", others_slow([64], [16, 64, 128]))
def test_candidates_are_few_and_fit(rank):
    like = table_of(H200)
    for outputs in ((4096,), (4096, 4096, 4096), (11008, 11008)):
        group = ProjectionGroup(4096, outputs, rank)
        for case in cases(max(ROWS), max(ADAPTERS), SMALL):
            shape = group.shape(*case)
            found = candidates(SMALL, like, shape)
            assert 1 <= len(found) == len(set(found)) <= 13
            assert all(fits(t, shape, SMALL) for t in found)
    shape = ProjectionGroup(4096, (4096,), rank).shape(64, 4)
    assert like.look_up(shape) in candidates(H200, like, shape)
    assert default_tiling(shape) in candidates(H200, like, shape)


@pytest.mark.parametrize("max_adapters", [1, 2])
def test_few_adapters_have_tilings_of_their_own_where_lora_comes_first(max_adapters):
    """Look-up then asks for as many adapters as have `ROWS_TOGETHER` rows each."""
    measured = {GROUP.shape(*case) for case in cases(4096, max_adapters, SMALL)}
    for rows in (256, 1024, 4096):
        assert GROUP.shape(rows, max_adapters, True) in measured


@pytest.mark.slow
def test_another_process_compiles():
    told = threading.Event()
    compiler = Compiler(CPU)
    compiler.on_news = told.set
    small = Tiling("shrink_expand", outputs=16, inputs=16, split=64, ranks=16)
    good, bad = Job(GROUP, ALL, small), Job(GROUP, ALL, replace(small, rows=3))  # no power of two
    try:
        assert not compiler.compile([good, bad])
        while not compiler.compile([good, bad]):
            assert told.wait(60)
            told.clear()
        assert compiler.failed == {bad}
        assert compiler._process is not None
        compiler._process.kill()
        assert told.wait(60)
        assert compiler.lost
        assert not compiler.compile([Job(GROUP, ALL, replace(small, outputs=32))])
    finally:
        compiler.close()
