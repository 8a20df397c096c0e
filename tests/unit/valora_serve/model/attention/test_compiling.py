"""A backend whose kernels are still being compiled has another one stand in for it."""

import asyncio
import os
import subprocess
import sys
import threading

import pytest
import torch

from tests.support.engine_reference import make_engine, question, run
from tests.support.lmm_checkpoints import save_llava
from tests.support.serve_helpers import make_adapter
from valora_serve.engine import profile
from valora_serve.engine.async_engine import AsyncEngine
from valora_serve.errors import SettingsError, StoppedError
from valora_serve.model.attention.compiling import Compiling, side_by_side
from valora_serve.model.attention.torch_backend import TorchBackend, TorchMixedPlan
from valora_serve.model.graphs import PromptGraphs

pytestmark = pytest.mark.usefixtures("one_thread")

LONG = 300.0
"""More seconds than any of these tests should take."""


class Compiler:
    """Stands for a compiler that takes as long as a test wants.

    Attributes:
        release: Ends the compilation.
        error: What it ends with.
        attended: Backends of the plans that were made or updated, in their order.
    """

    def __init__(self):
        self.release = threading.Event()
        self.error = None
        self.attended = []

    def run(self):
        """Compile."""
        assert self.release.wait(LONG)
        if self.error is not None:
            raise self.error


@pytest.fixture
def compiler(monkeypatch):
    """Plain torch is compiled first, and another plain torch stands in for it."""
    made = Compiler()

    class Noted(TorchMixedPlan):
        def __init__(self, backend):
            super().__init__(backend._cache)
            self._backend = backend

        def update(self, rows):
            made.attended.append(self._backend)
            super().update(rows)

    plan = TorchBackend.plan

    def eager(self, rows):
        made.attended.append(self)
        return plan(self, rows)

    monkeypatch.setattr("valora_serve.engine.warm_up.PATIENCE", 0.01)
    monkeypatch.setattr(TorchBackend, "stand_in", "torch")
    monkeypatch.setattr(TorchBackend, "crowd", lambda *_: 80)
    monkeypatch.setattr(TorchBackend, "compile", lambda _: made.run())
    monkeypatch.setattr(TorchBackend, "plan", eager)
    for kind in ("decode_plan", "mixed_plan", "crowded_plan"):
        monkeypatch.setattr(TorchBackend, kind, lambda self, *_: Noted(self))
    yield made
    made.release.set()


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return str(save_llava(tmp_path_factory.mktemp("llava"), seed=2))


@pytest.fixture(scope="module")
def adapter(base, tmp_path_factory):
    return make_adapter(tmp_path_factory.mktemp("adapter") / "a", base, seed=1, rank=4)


def started(base, adapter, **options):
    engine = make_engine(
        base, {"a": adapter}, prompt_graphs=True, max_requests=4, max_tokens=128, chunk=24,
        policy="slora", **options,
    )  # fmt: skip
    engine.warm_up()
    return engine


def ended(engine):
    compiling = engine.runner._compiling
    assert compiling is not None
    compiling.wait(LONG)
    assert not compiling.running


def test_requests_are_answered_before_and_after_another_backend_takes_over(base, adapter, compiler):
    asked = [question(f"{n}", ("a", None)[n % 2], tokens=3 + 5 * n) for n in range(3)]
    plain = make_engine(base, {"a": adapter}, policy="slora")
    expected = {name: got.tokens for name, got in run(plain, asked).items()}
    compiler.attended.clear()

    def answers():
        return {name: got.tokens for name, got in run(engine, asked).items()}

    engine = started(base, adapter)
    runner = engine.runner
    own = runner._compiling.backend
    assert runner.provisional
    compiler.attended.clear()
    assert answers() == expected
    while engine.prepare_next():
        pass
    assert compiler.attended and own not in compiler.attended
    stats = engine.stats()
    assert stats.preparations == stats.prepared + 1
    compiler.release.set()
    ended(engine)
    compiler.attended.clear()
    # Graphs of the other one are replayed until they are captured again, between steps.
    assert runner.provisional
    assert answers() == expected
    assert not runner.provisional
    assert own in compiler.attended and set(compiler.attended) != {own}
    while engine.prepare_next():
        pass
    compiler.attended.clear()
    assert answers() == expected
    assert set(compiler.attended) == {own}
    assert not any(graphs._stale for graphs in (runner._decode_graphs, runner._prompt_graphs))
    assert runner._crowded_graphs.captured()
    stats = engine.stats()
    assert stats.preparations == stats.prepared


def test_eager_and_chosen_backends_are_waited_for(base, adapter, compiler):
    for options in ({"capture": "eager"}, {"attention": "torch"}):
        compiler.release.clear()
        threading.Timer(0.2, compiler.release.set).start()
        runner = started(base, adapter, **options).runner
        assert compiler.release.is_set()
        assert runner._compiling is not None
        assert runner._resources.backend is runner._compiling.backend


@pytest.mark.parametrize("late", [False, True])
def test_one_that_cannot_be_compiled_never_takes_over(base, adapter, compiler, caplog, late):
    compiler.error = RuntimeError("nvcc has failed")
    if not late:
        compiler.release.set()
    engine = started(base, adapter, capture="lazy" if late else "eager")
    compiler.release.set()
    ended(engine)
    own = engine.runner._compiling.backend
    while engine.prepare_next():
        pass
    compiler.attended.clear()
    run(engine, [question("one", "a", tokens=9)])
    assert own not in compiler.attended
    assert not engine.runner.provisional
    assert "nvcc has failed" in caplog.text


@pytest.mark.parametrize("error", [RuntimeError("nvcc has failed\nwith many lines")])
def test_one_that_was_named_and_cannot_be_compiled_ends_the_start(base, adapter, compiler, error):
    compiler.error = error
    compiler.release.set()
    with pytest.raises(SettingsError, match=r"compiled \(nvcc has failed\): see .* attention=auto"):
        started(base, adapter, attention="torch")


@pytest.mark.parametrize("options", [{"attention": "torch"}, {}])
def test_a_start_that_is_interrupted_waits_for_no_compiler(
    base, adapter, compiler, monkeypatch,
    options,
):  # fmt: skip
    """The compiler is never done, and would be waited for."""
    monkeypatch.setattr("valora_serve.engine.warm_up.PATIENCE", LONG)
    made = make_engine(
        base, {"a": adapter}, prompt_graphs=True, max_requests=4, max_tokens=128, **options
    )

    async def main():
        engine = AsyncEngine(made)
        start = asyncio.create_task(engine.warm_up())
        while made.runner._compiling is None:
            await asyncio.sleep(0.01)
        await engine.close()
        with pytest.raises(StoppedError, match="the start was interrupted"):
            await start

    asyncio.run(main())
    assert not compiler.release.is_set()
    compiler.release.set()


def test_graphs_that_find_no_memory_are_kept_as_they_were(base, adapter, compiler, monkeypatch):
    engine = started(base, adapter)
    while engine.prepare_next():
        pass
    held = dict(engine.runner._prompt_graphs._graphs)
    compiler.release.set()
    ended(engine)

    def full(*_):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(PromptGraphs, "_capture", full)
    while engine.prepare_next():
        pass
    assert engine.runner._prompt_graphs._graphs == held
    assert not engine.runner._prompt_graphs._stale
    assert not engine.runner._crowded_graphs.captured()


def test_costs_are_measured_once_it_has_taken_over(
    base, adapter, compiler, tmp_path,
    monkeypatch,
):  # fmt: skip
    monkeypatch.setattr(profile, "FEW_ROWS", (1,))
    monkeypatch.setattr(profile, "FEW_TOKENS", (64,))
    monkeypatch.setattr("valora_serve.engine.async_engine.QUIET", 0.05)
    made = make_engine(
        base, {"a": adapter}, fresh=True, prompt_graphs=True, max_requests=4,
        max_tokens=128, policy="slora", profile=True, cost_folder=str(tmp_path / "costs"),
    )  # fmt: skip

    async def until(condition):
        async with asyncio.timeout(LONG):
            while not condition():
                await asyncio.sleep(0.02)

    async def serve():
        engine = AsyncEngine(made)
        try:
            await engine.warm_up()
            await until(lambda: not made.start_up.left)
            await asyncio.sleep(0.3)
            assert not made.cost.measured
            compiler.release.set()
            await until(lambda: made.cost.measured)
            assert not made.start_up.left
        finally:
            await engine.close()

    asyncio.run(serve())


def test_a_process_does_not_wait_for_its_compiler():
    """A pool of threads would be joined when Python ends."""
    program = """if True:
        import threading
        from valora_serve.model.attention.compiling import Compiling, side_by_side

        class Backend:
            def compile(self):
                side_by_side([began.set, threading.Event().wait])

        began = threading.Event()
        Compiling(Backend(), lambda: None, awaited=True)
        assert began.wait(60)
    """
    subprocess.run([sys.executable, "-c", program], check=True, timeout=LONG)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere priorities are those of processes")
@pytest.mark.parametrize("awaited", [True, False])
def test_a_compiler_that_is_awaited_has_the_priority_of_its_process(awaited):
    """The compilers that it starts have its own; other engines' starts left a lower one no time."""
    found = []

    class Backend:
        def compile(self):
            command = [sys.executable, "-c", "import os; print(os.nice(0))"]
            side_by_side([lambda: found.append(int(subprocess.check_output(command)))])

    compiling = Compiling(Backend(), lambda: None, awaited=awaited)
    compiling.wait(LONG)
    assert found == [os.nice(0) if awaited else min(19, os.nice(0) + 10)]


@pytest.mark.parametrize("error", [ValueError("no compiler"), SystemExit("no compiler")])
def test_jobs_side_by_side_end_with_their_first_error(error):
    both = threading.Barrier(2, timeout=LONG)
    done = []

    def wait():
        both.wait()
        done.append(1)

    def fail():
        both.wait()
        raise error

    with pytest.raises(type(error), match="no compiler"):
        side_by_side([fail, wait])
    assert done == [1]
