"""The attempts that are counted are those that each strategy would make."""

import statistics

import pytest

from valora_train.estimate.courses import possible_courses
from valora_train.fusion.parent import Parent
from valora_train.settings import FusionSettings

NAMES = ("a", "b", "c", "d", "e", "f")


@pytest.mark.parametrize(
    ("strategy", "worst"),
    [
        # Every open adapter, then a new one: 1 + 2 + … + 6.
        ("rehearsal", 21),
        ("first_fit", 21),
        # The latest adapter, then a new one: 1 + 5 × 2.
        ("paper", 11),
    ],
)
def test_best_and_worst(strategy, worst):
    found = possible_courses(FusionSettings(strategy=strategy), NAMES, 0)
    assert (len(found.best.attempts), found.best.adapters) == (6, 1)
    assert (len(found.worst.attempts), found.worst.adapters) == (worst, 6)
    expected = statistics.mean(len(one.attempts) for one in found.expected)
    assert 6 < expected < worst
    assert all(1 <= one.adapters <= 6 for one in found.expected)


def test_rehearsal_is_counted_as_the_strategy_has_it():
    for strategy, rehearses in (("rehearsal", True), ("first_fit", False)):
        last = possible_courses(FusionSettings(strategy=strategy), NAMES, 0).best.attempts[-1]
        assert (last.held, last.rehearse) == (NAMES[:-1], rehearses)


def test_one_domain_is_one_attempt():
    found = possible_courses(FusionSettings(), ["a"], 0)
    assert {len(one.attempts) for one in (found.best, found.worst, *found.expected)} == {1}


def test_domains_of_a_parent_are_not_trained_again(tmp_path):
    parent = Parent(
        tmp_path, 1, {"adapter-1": ("a", "b")}, ("c",), {}, {"used": 1, "closed": []}
    )  # fmt: skip
    found = possible_courses(FusionSettings(), NAMES[:4], 0, parent)
    assert [one.held for one in found.best.attempts] == [("a", "b")]
    assert [one.held for one in found.worst.attempts] == [("a", "b"), ()]
