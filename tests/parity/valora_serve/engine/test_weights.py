"""Adapters with weights against weights that PEFT's differences are added to, in fp32."""

from dataclasses import replace
from functools import partial

import pytest
from peft.tuners.lora import LoraLayer

from tests.parity.valora_serve.engine.test_engine import EVERY_POLICY, Forced, mixed
from tests.support.cases import others_slow
from tests.support.engine_reference import (
    Reference,
    ask,
    check_answers,
    finish,
    key_of,
    make_engine,
    question,
    run,
    steps,
)
from tests.support.serve_helpers import (
    EVERYTHING,
    LANGUAGE,
    MLP,
    DomainSpec,
    make_adapters,
    make_bundle,
)
from valora_serve.errors import RequestError, UnknownModelError
from valora_serve.orchestrator.registry import POLICIES
from valora_serve.types import Mode, SamplingParams

TOLERANCE = 1e-5  # relative error of log probabilities, in fp32; measured 1e-6
TOP = 20
PAIR = (("attention", 0.7), ("mlp", -1.5))
MIXES = [
    (), PAIR, (("mlp", 0.5),), (("patterns", 1.0),), (("attention", -2.0), ("patterns", 0.25)),
    (("everything", 1.0),), (("attention", 0.0),), (("mlp", 1.0), ("attention", 1.0)),
    (("mlp", 0.0), ("patterns", 3.0)), (("attention", 4.0),), (("mlp", 0.5), ("mlp", 0.25)),
    (("attention", -1.5), ("mlp", 0.7)), (("mlp", 1.0),), (("attention", 1.0),),
]  # fmt: skip


@pytest.fixture(scope="module")
def adapters(base, tmp_path_factory):
    return make_adapters(
        tmp_path_factory.mktemp("adapters"), base, 0.1,
        attention=(1, 8, 16, LANGUAGE),
        mlp=(2, 3, 7, f"{LANGUAGE}|{MLP}", ("use_rslora", True)),
        patterns=(3, 4, 6, MLP, ("alpha_pattern", {"up_proj": 11})),
        everything=(6, 6, 13, EVERYTHING),
    )  # fmt: skip


class WeightedReference(Reference):
    """PEFT's model, to whose weights the weighted differences of adapters are added."""

    def __call__(self, request):
        key = (*key_of(replace(request, model=None)), request.adapters)
        if key in self._known:
            return self._known[key]
        layers = [m for m in self.model.modules() if isinstance(m, LoraLayer)]
        kept = [(layer, layer.get_base_layer().weight.data.clone()) for layer in layers]
        for name, weight in request.adapters:
            for layer in layers:
                if name in layer.lora_A:
                    added = weight * layer.get_delta_weight(name)
                    layer.get_base_layer().weight.data += added
        self._known[key] = self._answer(replace(request, model=None))
        for layer, weight in kept:
            layer.get_base_layer().weight.data.copy_(weight)
        return self._known[key]


@pytest.fixture(scope="module")
def reference(base, adapters):
    return WeightedReference(base, adapters)


def asked(mixes, *, images=True, tokens=6):
    """Requests with these adapters, with none, one or two `images`."""
    params = SamplingParams(max_tokens=tokens, logprobs=TOP, ignore_eos=True)
    plain = mixed([None if n % 2 or not mix else mix[0][0] for n, mix in enumerate(mixes)])
    if not images:
        plain = [replace(one, images=[], messages=ask(f"Why {one.id}?")) for one in plain]
    return [
        replace(one, id=f"{n}", adapters=mix, sampling=params)
        for n, (one, mix) in enumerate(zip(plain, mixes, strict=True))
    ]


check = partial(check_answers, within=TOLERANCE)


@EVERY_POLICY
def test_weights_beside_other_requests(base, adapters, reference, policy, overlap):
    engine = make_engine(base, adapters, policy=policy, overlap=overlap, max_requests=6)
    requests = asked(MIXES)
    check(run(engine, requests, together=5), reference, *requests)
    assert not engine.requests.mixes


@pytest.mark.parametrize("policy", others_slow(["cost", "merge_only", "valora"], POLICIES))
def test_pairs_where_one_adapter_has_most_requests(base, adapters, reference, policy):
    engine = make_engine(base, adapters, policy=policy, max_requests=5)
    most = (("attention", 1.0),)
    requests = asked([most, most, PAIR, most, (("attention", 0.5),), most, PAIR, most, most])
    check(run(engine, requests, together=6), reference, *requests)


def test_strengths_in_mixture_mode(base, adapters, reference):
    def choose(view):
        able = sorted(one for one in view.switchable or view.resident if "attention" in one)
        return (Mode.MIXTURE, able[0]) if able else (Mode.UNMERGED, None)

    engine = make_engine(base, adapters)
    engine.policy = Forced(choose, engine)
    requests = asked([mix for mix in MIXES if len(mix) < 2 or mix[0][0] == mix[1][0]])
    found = run(engine, requests)
    check(found, reference, *requests)
    assert {found[one.id].last.mode for one in requests} == {Mode.MIXTURE}


@pytest.mark.parametrize(("slots", "pages"), [(2, 512), (8, 18)])
def test_adapters_of_pairs_come_together(base, adapters, reference, slots, pages):
    """Beside others that evict them, where hardly more than two fit."""
    room = {"slots": slots, "max_adapters": slots, "pages": pages}
    engine = make_engine(base, adapters, max_requests=3, **room)
    requests = asked([*MIXES, *MIXES[::-1]], images=False, tokens=3)
    check(run(engine, requests, together=4), reference, *requests)
    assert engine.adapters.loads > len(adapters)


def test_cached_prompts_are_those_of_the_same_weights(base, adapters, reference):
    engine = make_engine(base, adapters, block_size=4)
    mixes = [
        PAIR, PAIR[::-1], (("attention", 0.7),), (("attention", 0.7), ("mlp", -1.25)), (),
        (("attention", 1.0),), (("mlp", 0.0),), (("attention", 0.5), ("attention", 0.5)),
    ]  # fmt: skip
    same = {1: 0, 6: 4, 7: 5}  # what is told in other words
    for number, mix in enumerate(mixes):
        request = replace(asked([mix], images=False)[0], messages=ask("What is in this, and why?"))
        found = run(engine, [request])
        check(found, reference, request)
        usage = found[request.id].last.usage
        assert bool(usage.cached) == (number in same), mix


def test_wrong_weights(base, adapters, tmp_path, reference):
    spec = {"scene": DomainSpec("one", "classification", ["x", "y", "z"])}
    engine = make_engine(base, adapters)
    engine.load("bundle", make_bundle(tmp_path / "b", base, domains=spec, adapters={"one": {}}))
    engine.load("adapter", adapters["mlp"], "late", decode_only=True)
    wrong = [
        (None, (("nobody", 1.0),), UnknownModelError, "nobody"),
        (None, (("attention", 4.1),), RequestError, "-4 to 4"),
        (None, (("attention", float("nan")),), RequestError, "-4 to 4"),
        (None, (("attention", 1.0),) * 3, RequestError, "up to 2"),
        ("mlp", PAIR, RequestError, "the first of the adapters"),
        ("scene", PAIR, RequestError, "the first of the adapters"),
        (None, (("scene", 1.0), ("mlp", 1.0)), RequestError, "scene takes no weight .* no adapter"),
        (None, ((base, 1.0), ("mlp", 1.0)), RequestError, "is no adapter"),
        (None, (("everything", 0.5),), RequestError, "it changes how images"),
        (None, (("mlp", 0.5), ("everything", 1.0)), RequestError, "it changes how images"),
        (None, (("mlp", 0.5), ("late", 1.0)), RequestError, "decode_only"),
    ]
    for model, weights, error, said in wrong:
        with pytest.raises(error, match=said):
            engine.prepare(replace(question("q", model), adapters=weights))
    one = make_engine(base, adapters, slots=1, max_adapters=1)
    with pytest.raises(RequestError, match="raise slots"):
        one.add(one.prepare(replace(question("q"), adapters=PAIR)))
    prepared = one.prepare(replace(question("q"), adapters=PAIR))
    one.registry.unregister("adapter", "mlp")
    with pytest.raises(UnknownModelError, match="mlp was unloaded"):
        one.add(prepared)


def test_both_adapters_of_a_pair_stay_until_it_ends(base, adapters, reference):
    engine = make_engine(base, adapters)
    (request,) = asked([PAIR], images=False)
    engine.add(engine.prepare(request))
    found = steps(engine)
    for name in ("attention", "mlp"):
        engine.registry.unregister("adapter", name)
    assert len(engine.adapters) == 4
    check(finish(engine, found), reference, request)
    assert len(engine.adapters) == 2
