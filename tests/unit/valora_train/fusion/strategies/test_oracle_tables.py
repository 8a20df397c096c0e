"""Strategies played on tables of what every group reaches, beside the fewest adapters."""

import itertools
import random

import pytest
from hydra import compose, initialize_config_dir
from hypothesis import given
from hypothesis import strategies as st

from tests.bench.valora_train.bench_oracle import asked_of
from tests.bench.valora_train.oracle_table import (
    ORACLES,
    Measured,
    OracleTable,
    exact_packing,
    random_requirements,
    replay,
    served,
    share_requirements,
)
from tests.support.oracle_tables import conflict_table, interference_table, made_up_table
from tests.support.random_tests import examples
from valora_train.cli import config_folder
from valora_train.fusion.requirement import Requirement
from valora_train.fusion.strategies.registry import STRATEGIES, make_strategy
from valora_train.settings import from_config

SIX = [f"d{n}" for n in range(6)]


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


def drawn_table(count, seed):
    """A table in which every accuracy is drawn on its own, so that domains may help others."""
    names, draw, known = [f"d{n}" for n in range(count)], random.Random(seed), {}
    table = made_up_table(
        names, lambda *key: known.setdefault(key, draw.choice([0.5, 0.7, 0.8, 0.9]))
    )
    for name in names:
        table.head_only[0][name] = Measured(*[draw.choice([0.4, 0.75, 0.95])] * 2)
    return table, draw


@examples(30)
@given(st.integers(1, 5), st.integers(0, 10**6), st.booleans(), st.floats(0, 0.05))
def test_the_optimum_is_that_of_all_partitions(count, seed, head_only, margin):
    table, draw = drawn_table(count, seed)
    asked = {n: Requirement(draw.choice([0.6, 0.7, 0.8, 0.85]), margin) for n in table.domains}
    found = exact_packing(table, asked, 0, head_only)
    spared, floor, helpful = [], {}, []
    for name, one in asked.items():
        alone, without = table.alone(0, name).val, table.head_only[0][name].val
        enough = head_only and without >= one.target
        if enough or (head_only and alone < one.target and alone <= without):
            spared.append(name)
        if not enough:
            helpful.append(name)
        floor[name] = (
            one.target if alone >= one.target else max(alone - margin, without if head_only else 0)
        )

    def fits(group, trained):
        reached = table.reached(0, trained)
        return all(reached[name].val >= floor[name] - 1e-9 for name in group)

    def beside(group):
        others = [name for name in helpful if name not in group]
        subsets = (itertools.combinations(others, size) for size in range(len(others) + 1))
        return any(fits(group, {*group, *more}) for more in itertools.chain(*subsets))

    rest = [name for name in table.domains if name not in spared]
    fewest = min(len(one) for one in partitions(rest) if all(map(beside, one)))
    assert len(found.packing) == fewest
    assert sorted(name for group in found.packing for name in group) == rest
    for group, trained in zip(found.packing, found.trained, strict=True):
        assert set(group) <= set(trained) <= set(helpful) and fits(group, trained)
    for name in STRATEGIES:  # no strategy beats it
        packed = replay(make_strategy(name), table, asked, 0, head_only)
        assert len(packed.packing) >= fewest


def compared(table, asked, *names):
    """How often each strategy finds the fewest adapters, and its most above them."""
    best = [len(exact_packing(table, of, table.seeds[0]).packing) for of in asked]
    found = []
    for name in names:
        played = [replay(make_strategy(name), table, of, table.seeds[0]) for of in asked]
        above = [len(one.packing) - least for one, least in zip(played, best, strict=True)]
        found.append((above.count(0) / len(above), max(above)))
    return found


@pytest.mark.parametrize(("seed", "strength"), [(1, 0.06), (2, 0.15)])
def test_affinity_finds_the_optimum_where_first_fit_does_not(seed, strength):
    table = interference_table(SIX, seed, strength)
    asked = list(random_requirements(table, 30, seed=0))
    best, first_fit, paper = compared(table, asked, "affinity", "first_fit", "paper")
    assert best[0] >= 0.9 and best[1] <= 1
    assert best[0] > first_fit[0] > paper[0]
    attempts = [replay(make_strategy("affinity"), table, of, 0).attempts for of in asked]
    assert sum(attempts) < 16 * len(asked) and max(attempts) <= 4 * 6 + 6


@pytest.mark.parametrize("seed", [0, 7])
def test_strategies_end_where_domains_are_out_of_reach(seed):
    table, draw = interference_table(SIX, seed), random.Random(seed)
    for _ in range(15):
        asked = {n: Requirement(table.alone(0, n).val - draw.uniform(0, 0.03), 0.02) for n in SIX}
        for name in ("joint", "affinity"):
            assert replay(make_strategy(name), table, asked, 0).unreachable


def test_conflicts_of_ten_domains():
    ten = [f"d{n}" for n in range(10)]
    asked = [dict.fromkeys(ten, Requirement(0.8))]
    for seed in range(3):
        table = conflict_table(ten, seed, 0.35)
        affinity, first_fit = compared(table, asked, "affinity", "first_fit")
        assert affinity[1] <= min(first_fit[1], 1)


FEWEST = {
    "caption": (3, 2, 3), "classification": (2, 2, 2), "counting": (2, 2, 3),
    "detection": (1, 2, 1), "video": (1, 1, 1), "vqa": (2, 2, 2),
}  # fmt: skip
"""The fewest adapters of each task at its default contract, by seed."""


@pytest.mark.parametrize("task", FEWEST)
def test_the_default_strategy_finds_the_fewest_adapters(task):
    with initialize_config_dir(str(config_folder()), version_base=None):
        settings = from_config(compose("config", [f"task={task}"]))
    table, default = OracleTable.read(ORACLES / f"{task}.json"), settings.fusion.strategy
    # Three tables were measured when there were four domains of these tasks.
    assert {*table.domains} >= {domain.name for domain in settings.chosen()}
    asked = list(random_requirements(table, 30, 0))
    best, first_fit, paper = compared(table, asked, default, "first_fit", "paper")
    assert best[0] >= 0.9 and best[1] <= 1 and best[0] >= first_fit[0] >= paper[0]
    above, missed = 0, 0
    for place, (seed, of) in enumerate(asked_of(settings, table).items()):
        found = replay(make_strategy(default), table, of, seed)
        assert len(exact_packing(table, of, seed).packing) == FEWEST[task][place]
        above += len(found.packing) - FEWEST[task][place]
        assert found.unreachable == () and (found.attempts == 1 or len(found.packing) > 1)
        reached = served(table, found, seed)
        assert all(reached[name].val >= of[name].target - 1e-9 for name in of)
        missed += sum(reached[name].test < of[name].required_on_test for name in of)
        for share in (0.9, 0.99):
            asked_share = share_requirements(table, share, seed)
            kept = served(table, replay(make_strategy(default), table, asked_share, seed), seed)
            for name in asked_share:
                assert kept[name].val >= share * table.alone(seed, name).val
    assert above <= 1
    assert missed <= 1, "validation decides, and test differs by what chance allows"
