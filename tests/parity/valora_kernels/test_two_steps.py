"""The operator in two steps, with the exchange of a tensor-parallel group between them, by hand."""

from itertools import product

import pytest
import torch

from tests.support.cases import others_slow
from tests.support.lora_cases import assert_near, make_case, needs_triton, write_adapter
from valora_kernels import two_steps
from valora_kernels.launching import power_of_two
from valora_kernels.tiling import Tiling
from valora_kernels.weights import LoraWeights

TILINGS = [
    None,
    pytest.param(Tiling("shrink_expand", 16, 32, 32, 32, 16), id="kernels", marks=needs_triton),
    pytest.param(Tiling("fused", 16, 32, 32, parts=2), id="other", marks=needs_triton),
]


def part(case, a, b):
    """Weights with parts of the case's matrices; ranks are filled up with zeros."""
    rows = max(one.shape[0] for slot in a for one in slot)
    ranks = max(16, power_of_two(max(rows, *(one.shape[1] for slot in b for one in slot))))
    found = LoraWeights.contiguous(
        len(a), ranks, a[0][0].shape[1], [one.shape[0] for one in b[0]],
        dtype=case.x.dtype, device=case.x.device,
    )  # fmt: skip
    for slot, (ones, others) in enumerate(zip(a, b, strict=True)):
        write_adapter(found, slot, ones, others)
    return found


def check(found, case, *, exact):
    for one, want in zip(found, case.expected(), strict=True):
        assert_near(one.to(exact), want)


@pytest.mark.parametrize("tiling", TILINGS)
@pytest.mark.parametrize(("size", "terms"), others_slow([(2, 1), (3, 2)], product([2, 3], [1, 2])))
def test_rank_rows_dealt_out_to_gpus(tiling, size, terms):
    """Column layers: each GPU shrinks with its rows of A and zeros for the others'; a sum joins."""
    case = make_case(9, [5, 24, 33], 72, (64, 24), dtype=torch.float32, terms=terms)
    case.batch.tiles(16)
    total = None
    for k in range(size):
        own = [[torch.zeros_like(one) for one in slot] for slot in case.a]
        for mine, slot in zip(own, case.a, strict=True):
            for one, rows in zip(mine, slot, strict=True):
                one[k::size] = rows[k::size]
        shrunk = two_steps.shrink(case.x, part(case, own, case.b), case.batch, tiling=tiling)
        total = shrunk.h.clone() if total is None else total + shrunk.h
    assert total is not None
    ys = [y.clone() for y in case.ys]
    whole = part(case, case.a, case.b)
    two_steps.expand(ys, two_steps.Shrunk(total, shrunk.tiling), whole, case.batch)
    check(ys, case, exact=torch.float32)


@pytest.mark.parametrize("tiling", TILINGS)
def test_inputs_and_outputs_dealt_out_to_gpus(tiling):
    """Row layers: partial sums of x·Aᵀ are added up; each GPU expands its outputs."""
    case = make_case(9, [5, 24, 8], 64, (48,), dtype=torch.float32)
    halves = (slice(0, 32), slice(32, 64))
    total = None
    for half in halves:
        own = part(case, [[one[:, half] for one in slot] for slot in case.a], case.b)
        x = case.x[:, half].contiguous()
        shrunk = two_steps.shrink(x, own, case.batch, tiling=tiling)
        total = shrunk.h.clone() if total is None else total + shrunk.h
    assert total is not None
    y = case.ys[0].clone()
    for first in (0, 24):
        outputs = slice(first, first + 24)
        own = part(case, case.a, [[one[outputs] for one in slot] for slot in case.b])
        two_steps.expand([y[:, outputs]], two_steps.Shrunk(total, shrunk.tiling), own, case.batch)
    check([y], case, exact=torch.float32)
