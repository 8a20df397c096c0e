"""Steps with prompts in fixed buffers, as a graph replays them, against eager steps."""

from functools import cache, partial
from itertools import count

import pytest

from tests.support.cases import others_slow
from tests.support.engine_reference import ask, capture, make_engine, noise, run, tokens
from tests.support.serve_helpers import EVERYTHING, make_adapters
from valora_serve.engine.profile import measure
from valora_serve.model.graphs import PromptGraphs
from valora_serve.types import Request, SamplingParams

TURNS = ("what is this?", "how many stars?", "describe the image.")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    kinds = {f"a{n}": (n, rank, 16, EVERYTHING) for n, rank in enumerate((8, 16, 4))}
    return make_adapters(tmp_path_factory.mktemp("adapters"), "tiny", 0.2, **kinds)


def answers(folders, policy, between=lambda runner: None, **options):
    """Answers to questions about several images and adapters; some steps have something between."""
    engine = make_engine(
        "tiny", folders, policy=policy, pages=300, chunk=40, max_tokens=150, max_requests=12,
        **options,
    )  # fmt: skip
    engine.warm_up()
    requests = []
    for number in range(14):
        images = [noise(40 + number, 50, number)] if number % 5 else []
        said = ask(TURNS[number % 3], images=len(images))
        sampling = SamplingParams(max_tokens=5 + number, ignore_eos=True)
        model = [None, *folders][number % 4]
        requests.append(
            Request(str(number), model, messages=said, images=images, sampling=sampling)
        )
    step, steps = engine.step, count()

    def stepped():
        if next(steps) in (4, 14):
            between(engine.runner)
        return step()

    engine.step = stepped
    found = run(engine, requests)
    engine.close()
    assert all(got.error is None for got in found.values())
    return tokens(found)


def compile_kernels(runner):
    for one in runner._kernel_runs((0, 1, 2)):
        runner.prepare(one)


@pytest.fixture(scope="module")
def plain(folders):
    """Answers without any graph, by policy."""
    return cache(partial(answers, folders))


POLICIES = others_slow(["slora"], ["slora", "dlora"])


@pytest.mark.parametrize("policy", POLICIES)
def test_fixed_buffers_change_nothing(folders, plain, policy, monkeypatch):
    replayed, find = [], PromptGraphs.find

    def spy(*arguments):
        replayed.append(find(*arguments))
        return replayed[-1]

    monkeypatch.setattr(PromptGraphs, "find", spy)
    assert answers(folders, policy, prompt_graphs=True) == plain(policy)
    assert sum(graph is not None for graph in replayed) > 10


@pytest.mark.parametrize("policy", POLICIES)
def test_compiling_kernels_between_steps_changes_nothing(folders, plain, policy):
    assert answers(folders, policy, compile_kernels) == plain(policy)


def test_adapters_that_come_after_the_start_are_captured(folders):
    engine = make_engine("tiny", prompt_graphs=True, policy="slora")
    engine.warm_up()
    before = capture(engine.runner, (0, 1))
    engine.load("adapter", folders["a0"], "a0")
    assert capture(engine.runner, (0, 1)) == 2 * before
    engine.close()


def test_costs_know_where_graphs_end(folders):
    engine = make_engine("tiny", {"a0": folders["a0"]}, max_tokens=2100, prompt_graphs=True)
    engine.warm_up()
    costs = measure(engine, seconds=0.0)
    assert costs.captured_rows[-1] == 2048 and costs.uncaptured_seconds > 0
    engine.close()
