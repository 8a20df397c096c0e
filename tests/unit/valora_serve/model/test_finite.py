"""Rows that are not finite, or constant, are found; all others are not."""

import math

import pytest
import torch

from valora_serve.model.finite import BROKEN, finite_rows, mark_broken

GOOD = torch.tensor([[0.5, -1.0, 3.0], [0.0, 0.0, 1e-30], [3e38, -3e38, 0.0]])


@pytest.mark.parametrize(("value", "place"), [(math.nan, 0), (math.inf, 1), (-math.inf, 2)])
def test_one_value_is_enough(value, place):
    rows = GOOD.repeat(2, 1)
    rows[4, place] = value
    assert finite_rows(rows).tolist() == [True, True, True, True, False, True]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_a_norm_makes_of_an_overflow(dtype):
    """1e30 squared is infinite in fp32: the norm divides by infinity, and the row is zero."""
    rows = torch.tensor([[1.0, 2.0], [0.0, 0.0], [-7.0, -7.0]], dtype=dtype)
    assert finite_rows(rows).tolist() == [True, False, False]
    assert finite_rows(rows[:0]).tolist() == []


def test_marks():
    tokens = torch.tensor([7, 0, 9])
    told = mark_broken(tokens, torch.tensor([True, False, True]))
    assert told.tolist() == [7, BROKEN, 9]
    assert tokens.tolist() == [7, 0, 9]
