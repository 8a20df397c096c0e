"""What each built-in strategy proposes."""

import pytest

from valora_train.fusion.plan import FusionPlan
from valora_train.fusion.requirement import Requirement
from valora_train.fusion.strategies import affinity
from valora_train.fusion.strategies.base import Proposal, Strategy
from valora_train.fusion.strategies.registry import make_strategy


def plan_of(strategy, names, required=0.8, **more):
    requirements = {name: Requirement(required) for name in names}
    return FusionPlan(requirements, make_strategy(strategy), **more)


def play(plan, accuracy):
    """Tell what `accuracy` says of each domain in a group; return attempts as text."""
    made = []
    while (attempt := plan.next()) is not None:
        decision = plan.tell({n: accuracy(n, set(attempt.domains)) for n in attempt.domains})
        made.append(f"{attempt.name.split(' ', 1)[1]} {decision.verdict}")
    return made


def test_joint_leaves_out_and_halves():
    # Four together: none keeps its target; the closest two do; the others are packed next.
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
    # And goes on after training that diverged.
    plan = plan_of("joint", "abc")
    made = play(plan, lambda name, group: float("nan") if len(group) == 3 else 0.9)
    assert made[0].endswith("rolled back") and len(plan.packing) == 2


def test_no_adapter_is_emptied_into_a_group_that_failed():
    """Four domains moved, for nothing: the last move would have been what the first attempt was."""
    plan = plan_of("affinity", "abc")
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
        return self.script[done] if done < len(self.script) else affinity.emptying(view)


FAIL = ({"p", "x", "y"}, {"q", "z", "x"}, {"q", "z", "y"}, {"p", "q"})


@pytest.mark.parametrize("most", [affinity.MAX_STEPS, 0])
def test_the_first_move_leaves_room_for_those_after_it(monkeypatch, most):
    # q has more slack than p; but beside q, z leaves p to both x and y.
    monkeypatch.setattr(affinity, "MAX_STEPS", most)  # 0: the moves are not looked ahead

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


def test_what_an_earlier_fusion_packed_stays():
    held = {"adapter-1": ("a",), "adapter-2": ("b",)}
    plan = plan_of("affinity", "abc", packed=held, used=2)
    made = play(plan, lambda name, group: 0.9)
    assert not any(decision.attempt.moved for decision in plan.decisions), made
    assert {"a"} <= set(plan.packing["adapter-1"]) and {"b"} <= set(plan.packing["adapter-2"])
    assert len(plan.packing) == 2


def test_two_that_are_out_of_reach_share_an_adapter():
    # Each misses its target everywhere; the second was tried beside the first before that is known.
    for strategy in ("rehearsal", "paper", "affinity"):
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
