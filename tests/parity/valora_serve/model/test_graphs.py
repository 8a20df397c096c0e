"""Steps with prompts in fixed buffers, as a graph replays them, against eager steps."""

from functools import cache, partial

import pytest
from PIL import Image

from tests.support.cases import others_slow
from tests.support.engine_reference import capture
from tests.support.serve_helpers import EVERYTHING, make_adapters
from valora_serve.engine.engine import Engine
from valora_serve.engine.profile import measure
from valora_serve.engine.settings import EngineSettings
from valora_serve.model.graphs import PromptGraphs
from valora_serve.types import Request, SamplingParams

TURNS = ("what is this?", "how many stars?", "describe the image.")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    kinds = {f"a{n}": (n, rank, 16, EVERYTHING) for n, rank in enumerate((8, 16, 4))}
    return make_adapters(tmp_path_factory.mktemp("adapters"), "tiny", 0.2, **kinds)


def answers(folders, policy, compile_kernels=False, **options):
    engine = Engine(
        EngineSettings(policy=policy, pages=300, chunk=40, max_tokens=150, max_requests=12,
                       profile=False, **options)
    )  # fmt: skip
    for name, folder in folders.items():
        engine.load(folder, name)
    engine.warm_up()
    models = [None, *folders]
    for number in range(14):
        parts = [{"type": "text", "text": TURNS[number % 3]}]
        images = []
        if number % 5:
            parts.append({"type": "image"})
            images.append(Image.new("RGB", (40 + number, 50), (number * 17, 90, 200 - number)))
        request = Request(
            str(number), models[number % 4], messages=[{"role": "user", "content": parts}],
            images=images, sampling=SamplingParams(max_tokens=5 + number, ignore_eos=True),
        )  # fmt: skip
        engine.add(engine.prepare(request))
    said = {}
    while engine.busy:
        if compile_kernels and len(said) in (3, 9):
            for one in engine.runner._kernel_runs((0, 1, 2)):
                engine.runner.prepare(one)
        for output in engine.step():
            assert output.error is None
            said.setdefault(output.id, []).extend(output.token_ids)
    engine.close()
    return said


@pytest.fixture(scope="module")
def plain(folders):
    """Answers without any graph, by policy."""
    return cache(partial(answers, folders))


POLICIES = others_slow(["slora"], ["slora", "dlora"])


@pytest.mark.parametrize("policy", POLICIES)
def test_fixed_buffers_change_nothing(folders, plain, policy, monkeypatch):
    replayed = []
    find = PromptGraphs.find

    def spy(self, *arguments):
        graph = find(self, *arguments)
        replayed.append(graph is not None)
        return graph

    monkeypatch.setattr(PromptGraphs, "find", spy)
    assert answers(folders, policy, prompt_graphs=True) == plain(policy)
    assert sum(replayed) > 10


@pytest.mark.parametrize("policy", POLICIES)
def test_compiling_kernels_between_steps_changes_nothing(folders, plain, policy):
    assert answers(folders, policy, compile_kernels=True) == plain(policy)


def test_adapters_that_come_after_the_start_are_captured(folders):
    engine = Engine(EngineSettings(policy="slora", pages=300, profile=False, prompt_graphs=True))
    engine.warm_up()
    before = capture(engine.runner, (0, 1))
    engine.load(folders["a0"], "a0")
    assert capture(engine.runner, (0, 1)) == 2 * before
    engine.close()


def test_costs_know_where_graphs_end(folders):
    engine = Engine(EngineSettings(policy="slora", pages=300, max_tokens=2100, max_requests=12,
                                   profile=False, prompt_graphs=True))  # fmt: skip
    engine.load(folders["a0"], "a0")
    engine.warm_up()
    costs = measure(engine, seconds=0.0)
    assert costs.captured_rows[-1] == 2048 and costs.uncaptured_seconds > 0
    engine.close()
