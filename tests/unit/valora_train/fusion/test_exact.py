"""The fewest adapters, against every set partition."""

import itertools
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.oracle_tables import conflict_table, interference_table, made_up_table
from tests.support.random_tests import examples
from valora_train.fusion.exact import exact_packing, fewest_groups, lower_bound
from valora_train.fusion.oracle import Measured
from valora_train.fusion.requirement import Requirement


def partitions(names):
    """Every partition of a list into groups, the textbook recursion."""
    if not names:
        yield []
        return
    first, rest = names[0], names[1:]
    for smaller in partitions(rest):
        yield [[first], *smaller]
        for at in range(len(smaller)):
            yield [*smaller[:at], [first, *smaller[at]], *smaller[at + 1 :]]


def test_the_reference_counts_bell_numbers():
    assert [len(list(partitions(list("abcde")[:n]))) for n in range(6)] == [1, 1, 2, 5, 15, 52]


@examples(60)
@given(st.integers(1, 5), st.integers(0, 10**6), st.booleans(), st.floats(0, 0.05))
def test_the_optimum_is_that_of_all_partitions(count, seed, head_only, margin):
    names = [f"d{n}" for n in range(count)]
    draw = random.Random(seed)
    # Nothing is monotone here: every accuracy is drawn on its own.
    known = {}
    for size in range(1, count + 1):
        for group in itertools.combinations(names, size):
            for name in group:
                known[name, group] = draw.choice([0.5, 0.7, 0.8, 0.9])
    table = made_up_table(names, lambda name, group: known[name, group])
    for name in names:
        value = draw.choice([0.4, 0.75, 0.95])
        table.put_head_only(0, name, Measured(value, value))
    requirements = {name: Requirement(draw.choice([0.6, 0.7, 0.8, 0.85]), margin) for name in names}
    found = exact_packing(table, requirements, 0, head_only=head_only)

    spared, floor, helpful = [], {}, []
    for name in names:
        bar, alone = requirements[name].bar, known[name, (name,)]
        without = table.head_only(0)[name].val
        enough = head_only and without >= bar
        if enough or (head_only and alone < bar and alone <= without):
            spared.append(name)
        if not enough:
            helpful.append(name)
        floor[name] = bar if alone >= bar else max(alone - margin, without if head_only else 0)
    rest = [name for name in names if name not in spared]

    def spare(group, trained):
        return min(known[name, tuple(sorted(trained))] - floor[name] for name in group)

    def best_spare(group):
        """By itself, or else beside whatever helps most."""
        if spare(group, group) >= -1e-9:
            return spare(group, group)
        others = [name for name in helpful if name not in group]
        more = itertools.chain.from_iterable(
            itertools.combinations(others, size) for size in range(len(others) + 1)
        )
        return max(spare(group, [*group, *some]) for some in more)

    def by_itself(group):
        return spare(group, group)

    def worst(partition, of):
        return min(map(of, partition), default=math.inf)

    def feasible(of):
        return [one for one in partitions(rest) if worst(one, of) >= -1e-9]

    fewest = min(map(len, feasible(best_spare)))
    # Help is taken only where it saves an adapter.
    way = by_itself if fewest == min(map(len, feasible(by_itself))) else best_spare
    assert len(found.packing) == fewest
    assert sorted(found.head_only) == spared
    assert sorted(name for group in found.packing for name in group) == rest
    for group, trained in zip(found.packing, found.trained, strict=True):
        assert set(group) <= set(trained) <= set(helpful) and spare(group, trained) >= -1e-9
    best = max(worst(one, way) for one in feasible(way) if len(one) == fewest)
    assert found.slack == pytest.approx(best, abs=1e-6)
    assert set(found.unreachable) == {
        name
        for name in names
        if known[name, (name,)] < requirements[name].bar - 1e-9
        and not (head_only and table.head_only(0)[name].val >= requirements[name].bar - 1e-9)
    }


def test_domains_out_of_reach_share_adapters():
    # Neither reaches 0.9 alone; together they lose 0.01, within the margin of 0.02.
    table = made_up_table(["a", "b", "c"], lambda name, group: 0.86 - 0.01 * len(group))
    requirements = dict.fromkeys(["a", "b", "c"], Requirement(0.9, 0.02))
    found = exact_packing(table, requirements, 0)
    assert found.packing == (("a", "b", "c"),) and found.unreachable == ("a", "b", "c")
    strict = dict.fromkeys(["a", "b", "c"], Requirement(0.9, 0.0))
    assert len(exact_packing(table, strict, 0).packing) == 3


def test_a_domain_that_misses_its_bar_may_help_others():
    # Beside c, a and b keep their bars, and c misses its own; without c they do not.
    table = made_up_table(
        "abc",
        lambda name, group: 0.6 if len(group) == 2 or (name, len(group)) == ("c", 3) else 0.9,
    )
    found = exact_packing(table, dict.fromkeys("abc", Requirement(0.8)), 0)
    assert (found.packing, found.trained) == ((("a", "b"), ("c",)), (("a", "b", "c"), ("c",)))


def test_training_that_diverges_alone_takes_no_adapter():
    table = made_up_table(
        ["a", "b"], lambda name, group: math.nan if name == "a" else 0.9, head_only=0.1
    )
    requirements = {"a": Requirement(0.5), "b": Requirement(0.5)}
    for head_only in (True, False):
        found = exact_packing(table, requirements, 0, head_only=head_only)
        assert found.packing == (("b",),) and found.head_only == ("a",)


def test_ten_domains_are_solved():
    names = [f"d{n}" for n in range(10)]
    table = interference_table(names, 4)
    requirements = {name: Requirement(0.97 * table.reached(0, [name])[name].val) for name in names}
    found = exact_packing(table, requirements, 0)
    assert sorted(name for group in found.packing for name in group) == names
    for group in found.packing:
        reached = table.reached(0, group)
        assert all(reached[name].val >= requirements[name].bar - 1e-9 for name in group)


def test_no_partition_is_an_error():
    with pytest.raises(ValueError, match="every name alone"):
        fewest_groups(["a", "b"], lambda group: 0.0 if "a" in group and len(group) == 1 else None)
    assert fewest_groups([], lambda group: None) == ((), math.inf)


@examples(60)
@given(st.integers(1, 7), st.data())
def test_the_bound_is_the_optimum_when_all_conflicts_are_known(count, data):
    names = [f"d{n}" for n in range(count)]
    sizes = [g for size in (2, 3) for g in itertools.combinations(names, size)]
    conflicts = data.draw(st.lists(st.sampled_from(sizes), max_size=12)) if sizes else []
    legal = lambda group: not any(set(c) <= set(group) for c in conflicts)  # noqa: E731
    best = min(len(one) for one in partitions(names) if all(map(legal, one)))
    found = lower_bound(names, conflicts)
    assert found.adapters == best and found.exact
    # Fewer conflicts, or less effort, never prove more than there is.
    assert lower_bound(names, conflicts[::2]).adapters <= best
    assert lower_bound(names, conflicts, effort=data.draw(st.integers(1, 30))).adapters <= best


def test_bounds_and_their_proofs():
    names = [f"d{n}" for n in range(31)]
    assert lower_bound([], []).adapters == 0
    assert lower_bound(names, []).adapters == 1
    pairs = list(itertools.combinations(names[:4], 2))
    found = lower_bound(names, pairs)
    assert found.adapters == 4 and found.exact
    assert "no two of d0, d1, d2, d3 can share" in found.proof
    # No three fit anywhere: a search could not prove in time what counting proves at once.
    found = lower_bound(names, itertools.combinations(names, 3))
    assert found.adapters == 16 and "too small for fewer than 16" in found.proof
    # A ring of five: no three fail in pairs, yet two adapters are not enough.
    ring = [(names[n], names[(n + 1) % 5]) for n in range(5)]
    found = lower_bound(names[:5], ring)
    assert found.adapters == 3 and found.exact
    # Groups with domains that need no adapter, and single domains, prove nothing.
    assert lower_bound(["a", "b"], [("a",), ("a", "elsewhere"), ("a", "a")]).adapters == 1


@examples(60)
@given(st.integers(2, 6), st.data())
def test_the_bound_is_no_more_than_any_packing_whose_groups_are_known_to_keep_their_bars(
    count, data
):
    names = [f"d{n}" for n in range(count)]
    sizes = [g for size in (2, 3) for g in itertools.combinations(names, size)]
    conflicts = data.draw(st.lists(st.sampled_from(sizes), max_size=12))
    packing = data.draw(st.sampled_from(list(partitions(names))))
    assert lower_bound(names, conflicts, packing).adapters <= len(packing)
    assert lower_bound(names, conflicts, packing).adapters <= lower_bound(names, conflicts).adapters


def test_a_pair_that_fails_proves_nothing_where_a_larger_group_keeps_its_bars():
    # Measured on the shelf: digits fail with either caption, these with each other, but not beside
    # people_count.
    names = ["digit_reference", "pattern_caption", "place_caption", "people_count"]
    failed = [names[:2], [names[0], names[2]], names[1:3]]
    assert lower_bound(names, failed).adapters == 3
    assert lower_bound(names, failed, [names[1:]]).adapters == 2
    assert lower_bound(names, failed, [names[:2], names[:1]]).adapters == 2  # of itself, too
    assert lower_bound(names, failed, [[*names[1:3], "elsewhere"]]).adapters == 3


def test_the_bound_of_pairs_is_that_of_the_table():
    names = [f"d{n}" for n in range(8)]
    for seed in range(6):
        table = conflict_table(names, seed, 0.4)
        requirements = dict.fromkeys(names, Requirement(0.8))
        failed = [
            pair
            for pair in itertools.combinations(names, 2)
            if table.reached(0, pair)[pair[0]].val < 0.8
        ]
        best = len(exact_packing(table, requirements, 0).packing)
        assert lower_bound(names, failed).adapters == best
