"""Constraints on tokens: followed, or failing their own request only."""

import time
from dataclasses import replace
from functools import partial

import pytest

from tests.support.engine_reference import (
    add_requests,
    assert_empty,
    check_answers,
    collect,
    make_engine,
    question,
    run,
)
from valora_serve.errors import RequestError
from valora_serve.types import Finish, SamplingParams


class Broken:
    """A constraint that fails at token number `place`, in one of four ways."""

    def __init__(self, place, way):
        self._left, self._way = place, way

    def mask(self, allowed):
        if self._left == 0 and self._way == "mask":
            raise KeyError("no such state")
        if self._left == 0 and self._way == "refuse":
            raise RequestError("no such state")
        if self._left == 0 and self._way == "nothing":
            allowed[:] = False

    def advance(self, _token):
        if self._left == 0 and self._way == "advance":
            raise KeyError("no such state")
        self._left -= 1


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(
    ("way", "place"), [("mask", 0), ("advance", 2), ("nothing", 0), ("refuse", 2)]
)
def test_a_constraint_that_fails(base, reference, overlap, way, place):
    engine = make_engine(base, overlap=overlap)
    one, beside = question("one"), question("beside")
    bad = replace(one, sampling=replace(one.sampling, constraint=Broken(place, way)))
    found = run(engine, [bad, beside])
    assert found["one"].finish is Finish.ERROR
    assert ("allows no token" if way == "nothing" else "no such state") in str(found["one"].error)
    assert isinstance(found["one"].error, RequestError) == (way in ("nothing", "refuse"))
    assert found["one"].tokens == reference(one).tokens[:place]
    check_answers(found, reference, beside)


class Only:
    """A constraint that allows these tokens only, one after another.

    `free` says of each whether a stop text may end the answer in it; each mask calls `before`.
    """

    def __init__(self, tokens, free=(), before=lambda: None):
        self._tokens, self._free, self._before = [*tokens], [*free], before

    def mask(self, allowed):
        self._before()
        allowed[:] = False
        allowed[self._tokens[0]] = True

    def advance(self, token):
        assert token == self._tokens.pop(0)
        return self._free.pop(0) if self._free else None


def constrained(name, constraint, **options):
    sampling = SamplingParams(**{"max_tokens": 9, "constraint": constraint} | options)
    return replace(question(name), sampling=sampling)


@pytest.mark.parametrize("overlap", [False, True])
def test_constraints_and_min_tokens(base, reference, overlap):
    engine = make_engine(base, overlap=overlap)
    end = min(engine.lmm.stop_ids)
    beside = question("beside")
    asked = {
        "greedy": ([11, 12, end], {}), "drawn": ([13, end], {"temperature": 1.0, "seed": 1}),
        "early": ([14, end], {"min_tokens": 5}),  # nothing else is allowed
        "on": ([11, 12, end], {"ignore_eos": True}), "full": ([11, 12, end], {"max_tokens": 3}),
    }  # fmt: skip
    requests = [constrained(name, Only(ids), **more) for name, (ids, more) in asked.items()]
    found = run(engine, [*requests, beside])
    check_answers(found, reference, beside)
    assert all(found[name].tokens == ids for name, (ids, _) in asked.items())
    assert all(found[name].finish is Finish.STOP for name in asked)
    one = question("one", tokens=8)
    engine.lmm.stop_ids = frozenset(reference(one).tokens[1:3])
    sampling = SamplingParams(max_tokens=8, min_tokens=4)
    got = run(engine, [replace(one, sampling=sampling)])["one"]
    assert len(got.tokens) >= 5 and not set(got.tokens[:4]) & engine.lmm.stop_ids


def test_a_stop_text_that_cuts_constrained_text_is_an_error(base):
    engine = make_engine(base)
    words = Only([*engine.lmm.tokenizer("a red star")["input_ids"], min(engine.lmm.stop_ids)])
    found = run(engine, [constrained("one", words, stop=("ed",))])["one"]
    assert isinstance(found.error, RequestError) and "stop text" in str(found.error)


def test_stop_texts_count_where_a_constraint_says_so(base):
    engine = make_engine(base)
    words = [engine.lmm.tokenizer(word)["input_ids"] for word in ("red", " red", " red")]
    for bound, text in enumerate(["", "red ", "red red ", "red red red"]):
        free = [number >= bound for number, word in enumerate(words) for _ in word]
        tokens = [*(token for word in words for token in word), min(engine.lmm.stop_ids)]
        only = Only(tokens, [*free, True])
        asked = constrained("one", only, max_tokens=30, stop=("red", "d r"))
        found = run(engine, [asked])["one"]
        assert (found.finish, found.text) == (Finish.STOP, text)


@pytest.mark.parametrize("overlap", [False, True])
def test_slow_masks_delay_only_themselves(base, reference, overlap, monkeypatch):
    monkeypatch.setattr("valora_serve.engine.engine.MASK_SECONDS", 0.01)
    engine, beside = make_engine(base, overlap=overlap), question("beside", tokens=6)
    calls, steps, found = [], [], {}

    def wait(name, seconds):
        calls.append(name)
        time.sleep(seconds)

    add_requests(engine, beside)
    for name, seconds in (("slow 1", 0.03), ("slow 2", 0.03), ("slow 3", 0.03), ("quick", 0.0)):
        slow = Only([11, 12, 13, 14], before=partial(wait, name, seconds))
        add_requests(engine, constrained(name, slow, max_tokens=4))
    while engine.busy:
        calls.clear()
        collect(engine.step(), found)
        steps.append(list(calls))
    assert all(sum(name.startswith("slow") for name in step) <= 1 for step in steps)
    assert all(got.tokens == [11, 12, 13, 14] for name, got in found.items() if name != "beside")
    check_answers(found, reference, beside)
    # After a first mask each, the quick one comes first, so that it never waits again.
    quick = [number for number, step in enumerate(steps) if "quick" in step]
    assert quick[-1] - quick[0] <= 6
    assert_empty(engine)
