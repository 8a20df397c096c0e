"""Contexts and adapters at decoding only against transformers' caches and PEFT, in every mode."""

import json
import time
from dataclasses import replace

import pytest

from tests.support.cases import crossed, others_slow
from tests.support.context_bundles import ContextReference, ContextSpec, make_context_bundle
from tests.support.engine_reference import (
    add_requests,
    ask,
    assert_empty,
    check_answers,
    finish,
    make_engine,
    noise,
    run,
    steps,
)
from tests.support.lmm_checkpoints import save_llava, save_qwen3_vl
from tests.support.serve_helpers import LANGUAGE, MLP
from valora_data.contract.bundle import MANIFEST
from valora_data.contract.contexts import ADAPTER, MEMORY_TOKENS, PREFIX
from valora_serve.errors import AdapterError, RequestError, UnknownModelError
from valora_serve.orchestrator.decision import PolicySettings
from valora_serve.orchestrator.registry import POLICIES
from valora_serve.types import Mode, Request, SamplingParams

TOLERANCE = 1e-5  # relative error of log probabilities against transformers and PEFT, in fp32

ADAPTERS = {
    "always": {"rank": 8, "alpha": 16, "targets": LANGUAGE},
    "late": {"rank": 3, "alpha": 7, "targets": f"{LANGUAGE}|{MLP}", "decode_only": True},
}
CONTEXTS = {
    "whole": ContextSpec(PREFIX, 32),
    "ragged": ContextSpec(PREFIX, 21, "always", gap=40),
    "short": ContextSpec(PREFIX, 3, "late"),
    "tokens": ContextSpec(MEMORY_TOKENS, 19, "always"),
    "few": ContextSpec(MEMORY_TOKENS, 5, "late"),
    "plain": ContextSpec(MEMORY_TOKENS, 16),
    "closed": ContextSpec(ADAPTER, 0, "late"),
}
NAMES = [*CONTEXTS, None, "documents/always", "documents/late"]


@pytest.fixture(scope="module")
def bundle(base, tmp_path_factory):
    folder = tmp_path_factory.mktemp("bundle") / "documents"
    return make_context_bundle(folder, base, CONTEXTS, ADAPTERS)


@pytest.fixture(scope="module")
def reference(base, bundle):
    return ContextReference(base, bundle, CONTEXTS, ADAPTERS)


def engine_of(base, bundle, **settings):
    engine = make_engine(base, **settings)
    engine.load("bundle", bundle)
    return engine


def questions(names, *, tokens=6):
    """Questions of different lengths; every third has an image."""
    words = ("What is this?", "Count all things, then tell me about them. " * 3, "Yes or no", "Why")
    sampling = SamplingParams(max_tokens=tokens, ignore_eos=True, logprobs=1)
    return [
        Request(f"{n}-{name}", name, messages=ask(words[n % 4], images=n % 3 == 2),
                images=[noise(30, 40, n)] * (n % 3 == 2), sampling=sampling)
        for n, name in enumerate(names)
    ]  # fmt: skip


def check(found, requests, reference):
    """Every request has the tokens and log probabilities of its own memory and adapter."""

    def answer(request):
        return reference(replace(request, model=(request.model or "").rpartition("/")[2] or None))

    check_answers(found, answer, *requests, within=10 * TOLERANCE)


def test_the_reference_tells_contexts_apart(reference):
    asked = [replace(questions(["whole"])[0], model=name) for name in CONTEXTS]
    assert len({tuple(reference(one).tokens) for one in asked}) == len(CONTEXTS)


@pytest.mark.parametrize("settings", [
    {"overlap": True}, {"chunk": 7}, {"prefix_cache": False}, {"block_size": 4},
    {"pages": 14, "max_requests": 4}, {"attention": "torch"},
    *others_slow([{"policy": name, "max_requests": 6} for name in ("cost", "merge_only", "valora")],
                 [{"policy": name, "max_requests": 6} for name in POLICIES]),
])  # fmt: skip
def test_policies_and_settings(base, bundle, reference, settings):
    engine = engine_of(base, bundle, **settings)
    requests = questions(NAMES + NAMES[::-1])
    check(run(engine, requests, together=8), requests, reference)


@pytest.mark.parametrize(
    ("mode", "merged"), crossed([Mode.MERGED, Mode.MIXTURE], ["late", "always"])
)
def test_merged_adapters(base, bundle, reference, mode, merged):
    engine = engine_of(base, bundle, policy="merge_only" if mode is Mode.MERGED else "valora")
    key = next(key for key in engine.registry.ranks if key.startswith(merged))
    engine.adapters.load(key)
    engine.merge_state.switch(mode, key)
    requests = questions([n for n in NAMES if n is not None])
    check(run(engine, requests), requests, reference)


@pytest.mark.parametrize("block_size", others_slow([2], [2, 16]))
def test_the_prefix_cache_keeps_them_apart(base, bundle, reference, block_size):
    engine = engine_of(base, bundle, block_size=block_size)
    (first,) = questions(["same"])
    asked = [replace(first, id=f"{n}-{name}", model=name) for n, name in enumerate(NAMES * 2)]
    check(run(engine, asked, together=1), asked, reference)
    # Prompts and answers may be told apart at another token; the words are the same.
    ids = list(engine.prepare(replace(first, model=None)).prompt.ids)
    for cut in range(1, 4):
        model = "documents/late"
        one = Request(f"cut-{cut}", model=model, token_ids=ids[:-cut], sampling=first.sampling)
        alone = engine_of(base, bundle, block_size=block_size, prefix_cache=False)
        assert run(engine, [one])[one.id].tokens == run(alone, [one])[one.id].tokens


def test_adapters_at_decoding_only_share_the_base_models_cache(base, bundle):
    engine = engine_of(base, bundle)
    words = SamplingParams(max_tokens=2, ignore_eos=True)
    for name, cached in ((None, 0), ("documents/late", 96), ("documents/always", 0)):
        request = Request("x", name, token_ids=list(range(20, 120)), sampling=words)
        assert run(engine, [request])["x"].last.usage.cached == cached


def test_a_prefix_is_in_memory_once_and_evicted_when_others_need_it(base, bundle, reference):
    engine = engine_of(base, bundle, pages=20)
    requests = questions(["whole"] * 6)
    check(run(engine, requests), requests, reference)
    assert engine.stats().pages_contexts == 2  # 32 tokens
    assert engine.stats().context_loads == engine.stats().contexts_resident == 1
    long = Request("long", token_ids=[30] * 280, sampling=SamplingParams(max_tokens=4))
    assert run(engine, [long])["long"].error is None
    assert engine.stats().pages_contexts == 0
    check(run(engine, requests), requests, reference)
    assert engine.stats().context_loads == 2


def test_a_large_prefix_is_not_overtaken_for_ever(base, tmp_path):
    folder = make_context_bundle(tmp_path / "large", base, {"large": ContextSpec(PREFIX, 160)}, {})
    engine = make_engine(
        base, pages=16, max_requests=4, policy_settings=PolicySettings(patience=0.05)
    )
    engine.load("bundle", folder)
    sampling = SamplingParams(max_tokens=30, ignore_eos=True)
    late = Request("late", "large", messages=ask("Why"), sampling=SamplingParams(max_tokens=2))
    found = {}
    for number in range(400):
        if len(engine.requests.waiting) + len(engine.requests.running) < 6:
            beside = Request(str(number), token_ids=[20 + number] * 20, sampling=sampling)
            add_requests(engine, beside)
        if number == 4:
            add_requests(engine, late)
        if "late" in steps(engine, 1, found):
            break
        time.sleep(0.002)
    assert found["late"].error is None
    finish(engine, found)


def test_what_is_asked_together_has_its_own_context_and_text(base, bundle, reference):
    engine, (one,) = engine_of(base, bundle, policy="unmerge_only"), questions([None])
    asked = [replace(one, id=f"{name}", model=name) for name in ("whole", None, "tokens", "plain")]
    asked += [replace(one, id=text, messages=None, text=text) for text in ("a red car", "sea")]
    assert not engine.add_all([*engine.prepare_all(asked).values()])
    found = finish(engine)
    check(found, [one for one in asked if one.text is None], reference)
    assert all(found[x.id].tokens == run(engine, [x])[x.id].tokens for x in asked[-2:])


def test_deep_features_are_those_of_images_behind_memory_tokens(tmp_path):
    base = str(save_qwen3_vl(tmp_path / "base"))
    folder = make_context_bundle(tmp_path / "deep", base, {"a": ContextSpec(MEMORY_TOKENS, 9)}, {})
    *_, one = questions(["a"] * 3)  # with an image
    apart, whole = (run(engine_of(base, folder, chunk=n), [one])[one.id] for n in (4, 256))
    assert apart.top == pytest.approx(whole.top, abs=1e-4)


def test_a_share_of_adapters_holds_prefixes_or_refuses_them(base, bundle, reference):
    engine = engine_of(base, bundle, pages=40, adapter_share=0.05)
    with pytest.raises(RequestError, match=r"need 6 pages, 2 are .*: raise adapter_share"):
        add_requests(engine, *questions(["ragged"]))
    check(run(engine, whole := questions(["whole"])), whole, reference)


def test_a_context_may_be_forgotten_while_it_is_read(base, bundle, reference):
    engine = engine_of(base, bundle)
    first, second, third = questions(["whole", "ragged", "whole"])
    add_requests(engine, first, second)
    late, found = engine.prepare(third), steps(engine)
    engine.registry.unregister("bundle", "documents")
    assert len(engine.prefixes) == 2  # those that are read
    check(finish(engine, found), [first, second], reference)
    assert len(engine.prefixes) == 0
    with pytest.raises(UnknownModelError, match=r"^context whole was deleted: make it again$"):
        engine.add(late)
    assert_empty(engine)


@pytest.mark.parametrize("request_of, message", [
    (lambda: Request("a", "whole", messages=[
        {"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}]),
     "whole is a context, which stands in place of the system turn: leave that out"),
    (lambda: Request("a", "whole", messages=ask("Hi"),
                     sampling=SamplingParams(prompt_logprobs=1)),
     "prompt_logprobs: the tokens of context whole have none"),
])  # fmt: skip
def test_refusals(base, bundle, request_of, message):
    engine = engine_of(base, bundle)
    with pytest.raises(RequestError, match=message):
        add_requests(engine, request_of())


def test_a_memory_of_another_base_model_is_refused(base, bundle, tmp_path):
    other = str(save_llava(tmp_path / "other", seed=8))
    wrong = tmp_path / "wrong"
    make_context_bundle(wrong, other, {"a": ContextSpec(PREFIX, 16)}, {})
    engine = make_engine(base)
    with pytest.raises(AdapterError, match="use that base model"):
        engine.load("bundle", wrong)
    manifest = json.loads((wrong / MANIFEST).read_text())
    manifest["base"] = json.loads((bundle / MANIFEST).read_text())["base"]
    (wrong / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(AdapterError, match=r"context a: .* was made for base model"):
        engine.load("bundle", wrong)
    assert engine.stats().contexts_known == 0
