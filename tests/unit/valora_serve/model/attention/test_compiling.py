"""A backend whose kernels are still being compiled has another one stand in for it."""

import asyncio
import threading

import pytest

from tests.support.engine_reference import make_engine, question, run, tokens
from tests.support.lmm_checkpoints import save_llava
from tests.support.serve_helpers import make_adapter
from valora_serve.engine.async_engine import AsyncEngine
from valora_serve.errors import SettingsError, StoppedError
from valora_serve.model.attention.torch_backend import TorchBackend, TorchPlan

LONG = 300.0  # more seconds than any of these tests should take


class Compiler:
    """Stands for a compiler that takes as long as a test wants."""

    def __init__(self):
        self.release = threading.Event()  # ends the compilation
        self.error = None  # what it ends with
        self.attended = []  # backends of the plans that were made or updated, in their order
        self.own = None  # the backend that is compiled

    def run(self):
        assert self.release.wait(LONG)
        if self.error is not None:
            raise self.error


@pytest.fixture
def compiler(monkeypatch):
    """Plain torch is compiled first, and another plain torch stands in for it."""
    made = Compiler()

    class Noted(TorchPlan):
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

    def crowd(self, _):
        """Like FlashInfer, and unlike its stand-in."""
        made.own = made.own or self
        return 80 if self is made.own else None

    crowded = TorchBackend.crowded_plan

    def crowded_plan(self, *size):
        return Noted(self) if self is made.own else crowded(self, *size)

    monkeypatch.setattr("valora_serve.engine.warm_up.PATIENCE", 0.01)
    monkeypatch.setattr(TorchBackend, "stand_in", "torch")
    monkeypatch.setattr(TorchBackend, "crowd", crowd)
    monkeypatch.setattr(TorchBackend, "crowded_plan", crowded_plan)
    monkeypatch.setattr(TorchBackend, "compile", lambda _: made.run())
    monkeypatch.setattr(TorchBackend, "plan", eager)
    for kind in ("decode_plan", "mixed_plan"):
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
    assert engine.runner._wait_on.wait(LONG) and not engine.runner._compiling.running


def test_requests_are_answered_before_and_after_another_backend_takes_over(base, adapter, compiler):
    asked = [question(f"{n}", ("a", None)[n % 2], tokens=3 + 5 * n) for n in range(3)]
    plain = make_engine(base, {"a": adapter}, policy="slora")
    expected = tokens(run(plain, asked))
    compiler.attended.clear()

    def answers():
        return tokens(run(engine, asked))

    compiler.own = None
    engine = started(base, adapter)
    runner = engine.runner
    own = runner._compiling.backend
    assert own is compiler.own
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
    assert not any(graphs.stale for graphs in (runner._decode_graphs, runner._prompt_graphs))
    assert runner._crowded_graphs.held
    stats = engine.stats()
    assert stats.preparations == stats.prepared


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


def test_one_that_was_named_and_cannot_be_compiled_ends_the_start(base, adapter, compiler):
    compiler.error = RuntimeError("nvcc has failed\nwith many lines")
    compiler.release.set()
    with pytest.raises(SettingsError, match=r"compiled \(nvcc has failed\): see .* attention=auto"):
        started(base, adapter, attention="torch")


@pytest.mark.parametrize("options", [{"attention": "torch"}, {}])
def test_a_start_that_is_interrupted_waits_for_no_compiler(
    base, adapter, compiler, monkeypatch, options
):
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
