"""What attempts changed, as `fusion.json` has it, against a reading of the decisions by hand."""

import math

import pytest

from valora_train.fusion.decision import Attempt, AttemptDecision, Verdict, attempts_as_json
from valora_train.fusion.plan import FusionPlan
from valora_train.fusion.requirement import Requirement
from valora_train.fusion.strategies.base import Probe, Proposal, Strategy

COMMITTED, BACK, ALONE = Verdict.COMMITTED, Verdict.ROLLED_BACK, Verdict.UNREACHABLE
REQUIREMENTS = {
    "person": Requirement(0.9, 0.02), "bicycle": Requirement(0.8, 0.02),
    "vehicle": Requirement(0.7, 0.02), "plate": Requirement(0.95, 0.01),
}  # fmt: skip
START = {"person": 0.5, "bicycle": 0.4, "vehicle": 0.3, "plate": 0.2}
SCRIPT = [
    (Proposal(("person",)), {"person": 0.95}),
    (Proposal(("bicycle",), "adapter-1"), {"person": 0.91, "bicycle": 0.85}),
    (Proposal(("bicycle", "vehicle")), {"bicycle": 0.83, "vehicle": 0.6}),
    (Proposal(("vehicle",), "adapter-1"), {"person": 0.93, "vehicle": 0.75}),
    (Proposal(("plate",)), {"plate": 0.9}),
    (Proposal(("plate",), "adapter-2"), {"bicycle": 0.81, "plate": 0.895}),
    (Proposal(("bicycle",), "adapter-1"), {"person": 0.925, "vehicle": 0.74, "bicycle": 0.825}),
]


class Scripted(Strategy):
    """Proposes one after the other."""

    rehearse = True

    def propose(self, view):
        done = len(view.history)
        return SCRIPT[done][0] if done < len(SCRIPT) else None


def played():
    probes = {name: Probe(REQUIREMENTS[name].required, at) for name, at in START.items()}
    plan = FusionPlan(REQUIREMENTS, Scripted(), probes=probes)
    for _, accuracy in SCRIPT:
        plan.tell(accuracy)
    return plan.decisions


DECISIONS = played()
PACKING = {"adapter-1": ("person", "vehicle", "bicycle"), "adapter-3": ("plate",)}
RECORDS = attempts_as_json(DECISIONS, PACKING)


def decision(number, new, adapter, held, accuracy, verdict, below=(), kept=()):
    """A first attempt, judged by hand."""
    attempt = Attempt(number, tuple(new), adapter, tuple(held), rehearse=True)
    before = {name: START[name] for name in attempt.domains}
    floor = {name: REQUIREMENTS[name].target for name in attempt.domains}
    asked = {name: f"its target of {REQUIREMENTS[name].text}" for name in attempt.domains}
    return AttemptDecision(
        attempt, accuracy, verdict, tuple(below), "a reason", tuple(kept), before, floor, asked
    )


def test_attempts_say_where_domains_are_and_what_they_had_to_keep():
    # What was rolled back changed nothing.
    assert RECORDS[3]["before"] == {"person": 0.95, "vehicle": 0.3}
    assert RECORDS[6]["before"] == {"person": 0.93, "vehicle": 0.75, "bicycle": 0.83}
    for head_only, consequences in (
        ((), "waits for its next attempt"),
        ({"bicycle"}, "takes no adapter"),
    ):
        (one,) = attempts_as_json(DECISIONS[1:2], {"adapter-1": ("person",)}, head_only)
        assert one["went"] == {"bicycle": consequences}
    # A flagged domain must keep what it reached alone.
    assert RECORDS[4]["floor"]["plate"] == pytest.approx(0.96)
    assert RECORDS[5]["floor"] == pytest.approx({"plate": 0.89, "bicycle": 0.82})
    assert RECORDS[4]["asked"]["plate"] == "its target of 0.960 (required 0.950 + margin 0.010)"
    assert RECORDS[5]["asked"]["plate"] == "0.890 (reached 0.900 alone − margin 0.010)"
    # What diverged is null in JSON.
    bad = decision(1, ["person"], "adapter-1", [], {"person": math.nan}, ALONE, ["person"])
    assert attempts_as_json([bad], {}, {"person"})[0]["accuracy"] == {"person": None}
