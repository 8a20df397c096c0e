"""The bar of a requirement: where it lies, and what people are told of it."""

import math

import pytest

from valora_train.fusion.requirement import Requirement


@pytest.mark.parametrize(
    ("required", "margin", "largest", "bar"),
    [
        (0.80, 0.02, 1.0, 0.82),
        (0.95, 0.02, 1.0, 0.97),
        (0.96, 0.02, 1.0, 0.98),
        (0.97, 0.02, 1.0, 0.985),  # half of what is left
        (0.99, 0.02, 1.0, 0.995),
        (1.00, 0.02, 1.0, 1.0),
        (0.80, 0.50, 1.0, 0.9),
        (3.0, 0.02, 10.0, 3.02),
        (9.99, 0.02, 10.0, 9.995),
        (0.80, 0.0, 1.0, 0.8),
        (0.80, -10.0, 1.0, -9.2),
    ],
)
def test_the_bar_ends_below_what_is_possible(required, margin, largest, bar):
    requirement = Requirement(required, margin, largest)
    assert requirement.bar == pytest.approx(bar)
    assert requirement.met_by(bar)
    assert not requirement.met_by(bar - 1e-6)
    assert requirement.met_by(largest)
    assert not requirement.met_by(math.nan)
    if margin > 0 and required < largest:
        assert required < requirement.bar < largest


def test_sums_of_decimal_fractions_are_no_trap():
    # 0.80 + 0.02 is 0.8200000000000001 in binary; 82 of 100 are enough.
    assert 0.80 + 0.02 > 82 / 100
    assert Requirement(0.80, 0.02).met_by(82 / 100)
    assert not Requirement(0.80, 0.02).met_by(81 / 100)


@pytest.mark.parametrize(
    ("requirement", "text"),
    [
        (Requirement(0.8, 0.02), "0.820 (required 0.800 + margin 0.020)"),
        (Requirement(0.8), "0.800 (required 0.800)"),
        (Requirement(0.99, 0.02), "0.995 (required 0.990 + margin 0.005, cut from 0.020)"),
        (Requirement(1.0, 0.02), "1.000 (required 1.000 + margin 0.000, cut from 0.020)"),
        (Requirement(0.8, -10.0), "-9.200 (required 0.800 − margin 10.000)"),
        (
            Requirement(0.777, 0.02, origin="0.85 × the teacher's 0.914"),
            "0.797 (required 0.85 × the teacher's 0.914 + margin 0.020)",
        ),
    ],
)
def test_people_are_told_where_the_bar_comes_from(requirement, text):
    assert requirement.text == text
