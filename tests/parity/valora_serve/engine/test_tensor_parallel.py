"""Two processes with gloo against one: every mode and mix, mixed ranks, GQA, heads, failures.

An engine takes seconds to start its second process, so tests share it where they can.
"""

import math
import os
import signal
import time
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from tests.parity.valora_serve.engine.conftest import neighbours
from tests.parity.valora_serve.engine.test_engine import EVERYBODY, Forced, mixed
from tests.parity.valora_serve.engine.test_engine import MODES as ALL_MODES
from tests.support.context_bundles import ContextSpec, make_context_bundle
from tests.support.engine_reference import (
    add_requests,
    assert_empty,
    finish,
    make_engine,
    question,
    relative,
    run,
    steps,
    tokens,
)
from tests.support.forked import forked_workers
from tests.support.serve_helpers import LANGUAGE, MLP, DomainSpec, make_bundle
from valora_data.contract.contexts import ADAPTER, MEMORY_TOKENS, PREFIX
from valora_kernels.merge import MergeableWeights
from valora_serve.errors import AdapterError, RequestError, StoppedError
from valora_serve.types import Mode, NewContext, Request, SamplingParams

TOLERANCE = 1e-5  # relative Frobenius error of log probabilities against one process, in fp32
MODES = {name: choose for name, choose in ALL_MODES.items() if name != "switching"}


@pytest.fixture(scope="module")
def adapters(base, tmp_path_factory):
    """Two processes divide not every rank."""
    return neighbours(base, tmp_path_factory.mktemp("adapters"), everything=1)


def bundle(base, folder):
    """Domains with heads that read the last token, all visual tokens, or their places."""
    domains = {
        "plates": DomainSpec("adapter-1", labels=["plate"]),
        "scene": DomainSpec("adapter-2", "classification", ["forest", "street"]),
        "crowd": DomainSpec(None, "counting", ["0", "1", "2"], "visual_mean"),
    }
    return make_bundle(folder / "heads", base, name="heads", domains=domains, seed=1)


@pytest.fixture(
    scope="module", params=[pytest.param("slora", marks=pytest.mark.slow), "replicate_a"]
)
def pair(request, base, adapters, tmp_path_factory):
    folder = bundle(base, tmp_path_factory.mktemp("bundles"))
    one = make_engine(base, adapters)
    # Among the slow tests there is a server to fork from.
    with forked_workers() if request.param == "slora" else nullcontext():
        two = make_engine(
            base, adapters, fresh=True, tensor_parallel=2, lora_parallel=request.param
        )
    try:
        for engine in (one, two):
            engine.load("bundle", folder)
        yield one, two
    finally:
        two.close()


def requests():
    """Requests of all adapters with none to two images, their log probabilities wanted."""
    sampling = SamplingParams(max_tokens=3, temperature=0.0, logprobs=20)
    return [replace(one, sampling=sampling) for one in mixed(EVERYBODY)]


def assert_equal(found, wanted):
    """The same tokens, with log probabilities that differ by rounding only."""
    assert found.keys() == wanted.keys()
    for name, want in wanted.items():
        got = found[name]
        assert (got.error, want.error) == (None, None)
        assert got.tokens == want.tokens, name
        assert relative(got.top, want.top) < TOLERANCE


@pytest.mark.slow
def test_a_leader_without_memory_leaves_all_processes_as_they_were(base, adapters, monkeypatch):
    """Runs first, as a process leads one group at a time."""

    def keep(self):
        raise torch.OutOfMemoryError("too little")

    sampling = SamplingParams(max_tokens=3, temperature=0.0, logprobs=20)
    both = {name: adapters[name] for name in ("attention", "mlp")}
    asked = [Request(name, name, token_ids=[5, 9, 33, 12], sampling=sampling) for name in both]
    one = make_engine(base, both, fresh=True)
    wanted = run(one, asked)
    one.close()
    first = {"attention": adapters["attention"]}
    with forked_workers():
        two = make_engine(base, first, fresh=True, tensor_parallel=2)
    try:
        with monkeypatch.context() as failing:
            failing.setattr(MergeableWeights, "keep", keep)
            with pytest.raises(AdapterError, match="too little memory for a copy of the weights"):
                two.load("adapter", adapters["mlp"], "mlp")
        assert_equal(run(two, asked[:1]), {"attention": wanted["attention"]})
        two.load("adapter", adapters["mlp"], "mlp")
        assert_equal(run(two, asked), wanted)
    finally:
        two.close()


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_every_mode_answers_as_one_process(pair, mode):
    found = []
    for engine in pair:
        own, policy = engine.policy, Forced(MODES[mode], engine)
        engine.policy = policy
        engine.images._kept.clear()  # both encode all images
        engine.images.held_bytes = 0
        found.append(run(engine, requests(), together=8))
        assert set(policy.modes) >= {Mode(mode)}
        engine.policy = own
        engine.merge_state.switch(Mode.UNMERGED, None)
        assert_empty(engine)
    assert_equal(found[1], found[0])


@pytest.mark.slow
def test_adapters_with_weights_answer_as_in_one_process(pair):
    weights = [(("attention", 0.7), ("mlp", -1.5)), (("mlp", 0.5),), (), (("patterns", 1.0),)]
    asked = [
        replace(one, model=None, adapters=weights[number % 4])
        for number, one in enumerate(requests())
    ]
    wanted, found = (run(engine, asked, together=3) for engine in pair)
    assert_equal(found, wanted)
    assert len({tuple(got.tokens) for got in found.values()}) > 4


@pytest.mark.slow
def test_heads_answer_as_in_one_process(pair):
    asked = [
        Request(f"{number}-{name}", model=name, text=one.text, messages=one.messages,
                images=one.images or requests()[1].images, head=True)
        for number, (name, one) in enumerate(
            zip(("plates", "scene", "crowd", "plates", "scene"), requests()[1:3] * 3, strict=False)
        )
    ]  # fmt: skip
    wanted, found = (run(engine, asked) for engine in pair)
    for name, want in wanted.items():
        assert (found[name].error, want.error) == (None, None)
        assert relative(found[name].last.head.logits, want.last.head.logits) < TOLERANCE


@pytest.mark.slow
def test_chance_is_the_leaders(pair):
    """Sampled tokens, scores of prompts, and adapters that are evicted and loaded again."""
    drawn = SamplingParams(max_tokens=6, temperature=0.9, seed=3, ignore_eos=True)
    scored = SamplingParams(
        max_tokens=1, temperature=0.0, prompt_logprobs=2, logit_bias=((7, 1.5),), ignore_eos=True
    )
    asked = [question("drawn", "attention", sampling=drawn), question("plain", "mlp"),
             question("scored", "patterns", sampling=scored)]  # fmt: skip
    wanted, found = (run(engine, asked) for engine in pair)
    assert tokens(found) == tokens(wanted)
    scores = [side["scored"].last for side in (wanted, found)]
    assert relative(scores[1].prompt.logprobs, scores[0].prompt.logprobs) < TOLERANCE
    for engine in pair:
        engine.merge_state.switch(Mode.UNMERGED, None)
        for key in sorted(engine.adapters.resident):
            engine.adapters.evict(engine.adapters._entries[key])
    assert tokens(run(pair[1], asked)) == tokens(wanted)


def test_contexts_and_adapters_at_decoding_only(pair, base, tmp_path):
    late = {"reader": {"rank": 3, "alpha": 7, "targets": f"{LANGUAGE}|{MLP}", "decode_only": True}}
    contexts = {
        "read": ContextSpec(MEMORY_TOKENS, 6, "reader"),
        "shut": ContextSpec(ADAPTER, 0, "reader"),
        "keys": ContextSpec(PREFIX, 21, "reader", gap=9),
        "whole": ContextSpec(PREFIX, 32),
    }
    folder = make_context_bundle(tmp_path / "documents", base, contexts, late)
    sampling = SamplingParams(max_tokens=5, ignore_eos=True)
    turns = [{"role": "user", "content": "Who knows where the red key lies?"}]
    requests = [
        Request(name, name, messages=turns, sampling=sampling)
        for name in (*contexts, "documents/reader")
    ]
    answers = []
    for engine in pair:
        engine.load("bundle", folder)
        answers.append(tokens(run(engine, requests)))
    assert answers[0] == answers[1]
    assert len({tuple(answers[0][name]) for name in contexts}) == len(contexts)
    assert pair[1].stats().pages_contexts == 4
    with pytest.raises(RequestError, match="several GPUs that share a model cannot make a prefix"):
        pair[1].prepare_compression(NewContext("new", "Some text."), "new")
    for engine in pair:
        engine.registry.unregister("bundle", "documents")
    assert_empty(pair[1])


@pytest.mark.slow
def test_each_process_holds_its_part(pair):
    one, two = pair

    def held(engine):
        groups = engine.lmm.linears.groups.values()
        return sum(w.numel() for g in groups if g.spec.part == "text" for w in g.weights)

    def merged(engine, part):
        linears = engine.lmm.linears
        shapes = [item for memory in linears.merged for item in memory.shapes.items()]
        own = [shape for name, shape in shapes if linears.group_of[name][0].spec.part == part]
        return sum(map(math.prod, own))

    assert 2 * held(two) == held(one)
    assert 2 * two.memory.page.elements == one.memory.page.elements
    assert [2 * merged(two, "text"), merged(two, "vision")] == [
        merged(one, part) for part in ("text", "vision")
    ]
    if two.settings.lora_parallel == "slora":
        sizes = [{k: e.host_bytes for k, e in one.adapters._entries.items()} for one in pair]
        for key in (key for key in sizes[0] if key.startswith(("attention", "mlp"))):
            assert sizes[1][key] <= 0.75 * sizes[0][key]


@pytest.mark.slow
def test_a_killed_process_ends_requests_with_one_message(pair, adapters):
    """Runs last, as the engine is lost."""
    engine = pair[1]
    worker = engine.workers.processes[0]
    asked = [question(f"r{number}", "mlp", tokens=400) for number in range(4)]
    add_requests(engine, *asked)
    found = steps(engine, 5)
    os.kill(worker.pid, signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(StoppedError, match=r"^process 1 of .* was killed by SIGKILL: restart the"):
        finish(engine, found, most=1000)
    assert time.monotonic() - began < 10
    ended = engine.fail_all("over")
    assert {output.id for output in ended} == {request.id for request in asked}
    with pytest.raises(StoppedError, match="was killed by SIGKILL"):
        engine.load("adapter", adapters["mlp"], "another")
