"""What each built-in strategy proposes."""

import pytest

from tests.support.oracle_tables import made_up_table
from valora_train.fusion.plan import FusionPlan
from valora_train.fusion.requirement import Requirement
from valora_train.fusion.strategies import repack
from valora_train.fusion.strategies.base import Proposal, Strategy
from valora_train.fusion.strategies.registry import make_strategy


def plan_of(strategy, names, required=0.8, table=None, **more):
    requirements = {name: Requirement(required) for name in names}
    return FusionPlan(requirements, make_strategy(strategy, table), **more)


def play(plan, accuracy):
    """Tell what `accuracy` says of each domain in a group; return attempts as text."""
    made = []
    while (attempt := plan.next()) is not None:
        decision = plan.tell({n: accuracy(n, set(attempt.domains)) for n in attempt.domains})
        made.append(f"{attempt.name.split(' ', 1)[1]} {decision.verdict}")
    return made


def test_best_fit_tries_the_adapter_with_the_most_slack_first():
    # a and b cannot share, and a has less slack than b.
    def accuracy(name, group):
        if {"a", "b"} <= group:
            return 0.7
        return {"a": 0.82, "b": 0.9, "c": 0.85}[name]

    assert play(plan_of("best_fit", "abc"), accuracy) == [
        "a → adapter-1 committed", "b → adapter-1 rolled back", "b → adapter-2 committed",
        "c → adapter-2 committed",
    ]  # fmt: skip


def test_joint_leaves_out_and_halves():
    # Four together: none keeps its bar; the closest two do; the others are packed next.
    def accuracy(name, group):
        if len(group) == 4:
            return {"a": 0.7, "b": 0.75, "c": 0.6, "d": 0.79}[name]
        return 0.7 if group == {"a", "c"} and name == "c" else 0.9

    plan = plan_of("joint", "abcd")
    assert play(plan, accuracy) == [
        "a + b + 2 more → adapter-1 rolled back", "b + d → adapter-1 committed",
        "a + c → adapter-2 committed", "c → adapter-3 committed",
    ]  # fmt: skip
    assert plan.packing == {"adapter-1": ("b", "d"), "adapter-2": ("a",), "adapter-3": ("c",)}
    assert not any(decision.attempt.rehearse for decision in plan.decisions)


def test_joint_goes_on_after_training_that_diverged():
    plan = plan_of("joint", "abc")
    made = play(plan, lambda name, group: float("nan") if len(group) == 3 else 0.9)
    assert made[0].endswith("rolled back") and len(plan.packing) == 2


def test_repack_empties_an_adapter():
    # c breaks a, so that it opens a second adapter, and d goes into the first; a and d fit there.
    legal = [{"a"}, {"b"}, {"c"}, {"a", "b"}, {"b", "c"}]

    def accuracy(name, group):
        return 0.9 if group in legal else 0.7

    assert play(plan_of("first_fit", "abc"), accuracy)[-1] == "c → adapter-2 committed"
    # Here first-fit leaves a alone: b left it for c, and nothing may join it.
    only = [{"a"}, {"b"}, {"c"}, {"d"}, {"a", "c"}, {"b", "d"}, {"c", "b"}]
    plan = plan_of("repack:paper", "abcd")
    made = play(plan, lambda name, group: 0.9 if group in only else 0.7)
    assert made[:6] == [
        "a → adapter-1 committed", "b → adapter-1 rolled back", "b → adapter-2 committed",
        "c → adapter-2 committed", "d → adapter-2 rolled back", "d → adapter-3 committed",
    ]  # fmt: skip
    assert len(plan.packing) == 3 or sorted(map(set, plan.packing.values()), key=len)
    assert all(group in only for group in map(set, plan.packing.values()))


def test_repack_saves_the_adapter_that_greedy_packing_wastes():
    # One by one, next-fit opens three adapters; the last domain fits into the first.
    only = [{"a"}, {"b"}, {"c"}, {"a", "c"}]
    plan = plan_of("repack:paper", "abc")
    made = play(plan, lambda name, group: 0.9 if group in only else 0.7)
    assert len(play(plan_of("paper", "abc"), lambda n, g: 0.9 if g in only else 0.7)) == 5
    assert made[-1] in ("a → adapter-3 committed", "c → adapter-1 committed")
    assert sorted(map(sorted, plan.packing.values())) == [["a", "c"], ["b"]]


@pytest.mark.parametrize("strategy", ["repack:joint", "affinity"])
def test_no_adapter_is_emptied_into_a_group_that_failed(strategy):
    """Four domains moved, for nothing: the last move would have been what the first attempt was."""
    plan = plan_of(strategy, "abc")
    made = play(plan, lambda name, group: 0.78 if name == "c" and len(group) == 3 else 0.9)
    assert made == ["a + b + c → adapter-1 committed", "c → adapter-2 committed"]
    assert plan.packing == {"adapter-1": ("a", "b"), "adapter-2": ("c",)}


class Scripted(Strategy):
    """Proposes what it is told to, and then empties adapters."""

    script = (
        Proposal(("z", "x", "y")), Proposal(("p",)), Proposal(("q",)),
        Proposal(("x", "y"), "adapter-2"), Proposal(("z", "x"), "adapter-3"),
        Proposal(("z", "y"), "adapter-3"), Proposal(("p",), "adapter-3"),
    )  # fmt: skip

    def propose(self, view):
        done = len(view.history)
        return self.script[done] if done < len(self.script) else repack.emptying(view)


FAIL = ({"p", "x", "y"}, {"q", "z", "x"}, {"q", "z", "y"}, {"p", "q"})


@pytest.mark.parametrize("most", [repack.MOST_STEPS, 0])
def test_the_first_move_leaves_room_for_those_after_it(monkeypatch, most):
    # q has more slack than p; but beside q, z leaves p to both x and y.
    monkeypatch.setattr(repack, "MOST_STEPS", most)  # 0: the moves are not looked ahead

    def accuracy(name, group):
        return 0.7 if any(part <= group for part in FAIL) else {"q": 0.95, "p": 0.85}.get(name, 0.9)

    plan = FusionPlan({name: Requirement(0.8) for name in "zxypq"}, Scripted())
    made = play(plan, accuracy)[len(Scripted.script) :]
    if most:
        assert made == ["z → adapter-2 committed", "q → adapter-1 committed"]
        assert plan.packing == {"adapter-1": ("x", "y", "q"), "adapter-2": ("p", "z")}
    else:
        assert made[0] == "z → adapter-3 committed"
        assert len(plan.packing) == 3


def test_what_an_earlier_fusion_packed_is_not_repacked():
    held = {"adapter-1": ("a",), "adapter-2": ("b",)}
    for strategy in ("repack:first_fit", "affinity"):
        plan = plan_of(strategy, "abc", packed=held, used=2)
        made = play(plan, lambda name, group: 0.9)
        assert not any(decision.attempt.moved for decision in plan.decisions), made
        assert {"a"} <= set(plan.packing["adapter-1"]) and {"b"} <= set(plan.packing["adapter-2"])
        assert len(plan.packing) == 2


def test_grow_raises_the_rank_before_it_opens_an_adapter():
    # Two fit into rank 8, three into 16; c came closest in adapter-1.
    plan = plan_of("grow:first_fit", "abcd", rank=8)
    told = []
    while (attempt := plan.next()) is not None:
        rank = attempt.rank or plan.ranks.get(attempt.adapter, 8)
        enough = len(attempt.domains) <= {8: 2, 16: 3}[rank]
        told.append(attempt.name)
        plan.tell(dict.fromkeys(attempt.domains, 0.9 if enough else 0.7))
    assert told == [
        "01 a → adapter-1", "02 b → adapter-1", "03 c → adapter-1",
        "04 c → adapter-1 (rank 16)", "05 d → adapter-1", "06 d → adapter-2",
    ]  # fmt: skip
    assert plan.packing == {"adapter-1": ("a", "b", "c"), "adapter-2": ("d",)}
    assert plan.ranks == {"adapter-1": 16, "adapter-2": 8}


def test_growing_in_vain_opens_an_adapter():
    plan = plan_of("grow", "ab", rank=4)
    assert play(plan, lambda name, group: 0.9 if len(group) == 1 else 0.5) == [
        "a → adapter-1 committed", "b → adapter-1 rolled back",
        "b → adapter-1 (rank 8) rolled back", "b → adapter-2 committed",
    ]  # fmt: skip
    assert plan.ranks == {"adapter-1": 4, "adapter-2": 4}


def test_adapters_grow_no_larger_than_adapters_may_be():
    plan = plan_of("grow", "ab", rank=256)
    assert not any("rank" in made for made in play(plan, lambda n, g: 0.9 if len(g) == 1 else 0.5))


def test_exact_trains_the_groups_of_the_table():
    table = made_up_table("abcd", lambda name, group: 0.9 if len(group) < 3 else 0.5)
    plan = plan_of("exact", "abcd", table=table)
    made = play(plan, lambda name, group: 0.9)
    assert len(made) == 2 and all("+" in one for one in made)


@pytest.mark.parametrize("surprise", [0.7, 0.85])
def test_exact_goes_on_when_the_table_promised_too_much(surprise):
    table = made_up_table("abcd", lambda name, group: 0.9 if len(group) < 3 else 0.5)

    def accuracy(name, group):
        return surprise if name == "a" and len(group) > 1 else 0.9

    plan = plan_of("exact", "abcd", table=table)
    play(plan, accuracy)
    assert sorted(name for held in plan.packing.values() for name in held) == list("abcd")
    assert len(plan.packing) == (2 if surprise > 0.8 else 3) or surprise < 0.8


def test_a_strategy_may_override_nothing_at_all():
    plan = FusionPlan({name: Requirement(0.5) for name in "ab"}, Strategy())
    play(plan, lambda name, group: 0.9)
    assert plan.packing == {"adapter-1": ("a", "b")}


def test_two_that_are_out_of_reach_share_an_adapter():
    # Each misses its bar everywhere; the second was tried beside the first before that is known.
    for strategy in ("rehearsal", "best_fit", "paper", "affinity", "repack:joint"):
        plan = plan_of(strategy, "abc", required=0.95)
        play(plan, lambda name, group: 0.96 if name == "c" else 0.9)
        assert set(plan.unreachable) == {"a", "b"}, strategy
        assert len(plan.packing) == 1, strategy


def test_many_domains_are_merged_group_by_group():
    names = [f"d{n}" for n in range(24)]
    half = {name: at % 3 for at, name in enumerate(names)}

    def accuracy(name, group):
        return 0.9 - 0.02 * sum(half[name] != half[other] for other in group)

    plan = plan_of("affinity", names, required=0.8)
    play(plan, accuracy)
    assert all(
        accuracy(name, set(held)) >= 0.8 - 1e-9 for held in plan.packing.values() for name in held
    )
    greedy = plan_of("first_fit", names, required=0.8)
    play(greedy, accuracy)
    assert len(plan.packing) <= len(greedy.packing)
    assert len(plan.decisions) < len(greedy.decisions)


@pytest.mark.parametrize("lost", [0.0, 0.0025])
def test_many_domains_that_lose_little_take_one_attempt(lost):
    names = [f"d{n:02}" for n in range(37)]
    plan = plan_of("affinity", names, required=0.8)
    play(plan, lambda name, group: 0.9 - lost * (len(group) - 1))
    assert [len(held) for held in plan.packing.values()] == [37]
    assert len(plan.decisions) == 1
