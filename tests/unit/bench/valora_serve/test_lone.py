"""A lone prompt is taken apart into what the host and the GPU do."""

import pytest

from tests.bench.valora_serve.bench_serve import options
from tests.bench.valora_serve.harness import Bench, found
from tests.bench.valora_serve.sections.lone import lone
from valora_serve.model.graphs import PromptGraphs
from valora_serve.model.work import LoraTerms


@pytest.mark.slow
def test_the_parts_of_a_lone_prompt_are_told_apart(monkeypatch, capsys):
    own = LoraTerms.fill, PromptGraphs.replay
    given = ["--device", "cpu", "--layers", "1", "--width", "128", "--no-vision"]
    bench = Bench(options().parse_args(given))
    start = bench.start
    monkeypatch.setattr(bench, "start", lambda *a, **k: start(*a, **k, prompt_graphs=True))
    lone(bench)
    bench.stop()
    plain, adapted = found["Lone prompts (rank 64 on q, k, v, o)"]["rows"]
    assert plain[:2] == [8, "–"]
    assert adapted[:2] == [8, "one of 16"]
    for row in (plain, adapted):
        whole, graph, host, attention = row[2:6]
        assert graph is None  # it is timed on a GPU
        assert 0 < attention < host < whole
    assert plain[6] is None
    assert 0 < adapted[6] < adapted[4]
    assert own == (LoraTerms.fill, PromptGraphs.replay)
    assert "## Lone prompts" in capsys.readouterr().out
