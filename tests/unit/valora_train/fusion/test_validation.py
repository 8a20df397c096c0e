"""What is said of validation splits that are too small, and of teachers that teach little."""

import pytest
from scipy.stats import binomtest

from valora_train.errors import SettingsError
from valora_train.fusion.requirement import (
    Contract,
    Requirement,
    few_samples,
    weak_teacher,
    wilson_interval,
)


@pytest.mark.parametrize(("hits", "count"), [(0, 7), (7, 7), (1, 2), (24, 30), (400, 999)])
def test_the_interval_is_wilsons(hits, count):
    expected = binomtest(hits, count).proportion_ci(0.95, method="wilson")
    assert wilson_interval(hits / count, count) == pytest.approx(tuple(expected), abs=1e-12)


def test_fewer_than_fifty_samples_are_named_with_their_interval():
    assert few_samples("cat", 50, 50, Contract(0.8), 0.02) == []
    low, high = binomtest(24, 30).proportion_ci(0.95, method="wilson")
    validation, test = few_samples("cat", 30, 30, Contract(0.8), 0.02)
    assert validation == (
        "cat: 30 validation samples can decide little of what is asked for: at 0.800 the 95 % "
        f"interval is {low:.2f} to {high:.2f}, {high - low:.2f} wide, and one sample weighs 0.033 "
        "(margin 0.02); give it at least 50, better 300 (source.counts, source.fractions, or a "
        "larger split)"
    )
    assert test.startswith("cat: 30 test samples can confirm little of what is asked for: at 0.800")
    (said,) = few_samples("cat", 49, 50, Contract(None, 0.9), 0.0)
    assert "at 0.900 the 95 %" in said
    # CIDEr is no share of the samples.
    (said,) = few_samples("cat", 50, 1, Contract(3.0, None, 10.0), 0.02)
    assert said.startswith("cat: 1 test sample can confirm little of what is asked for; give it")


@pytest.mark.parametrize("count", [0, 1])
def test_one_sample_decides_nothing(count):
    with pytest.raises(SettingsError, match=f"domain cat has {count} validation sample, which can"):
        few_samples("cat", count, 50, Contract(0.8), 0.02)


@pytest.mark.parametrize(
    ("alone", "teacher", "said"),
    [
        (0.7, 0.9, None),
        (0.9, 0.9, None),  # as good as the head alone
        (0.7, None, None),
        (float("nan"), 0.9, None),
        (0.85, 0.80, "0.800 on validation, less than the 0.850 without LoRA, so that what is "
                     "asked for is met without LoRA: check the teacher"),
        (0.75, 0.70, "0.700 on validation, less than the 0.750 without LoRA, so that it has "
                     "nothing to teach: check the teacher"),
        (0.70, 0.81, "d: 0.820 (required 0.800 + margin 0.020) is asked for, more than the 0.810"),
    ],
)  # fmt: skip
def test_weak_teachers_are_named(alone, teacher, said):
    found = weak_teacher("d", Requirement(0.8, 0.02), alone, teacher)
    assert found is None if said is None else said in found


def test_a_share_of_a_teacher_is_never_more_than_it_reaches():
    requirement = Contract(0.5, 0.99).requirement("d", 0.02, 0.8, 0.8)
    assert weak_teacher("d", requirement, 0.7, 0.8) is None
    said = weak_teacher("d", requirement, 0.81, 0.8)
    assert "is met without LoRA" in said
