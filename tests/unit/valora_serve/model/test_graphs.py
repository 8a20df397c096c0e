"""Which steps replay a graph, on a CPU, where functions stand for CUDA graphs."""

from pathlib import Path

import pytest

from tests.support.engine_reference import make_engine, run
from valora_serve.model import graphs
from valora_serve.model.attention.torch_backend import TorchBackend, TorchMixedPlan
from valora_serve.types import Request, SamplingParams


def test_steps_whose_page_tables_are_too_long_run_without_a_graph(
    random_llava: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = list(range(5, 45))
    sampling = SamplingParams(max_tokens=4, ignore_eos=True)
    asked = [Request(str(n), token_ids=[*shared, 50 + n], sampling=sampling) for n in range(6)]
    plain = make_engine(str(random_llava), policy="slora")
    expected = {name: got.tokens for name, got in run(plain, asked).items()}
    plan = lambda self, sequences: TorchMixedPlan(self._cache)  # noqa: E731
    monkeypatch.setattr(TorchBackend, "decode_plan", plan)
    monkeypatch.setattr(TorchMixedPlan, "max_pages", 12)
    held, told = graphs._holds, set()

    def noted(plan, tables):
        found = held(plan, tables)
        told.add((found, sum(map(len, tables)) <= 12))
        return found

    monkeypatch.setattr(graphs, "_holds", noted)
    engine = make_engine(
        str(random_llava), policy="slora", prompt_graphs=True, max_tokens=128, max_requests=8
    )
    engine.warm_up()
    assert {name: got.tokens for name, got in run(engine, asked, together=6).items()} == expected
    assert told == {(True, True), (False, False)}
