"""Constraints on tokens: followed, or failing their own request only."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.support.engine_reference import (
    Reference,
    assert_empty,
    check_answers,
    make_engine,
    question,
    run,
)
from valora_serve.types import Finish, Request, SamplingParams

pytestmark = pytest.mark.usefixtures("one_thread")


class Broken:
    """A constraint that fails at token number `place`, in one of three ways."""

    def __init__(self, place: int, way: str) -> None:
        self._left, self._way = place, way

    def mask(self, allowed: NDArray[np.bool_]) -> None:
        if self._left == 0 and self._way == "mask":
            raise KeyError("no such state")
        if self._left == 0 and self._way == "nothing":
            allowed[:] = False

    def advance(self, _token: int) -> None:
        if self._left == 0 and self._way == "advance":
            raise KeyError("no such state")
        self._left -= 1


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("way", ["mask", "advance", "nothing"])
@pytest.mark.parametrize("place", [0, 2])
def test_a_constraint_that_fails(
    base: str, reference: Reference, overlap: bool, way: str, place: int
) -> None:
    engine = make_engine(base, overlap=overlap)
    one, beside = question("one"), question("beside")
    bad = replace(one, sampling=replace(one.sampling, constraint=Broken(place, way)))
    found = run(engine, [bad, beside])
    assert found["one"].finish is Finish.ERROR
    assert "allows no token" in str(found["one"].error) or "no such state" in str(
        found["one"].error
    )
    assert found["one"].tokens == reference(one).tokens[:place]
    check_answers(found, reference, beside)
    assert_empty(engine)


class Only:
    """A constraint that allows these tokens only, one after another."""

    def __init__(self, tokens: list[int]) -> None:
        self._tokens = tokens

    def mask(self, allowed: NDArray[np.bool_]) -> None:
        allowed[:] = False
        allowed[self._tokens[0]] = True

    def advance(self, token: int) -> None:
        assert token == self._tokens.pop(0)


@pytest.mark.parametrize("overlap", [False, True])
def test_constraints_and_min_tokens(base: str, reference: Reference, overlap: bool) -> None:
    engine = make_engine(base, overlap=overlap)
    end = min(engine.lmm.stop_ids)
    beside = question("beside")

    def constrained(name: str, tokens: list[int], **options: Any) -> Request:
        sampling = SamplingParams(max_tokens=9, constraint=Only(tokens), **options)
        return replace(question(name), sampling=sampling)

    asked = [
        constrained("greedy", [11, 12, end]),
        constrained("drawn", [13, end], temperature=1.0, seed=1),
        constrained("early", [14, end], min_tokens=5),  # nothing else is allowed
        beside,
    ]
    found = run(engine, asked)
    check_answers(found, reference, beside)
    assert found["greedy"].tokens == [11, 12, end]
    assert found["drawn"].tokens == [13, end]
    assert found["early"].tokens == [14, end]
    assert found["greedy"].finish is Finish.STOP
    one = question("one", tokens=8)
    wanted = reference(one).tokens
    engine.lmm.stop_ids = frozenset(wanted[1:3])
    sampling = SamplingParams(max_tokens=8, min_tokens=4)
    found = run(engine, [replace(one, sampling=sampling)])
    assert len(found["one"].tokens) >= 5
    assert not set(found["one"].tokens[:4]) & engine.lmm.stop_ids
    assert_empty(engine)
