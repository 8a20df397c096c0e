"""Penalties, bias and log probabilities of prompts in the engine, against transformers."""

from dataclasses import replace

import pytest
import torch

from tests.support.engine_reference import (
    add_requests,
    assert_empty,
    check_answers,
    finish,
    make_engine,
    question,
    run,
    steps,
)
from valora_serve.errors import RequestError
from valora_serve.types import Request, SamplingParams


def generated(reference, request, **options):
    """Greedy tokens of transformers' `generate` with its own processors of logits."""
    reference.model.set_adapter(request.model)
    inputs = reference.inputs(request)
    found = reference.model.generate(
        **inputs, max_new_tokens=request.sampling.max_tokens, do_sample=False, eos_token_id=-1,
        **options,
    )  # fmt: skip
    return found[0, inputs["input_ids"].shape[1] :].tolist()


@pytest.mark.parametrize("overlap", [False, True])
def test_penalties_and_bias_beside_plain_requests(base, adapters, reference, overlap):
    engine = make_engine(base, adapters, overlap=overlap, chunk=7)
    plain = [question("plain", "attention", tokens=14), question("other", "patterns", tokens=9)]
    bias = {reference(plain[0]).tokens[1]: -100.0, 77: 3.0, 78: 3.5}

    def asked(name, model, **options):
        params = SamplingParams(max_tokens=14, ignore_eos=True, **options)
        return replace(question(name, model), sampling=params)

    repeating = asked("repeating", "attention", repetition_penalty=1.7)
    encouraged = asked("encouraged", "patterns", repetition_penalty=0.6)
    biased = replace(asked("biased", "attention", logit_bias=tuple(bias.items())),
                     token_ids=plain[0].token_ids)  # fmt: skip
    presence = asked("presence", "patterns", presence_penalty=2.0, frequency_penalty=2.0)
    found = run(engine, [*plain, repeating, encouraged, biased, presence], together=4)
    check_answers(found, reference, *plain)
    assert found["repeating"].tokens == generated(reference, repeating, repetition_penalty=1.7)
    assert found["encouraged"].tokens == generated(reference, encouraged, repetition_penalty=0.6)
    sequence_bias = [[[token], value] for token, value in bias.items()]
    wanted = generated(reference, biased, sequence_bias=sequence_bias)
    assert found["biased"].tokens == wanted != reference(plain[0]).tokens
    # Frequency and presence penalties are not in transformers: token by token, in closed form.
    tokens = found["presence"].tokens
    assert len(tokens) == 14
    for place, token in enumerate(tokens):
        ids = [*presence.token_ids, *tokens[:place]]
        one = replace(presence, token_ids=ids, sampling=SamplingParams(max_tokens=1))
        logits = reference(one).logits[0].clone()
        for known in set(tokens[:place]):
            logits[known] -= 2.0 * tokens[:place].count(known) + 2.0
        assert int(logits.argmax()) == token


def test_penalties_hold_after_a_preemption(base, adapters, reference):
    engine = make_engine(base, adapters, overlap=True)
    one = question("one", "attention", tokens=12)
    one = replace(one, sampling=replace(one.sampling, repetition_penalty=1.7))
    add_requests(engine, one)
    found = steps(engine, 6)
    engine._preempt([one.id])
    finish(engine, found)
    assert engine.requests.preemptions == 1
    assert found[one.id].tokens == generated(reference, one, repetition_penalty=1.7)


def test_bias_of_unknown_tokens_is_refused(base):
    engine = make_engine(base)
    most = engine.lmm.vocabulary
    for token in (most, -1):
        one = question("one")
        params = replace(one.sampling, logit_bias=((5, 1.0), (token, 1.0)))
        with pytest.raises(RequestError, match=f"0 to {most - 1}"):
            add_requests(engine, replace(one, sampling=params))
    assert_empty(engine)


def prompts_of(engine, requests):
    """The prompt log probabilities of requests; each gets them once."""
    found = {}
    add_requests(engine, *requests)
    while engine.busy:
        for output in engine.step():
            assert output.error is None
            if output.prompt is not None:
                assert output.id not in found
                assert output.token_ids
                found[output.id] = output.prompt
    assert_empty(engine)
    return found


@pytest.mark.parametrize(("chunk", "overlap"), [(256, False), (5, True), (1, True)])
def test_prompt_logprobs(base, adapters, reference, chunk, overlap, monkeypatch):
    monkeypatch.setattr("valora_serve.model.runner.SCORED_ROWS", 4)
    engine = make_engine(base, adapters, chunk=chunk, overlap=overlap, block_size=4)
    plain = [question("plain", "attention"), question("other", "patterns")]
    wanted = {"a": 0, "b": 3, "c": 5}
    requests = [
        replace(question("plain", model), id=name, sampling=SamplingParams(
            max_tokens=3, prompt_logprobs=wanted[name], ignore_eos=True, logprobs=1))
        for name, model in (("a", "attention"), ("b", "patterns"), ("c", "attention"))
    ]  # fmt: skip
    run(engine, plain)  # their pages are in the prefix cache
    found = prompts_of(engine, [requests[0], plain[0], *requests[1:]])
    assert set(found) == set(wanted)
    for request in requests:
        got, inputs = found[request.id], reference.inputs(request)
        reference.model.set_adapter(request.model)
        with torch.no_grad():
            scores = reference.model(**inputs).logits[0].float().log_softmax(-1)[:-1]
        assert got.ids.tolist() == list(request.token_ids or ())
        each = scores.gather(1, inputs["input_ids"][0, 1:, None])[:, 0]
        assert got.logprobs == pytest.approx(each.numpy(), abs=1e-4)
        values, ids = scores.topk(wanted[request.id], -1)
        assert got.top_ids.tolist() == ids.tolist()
        assert got.top_logprobs == pytest.approx(values.numpy(), abs=1e-4)


def test_prompt_logprobs_after_a_preemption(base, adapters, reference):
    engine = make_engine(base, adapters, chunk=5, overlap=True)
    params = SamplingParams(max_tokens=4, prompt_logprobs=1, ignore_eos=True)
    one = replace(question("one", "attention"), sampling=params)
    late = replace(question("late", "patterns"), sampling=params)
    whole = prompts_of(engine, [one, late])
    for place in (1, 2, 4):  # in the middle of the prompt, and of the answer
        add_requests(engine, one, late)
        found = steps(engine, place)
        engine._preempt(list(engine.requests.running))
        finish(engine, found)
        for name in ("one", "late"):
            assert found[name].prompt.ids.tolist() == whole[name].ids.tolist()
            assert found[name].prompt.logprobs == pytest.approx(whole[name].logprobs, abs=1e-5)


def test_a_prompt_of_one_token_has_no_log_probabilities(base):
    engine = make_engine(base)
    params = SamplingParams(max_tokens=1, prompt_logprobs=2)
    one = Request("one", token_ids=[17], sampling=params)
    found = prompts_of(engine, [one])["one"]
    assert found.ids.tolist() == [17]
    assert (found.logprobs.shape, found.top_ids.shape) == ((0,), (0, 2))
    assert run(engine, [replace(one, id="again")])["again"].error is None
