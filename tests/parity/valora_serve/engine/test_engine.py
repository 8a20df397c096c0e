"""The engine against PEFT and transformers, request by request, in every mode and mix."""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.support.cases import crossed, others_slow
from tests.support.engine_reference import (
    Reference,
    add_requests,
    ask,
    check_answers,
    finish,
    make_engine,
    noise,
    relative,
    run,
)
from valora_serve.engine.engine import Engine
from valora_serve.orchestrator.registry import POLICIES, make_policy
from valora_serve.types import Finish, Mode, Request, SamplingParams

# Relative Frobenius error of logits against PEFT, in fp32; measured 1e-6 to 2e-6.
TOLERANCE = 1e-5
# Largest mean error in bf16, in units of PEFT's and transformers' own; measured 0.8 to 1.05.
ROUNDING = 1.25


EVERY_POLICY = pytest.mark.parametrize(("policy", "overlap"), crossed(POLICIES, [True, False]))


def mixed(names, *, tokens=8):
    """Requests with none, one or two images, in an order in which neighbours differ."""
    greedy = SamplingParams(max_tokens=tokens)
    words = ("What is this?", "Count all things, then tell me about them.", "Yes or no", "Why")
    return [
        Request(f"{n}-{name}", name, messages=ask(words[n % 4], images=n % 3), sampling=greedy,
                images=[noise(30 + 7 * n, 40, 100 + n % 5 + i) for i in range(n % 3)])
        for n, name in enumerate(names)
    ]  # fmt: skip


EVERYBODY = [
    None, "attention", "mlp", "everything", "tower", None, "patterns", "projector",
    "attention", "everything", "mlp", None,
]  # fmt: skip


def check_mixed(engine, reference, together):
    """Every request has the tokens of its own adapter's model."""
    requests = mixed(EVERYBODY)
    check_answers(run(engine, requests, together=together), reference, *requests)


def test_adapters_and_prompts_make_a_difference(reference):
    names = [None, "attention", "mlp", "everything", "patterns", "tower", "projector"]
    asked = [replace(one, model=name) for name in names for one in mixed([None] * 3)]
    assert len({tuple(reference(one).tokens) for one in asked}) == len(asked) - 2
    # Without an image neither the tower nor the projector matters.


@EVERY_POLICY
def test_policies(base, adapters, reference, policy, overlap):
    engine = make_engine(base, adapters, policy=policy, overlap=overlap, max_requests=6)
    check_mixed(engine, reference, 4)


class Forced:
    """Decides on the batch as `unmerge_only` does, and on the mode as it is told."""

    def __init__(self, choose, engine):
        self._choose = choose
        self._inner = make_policy("unmerge_only", engine.cost)
        self.modes = []

    def decide(self, view):
        decision = self._inner.decide(view)
        mode, merged = self._choose(view)
        batch = decision.batch
        if mode is Mode.MERGED:
            known = {one.id: one.adapter for one in (*view.running, *view.waiting)}
            batch = tuple((key, n) for key, n in batch if known[key] == merged)
        if not batch and decision.batch:
            mode, merged, batch = Mode.UNMERGED, None, decision.batch
        self.modes.append(mode)
        return replace(decision, mode=mode, merged=merged, batch=batch)

    def finished(self, request_id):
        self._inner.finished(request_id)


def unmerged(_view):
    return Mode.UNMERGED, None


def _asked_for(view):
    """Resident adapters, those of the oldest requests first."""
    asked = [one.adapter for one in sorted((*view.running, *view.waiting), key=lambda r: r.arrival)]
    return [name for name in dict.fromkeys(asked) if name in view.resident and name is not None]


def merged(view):
    names = _asked_for(view)
    return (Mode.MERGED, names[0]) if names else (Mode.UNMERGED, None)


def mixture(view):
    """Stays with the adapter that is merged, also when nobody asks for it any more."""
    names = [view.merged] if view.merged else _asked_for(view)
    return (Mode.MIXTURE, names[0]) if names else (Mode.UNMERGED, None)


def at_random(seed):
    draw = random.Random(seed)

    def choose(view):
        mode = draw.choice(list(Mode))
        if mode is Mode.UNMERGED or not view.resident:
            return Mode.UNMERGED, None
        names = _asked_for(view) if mode is Mode.MERGED else sorted(view.resident)
        return (mode, draw.choice(names)) if names else (Mode.UNMERGED, None)

    return choose


MODES = {"unmerged": unmerged, "merged": merged, "mixture": mixture, "switching": at_random(1)}


def forced(base, adapters, mode, **settings):
    engine = make_engine(base, adapters, policy="valora", **settings)
    choose = at_random(1) if mode == "switching" else MODES[mode]
    engine.policy = Forced(choose, engine)
    return engine


@pytest.mark.parametrize(("mode", "overlap"), crossed(MODES, [True, False]))
def test_modes(base, adapters, reference, mode, overlap):
    engine = forced(base, adapters, mode, overlap=overlap, max_requests=8)
    check_mixed(engine, reference, 6)
    used = set(engine.policy.modes)
    if mode == "switching":
        assert used == set(Mode) and engine.stats().switches > 10
    else:
        assert used >= {Mode(mode)}


@pytest.mark.parametrize(
    ("mode", "block_size", "chunk"), crossed(["unmerged", "switching"], [1, 4, 16], [256, 7])
)
def test_chunks_and_pages(base, adapters, reference, mode, block_size, chunk):
    sizes = {"block_size": block_size, "chunk": chunk, "pages": 16384 // block_size}
    check_mixed(forced(base, adapters, mode, **sizes), reference, 8)


@pytest.mark.parametrize(("mode", "overlap"), crossed(["unmerged", "switching"], [False, True]))
def test_preemption(base, adapters, reference, mode, overlap):
    requests = mixed([None, "mlp", None, "tower", "mlp", None], tokens=40)
    settings = {"block_size": 4, "overlap": overlap, "prefix_cache": False}
    engine = forced(base, adapters, mode, **settings)
    pages = 2 * max(-(-(len(engine.prepare(one).prompt.ids) + 40) // 4) for one in requests)
    for key in engine.registry.ranks:
        pages += engine.adapters[key].page_count if key.startswith(("mlp", "tower")) else 0
    engine = forced(base, adapters, mode, pages=pages, **settings)
    check_answers(run(engine, requests), reference, *requests)
    assert engine.stats().preemptions > 0


def test_prefixes_are_found_again_by_adapter_and_image(base, adapters, reference):
    engine = forced(base, adapters, "switching", block_size=4)
    first = mixed(EVERYBODY)
    check_answers(run(engine, first), reference, *first)
    before = engine.stats()
    again = [replace(one, id=f"again {one.id}") for one in first]
    found = run(engine, again)
    check_answers(found, reference, *again)
    after = engine.stats()
    queries = after.prefix_queries - before.prefix_queries
    assert after.prefix_hits - before.prefix_hits > 0.6 * queries
    encoded = [stats.image_queries - stats.image_hits for stats in (before, after)]
    assert encoded[0] == encoded[1] > 4
    assert all(found[one.id].last.usage.cached for one in again)
    # The same words and picture under another adapter or with another picture share nothing
    # that depends on it.
    picture = first[1]
    changes = {"model": "patterns"}, {"images": [noise(31, 40, 999)]}, {"model": None}
    others = [replace(picture, id=str(changed), **changed) for changed in changes]
    check_answers(run(engine, others), reference, *others)


def test_images_are_encoded_once_for_each_adapter_of_the_tower(base, adapters, reference):
    picture = noise(40, 30, 5)
    names = [None, "attention", "mlp", "tower", "everything", "projector"]
    requests = [
        Request(str(name), name, messages=ask("What is it?", images=1), images=[picture],
                sampling=SamplingParams(max_tokens=4))
        for name in names
    ]  # fmt: skip
    engine = make_engine(base, adapters, policy="unmerge_only", prefix_cache=False)
    check_answers(run(engine, requests), reference, *requests)
    assert len(engine.images._kept) == 4  # as the base model sees it, and three adapted ones
    check_answers(run(engine, requests), reference, *requests)
    stats = engine.stats()
    assert (stats.image_queries, stats.image_queries - stats.image_hits) == (12, 4)
    assert len(engine.images._kept) == 4


def test_prompt_that_grows_in_a_conversation(base, reference):
    engine = make_engine(base, block_size=4)
    ids = list(range(40, 75))
    for turn in range(3):
        one = Request(f"{turn}", token_ids=ids, sampling=SamplingParams(max_tokens=9))
        found = run(engine, [one])
        check_answers(found, reference, one)
        usage = found[one.id].last.usage
        # Answers are found again as well, their last token excepted, which was never computed.
        assert usage.cached == (0 if not turn else (len(ids) - 5 - 1) // 4 * 4)
        ids += [*found[one.id].tokens, *range(100 + turn, 105 + turn)]


@pytest.mark.parametrize("mode", others_slow(["unmerged", "switching"], MODES))
def test_logprobs(base, adapters, reference, mode):
    wanted = [0, 3, None, 5]
    requests = [
        replace(one, sampling=replace(one.sampling, logprobs=wanted[n % 4]))
        for n, one in enumerate(mixed(EVERYBODY))
    ]
    found = run(forced(base, adapters, mode), requests)
    for request in requests:
        got, expected = found[request.id], reference(request)
        assert got.tokens == expected.tokens
        most = request.sampling.logprobs
        assert len(got.logprobs) == (0 if most is None else len(got.tokens))
        for place, said in enumerate(got.logprobs):
            scores = expected.logprobs()[place]
            assert said.chosen.token == got.tokens[place]
            assert said.chosen.logprob == pytest.approx(float(scores[said.chosen.token]), abs=1e-4)
            values, ids = scores.topk(int(most or 0))
            assert [one.token for one in said.top] == ids.tolist()
            assert [one.logprob for one in said.top] == pytest.approx(values.tolist(), abs=1e-4)


def logits_of(base, adapters, requests, mode, dtype):
    """What the first token of each request is chosen from, all computed in one step."""
    engine = make_engine(base, adapters, policy="valora", prefix_cache=False, dtype=dtype)
    keys = {key.split("#")[0]: key for key in engine.registry.ranks}
    for key in keys.values():
        assert engine.adapters.load(key)
    chosen = (Mode.UNMERGED, None) if mode == "unmerged" else (Mode.MIXTURE, keys["everything"])
    engine.policy = Forced(lambda _: chosen, engine)
    seen, logits = [], engine.lmm.logits
    engine.lmm.logits = lambda hidden: seen.append(logits(hidden)) or seen[-1]
    run(engine, requests)
    (rows,) = seen
    assert len(rows) == len(requests)
    return [row.numpy() for row in rows]


@pytest.mark.parametrize("mode", ["unmerged", "merged", "mixture"])
def test_logits_within_tolerance(base, adapters, reference, mode):
    names = ["everything", None, "attention", "mlp", "patterns", "everything"]
    requests = mixed(["everything"] * 3 if mode == "merged" else names, tokens=1)
    expected = [reference(one).logits[0].numpy() for one in requests]

    def errors(found):
        return [relative(a, b) for a, b in zip(found, expected, strict=True)]

    exact = errors(logits_of(base, adapters, requests, mode, "float32"))
    assert max(exact) < TOLERANCE, exact
    # In bf16 they may be off by what rounding costs PEFT and transformers themselves.
    plain = Reference(base, adapters, torch.bfloat16)
    rounded = errors(plain(one).logits[0].numpy() for one in requests)
    own = errors(logits_of(base, adapters, requests, mode, "bfloat16"))
    assert np.mean(own) < ROUNDING * np.mean(rounded), (own, rounded)


def test_ends(base, reference):
    """max_tokens, the context's end, a stop token, a stop text."""
    plain = Request("plain", token_ids=range(20, 40), sampling=SamplingParams(max_tokens=12))
    wanted = reference(plain).tokens
    engine = make_engine(base, context_length=27)
    got = run(engine, [plain])["plain"]
    assert (got.tokens, got.finish) == (wanted[:7], Finish.LENGTH)
    engine = make_engine(base)
    engine.lmm.stop_ids = frozenset({wanted[3]})
    unlimited = replace(plain, id="ends", sampling=SamplingParams(max_tokens=None))
    ignoring = replace(plain, id="goes on", sampling=SamplingParams(max_tokens=6, ignore_eos=True))
    text = engine.lmm.tokenizer.decode(wanted[:3], skip_special_tokens=True)
    found = run(engine, [unlimited, ignoring])
    ends, goes_on = found["ends"], found["goes on"]
    assert (ends.finish, ends.tokens, ends.text) == (Finish.STOP, wanted[:4], text)
    assert (goes_on.finish, goes_on.tokens) == (Finish.LENGTH, wanted[:6])
    engine = make_engine(base, overlap=True)
    whole = engine.lmm.tokenizer.decode(wanted, skip_special_tokens=True)
    stop = whole[4:7]
    asked = replace(plain, id="stop", sampling=SamplingParams(max_tokens=12, stop=(stop, "zzz")))
    got = run(engine, [asked])["stop"]
    assert (got.finish, got.text) == (Finish.STOP, whole[: whole.index(stop)])


def test_nothing_changes_when_requests_come_and_go_beside_it(base, adapters, reference):
    """Drawn answers repeat with the seed, whatever runs beside them and in which mode."""
    drawn = [
        replace(one, id=f"drawn {n}", sampling=SamplingParams(
            max_tokens=10, temperature=0.9, top_k=40, top_p=0.95, min_p=0.01, seed=11 + n))
        for n, one in enumerate(mixed([None, "attention", "everything"]))
    ]  # fmt: skip
    alone = [run(forced(base, adapters, "unmerged"), [one])[one.id] for one in drawn]
    engine = forced(base, adapters, "switching", chunk=9, overlap=True)
    others = mixed(EVERYBODY)
    found = run(engine, [*others[:4], *drawn, *others[4:]], together=5)
    check_answers(found, reference, *others)
    assert [found[one.id].tokens for one in drawn] == [got.tokens for got in alone]


def test_loading_and_unloading_while_requests_run(base, adapters, reference):
    engine = make_engine(base, {"attention": adapters["attention"]}, policy="valora")
    requests = mixed([None, "attention", "attention"])
    add_requests(engine, *requests)
    engine.step()
    engine.load("adapter", adapters["everything"], "everything")  # brings more linears with LoRA
    late = [replace(one, id=f"late {one.id}", model="everything") for one in requests]
    add_requests(engine, *late)
    engine.step()
    engine.registry.unregister("adapter", "attention")
    found = finish(engine)
    for one in [*requests, *late]:
        assert found[one.id].finish in (Finish.LENGTH, Finish.STOP)
        wanted = reference(one).tokens
        assert found[one.id].tokens == wanted[len(wanted) - len(found[one.id].tokens) :]
    (key,) = engine.registry.ranks
    assert key.startswith("everything") and len(engine.adapters) == 1


def test_a_model_goes_from_one_engine_to_the_next(base, adapters, reference):
    """Also where the next one's adapters change fewer linears than were merged into before."""
    engine = make_engine(base, policy="merge_only")
    for names in (["attention", "mlp"], ["patterns"], ["attention"]):
        engine = Engine(engine.settings, engine.lmm, engine.cost)
        for name in names:
            engine.load("adapter", adapters[name], name)
        requests = mixed([*names, None, *names])
        check_answers(run(engine, requests), reference, *requests)
        assert not engine.adapters.unmergeable
        engine.close()
        engine.lmm.linears.release()
