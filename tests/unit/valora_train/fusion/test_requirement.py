"""What a domain must reach, and what is said of few samples and of weak teachers."""

import math
import random

import pytest
from scipy.stats import binomtest

from valora_data.schema import Task
from valora_train.errors import SettingsError
from valora_train.fusion.requirement import (
    Requirement,
    contract_requirement,
    few_samples,
    weak_teacher,
    wilson_interval,
)
from valora_train.settings import DomainSettings


def domain(required, of_teacher=None, task=Task.DETECTION):
    return DomainSettings("d", task=task, labels=["d"], required=required, of_teacher=of_teacher)


@pytest.mark.parametrize(
    ("required", "margin", "largest", "target"),
    [
        (0.80, 0.02, 1.0, 82 / 100),  # though the sum is 0.8200000000000001 in binary
        (0.97, 0.02, 1.0, 0.985), (0.80, 0.50, 1.0, 0.9),  # half of what is left
        (1.00, 0.02, 1.0, 1.0), (3.0, 0.02, 10.0, 3.02), (9.99, 0.02, 10.0, 9.995),
        (0.80, 0.0, 1.0, 0.8), (0.80, -10.0, 1.0, -9.2),
    ],
)  # fmt: skip
def test_the_target_ends_below_what_is_possible(required, margin, largest, target):
    requirement = Requirement(required, margin, largest)
    assert requirement.target == pytest.approx(target)
    assert requirement.met_by(target)
    assert not requirement.met_by(target - 1e-6)
    assert requirement.met_by(largest)
    assert not requirement.met_by(math.nan)
    if margin > 0 and required < largest:
        assert required < requirement.target < largest


@pytest.mark.parametrize(
    ("required", "of_teacher", "teacher", "target", "text"),
    [
        (1.0, None, None, 1.0, "1.000 (required 1.000 + margin 0.000, cut from 0.020)"),
        # The share binds; half of what the teacher reaches above it limits the margin.
        (0.8, 0.97, 0.94, 0.9259,
         "0.926 (required 0.912 = 0.97 × the teacher's 0.940, above 0.800, + margin 0.014, cut "
         "from 0.020)"),
        # The accuracy binds, and what the teacher reaches limits nothing.
        (0.85, 0.9, 0.86, 0.87,
         "0.870 (required 0.850, above 0.774 = 0.9 × the teacher's 0.860, + margin 0.020)"),
        # The share asks for a little more than the accuracy: never for less on validation.
        (0.8, 0.98, 0.82, 0.82,
         "0.820 (required 0.804 = 0.98 × the teacher's 0.820, above 0.800, + margin 0.016, cut "
         "from 0.020)"),
        (None, 1.0, 0.9, 0.9,
         "0.900 (required 0.900 = 1 × the teacher's 0.900 + margin 0.000, cut from 0.020)"),
        (None, 0.5, 0.9, 0.47, "0.470 (required 0.450 = 0.5 × the teacher's 0.900 + margin 0.020)"),
    ],
)  # fmt: skip
def test_the_larger_of_both_figures_counts(required, of_teacher, teacher, target, text):
    found = contract_requirement(domain(required, of_teacher), 0.02, teacher, 0.5)
    if of_teacher:
        assert found.required == max(required or 0.0, of_teacher * teacher)
        assert found.required_on_test == max(required or 0.0, of_teacher * 0.5)
    assert (found.target, found.text) == (pytest.approx(target), text)


@pytest.mark.parametrize("task", [Task.DETECTION, Task.CAPTION])
@pytest.mark.parametrize("margin", [0.0, 0.02, 0.3])
def test_a_contract_that_asks_for_more_never_lowers_the_target(task, margin):
    draw, largest = random.Random(0).uniform, task.spec.largest
    for _ in range(300):
        required, share, more = draw(0.01, largest), draw(0.01, 1), draw(0.01, 1)
        teacher = draw(0.01, largest)

        def asked(*contract, of=teacher):
            return contract_requirement(domain(*contract, task), margin, of, None)

        both = asked(required, share)
        alone, relative = asked(required, None), asked(None, share)
        assert both.required == max(alone.required, relative.required)
        assert both.target >= max(alone.target, both.required)
        assert relative.required <= relative.target <= teacher
        assert asked(required, max(share, more)).target >= both.target - 1e-12
        assert both.target < max(largest, teacher) or required == largest


def test_a_requirement_is_kept_on_both_splits():
    for val, test in ((0.90, 0.80), (0.899, 0.80), (0.90, 0.799), (0.99, 0.79)):
        kept = Requirement(0.9, 0.02, on_test=0.8).kept_by({"val": val, "test": test})
        assert kept == ((val, test) == (0.90, 0.80))
        assert not Requirement(0.9).kept_by({"val": 0.9, "test": test})


def test_the_interval_is_wilsons():
    for hits, count in ((0, 7), (7, 7), (1, 2), (24, 30), (400, 999)):
        expected = binomtest(hits, count).proportion_ci(0.95, method="wilson")
        assert wilson_interval(hits / count, count) == pytest.approx(tuple(expected), abs=1e-12)


def test_fewer_than_fifty_samples_are_named_with_their_interval():
    assert few_samples(domain(0.8), 50, 50, None, 0.02) == []
    low, high = binomtest(24, 30).proportion_ci(0.95, method="wilson")
    validation, test = few_samples(domain(0.8), 30, 30, None, 0.02)
    assert f"at 0.800 the 95 % interval is {low:.2f} to {high:.2f}, {high - low:.2f}" in validation
    assert "one sample weighs 0.033 (margin 0.02)" in validation
    assert test.startswith("d: 30 test samples can confirm little of what is asked for: at 0.800")
    (said,) = few_samples(domain(0.8), 49, 50, 0.9, 0.0)
    assert "at 0.900 the 95 %" in said
    # CIDEr is no share of the samples.
    (said,) = few_samples(domain(3.0, task=Task.CAPTION), 50, 1, None, 0.02)
    assert said.startswith("d: 1 test sample can confirm little of what is asked for; give it")
    with pytest.raises(SettingsError, match="domain d has 1 validation sample, which can"):
        few_samples(domain(0.8), 1, 50, None, 0.02)


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
