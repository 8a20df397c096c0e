"""Strategies played on made-up tables, beside the optimum."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.oracle_tables import conflict_table, interference_table, made_up_table
from tests.support.random_tests import examples
from valora_train.fusion.oracle import Measured
from valora_train.fusion.replay import (
    asked_of,
    compare,
    random_requirements,
    replay,
    served,
    share_requirements,
)
from valora_train.fusion.requirement import Requirement
from valora_train.fusion.strategies.registry import STRATEGIES, make_strategy
from valora_train.settings import FusionSettings

SIX = [f"d{n}" for n in range(6)]


def made(*names):
    return {name: make_strategy(name) for name in names}


def test_a_replay_is_the_fusion_of_the_table():
    # Two of a and b fit together, and c beside neither; d needs no adapter; e is out of reach.
    fits = [{"a", "b"}]
    table = made_up_table(
        "abcde", lambda name, group: 0.9 if len(group) == 1 or set(group) in fits else 0.6
    )
    table.put_head_only(0, "d", Measured(0.85, 0.2))
    asked = {name: Requirement(0.95 if name == "e" else 0.8) for name in "abcde"}
    found = replay(make_strategy("first_fit"), table, asked, 0)
    assert found.packing == {"adapter-1": ("a", "b"), "adapter-2": ("c",), "adapter-3": ("e",)}
    assert (found.head_only, found.unreachable, found.adapters) == (("d",), ("e",), 3)
    tried = [(*d.attempt.held, *d.attempt.new) for d in found.decisions]
    assert tried == [
        ("a",),
        ("a", "b"),
        ("a", "b", "c"),
        ("c",),
        ("a", "b", "e"),
        ("c", "e"),
        ("e",),
    ]
    assert found.attempts == 7
    # Some domains, in another order, all of them with an adapter.
    some = {name: asked[name] for name in "cdb"}
    found = replay(make_strategy("paper"), table, some, 0, head_only=False, order="probe")
    assert list(found.packing.values()) == [("c",), ("b",), ("d",)]


def test_random_requirements_are_within_what_the_domains_reach():
    table = interference_table(SIX, 3)
    drawn = list(random_requirements(table, 50, seed=4))
    assert drawn == list(random_requirements(table, 50, seed=4))
    assert drawn != list(random_requirements(table, 50, seed=5))
    for name in SIX:
        reached = [table.reached(0, group)[name].val for group in table.groups() if name in group]
        required = [asked[name].required for asked in drawn]
        alone = table.reached(0, [name])[name].val
        assert min(reached) <= min(required) and max(required) <= alone
        assert max(required) - min(required) > 0.7 * (alone - min(reached))
        assert all(asked[name].bar == asked[name].required for asked in drawn)


def test_what_a_packing_serves():
    table = made_up_table("abc", lambda name, group: 0.9 - 0.1 * len(group), head_only=0.3)
    for trained, reached in ((("a", "c"), 0.7), (("a", "b", "c"), 0.6)):
        found = served(table, [("a", "c")], [trained], 0)
        assert {name: round(one.test, 6) for name, one in found.items()} == {
            "a": reached, "b": 0.3, "c": reached
        }  # fmt: skip


def test_shares_of_dedicated_adapters():
    table = made_up_table("ab", lambda name, group: 0.8 if name == "a" else float("nan"))
    asked = share_requirements(table, 0.95, 0)
    fusion = FusionSettings(of_dedicated=0.95, margin=0.0)
    assert asked_of(table, {}, fusion) == dict.fromkeys(table.seeds, asked)
    contracts = {"a": Requirement(0.5)}
    assert asked_of(table, contracts, FusionSettings()) == {0: contracts}
    assert asked["a"].bar == pytest.approx(0.76)
    assert asked["b"].bar == 0.0, "a training that diverged asks for nothing"


def test_a_comparison_counts_adapters_and_attempts():
    table = made_up_table("abc", lambda name, group: 0.9 if set(group) != set("abc") else 0.5)
    asked = [dict.fromkeys("abc", Requirement(0.8)), dict.fromkeys("abc", Requirement(0.4))]
    found = compare(table, made("first_fit"), asked)
    # Two adapters and four attempts; then one adapter and three attempts.
    one = found["first_fit"]
    assert (one.at_optimum, one.most_above, one.adapters, one.optimum) == (1.0, 0, 1.5, 1.5)
    assert (one.attempts, one.most_attempts, one.rolled_back) == (3.5, 4, 0.5)


@pytest.mark.parametrize(("seed", "strength"), [(1, 0.06), (2, 0.15)])
def test_affinity_finds_the_optimum_where_first_fit_does_not(seed, strength):
    table = interference_table(SIX, seed, strength)
    asked = list(random_requirements(table, 60, seed=0))
    found = compare(table, made("paper", "first_fit", "affinity"), asked)
    best = found["affinity"]
    assert best.at_optimum >= 0.9 and best.most_above <= 1
    assert best.at_optimum > found["first_fit"].at_optimum > found["paper"].at_optimum
    assert best.attempts < 16 and best.most_attempts <= 4 * 6 + 6


@pytest.mark.parametrize("seed", [0, 7])
def test_affinity_ends_where_domains_are_out_of_reach(seed):
    table = interference_table(SIX, seed)
    draw = random.Random(seed)
    for _ in range(40):
        alone = {name: table.reached(0, [name])[name].val for name in SIX}
        asked = {name: Requirement(alone[name] - draw.uniform(0, 0.03), 0.02) for name in SIX}
        packed = {
            name: replay(make_strategy(name), table, asked, 0) for name in ("joint", "affinity")
        }
        assert all(one.unreachable for one in packed.values())


def test_conflicts_of_ten_domains():
    ten = [f"d{n}" for n in range(10)]
    asked = [dict.fromkeys(ten, Requirement(0.8))]
    above = {"first_fit": 0, "affinity": 0}
    for seed in range(3):
        table = conflict_table(ten, seed, 0.35)
        for name, one in compare(table, made(*above), asked).items():
            above[name] += one.most_above
            assert one.most_above <= 1
    assert above["affinity"] <= above["first_fit"]


@examples(60)
@given(st.integers(1, 5), st.integers(0, 10**6), st.booleans())
def test_no_strategy_beats_the_optimum(count, seed, head_only):
    names = [f"d{n}" for n in range(count)]
    draw = random.Random(seed)
    known = {}

    def reached(name, group):  # nothing is monotone: some domains help others
        return known.setdefault((name, group), draw.choice([0.5, 0.7, 0.8, 0.9]))

    table = made_up_table(names, reached)
    for name in names:
        table.put_head_only(0, name, Measured(*[draw.choice([0.4, 0.75])] * 2))
    asked = [
        {name: Requirement(draw.choice([0.6, 0.7, 0.8, 0.85])) for name in names} for _ in range(3)
    ]
    found = compare(table, made(*STRATEGIES), asked, head_only=head_only)
    assert all(one.adapters >= one.optimum for one in found.values())
