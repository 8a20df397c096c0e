"""What is prepared, measured and tuned before, beside and between requests, on the CPU with graphs
that run again, a made-up clock and a made-up compiler."""

import asyncio
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path
from shutil import copytree, rmtree
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from tests.support.engine_reference import (
    add_requests,
    finish,
    fix_buffers,
    make_engine,
    question,
    run,
    serve,
    tokens,
    with_client,
)
from valora_kernels import lookup
from valora_kernels.gpus import H200, gpu_of
from valora_kernels.lookup import TilingTable, table_of
from valora_kernels.metadata import NONE
from valora_kernels.tiling import Case, Shape, Tiling
from valora_kernels.tune import Tuner
from valora_serve.engine import async_engine, profile
from valora_serve.engine.sizing import machine_of
from valora_serve.engine.tuning import Tuning, read_table
from valora_serve.engine.warm_up import PATIENCE, PAUSE, WarmUp
from valora_serve.model.work import (
    DECODE,
    KERNELS,
    MIXTURE,
    PROMPT,
    VISION,
    GraphRecorder,
    Preparation,
)
from valora_serve.orchestrator.cost_model import load_or_estimate
from valora_serve.types import Mode

CPU = torch.device("cpu")
FIRST = [Preparation(DECODE, 64, 0), Preparation(PROMPT, 256, 1)]
REST = [Preparation(DECODE, 2, 0), Preparation(PROMPT, 128, 0), Preparation(KERNELS, 7, 1)]


@pytest.fixture(autouse=True)
def apart(monkeypatch):
    """No other test sees these tables; plain torch has fixed buffers for decode steps, too."""
    monkeypatch.setattr(lookup, "_tables", {})
    monkeypatch.setattr("valora_kernels.tune.MAX_SETS", 2)
    fix_buffers(monkeypatch)
    yield
    lookup.choose.cache_clear()


@pytest.fixture
def quick(monkeypatch):
    """Few steps are measured, each of them once."""
    monkeypatch.setattr(profile, "FEW_ROWS", (1,))
    monkeypatch.setattr(profile, "FEW_TOKENS", (64,))
    monkeypatch.setattr(profile, "measure", partial(profile.measure, seconds=0.0))


def test_what_a_step_misses_is_prepared_without_slowing_requests_down(monkeypatch):
    """Every preparation takes a second."""
    now, made = [100.0], []
    monkeypatch.setattr("valora_serve.engine.warm_up.time.monotonic", lambda: now[0])
    runner = Mock()
    runner.adopt.return_value, runner.preparations.return_value = False, (FIRST, REST)
    runner.prepare = lambda one: made.append(one) or now.append(now.pop() + 1) or True
    warm = WarmUp([0, 1], lazy=True)
    assert not warm.prepare_next(runner)  # nothing before the start
    warm.start(runner)
    runner.compile_together.assert_called_once_with(FIRST, PATIENCE)
    for wanted, later, prepared in (
        (None, 0.0, FIRST), (REST[1], 0.0, [*FIRST, REST[1]]),
        (REST[0], PAUSE - 0.5, [*FIRST, REST[1]]), (REST[0], 1.0, [*FIRST, REST[1], REST[0]]),
    ):  # fmt: skip
        runner.next_missed.return_value = wanted
        now[0] += later
        warm.prepare_missed(runner)
        assert made == prepared
    assert ([*warm.left], str(warm)) == ([REST[2]], "4 of 5 graphs and kernels prepared")
    assert [warm.prepare_next(runner) for _ in range(2)] == [True, False]
    assert warm.seconds == {"graphs": 4.0, "kernels": 1.0}


def graphs(engine):
    return {
        Preparation(kind, size, terms): graph
        for kind, held in engine.runner._graphs.items()
        for (size, terms), graph in held.held.items()
    }


def lazily(base, adapters, policy="slora", most=(4, 128), **options):
    sizes = {"max_requests": most[0], "max_tokens": most[1], "chunk": 24, "prompt_graphs": True}
    return make_engine(base, {"a": adapters["a"]}, policy=policy, **sizes, **options)


def prepared(engine, also=lambda: False):
    engine.warm_up()
    while engine.prepare_next() or also():
        pass
    return engine


def answers(engine, asked):
    return tokens(run(engine, asked))


def test_larger_graphs_serve_until_smaller_ones_are_captured(base, adapters):
    asked = [question(f"{n}", ("a", None)[n % 2], tokens=3 + 5 * n) for n in range(3)]
    expected = answers(make_engine(base, {"a": adapters["a"]}, policy="slora"), asked)
    engine = lazily(base, adapters)
    engine.warm_up()
    sizes = ((DECODE, (1, 4), (0, 1)), (PROMPT, (64, 128), (0, 1)), (VISION, (1, 4, 16), (0,)))
    first = {Preparation(k, size, t) for k, some, terms in sizes for size in some for t in terms}
    assert graphs(engine).keys() == first
    missing = {Preparation(DECODE, 2, terms) for terms in (0, 1)}
    missing |= {Preparation(VISION, size, 0) for size in (2, 8)}
    assert set(engine.start_up.left) == missing
    assert answers(engine, asked) == expected
    assert graphs(engine).keys() > first  # of what its steps have missed
    while engine.prepare_next():
        pass
    assert graphs(engine).keys() == first | missing
    stats = engine.stats()
    assert stats.prepared == stats.preparations == 15
    assert {"memory", "attention", "graphs"} <= stats.start_seconds.keys()
    assert answers(engine, asked) == expected


def test_graphs_that_are_there_serve_where_there_is_no_memory_for_mixtures(
    base, adapters, monkeypatch
):
    engine = lazily(base, adapters, policy="valora")
    _, rest = engine.runner.preparations((0, 1, 2))
    assert rest[0] == Preparation(DECODE, 4, MIXTURE)  # which serves smaller mixtures meanwhile
    record, prepare, tried = GraphRecorder.record, engine.runner.prepare, []

    def refuse(self, run):
        if tried[-1].terms == MIXTURE:
            raise torch.OutOfMemoryError("too little")
        return record(self, run)

    monkeypatch.setattr(GraphRecorder, "record", refuse)
    monkeypatch.setattr(engine.runner, "prepare", lambda one: tried.append(one) or prepare(one))
    prepared(engine)
    assert {one.terms for one in graphs(engine)} == {0, 1}
    assert any(one.terms == MIXTURE for one in tried) and len(set(tried)) == len(tried)
    for held in engine.runner._graphs.values():
        for (size, terms), graph in held.held.items():
            assert held._best(size, terms) is graph
    assert not engine.start_up.left and engine.runner.next_missed() is None
    assert engine.stats().prepared == engine.stats().preparations


def test_nothing_is_prepared_in_the_short_gaps_between_requests(base, monkeypatch):
    """Clients whose answers end together ask again a moment later."""
    monkeypatch.setattr(async_engine, "QUIET", 3600.0)
    made, settled = make_engine(base), threading.Event()
    monkeypatch.setattr(made, "prepare_next", settled.set)

    async def served(engine):
        for name in ("0", "1", "2", "last"):
            if name == "last":
                monkeypatch.setattr(async_engine, "QUIET", 0.0)
            async for output in engine.generate(question(name, None, tokens=2)):
                assert output.error is None
            await asyncio.sleep(0.05)
            assert name == "last" or not settled.is_set()
        assert await asyncio.to_thread(settled.wait, 60)

    with_client(made, served)


def test_costs_are_measured_once(base, adapters, tmp_path, quick):
    options = {"profile": True, "cost_folder": str(tmp_path), "policy": "valora"}
    bare = make_engine(base, **options)
    profile.ensure_costs(bare)
    assert bare.cost.measured and not bare.cost.lora_rank  # so that they are measured again
    engine = make_engine(base, {"a": adapters["a"]}, **options)
    before = engine.policy
    add_requests(engine, question("one"))
    profile.ensure_costs(engine)
    assert engine.policy is before  # there was a request
    finish(engine)
    profile.ensure_costs(engine)
    assert engine.cost.lora_rank and engine.policy is not before
    machine = machine_of(engine.settings, engine.device, torch.float32)
    assert load_or_estimate(tmp_path, machine, base).measured
    packed = replace(engine.settings, quantize="fp8")  # its steps cost something else
    assert machine_of(packed, engine.device, torch.float32) == f"{machine} fp8"
    stats, measured = engine.stats(), engine.cost
    assert (stats.switches, stats.merged_adapter, stats.pages_kv) == (0, None, 0)
    profile.ensure_costs(engine)
    assert engine.cost is measured
    engine.cost = replace(measured, lora_rank=measured.lora_rank - 1)
    assert profile.lacks_costs(engine)  # those of a larger rank are not known


def test_costs_of_adapters_that_come_at_run_time_are_measured(base, adapters, tmp_path, quick):
    made = make_engine(base, profile=True, cost_folder=str(tmp_path), policy="valora")
    made.cost = replace(made.cost, measured=True)

    async def served(engine):
        await engine.warm_up()
        await engine.load("adapter", Path(adapters["a"]), "a")
        async for output in engine.generate(question("one", "a", tokens=2)):
            assert output.error is None
        while not made.cost.lora_rank:
            await asyncio.sleep(0.02)

    with_client(made, served)
    assert load_or_estimate(tmp_path, made.cost.machine, base).lora_rank


def test_costs_that_cannot_be_saved_are_used_all_the_same(base, tmp_path, quick, caplog):
    (tmp_path / "costs").touch()  # nobody, not even root, makes folders in it
    engine = make_engine(base, profile=True, cost_folder=str(tmp_path))
    profile.ensure_costs(engine)
    assert engine.cost.measured
    (said,) = [record.getMessage() for record in caplog.records if "costs" in record.getMessage()]
    assert str(tmp_path) in said and "--cost-folder" in said


@pytest.mark.parametrize("limits", [
    {"max_adapters": 1}, {"max_tokens": 16, "chunk": 16, "max_requests": 64},
    {"max_tokens": 66, "chunk": 16, "prompt_graphs": True, "max_adapters": 2},
])  # fmt: skip
def test_measured_steps_keep_the_limits(base, adapters, limits):
    engine = make_engine(base, adapters, policy="valora", **limits)
    runner, settings = engine.runner, engine.settings
    if settings.prompt_graphs:  # there was no memory for the larger one
        runner.give_up(Preparation(PROMPT, runner.captured_prompts[-1], 0))
    ran, step = [], runner.step
    runner.step = lambda works, merged: ran.append(works) or step(works, merged)
    assert profile.measure(engine) is not None
    assert max(len(works) for works in ran) <= settings.max_requests
    assert max(sum(work.count for work in works) for works in ran) <= settings.max_tokens
    distinct = [len({work.adapter for work in works} - {NONE}) for works in ran]
    assert max(distinct) == min(len(adapters), settings.max_adapters)


def test_an_adapter_whose_file_is_gone_is_left_out(base, adapters, tmp_path, quick):
    folders = {name: Path(copytree(adapters[name], tmp_path / name)) for name in "ab"}
    engine = make_engine(base, folders, host_bytes=0)
    rmtree(folders["a"])
    assert profile.measure(engine).measured
    assert engine.stats().on_device == ("b",)


def test_an_engine_serves_without_costs(base, adapters, monkeypatch):
    made = make_engine(base, {"a": adapters["a"]}, profile=True, policy="valora")
    before, times = made.cost, []

    def fail(engine, step):
        times.append(engine.merge_state.adapter)
        if times[-1] is None:
            return 1.0
        raise torch.OutOfMemoryError("too little")

    monkeypatch.setattr(profile, "_time", fail)
    serve(made, question("one", "a", tokens=3), lambda: bool(times) and times[-1] is not None)
    assert times[-1] is not None and made.cost is before
    stats = made.stats()
    assert (stats.merged_adapter, stats.pages_kv, stats.switches) == (None, 0, 0)


@pytest.mark.parametrize("pages", [8, 40, 400])
def test_prompts_on_a_gpu_are_measured_beside_as_many_requests_as_fit(base, adapters, pages):
    engine = make_engine(base, {"a": adapters["a"]}, pages=pages, max_tokens=1024)
    engine.device = Mock(type="cuda")
    beside = [step.shape for step in profile._steps(engine) if step.shape.prefill]
    assert {shape.decode + shape.prefill for shape in beside} >= {16, 64}
    assert max(shape.decode for shape in beside) == {8: 0, 40: 1, 400: 11}[pages]


def test_a_measurement_that_is_interrupted_goes_on(base, adapters, monkeypatch):
    engine = make_engine(base, {"a": adapters["a"]}, policy="valora", prompt_graphs=True)
    engine.runner.give_up(Preparation(PROMPT, engine.runner.captured_prompts[-1], 0))
    monkeypatch.setattr(profile, "_uncaptured", uncaptured := Mock(wraps=profile._uncaptured))
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
    assert uncaptured.call_count == 1  # else no request may come for half a second
    shapes = profiler._points.keys()
    assert {step.shape for step in profile._steps(engine)} == shapes
    assert {shape.images for shape in shapes} == {0, *profile.FEW_IMAGES}
    assert (engine.stats().merged_adapter, engine.stats().pages_kv) == (None, 0)


def clock(calls, **_):
    """Time calls: what has 32 output columns takes half as long as what has not."""
    return {name: np.array([1.0 + ("outputs=32" not in name)]) for name in calls}


@pytest.fixture
def tunable(base, adapters, tmp_path):
    best = Tiling("shrink_expand", outputs=32)
    like = TilingTable(H200, [(Shape(64, 64, 1, 16, 16, 4.0), best)])

    compiler = Mock(failed=frozenset(), lost=False)  # has compiled everything already
    compiler.compile.return_value = True

    def make(file=tmp_path / "cpu.json", **settings):
        engine = lazily(base, adapters, most=(2, 64), **settings)
        tuner = Tuner(read_table(file, gpu_of(CPU)), like, compiler, CPU, clock)
        few = replace(engine.settings, max_adapters=2)
        engine.tuning = Tuning(tuner, file, engine.runner, few, [0, 1])
        return engine

    return make


def test_steps_choose_from_what_was_measured(tunable, tmp_path):
    asked = [question(f"{n}", ("a", None)[n % 2], tokens=4) for n in range(3)]
    file = tmp_path / "tilings" / "cpu.json"
    engine = tunable(file)
    assert not engine.tune()  # before the start
    expected = answers(prepared(engine), asked)
    before, tuning, progress = graphs(engine), engine.tuning, []
    while engine.tune():
        progress.append(tuning.progress)
        if len(progress) % 5 == 0:  # a request comes in between
            tuning.tuner.pause()
            assert answers(engine, asked) == expected
    assert progress == sorted(progress)
    stats = engine.stats()
    assert tuning.progress == (stats.tilings_measured, stats.tilings_wanted) == (8, 8)
    table = table_of(gpu_of(CPU))
    assert {tiling.outputs for tiling in table.entries.values()} == {32}
    assert table.entries.keys() == read_table(file, gpu_of(CPU)).entries.keys()
    after = graphs(engine)
    assert after.keys() == before.keys()
    renewed = {key for key, graph in after.items() if graph is not before[key]}
    assert renewed == {key for key in before if key.terms}  # those with LoRA terms
    assert not engine.cost.measured
    assert tuning.adopted == 1
    assert answers(engine, asked) == expected
    again = prepared(tunable(file))
    assert not again.tune() and again.tuning.progress == (8, 8)


def test_an_idle_engine_settles_tunes_and_measures_its_costs_again(
    tunable, tmp_path, quick, monkeypatch
):
    made, measured = tunable(profile=True, cost_folder=str(tmp_path)), []
    monkeypatch.setattr(
        "valora_serve.engine.async_engine.adopt",
        lambda engine, costs: measured.append(made.tuning.adopted) or profile.adopt(engine, costs),
    )
    serve(made, question("one", "a", tokens=3), lambda: len(measured) == 2)
    assert measured == [0, 1]
    assert made.cost.measured
    stats = made.stats()
    assert stats.prepared == stats.preparations
    assert (stats.mode, stats.pages_kv, stats.switches) == (Mode.UNMERGED, 0, 0)


def test_a_file_that_cannot_be_read_or_written(tunable, tmp_path, caplog):
    file = tmp_path / "cpu.json"
    for text in ("{", "[]", '{"version": 1}', '{"version": 2, "gpu": "cpu", "tilings": [{}]}'):
        file.write_text(text)
        assert not read_table(file, gpu_of(CPU)).entries
    assert caplog.text.count("tilings are measured again") == 4
    assert not read_table(tmp_path / "none.json", gpu_of(CPU)).entries
    engine = tunable(file / "below" / "cpu.json")
    prepared(engine, engine.tune)
    assert caplog.text.count("the tilings of this GPU are not kept") == 1
    assert engine.tuning.adopted == 1


def test_a_measurement_that_fails_ends_nothing_else(tunable, caplog):
    def fails(*_, **__):
        raise RuntimeError("no such kernel")

    engine = tunable()
    engine.tuning.tuner._clock = fails
    prepared(engine, engine.tune)
    assert engine.tuning is None
    assert "tilings are not measured any more" in caplog.text
    assert run(engine, [question("one", "a")])["one"].error is None


@pytest.mark.parametrize(("quantize", "orders"), [("none", {False, True}), ("fp8", {False})])
def test_lora_never_comes_before_the_product_of_rounded_weights(tunable, quantize, orders):
    tuning = tunable(fresh=True, quantize=quantize).tuning
    tuning._cases = [Case(16, 2), Case(64, 1, first=True)]
    assert {case.first for _, case in tuning._wanted()} == orders
