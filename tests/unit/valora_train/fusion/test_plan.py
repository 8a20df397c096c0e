"""What becomes of attempts with several new domains, of moves, and of domains out of reach."""

import math

import pytest

from valora_train.errors import StrategyError
from valora_train.fusion.decision import Attempt, Verdict
from valora_train.fusion.plan import FusionPlan
from valora_train.fusion.requirement import Requirement
from valora_train.fusion.strategies.affinity import slack
from valora_train.fusion.strategies.base import Probe, Proposal, Strategy

NAMES = ("a", "b", "c", "d")
COMMITTED, ROLLED_BACK, UNREACHABLE = Verdict.COMMITTED, Verdict.ROLLED_BACK, Verdict.UNREACHABLE


class Scripted(Strategy):
    """Proposes what a test says, one after the other."""

    rehearse = True

    def __init__(self, *script):
        self.script = script
        self.views = []

    def propose(self, view):
        self.views.append(view)
        return self.script[len(view.history)] if len(view.history) < len(self.script) else None


def plan_of(*script, margin=0.02, **more):
    requirements = {name: Requirement(0.8, margin) for name in NAMES}
    return FusionPlan(requirements, Scripted(*script), **more)


def tell(plan, **accuracy):
    return plan.tell(accuracy)


def test_domains_that_miss_their_bar_are_left_out_and_wait():
    plan = plan_of(Proposal(("a", "b", "c")), Proposal(("b", "d"), "adapter-1"))
    attempt = plan.next()
    assert attempt == Attempt(1, ("a", "b", "c"), "adapter-1", (), rehearse=False)
    decision = tell(plan, a=0.9, b=0.79, c=0.82)
    assert (decision.verdict, decision.below, decision.kept) == (COMMITTED, ("b",), ("a", "c"))
    assert decision.left_out == ("b",)
    assert decision.reason == (
        "b 0.790 < 0.820 (required 0.800 + margin 0.020), 0.030 below: left out, a and c → "
        "adapter-1"
    )
    assert (plan.packing, plan.waiting) == ({"adapter-1": ("a", "c")}, ("b", "d"))
    attempt = plan.next()
    assert (attempt.held, attempt.rehearse, attempt.domains) == (
        ("a", "c"), True, ("a", "c", "b", "d")
    )  # fmt: skip
    decision = tell(plan, a=0.9, b=0.83, c=0.83, d=0.84)
    assert decision.reason == (
        "every domain keeps what it must, most narrowly c (0.830 ≥ 0.820 (required 0.800 + margin "
        "0.020)): b and d → adapter-1"
    )
    assert plan.packing == {"adapter-1": ("a", "c", "b", "d")} and plan.next() is None


def test_a_held_domain_that_misses_its_bar_rolls_everything_back():
    plan = plan_of(Proposal(("a",)), Proposal(("b", "c"), "adapter-1"))
    tell(plan, a=0.9)
    decision = tell(plan, a=0.8, b=0.9, c=0.7)
    assert (decision.verdict, decision.kept, decision.left_out) == (ROLLED_BACK, (), ())
    assert decision.reason == (
        "a 0.800 < 0.820 (required 0.800 + margin 0.020), 0.020 below, c 0.700 < 0.820 (required "
        "0.800 + margin 0.020), 0.120 below: b and c not in adapter-1"
    )
    assert (plan.packing, plan.waiting) == ({"adapter-1": ("a",)}, ("b", "c", "d"))


def test_only_a_domain_alone_is_unreachable():
    plan = plan_of(Proposal(("a", "b")), Proposal(("a",)), Proposal(("b", "c"), "adapter-1"))
    assert tell(plan, a=0.5, b=0.5).verdict is ROLLED_BACK
    decision = tell(plan, a=0.7)
    assert (decision.verdict, decision.kept) == (UNREACHABLE, ("a",))
    assert decision.reason.endswith("0.120 below, even alone: flagged, a → adapter-1")
    assert (plan.alone, plan.unreachable) == ({"a": 0.7}, {"a": 0.7})
    plan.next()
    view = plan._strategy.views[-1]
    assert view.floors == pytest.approx({"a": 0.68, "b": 0.82, "c": 0.82, "d": 0.82})
    assert tell(plan, a=0.68, b=0.9, c=0.9).verdict is COMMITTED
    assert plan.unreachable == {"a": 0.68}
    assert slack(view, "adapter-1") == pytest.approx(0.02)


def test_a_flagged_domain_that_reaches_its_bar_beside_others_is_met():
    plan = plan_of(Proposal(("a",)), Proposal(("b",), "adapter-1"))
    tell(plan, a=0.7)
    assert tell(plan, a=0.83, b=0.9).verdict is COMMITTED
    assert (plan.alone, plan.unreachable) == ({}, {})


def test_a_flagged_domain_keeps_what_it_reaches_without_lora():
    probes = {name: Probe(0.8, 0.69) for name in NAMES}
    plan = plan_of(Proposal(("a",)), Proposal(("b",), "adapter-1"), probes=probes)
    tell(plan, a=0.7)
    decision = tell(plan, a=0.685, b=0.9)
    assert decision.verdict is ROLLED_BACK
    assert decision.reason.startswith("a 0.685 < 0.690 (reached without LoRA), 0.005 below")


def test_domains_move_and_an_adapter_that_is_emptied_is_dropped():
    plan = plan_of(
        Proposal(("a", "b")), Proposal(("c", "d")), Proposal(("c", "d"), "adapter-1"),
        Proposal(("d",), "adapter-1"),
    )  # fmt: skip
    tell(plan, a=0.9, b=0.9)
    tell(plan, c=0.9, d=0.9)
    assert plan.next().moved == ("c", "d")
    decision = tell(plan, a=0.9, b=0.9, c=0.9, d=0.8)
    assert (decision.kept, decision.left_out) == (("a", "b", "c"), ("d",))
    assert plan.packing == {"adapter-1": ("a", "b", "c"), "adapter-2": ("d",)}
    assert plan.waiting == ()
    tell(plan, a=0.9, b=0.9, c=0.9, d=0.9)
    assert plan.packing == {"adapter-1": ("a", "b", "c", "d")}
    assert plan.next() is None


def test_a_domain_that_is_placed_is_not_unreachable_elsewhere():
    plan = plan_of(Proposal(("a", "b")), Proposal(("c", "d")), Proposal(("a",)))
    tell(plan, a=0.9, b=0.9)
    tell(plan, c=0.9, d=0.9)
    attempt = plan.next()
    assert (attempt.adapter, attempt.held, attempt.moved) == ("adapter-3", (), ("a",))
    assert tell(plan, a=0.7).verdict is ROLLED_BACK
    assert plan.packing == {"adapter-1": ("a", "b"), "adapter-2": ("c", "d")}


def test_a_move_that_fails_leaves_everything_where_it_was():
    plan = plan_of(Proposal(("a",)), Proposal(("b", "c", "d")), Proposal(("a",), "adapter-2"))
    tell(plan, a=0.9)
    tell(plan, b=0.9, c=0.9, d=0.9)
    decision = tell(plan, a=0.81, b=0.9, c=0.9, d=0.9)
    assert decision.verdict is ROLLED_BACK
    assert plan.packing == {"adapter-1": ("a",), "adapter-2": ("b", "c", "d")}


def test_training_that_diverges_says_so():
    plan = plan_of(Proposal(("a", "b")))
    decision = tell(plan, a=math.nan, b=math.nan)
    assert decision.verdict is ROLLED_BACK and decision.reason.startswith("training diverged")


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ([None], "proposes nothing, but a, b, c, d must be placed"),
        ([Proposal(())], "wants to try nothing → a new adapter: domains must wait"),
        ([Proposal(("a", "a"))], "wants to try a, a → a new adapter: domains must wait"),
        ([Proposal(("x",))], "wants to try x → a new adapter: domains must wait"),
        ([Proposal(("a",), "adapter-2")], "wants to try 'adapter-2' for a, which is no open"),
        ([Proposal(("a",)), Proposal(("a",), "adapter-1")], "wants to try a → adapter-1: domains"),
    ],
)
def test_what_no_strategy_may_propose(script, message):
    plan = plan_of(*script)
    for _ in script[1:]:
        tell(plan, a=0.9)
    with pytest.raises(StrategyError, match=f"fusion strategy Scripted .*{message}"):
        plan.next()


def test_what_failed_is_not_tried_again():
    plan = plan_of(Proposal(("a", "b")), Proposal(("b", "a")))
    tell(plan, a=0.5, b=0.5)
    with pytest.raises(StrategyError, match="wants to try b, a → a new adapter again"):
        plan.next()


def test_a_strategy_that_does_not_end_is_stopped():
    class Restless(Strategy):
        def propose(self, view):
            if view.waiting:
                return Proposal(view.waiting[:1])
            return Proposal(("a",), next(n for n, held in view.adapters.items() if "a" not in held))

    plan = FusionPlan({name: Requirement(0.5) for name in "abc"}, Restless())
    with pytest.raises(StrategyError, match="after 300 attempts: it must end"):
        while (attempt := plan.next()) is not None:
            plan.tell(dict.fromkeys(attempt.domains, 0.9))


def test_names_of_attempts():
    label = lambda *new: Attempt(3, new, "adapter-1", (), rehearse=False).name  # noqa: E731
    assert label("a") == "03 a → adapter-1"
    assert label("a", "b", "c") == "03 a + b + c → adapter-1"
    assert label("a", "b", "c", "d", "e") == "03 a + b + 3 more → adapter-1"
