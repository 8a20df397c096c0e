"""Texts about attempts: the first lines say what was tried, what fell, and by how much."""

import math
import random

import pytest

from tests.unit.valora_train.fusion.test_history import (
    ALONE,
    BACK,
    COMMITTED,
    DECISIONS,
    PACKING,
    REQUIREMENTS,
    START,
    decision,
)
from valora_train.fusion.history import History
from valora_train.fusion.plan import FusionPlan
from valora_train.fusion.requirement import Requirement
from valora_train.fusion.strategies.base import Probe
from valora_train.fusion.strategies.registry import make_strategy
from valora_train.reporting.attempt_text import (
    attempt_page,
    outcome_of,
    rejected_lines,
    verdict_of,
    went,
)
from valora_train.reporting.text import fitting, joined


@pytest.fixture
def pages():
    return [attempt_page(one) for one in History(REQUIREMENTS, START).told(DECISIONS, PACKING)]


def first_lines(page: str) -> list[str]:
    return [line for line in page.split("| domain |", maxsplit=1)[0].splitlines() if line]


def test_the_first_lines_say_all_that_was_decided(pages):
    assert first_lines(pages[0]) == [
        "**Committed**: tried person in adapter-1, a new adapter of its own.",
        "Every domain keeps what it must; closest is person, which rose from 0.500 without LoRA to "
        "0.950, 0.030 above its bar of 0.920 (required 0.900 + margin 0.020).",
    ]
    assert first_lines(pages[1]) == [
        "**Rolled back**: tried bicycle in adapter-1 beside person.",
        "person fell from 0.950 to 0.910, 0.010 below its bar of 0.920 (required 0.900 + margin "
        "0.020).",
        "bicycle went to adapter-1 with attempt 07.",
    ]
    assert first_lines(pages[2]) == [
        "**Committed in part**: tried bicycle and vehicle together in adapter-2, a new adapter.",
        "vehicle rose from 0.300 without LoRA to 0.600, 0.120 below its bar of 0.720 (required "
        "0.700 + margin 0.020).",
        "bicycle moved on to adapter-1 with attempt 07; vehicle went to adapter-1 with attempt 04.",
    ]
    assert first_lines(pages[4]) == [
        "**Unreachable**: tried plate in adapter-3, a new adapter of its own.",
        "plate rose from 0.200 without LoRA to 0.900, 0.060 below its bar of 0.960 (required 0.950 "
        "+ margin 0.010).",
        "plate keeps adapter-3, flagged.",
    ]
    assert first_lines(pages[5]) == [
        "**Rolled back**: tried plate in adapter-2 beside bicycle; plate would leave the adapter "
        "that held it.",
        "bicycle fell from 0.830 to 0.810, 0.010 below its bar of 0.820 (required 0.800 + margin "
        "0.020).",
        "plate stays in adapter-3.",
    ]


def test_the_table_has_every_domain_of_the_attempt(pages):
    assert "| **person** | held | 0.950 | 0.910 | -0.040 | 0.920 | -0.010 |" in pages[1]
    assert "| bicycle | new | 0.400 | 0.850 | +0.450 | 0.820 | +0.030 |" in pages[1]
    assert "| bicycle | moved here | 0.830 | 0.825 | -0.005 | 0.820 | +0.005 |" in pages[6]


def test_rejected_attempts_are_listed_with_their_reasons():
    lines = rejected_lines(History(REQUIREMENTS, START).told(DECISIONS, PACKING))
    assert [line.split("**")[1] for line in lines] == [
        "02 bicycle → adapter-1", "03 bicycle + vehicle → adapter-2", "05 plate → adapter-3",
        "06 plate → adapter-2",
    ]  # fmt: skip
    assert lines[0] == (
        "- **02 bicycle → adapter-1**, rolled back: person fell from 0.950 to 0.910, 0.010 below "
        "its bar of 0.920 (required 0.900 + margin 0.020). bicycle went to adapter-1 with attempt "
        "07."
    )
    assert rejected_lines([{"verdict": "rolled back", "domain": "of an earlier version"}]) == []


def only(**facts):
    (one,) = History(REQUIREMENTS, START).told([decision(**facts)], {"adapter-1": ("person",)})
    return one


def test_an_attempt_that_took_a_dedicated_adapter_says_that_nothing_was_trained():
    told = History(REQUIREMENTS, START).told(DECISIONS, PACKING, dedicated={5})
    assert [one["dedicated"] for one in told] == [False] * 4 + [True, False, False]
    assert first_lines(attempt_page(told[4]))[0] == (
        "**Unreachable**: tried plate in adapter-3 with its dedicated adapter: nothing was trained."
    )


def test_small_gaps_are_not_shown_as_nothing():
    near = only(
        number=2, new=["bicycle"], adapter="adapter-1", held=["person"],
        accuracy={"person": 0.91996, "bicycle": 0.9}, verdict=BACK, below=["person"],
    )  # fmt: skip
    assert "0.00004 below" in outcome_of(near)
    same = only(
        number=2, new=["bicycle"], adapter="adapter-1", held=["person"],
        accuracy={"person": 0.5001, "bicycle": 0.9}, verdict=BACK, below=["person"],
    )  # fmt: skip
    assert outcome_of(same).startswith("person stayed at 0.500, 0.420 below")


def test_a_training_that_diverged_says_so():
    bad = only(
        number=1, new=["person"], adapter="adapter-1", held=[], accuracy={"person": math.nan},
        verdict=ALONE, below=["person"], kept=[],
    )  # fmt: skip
    assert outcome_of(bad) == "a reason"
    assert "| **person** | new | 0.500 | – | – | 0.920 | – |" in attempt_page(bad)


@pytest.mark.parametrize("strategy", ["paper", "first_fit", "affinity", "joint"])
@pytest.mark.parametrize("seed", range(12))
def test_texts_hold_for_whatever_a_strategy_does(strategy, seed):
    """Every page agrees with the plan itself, whatever accuracies come out."""
    rng = random.Random(seed)
    names = [f"d{number}" for number in range(6)]
    requirements = {name: Requirement(rng.uniform(0.6, 0.8), 0.02) for name in names}
    probes = {
        name: Probe(one.required, rng.uniform(0.2, 0.85)) for name, one in requirements.items()
    }
    plan = FusionPlan(requirements, make_strategy(strategy), probes=probes)
    start = {name: probe.head_only for name, probe in probes.items()}
    held = dict(start)
    befores, afters = [], []
    while (attempt := plan.next()) is not None:
        before = {name: held[name] for name in attempt.domains}
        reached = {name: rng.uniform(0.55, 0.95) for name in attempt.domains}
        done = plan.tell(reached)
        held |= {name: reached[name] for name in done.kept}
        befores.append(before)
        afters.append((reached, done))
    told = History(requirements, start).told(plan.decisions, plan.packing, plan.head_only)
    assert len(told) == len(befores)
    for one, before, (reached, done) in zip(told, befores, afters, strict=True):
        assert one["before"] == before
        page = attempt_page(one)
        assert verdict_of(one).capitalize() in page.splitlines()[0]
        for name in done.below:
            how = "fell" if reached[name] < before[name] else "rose"
            if f"{reached[name]:.3f}" != f"{before[name]:.3f}":
                assert f"{name} {how} from {before[name]:.3f}" in outcome_of(one)
            assert f"to {reached[name]:.3f}" in outcome_of(one)
        home = {name: adapter for adapter, names in plan.packing.items() for name in names}
        for name in done.attempt.new:
            if home.get(name) != done.attempt.adapter:
                assert f"{name} " in went(one)
                assert home.get(name, "takes no adapter") in one["went"][name]
    rejected = [one for one in afters if one[1].verdict != COMMITTED or one[1].left_out]
    assert len(rejected_lines(told)) == len(rejected)


def test_long_descriptions_lose_the_ends_of_their_longest_parts():
    short, long = ["head", ""], [f"line {number}" for number in range(100)]
    assert fitting([short, long[:2]], 1000, "there") == "head\n\nline 0\nline 1"
    text = fitting([short, long], 300, "see there")
    assert len(text) <= 300
    assert text.startswith("head\n\nline 0")
    left = sum(line.startswith("line") for line in text.splitlines())
    assert text.endswith(f"… and {100 - left} more: see there")


def test_names_in_a_sentence():
    assert [joined(names) for names in ([], ["a"], ["a", "b"], ["a", "b", "c"])] == [
        "", "a", "a and b", "a, b and c",
    ]  # fmt: skip
