"""Tilings measured while an engine is idle: on the CPU, with a made-up clock and compiler."""

import numpy as np
import pytest
import torch

from tests.support.engine_reference import make_engine, question, run, serve
from valora_kernels import lookup
from valora_kernels.gpus import H200, gpu_of
from valora_kernels.lookup import TilingTable, table_of
from valora_kernels.tiling import Case, Shape, Tiling
from valora_kernels.tune import Tuner
from valora_serve.engine import profile
from valora_serve.engine.tuning import Tuning, make_tuning, read_table
from valora_serve.model.attention.torch_backend import TorchBackend, TorchMixedPlan

CPU = torch.device("cpu")
BEST = Tiling("shrink_expand", outputs=32)
LIKE = TilingTable(H200, [(Shape(64, 64, 1, 16, 16, 4.0), BEST)])


@pytest.fixture(autouse=True)
def apart(one_thread, monkeypatch):
    """No other test sees these tables; plain torch has fixed buffers for decode steps, too."""
    monkeypatch.setattr(lookup, "_tables", {})
    monkeypatch.setattr("valora_kernels.tune.MOST_SETS", 2)
    plan = lambda self, sequences: TorchMixedPlan(self._cache)  # noqa: E731
    monkeypatch.setattr(TorchBackend, "decode_plan", plan)
    yield
    lookup.choose.cache_clear()


class Compiled:
    """A compiler that has compiled everything already."""

    failed: frozenset[object] = frozenset()
    lost = False

    def compile(self, jobs):
        return True

    def close(self): ...


def clock(calls, **_):
    """Time calls: what has 32 output columns takes half as long as what has not."""
    return {name: np.array([1.0 + ("outputs=32" not in name)]) for name in calls}


def tunable(base, adapters, file, **settings):
    """An engine that measures as it would on a GPU."""
    engine = make_engine(
        base, adapters, prompt_graphs=True, max_requests=2, max_tokens=64, chunk=24,
        policy="slora", **settings,
    )  # fmt: skip
    tuner = Tuner(read_table(file, gpu_of(CPU)), LIKE, Compiled(), CPU, clock)
    engine.tuning = Tuning(
        tuner, file, engine.lmm.linears, engine.runner,
        terms=[0, 1], most_rows=64, most_adapters=2,
    )  # fmt: skip
    return engine


def graphs(engine):
    return {
        (kind, *key): graph
        for kind, held in engine.runner._graphs.items()
        for key, graph in held._graphs.items()
    }


def test_steps_choose_from_what_was_measured(base, adapters, tmp_path):
    asked = [question(f"{n}", ("a", None)[n % 2], tokens=4) for n in range(3)]
    file = tmp_path / "tilings" / "cpu.json"
    engine = tunable(base, {"a": adapters["a"]}, file)
    assert not engine.tune()  # before the start
    engine.warm_up()
    while engine.prepare_next():
        pass
    expected = {name: got.tokens for name, got in run(engine, asked).items()}
    before, tuning = graphs(engine), engine.tuning
    assert tuning is not None
    progress = []
    while engine.tune():
        progress.append(tuning.progress)
        if len(progress) % 5 == 0:  # a request comes in between
            tuning.pause()
            assert {n: got.tokens for n, got in run(engine, asked).items()} == expected
    measured = tuning.progress[1]
    assert progress == sorted(progress)
    assert tuning.progress == (measured, measured) == (8, 8)
    stats = engine.stats()
    assert (stats.tilings_measured, stats.tilings_wanted) == (measured, measured)
    table = table_of(gpu_of(CPU))
    assert {tiling.outputs for tiling in table.entries.values()} == {32}
    assert table.entries.keys() == read_table(file, gpu_of(CPU)).entries.keys()
    after = graphs(engine)
    assert after.keys() == before.keys()
    renewed = {key for key, graph in after.items() if graph is not before[key]}
    assert renewed == {key for key in before if key[-1]}  # those with LoRA terms
    assert not engine.cost.measured
    assert tuning.adopted == 1
    assert {n: got.tokens for n, got in run(engine, asked).items()} == expected
    again = tunable(base, {"a": adapters["a"]}, file)
    again.warm_up()
    while again.prepare_next():
        pass
    assert not again.tune()
    assert again.tuning is not None and again.tuning.progress == (measured, measured)


def test_an_idle_engine_tunes_and_measures_its_costs_again(base, adapters, tmp_path, monkeypatch):
    monkeypatch.setattr(profile, "FEW_ROWS", (1,))
    monkeypatch.setattr(profile, "FEW_TOKENS", (64,))
    file = tmp_path / "cpu.json"
    made = tunable(base, {"a": adapters["a"]}, file, profile=True, cost_folder=str(tmp_path))
    tuning = made.tuning
    assert tuning is not None
    measured = []
    monkeypatch.setattr(
        "valora_serve.engine.async_engine.adopt",
        lambda engine, costs: measured.append(tuning.adopted) or profile.adopt(engine, costs),
    )
    serve(made, question("one", "a", tokens=3), lambda: len(measured) == 2)
    assert measured == [0, 1]
    assert made.cost.measured


def test_a_file_that_cannot_be_read_or_written(base, adapters, tmp_path, caplog):
    file = tmp_path / "cpu.json"
    for text in ("{", "[]", '{"version": 1}', '{"version": 2, "gpu": "cpu", "tilings": [{}]}'):
        file.write_text(text)
        assert not read_table(file, gpu_of(CPU)).entries
    assert caplog.text.count("tilings are measured again") == 4
    assert not read_table(tmp_path / "none.json", gpu_of(CPU)).entries
    engine = tunable(base, {"a": adapters["a"]}, file / "below" / "cpu.json")
    engine.warm_up()
    while engine.prepare_next() or engine.tune():
        pass
    assert caplog.text.count("the tilings of this GPU are not kept") == 1
    assert engine.tuning is not None and engine.tuning.adopted == 1


def test_a_measurement_that_fails_ends_nothing_else(base, adapters, tmp_path, caplog):
    def fails(*_, **__):
        raise RuntimeError("no such kernel")

    engine = tunable(base, {"a": adapters["a"]}, tmp_path / "cpu.json")
    assert engine.tuning is not None
    engine.tuning._tuner._clock = fails
    engine.warm_up()
    while engine.prepare_next() or engine.tune():
        pass
    assert engine.tuning is None
    assert "tilings are not measured any more" in caplog.text
    assert run(engine, [question("one", "a")])["one"].error is None


def test_what_is_left_when_the_compiler_dies(base, adapters, tmp_path):
    engine = tunable(base, {"a": adapters["a"]}, tmp_path / "cpu.json")
    tuning = engine.tuning
    assert tuning is not None
    engine.warm_up()
    while engine.prepare_next():
        pass
    while tuning.progress[0] < 3:
        assert engine.tune()
    compiler = tuning._tuner.compiler
    compiler.lost, compiler.compile = True, lambda jobs: False
    while engine.tune():
        pass
    stats = engine.stats()
    assert (stats.tilings_measured, stats.tilings_wanted) == (3, 3)
    assert tuning.adopted == 1


def test_no_memory_to_compile_kernels_with_new_tilings(base, adapters, tmp_path, monkeypatch):
    engine = tunable(base, {"a": adapters["a"]}, tmp_path / "cpu.json")
    engine.warm_up()
    while engine.prepare_next():
        pass

    def fail(wanted):
        raise torch.OutOfMemoryError("too little")

    monkeypatch.setattr(engine.runner, "_compile", fail)
    while engine.tune():
        pass
    assert engine.tuning is not None and engine.tuning.adopted == 1


@pytest.mark.parametrize(("quantize", "orders"), [("none", {False, True}), ("fp8", {False})])
def test_lora_never_comes_before_the_product_of_rounded_weights(
    base, adapters, tmp_path, quantize, orders
):
    engine = tunable(
        base, {"a": adapters["a"]}, tmp_path / "cpu.json", fresh=True, quantize=quantize
    )
    tuning = engine.tuning
    assert tuning is not None
    tuning._cases = [Case(16, 2), Case(64, 1, first=True)]
    assert {case.first for _, case in tuning._wanted()} == orders


def test_nothing_is_measured_on_a_cpu_or_with_tilings(base):
    engine = make_engine(base, profile=True)
    assert engine.tuning is None
    assert not engine.tune()
    assert make_tuning(engine.settings, CPU, engine.lmm.linears, engine.runner, [0, 1]) is None
