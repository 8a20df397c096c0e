"""User satisfaction is what S-LoRA's published code computes."""

import math

import pytest

from tests.bench.valora_serve.sections.slo import satisfaction


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(0, 1), (1.5, 0.9375), (3, 0.75), (4.5, 0.4375), (6, 0), (9, 0), (math.inf, 0)],
)
def test_satisfaction_falls_with_the_square_of_the_wait(seconds, expected):
    assert satisfaction(seconds, 6) == pytest.approx(expected)
