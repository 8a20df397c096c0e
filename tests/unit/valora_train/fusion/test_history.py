"""What attempts changed, against a reading of the decisions by hand."""

import math

import pytest

from valora_train.fusion.decision import Attempt, AttemptDecision, Verdict
from valora_train.fusion.history import History
from valora_train.fusion.requirement import Requirement

COMMITTED, BACK, ALONE = Verdict.COMMITTED, Verdict.ROLLED_BACK, Verdict.UNREACHABLE
REQUIREMENTS = {
    "person": Requirement(0.9, 0.02), "bicycle": Requirement(0.8, 0.02),
    "vehicle": Requirement(0.7, 0.02), "plate": Requirement(0.95, 0.01),
}  # fmt: skip
START = {"person": 0.5, "bicycle": 0.4, "vehicle": 0.3, "plate": 0.2}


def decision(number, new, adapter, held, accuracy, verdict, below=(), kept=None, moved=()):
    attempt = Attempt(number, tuple(new), adapter, tuple(held), True, tuple(moved))
    kept = (() if verdict is BACK else attempt.domains) if kept is None else tuple(kept)
    return AttemptDecision(attempt, accuracy, verdict, tuple(below), "a reason", kept)


DECISIONS = [
    decision(1, ["person"], "adapter-1", [], {"person": 0.95}, COMMITTED),
    decision(
        2, ["bicycle"], "adapter-1", ["person"], {"person": 0.91, "bicycle": 0.85}, BACK,
        ["person"],
    ),
    decision(
        3, ["bicycle", "vehicle"], "adapter-2", [], {"bicycle": 0.83, "vehicle": 0.6}, COMMITTED,
        ["vehicle"], ["bicycle"],
    ),
    decision(
        4, ["vehicle"], "adapter-1", ["person"], {"person": 0.93, "vehicle": 0.75}, COMMITTED
    ),
    decision(5, ["plate"], "adapter-3", [], {"plate": 0.9}, ALONE, ["plate"]),
    decision(
        6, ["plate"], "adapter-2", ["bicycle"], {"bicycle": 0.81, "plate": 0.895}, BACK,
        ["bicycle"], moved=["plate"],
    ),
    decision(
        7, ["bicycle"], "adapter-1", ["person", "vehicle"],
        {"person": 0.925, "vehicle": 0.74, "bicycle": 0.825}, COMMITTED, moved=["bicycle"],
    ),
]  # fmt: skip
PACKING = {"adapter-1": ("person", "vehicle", "bicycle"), "adapter-3": ("plate",)}


def told():
    return History(REQUIREMENTS, START).told(DECISIONS, PACKING)


def test_before_is_the_accuracy_where_the_domain_was_until_then():
    assert [one["before"] for one in told()] == [
        {"person": 0.5},
        {"person": 0.95, "bicycle": 0.4},
        {"bicycle": 0.4, "vehicle": 0.3},
        {"person": 0.95, "vehicle": 0.3},  # what was rolled back changed nothing
        {"plate": 0.2},
        {"bicycle": 0.83, "plate": 0.9},
        {"person": 0.93, "vehicle": 0.75, "bicycle": 0.83},
    ]


def test_domains_went_where_they_are_in_the_end():
    assert [one["went"] for one in told()] == [
        {"person": "is in adapter-1"},
        {"bicycle": "went to adapter-1 with attempt 07"},
        {
            "bicycle": "moved on to adapter-1 with attempt 07",
            "vehicle": "went to adapter-1 with attempt 04",
        },
        {"vehicle": "is in adapter-1"},
        {"plate": "is in adapter-3"},
        {"plate": "stays in adapter-3"},
        {"bicycle": "is in adapter-1"},
    ]


def test_while_it_runs_domains_wait():
    history = History(REQUIREMENTS, START)
    (one,) = history.told(DECISIONS[1:2], {"adapter-1": ("person",)})
    assert one["went"] == {"bicycle": "waits for its next attempt"}
    (one,) = history.told(DECISIONS[1:2], {"adapter-1": ("person",)}, {"bicycle"})
    assert one["went"] == {"bicycle": "takes no adapter"}


def test_a_flagged_domain_must_keep_what_it_reached_alone():
    floors = [one["floor"] for one in told()]
    assert floors[4]["plate"] == pytest.approx(0.96)
    assert floors[5] == pytest.approx({"plate": 0.89, "bicycle": 0.82})
    asked = [one["asked"] for one in told()]
    assert asked[4]["plate"] == "its bar of 0.960 (required 0.950 + margin 0.010)"
    assert asked[5]["plate"] == "0.890 (reached 0.900 alone − margin 0.010)"
    known = History(REQUIREMENTS, START, {"bicycle": 0.7}).told(DECISIONS[1:2], PACKING)
    assert known[0]["floor"]["bicycle"] == pytest.approx(0.68)


def test_what_diverged_is_null_in_json():
    bad = decision(1, ["person"], "adapter-1", [], {"person": math.nan}, ALONE, ["person"], [])
    (one,) = History(REQUIREMENTS, START).told([bad], {}, {"person"})
    assert one["accuracy"] == {"person": None}
