"""Which steps replay a graph, on a CPU, where functions stand for CUDA graphs."""

from tests.support.engine_reference import (
    add_requests,
    finish,
    fix_buffers,
    make_engine,
    run,
    steps,
    tokens,
)
from valora_serve.model.attention.torch_backend import TorchBackend, TorchPlan
from valora_serve.model.graphs import Graphs
from valora_serve.model.work import CROWDED, Preparation
from valora_serve.types import Request, SamplingParams


def test_steps_whose_page_tables_are_too_long_run_without_a_graph(random_llava, monkeypatch):
    shared = list(range(5, 45))
    sampling = SamplingParams(max_tokens=4, ignore_eos=True)
    asked = [Request(str(n), token_ids=[*shared, 50 + n], sampling=sampling) for n in range(6)]
    plain = make_engine(str(random_llava), policy="slora")
    expected = tokens(run(plain, asked))
    fix_buffers(monkeypatch)
    monkeypatch.setattr(TorchPlan, "max_pages", 12)
    best, told = Graphs._best, set()

    def noted(self, rows, terms, tables=()):
        found = best(self, rows, terms, tables)
        told.add((found is not None, sum(map(len, tables)) <= 12))
        return found

    monkeypatch.setattr(Graphs, "_best", noted)
    engine = make_engine(
        str(random_llava), policy="slora", prompt_graphs=True, max_tokens=128, max_requests=8
    )
    engine.warm_up()
    assert tokens(run(engine, asked, together=6)) == expected
    assert told == {(True, True), (False, False)}


def test_steps_beside_which_many_rows_decode_have_graphs_of_their_own(random_llava, monkeypatch):
    """Prompts that come while two, then three, then four others decode."""
    sampling = SamplingParams(max_tokens=20, ignore_eos=True)
    first = [Request(str(n), token_ids=[5 + n] * 9, sampling=sampling) for n in range(5)]
    short = SamplingParams(max_tokens=2, ignore_eos=True)
    later = [Request(f"late {n}", token_ids=[50 + n] * (70 + n), sampling=short) for n in range(3)]
    expected = run(make_engine(str(random_llava), policy="slora"), [*first, *later])
    plans = []

    class Noted(TorchPlan):
        kind = "mixed"

        def update(self, rows):
            plans.append((self.kind, rows.decoding))
            super().update(rows)

    class Crowded(Noted):
        kind = "crowded"

    monkeypatch.setattr(TorchBackend, "crowd", lambda self, sequences: 3)
    monkeypatch.setattr(TorchBackend, "mixed_plan", lambda self, *_: Noted(self._cache))
    monkeypatch.setattr(TorchBackend, "crowded_plan", lambda self, *_: Crowded(self._cache))
    engine = make_engine(
        str(random_llava), policy="slora", prompt_graphs=True, max_tokens=128, max_requests=8,
        capture="eager",
    )  # fmt: skip
    engine.warm_up()
    plans.clear()
    found = {}

    def come(*requests):
        for request in requests:
            add_requests(engine, request)
            steps(engine, 1, found)

    for new, late in zip((first[:2], first[2:3], first[3:]), later, strict=True):
        come(*new, late)
        while late.id not in found:
            steps(engine, 1, found)
    assert tokens(finish(engine, found)) == tokens(expected)
    prompts = [(kind, decoding) for kind, decoding in plans if decoding >= 2]
    assert ("mixed", 2) in prompts
    assert {("crowded", 3), ("crowded", 5)} <= set(prompts)
    assert all((kind == "crowded") == (decoding >= 3) for kind, decoding in prompts)
    # A much larger graph that is captured first does not take steps from one that fits.
    largest = engine.runner._crowded_graphs
    for size, terms in [*largest.held]:
        if size < 128:
            del largest.held[size, terms]
    plans.clear()
    small = [Request(f"small {n}", token_ids=[9 + n] * 5, sampling=sampling) for n in range(5)]
    come(*small)
    finish(engine, found)
    assert ("mixed", 4) in plans and {kind for kind, _ in plans} == {"mixed"}
    # Steps in which few rows decode do not ask for a graph for crowds.
    largest.forget()
    engine.start_up.left |= {Preparation(CROWDED, size, 0): None for size in largest.sizes}
    for number, request in enumerate(small[:4]):
        come(Request(f"again {number}", token_ids=request.token_ids, sampling=sampling))
        assert bool(engine.runner.missed) == (number >= 3)
