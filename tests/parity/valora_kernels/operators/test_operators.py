"""The LoRA operators that ATMM is compared with, against row-by-row arithmetic."""

import pytest
import torch

from tests.support.lora_cases import assert_near, make_case
from valora_kernels.operators import OPERATORS, operator

FP32 = torch.float32


def added(name, case):
    found = [y.clone() for y in case.ys]
    operator(name).add(found, case.x, case.weights, case.batch)
    return found


def check(name, case):
    for got, want in zip(added(name, case), case.expected(), strict=True):
        assert_near(got, want)


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("terms", [1, 2])
def test_mixed_ranks_and_projections_of_different_widths(name, paged, terms):
    case = make_case(
        37, [8, 24, 3, 16], 72, (64, 24, 40), dtype=FP32, terms=terms, paged=paged, device="cpu"
    )
    check(name, case)


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("rows", [0, 1, 600])
def test_row_counts(name, rows):
    check(name, make_case(
        rows, [5, 16], 16, (24,), dtype=FP32, popularity="zipf", paged=True, device="cpu"
    ))  # fmt: skip


@pytest.mark.parametrize("name", OPERATORS)
def test_widths_that_kernels_cannot_compute(name):
    check(name, make_case(9, [2, 5], 10, (7,), dtype=FP32, paged=True, device="cpu"))


def test_an_unknown_operator_names_those_there_are():
    with pytest.raises(ValueError, match=r"unknown LoRA operator 'sgmv'.*padded"):
        operator("sgmv")
