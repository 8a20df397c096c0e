"""Requests that are refused, cancelled or late leave nothing behind; others are all answered."""

import math
import time
from dataclasses import replace
from itertools import product

import pytest
import torch

from tests.support.cases import crossed, others_slow
from tests.support.engine_reference import (
    Got,
    Reference,
    add_requests,
    ask,
    check_answers,
    collect,
    finish,
    make_engine,
    noise,
    question,
    run,
    steps,
)
from tests.support.lmm_checkpoints import save_qwen3_vl
from valora_serve.engine import engine as engine_module
from valora_serve.engine.engine import Engine
from valora_serve.engine.settings import EngineSettings
from valora_serve.errors import (
    CancelledRequestError,
    DeadlineError,
    ImageError,
    RequestError,
    SettingsError,
    TooLongError,
)
from valora_serve.orchestrator.decision import PolicySettings
from valora_serve.orchestrator.registry import POLICIES
from valora_serve.types import Finish, Request


def test_prompts_that_do_not_fit(base, reference):
    engine = make_engine(base, context_length=40, pages=5, block_size=8)
    context = r"maximum context length is 40 tokens\. However, your messages resulted in 40 tokens"
    picture = noise(9, 9, 1)
    for error, said, asked in (
        (TooLongError, context, replace(question("long"), token_ids=list(range(10, 50)))),
        (TooLongError, r"pages.*fewer tokens", question("large", tokens=28)),
        (RequestError, "max_tokens: expected at least 1", question("none", tokens=0)),
        (RequestError, "at least one token", replace(question("empty"), token_ids=[])),
        (RequestError, "expected tokens 0 to", replace(question("wrong"), token_ids=[10**6])),
        (RequestError, "nothing is asked", Request("nothing")),
        (RequestError, "names 1 images, but 0", Request("x", messages=ask("Look", images=1))),
        (RequestError, "", Request("x", messages=ask("Look"), images=[picture])),
        (RequestError, "", Request("x", messages=ask("Look", images=1), images=[picture] * 2)),
    ):
        with pytest.raises(error, match=said):
            add_requests(engine, asked)
    fits = question("fits")
    check_answers(run(engine, [fits]), reference, fits)


def test_an_id_that_is_in_use(base, reference):
    engine, found = make_engine(base), {}
    add_requests(engine, one := question("one"))
    again = engine.prepare(question("one"))
    for _ in range(2):  # while it waits, and while it runs
        with pytest.raises(RequestError, match="in use"):
            engine.add(again)
        steps(engine, 1, found)
    check_answers(finish(engine, found), reference, one)
    engine.add(again)
    check_answers(finish(engine), reference, one)


WHEN = [(False, 0), (True, 1), (False, 2), (True, 2), (True, 4)]


@pytest.mark.parametrize(("kind", "when"), crossed(["text", "image", "head"], WHEN))
def test_cancelled(base, reference, scene, kind, when):
    """Cancelled while it waits, between two chunks of its prompt, and while it generates."""
    overlap, count = when
    engine = make_engine(base, chunk=10, overlap=overlap, policy="valora")
    one = question("one")
    if kind == "image":
        one = about("one", noise(9, 9, 1))
    if kind == "head":
        engine.load("bundle", scene)
        one = replace(one, model="scene")
    beside = question("beside", tokens=9)
    add_requests(engine, one, beside)
    found = steps(engine, count)
    over = "one" in found and found["one"].finish is not None
    assert [engine.cancel(name) for name in ("one", "one", "nobody")] == [not over, False, False]
    other = question("two")
    add_requests(engine, replace(other, id="one"))
    seen = steps(engine)
    if not over:
        first = seen.pop("one")
        assert first.finish is Finish.CANCELLED
        assert isinstance(first.error, CancelledRequestError)
    finish(engine, seen)
    assert seen["one"].tokens == reference(other).tokens
    assert found.get("beside", Got()).tokens + seen["beside"].tokens == reference(beside).tokens


def test_no_cache_keeps_what_is_not_finite_of_a_request_that_has_ended(base, reference):
    engine, one = make_engine(base, overlap=True, block_size=4), question("one")
    words = engine.lmm.language_model.get_input_embeddings().weight.data
    whole = words.clone()
    add_requests(engine, one)
    words.fill_(math.nan)
    steps(engine)
    words.copy_(whole)
    assert engine.cancel("one") and finish(engine)
    check_answers(run(engine, [one]), reference, one)


def test_deadlines(base, reference, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    engine = make_engine(base, policy="unmerge_only")
    soon, later = question("soon", deadline=2.0), question("later", deadline=50.0)
    never = question("never")
    add_requests(engine, soon, later, never)
    found = steps(engine)
    now[0] += 3.0
    steps(engine, 1, found)
    assert isinstance(found["soon"].error, DeadlineError)
    check_answers(finish(engine, found), reference, later, never)
    # Another request of the same id has nothing to do with the old one's deadline.
    add_requests(engine, replace(later, deadline=None))
    found = steps(engine)
    now[0] += 100.0
    check_answers(finish(engine, found), reference, later)
    for late in ({"deadline": 0.0}, {"deadline": 9.0, "arrival": now[0] - 10}):
        add_requests(engine, question("at once", **late))
        assert isinstance(finish(engine)["at once"].error, DeadlineError)


def test_what_policies_are_told_of_limits_and_arrivals(base, scene, monkeypatch):
    """The policy sees the oldest, the newest and the most urgent, and hears of all arrivals."""
    monkeypatch.setattr(engine_module, "SEEN", 8)
    limits = PolicySettings(latency_limits={"scene": 3.0})
    engine = make_engine(base, max_requests=1, policy="slora", policy_settings=limits)
    engine.load("bundle", scene)
    views, decide = [], engine.policy.decide
    monkeypatch.setattr(engine.policy, "decide", lambda view: views.append(view) or decide(view))
    more = {9: {"deadline": 50.0}, 10: {"model": "scene", "deadline": 70.0},
            11: {"model": "scene", "deadline": 2.0}}  # fmt: skip
    add_requests(engine, *(question(f"{n}", tokens=2, **more.get(n, {})) for n in range(20)))
    collect(engine.step(), {})
    told = {r.id: r.latency_limit for r in views[0].waiting}
    assert list(told) == ["0", "1", "2", "3", "10", "11", "18", "19"]
    assert (told["10"], told["11"], told["0"]) == (pytest.approx(3), pytest.approx(2), None)
    finish(engine)
    assert sum(len(view.arrived or ()) for view in views) == 20


PLACES = [(name, 1 + n % 2 * 2) for n, name in enumerate(sorted(POLICIES))]


@pytest.mark.parametrize(("policy", "places"), others_slow(PLACES[::3], PLACES))
def test_requests_that_hold_all_places_and_wait_to_be_read(base, adapters, policy, places):
    """All end in the same step, while others wait, some of them with a deadline."""
    options = {"policy": policy, "overlap": True, "max_requests": places}
    engine, more = make_engine(base, {"a": adapters["a"]}, **options), [{}, {"deadline": 500.0}]
    asked = [question(f"q{n}", "a", tokens=5, **more[n % 2]) for n in range(4 * places)]
    found = run(engine, asked)
    assert {(found[one.id].error, len(found[one.id].tokens)) for one in asked} == {(None, 5)}
    if not policy.startswith("algorithm1"):  # which may wait unmerged
        assert engine.merge_state.switches <= 1


@pytest.mark.parametrize(
    ("policy", "room"),
    others_slow(
        [("cost", 2), ("valora", 14)], [("cost", 2), ("cost", 14), ("slora", 2), ("valora", 14)]
    ),
)
def test_requests_that_have_waited_too_long_take_turns(base, adapters, policy, room):
    """No two adapters fit together with their requests, and each evicts another."""
    engine = make_engine(base, adapters, block_size=1)
    asked = [question(f"size {name}", name) for name in "abc"]
    views = [engine.requests.sequence(engine.prepare(one)) for one in asked]
    pages = max(view.pages + 6 + view.adapter_pages for view in views) + room
    engine = make_engine(
        base, {name: adapters[name] for name in "abc"}, policy=policy, pages=pages, block_size=1,
        slots=2, max_requests=4, policy_settings=PolicySettings(patience=0.0),
    )  # fmt: skip
    asked = [question(f"q{n}", "abc"[n % 3]) for n in range(6)]
    add_requests(engine, *asked)
    finish(engine, most=300)


@pytest.mark.parametrize(
    ("make", "wrong", "words"),
    [
        (Engine, {"device": "banana"}, "device banana cannot be used"),
        (Engine, {"adapter_share": 0.99, "pages": 10}, "leaves too few for keys and values"),
        (Engine, {"pages": 10**13}, "cannot be allocated .*: lower pages, block_size"),
        (None, {"max_requests": 10**9}, "max_requests: expected at most 65536, got 1000000000"),
        (None, {"policy_settings": PolicySettings(fair=True)}, "set with share_by"),
        (None, {"policy": "fifo"}, "policy .fifo.: choose one of algorithm1, "),
        (None, {"switch": "slow"}, "switch: expected one of swift, by_matrix, got slow"),
        (None, {"adapter_share": 1.0}, r"adapter_share: expected a share in \[0, 1\), got 1.0"),
        (None, {"quantize": "fp8", "tensor_parallel": 2},
         "fp8 is for a model on one GPU: use tensor_parallel=1"),
        (None, {"quantize": "nf4_packed", "tensor_parallel": 2},
         "nf4_packed is for a model on one GPU.*quantize=nf4$"),
        (PolicySettings, {"theta": -1}, "theta: expected 0 or more"),
        (PolicySettings, {"clusters": math.nan}, "clusters: expected 0 or more"),
        (PolicySettings, {"latency_limits": {"x": 0.0}}, "expected more than 0 s for x"),
    ],
)  # fmt: skip
def test_settings_that_are_refused(base, make, wrong, words):
    with pytest.raises((SettingsError, ValueError), match=words):
        if make is Engine:
            given = {"base": base, "device": "cpu", "pages": 64, "profile": False} | wrong
            Engine(EngineSettings(**given))
        else:
            (make or EngineSettings)(**wrong)


def test_each_name_of_an_adapter_has_an_account_of_its_own(base, adapters):
    names = {"one": adapters["a"], "two": adapters["a"]}
    engine = make_engine(base, names, share_by="adapter", shares={"two": 5.0})
    asked = [question("x", name) for name in ("one", "two", None)]
    clients = [engine.requests.sequence(engine.prepare(one)).client for one in asked]
    assert clients == ["one", "two", "base"]


@pytest.mark.parametrize(
    ("policy", "slots"),
    others_slow([("cost", 2), ("merge_only", 1), ("slora", 2)], product(POLICIES, [1, 2])),
)
def test_fewer_places_than_adapters(base, adapters, reference, policy, slots):
    """The merged adapter is pinned, and must still make room for another."""
    engine = make_engine(
        base, adapters, policy=policy, slots=slots, max_adapters=slots, overlap=slots == 2
    )
    requests = [question(f"{name}{n}", name) for n in range(2) for name in "abcdef"]
    requests.insert(5, question("base"))
    check_answers(run(engine, requests, together=8), reference, *requests)
    for name in "aba":
        requests = [question(f"{name}{n}", name, tokens=12) for n in range(4)]
        check_answers(run(engine, requests), reference, *requests)


def about(name, *images, **more):
    asked = {"token_ids": None, "messages": ask("Look", images=len(images)), "images": images}
    return replace(question(name), **asked | more)


@pytest.mark.parametrize("together", [False, True])
def test_only_requests_of_one_salt_share_prompts_and_images(base, together):
    """Two requests of each salt with the same image, one after the other or all in one step."""
    engine = make_engine(base, policy="unmerge_only", block_size=4)
    salts, picture = (None, "a", "b"), noise(20, 20, 1)
    asked = [about(f"{salt}{n}", picture, cache_salt=salt) for n in range(2) for salt in salts]
    found = {}
    for requests in [asked] if together else [[one] for one in asked]:
        add_requests(engine, *requests)
        finish(engine, found)
    assert engine.images.encoded == len(salts)
    for name, got in found.items():
        usage = got.last.usage
        assert (usage.cached > 0) == (name.endswith("1") and not together), name
        assert usage.cached in (0, (usage.prompt - 1) // 4 * 4)
    assert len({tuple(got.tokens) for got in found.values()}) == 1  # a salt changes no answer


@pytest.mark.parametrize("error", [RuntimeError, TypeError, MemoryError])
def test_an_image_that_the_encoder_cannot_encode(base, error, monkeypatch, caplog):
    engine, reference = make_engine(base, policy="unmerge_only"), Reference(base, {})
    requests = [about(f"{n}", *(noise(20, 20, n + i) for i in range(n % 3))) for n in range(5)]
    bad = about("bad", noise(20, 20, 2), noise(20, 20, 77))  # one of them is also another's
    prepared = engine.prepare(bad)
    wrong = prepared.prompt.visuals[1].tensors["pixel_values"]
    encode = engine.runner.encode

    def fails(visuals, *slots):
        if any(torch.equal(one.tensors["pixel_values"], wrong) for one in visuals):
            raise error("cannot")
        return encode(visuals, *slots)

    monkeypatch.setattr(engine.runner, "encode", fails)
    add_requests(engine, *requests[:3])
    engine.add(prepared)
    add_requests(engine, *requests[3:])
    found = finish(engine)
    assert isinstance(found["bad"].error, ImageError)
    assert str(found["bad"].error).startswith("image 2 cannot be encoded")
    tracebacks = [record.getMessage() for record in caplog.records if record.exc_info]
    assert tracebacks and all("together failed" in said for said in tracebacks)
    (single,) = (r.getMessage() for r in caplog.records if "cannot be encoded" in r.getMessage())
    assert "request bad" in single
    check_answers(found, reference, *requests)
    held = sum(one.embeddings.numel() * 4 for one in engine.images._kept.values())
    assert engine.images.held_bytes == held


def test_the_image_cache_keeps_its_bound(base):
    one = 16 * 64 * 4  # bytes of an encoded image
    engine = make_engine(base, image_cache_bytes=2 * one + 1, prefix_cache=False)
    for n in (1, 2, 1, 3, 1, 2):
        asked = about(f"{n}", noise(20, 20, n))
        run(engine, [asked])
        assert engine.images.held_bytes == len(engine.images._kept) * one <= 2 * one
    assert engine.stats().image_hits == 2  # the least recently used one goes
    assert engine.images.encoded == 4
    engine = make_engine(base, image_cache_bytes=one - 1)
    run(engine, [asked])
    assert not len(engine.images._kept)


def test_cached_images_keep_no_others_in_memory(base):
    """Images that are encoded together lie in one tensor."""
    engine = make_engine(base, policy="unmerge_only", image_cache_bytes=1 << 30)
    run(engine, [about(f"{n}", noise(20, 20, n)) for n in range(4)])
    kept = list(engine.images._kept.values())
    assert len(kept) == 4
    held = {one.embeddings.untyped_storage().data_ptr(): one.embeddings for one in kept}
    stored = sum(part.untyped_storage().nbytes() for part in held.values())
    assert stored == engine.images.held_bytes


def test_a_video_of_one_frame_is_refused_where_a_model_needs_more(tmp_path):
    """Qwen3-VL's processor says so in its own words."""
    video = [[noise(24, 24, 1)]]
    engine = make_engine(str(save_qwen3_vl(tmp_path / "base", seed=2)))
    with pytest.raises(ImageError, match="one frame, and this model needs more: send the frame"):
        engine.prepare(Request("x", messages=ask("What?", videos=1), videos=video))
