"""What is prepared before, beside and between requests, on the CPU with graphs that run again."""

import asyncio
import threading

import pytest
import torch

from tests.support.engine_reference import add_requests, finish, make_engine, question, run, serve
from valora_serve.engine import async_engine, profile
from valora_serve.engine.async_engine import AsyncEngine
from valora_serve.engine.warm_up import PATIENCE, PAUSE, WarmUp
from valora_serve.model.attention.torch_backend import TorchBackend, TorchMixedPlan
from valora_serve.model.graphs import GraphRecorder
from valora_serve.model.preparation import DECODE, KERNELS, MIXTURE, PROMPT, VISION, Preparation
from valora_serve.types import Mode

pytestmark = pytest.mark.usefixtures("one_thread")

FIRST = [Preparation(DECODE, 64, 0), Preparation(PROMPT, 256, 1)]
REST = [Preparation(DECODE, 2, 0), Preparation(PROMPT, 128, 0), Preparation(KERNELS, 7, 1)]


class FakeRunner:
    """Records what is prepared; every preparation takes a second of a clock of its own."""

    def __init__(self):
        self.now = 100.0
        self.prepared = []
        self.wanted = None

    def preparations(self, terms):
        assert terms == [0, 1]
        return list(FIRST), list(REST)

    def compile_together(self, wanted, patience):
        assert (list(wanted), patience) == (FIRST, PATIENCE)

    def adopt(self):
        return False

    def prepare(self, wanted):
        self.now += 1.0
        self.prepared.append(wanted)
        return True

    def missed(self):
        return self.wanted


def test_what_a_step_misses_is_prepared_without_slowing_requests_down(monkeypatch):
    runner = FakeRunner()
    monkeypatch.setattr("valora_serve.engine.warm_up.time.monotonic", lambda: runner.now)
    warm = WarmUp([0, 1], lazy=True)
    assert not warm.prepare_next(runner)  # nothing before the start
    warm.start(runner)
    warm.prepare_missed(runner)
    assert runner.prepared == FIRST
    runner.wanted = REST[1]
    warm.prepare_missed(runner)
    assert runner.prepared == [*FIRST, REST[1]]
    runner.wanted = REST[0]
    runner.now += PAUSE - 0.5
    warm.prepare_missed(runner)
    assert len(runner.prepared) == 3
    runner.now += 1.0
    warm.prepare_missed(runner)
    assert runner.prepared == [*FIRST, REST[1], REST[0]]
    assert warm.left == [REST[2]]
    assert str(warm) == "4 of 5 graphs and kernels prepared"
    assert [warm.prepare_next(runner) for _ in range(2)] == [True, False]
    assert warm.seconds == {"graphs": 4.0, "kernels": 1.0}


def graphs(engine):
    return {
        Preparation(kind, size, terms)
        for kind, held in engine.runner._graphs.items()
        for size, terms in held._graphs
    }


def lazily(base, adapters, **options):
    return make_engine(
        base, adapters, prompt_graphs=True, max_requests=4, max_tokens=128, chunk=24,
        policy="slora", **options,
    )  # fmt: skip


@pytest.fixture
def decode_graphs(monkeypatch):
    """Plain torch has fixed buffers for decode steps, too."""
    plan = lambda self, sequences: TorchMixedPlan(self._cache)  # noqa: E731
    monkeypatch.setattr(TorchBackend, "decode_plan", plan)


@pytest.mark.usefixtures("decode_graphs")
def test_larger_graphs_serve_until_smaller_ones_are_captured(base, adapters):
    asked = [question(f"{n}", ("a", None)[n % 2], tokens=3 + 5 * n) for n in range(3)]
    plain = make_engine(base, {"a": adapters["a"]}, policy="slora")
    expected = {name: got.tokens for name, got in run(plain, asked).items()}
    engine = lazily(base, {"a": adapters["a"]})
    engine.warm_up()
    first = {Preparation(DECODE, size, terms) for size in (1, 4) for terms in (0, 1)}
    first |= {Preparation(PROMPT, size, terms) for size in (64, 128) for terms in (0, 1)}
    first |= {Preparation(VISION, size, 0) for size in (1, 4, 16)}
    assert graphs(engine) == first
    missing = {Preparation(DECODE, 2, terms) for terms in (0, 1)}
    missing |= {Preparation(VISION, size, 0) for size in (2, 8)}
    assert set(engine.start_up.left) == missing
    found = run(engine, asked)
    assert {name: got.tokens for name, got in found.items()} == expected
    assert graphs(engine) > first  # of what its steps have missed
    while engine.prepare_next():
        pass
    assert graphs(engine) == first | missing
    stats = engine.stats()
    assert stats.prepared == stats.preparations == 15
    assert {"memory", "attention", "adapters", "graphs"} <= stats.start_seconds.keys()
    again = run(engine, asked)
    assert {name: got.tokens for name, got in again.items()} == expected


def test_graphs_of_mixtures_wait(base, adapters):
    engine = lazily(base, {"a": adapters["a"]}).runner
    first, rest = engine.preparations((0, 1, 2))
    assert {one.terms for one in first} == {0, 1}
    assert {one.size for one in rest if one.terms == MIXTURE} == {1, 2, 4, 64, 128}
    assert rest[0] == Preparation(DECODE, 4, MIXTURE)  # which serves smaller mixtures meanwhile


@pytest.mark.usefixtures("decode_graphs")
def test_an_idle_engine_settles_and_then_measures(base, adapters, tmp_path, monkeypatch):
    monkeypatch.setattr(profile, "FEW_ROWS", (1,))
    monkeypatch.setattr(profile, "FEW_TOKENS", (64,))
    made = lazily(base, {"a": adapters["a"]}, profile=True, cost_folder=str(tmp_path))
    serve(made, question("one", "a", tokens=3), lambda: made.cost.measured)
    assert made.cost.measured
    stats = made.stats()
    assert stats.prepared == stats.preparations
    assert (stats.mode, stats.pages_kv, stats.switches) == (Mode.UNMERGED, 0, 0)
    assert list(tmp_path.iterdir())


def test_nothing_is_prepared_in_the_short_gaps_between_requests(base, monkeypatch):
    # Clients whose answers end together ask again a moment later.
    monkeypatch.setattr(async_engine, "QUIET", 3600.0)
    made = make_engine(base)
    settled = threading.Event()
    monkeypatch.setattr(made, "prepare_next", settled.set)

    async def ask(engine, name):
        async for output in engine.generate(question(name, None, tokens=2)):
            assert output.error is None

    async def serve():
        engine = AsyncEngine(made)
        try:
            for number in range(3):
                await ask(engine, f"{number}")
                await asyncio.sleep(0.05)
            assert not settled.is_set()
            monkeypatch.setattr(async_engine, "QUIET", 0.0)
            await ask(engine, "last")
            assert await asyncio.to_thread(settled.wait, 60)
        finally:
            await engine.close()

    asyncio.run(serve())


def test_a_measurement_that_is_interrupted_goes_on(base, adapters):
    engine = make_engine(base, {"a": adapters["a"]}, policy="valora")
    profiler = profile.Profiler(engine)
    for piece in range(200):
        profiler.go_on()
        if profiler.found is not None:
            break
        if piece % 3 == 2:
            profiler.pause()
            assert engine.stats().pages_kv == 0
            add_requests(engine, question(f"{piece}", "a", tokens=2))
            finish(engine)
    assert profiler.found is not None and profiler.found.measured
    shapes = {shape for shape, _, _ in profile._steps(engine)}
    assert shapes == profiler._points.keys()
    stats = engine.stats()
    assert (stats.merged_adapter, stats.pages_kv) == (None, 0)


@pytest.mark.usefixtures("decode_graphs")
def test_graphs_that_are_there_serve_where_there_is_no_memory_for_mixtures(
    base, adapters, monkeypatch
):
    engine = make_engine(
        base, {"a": adapters["a"]}, prompt_graphs=True, max_requests=4, max_tokens=128, chunk=24,
        policy="valora",
    )  # fmt: skip
    record = GraphRecorder.record

    def refuse(self, run):
        if next_one[-1].terms == MIXTURE:
            raise torch.OutOfMemoryError("too little")
        return record(self, run)

    next_one = []
    prepare = engine.runner.prepare
    monkeypatch.setattr(GraphRecorder, "record", refuse)
    monkeypatch.setattr(
        engine.runner, "prepare", lambda wanted: next_one.append(wanted) or prepare(wanted)
    )
    engine.warm_up()
    while engine.prepare_next():
        pass
    assert {one.terms for one in graphs(engine)} == {0, 1}
    tried = [one for one in next_one if one.terms == MIXTURE]
    assert tried and len(set(next_one)) == len(next_one)
    for held in engine.runner._graphs.values():
        for (size, terms), graph in held._graphs.items():
            assert held._best(size, terms) is graph
        assert not held.missed and not held.missing(MIXTURE)
    assert engine.stats().prepared == engine.stats().preparations
