"""The LoRA operators that ATMM is compared with on a GPU: in bf16, and in CUDA graphs."""

import numpy as np
import pytest
import torch

import tests.bench.valora_kernels.operators  # noqa: F401 - registers those to compare with
from tests.support.lora_cases import draw_rows, make_case
from valora_kernels.metadata import LoraBatch
from valora_kernels.operators import OPERATORS, operator

pytestmark = pytest.mark.gpu

TOLERANCE = 1e-2
"""Relative Frobenius error: operators in torch round between their products."""
RANKS = [64, 8, 32, 16]


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("terms", [1, 2])
@pytest.mark.parametrize("rows", [32, 640])
def test_a_replay_computes_the_next_mix(name, terms, rows):
    case = make_case(
        rows, RANKS, 512, (256, 128), dtype=torch.bfloat16, terms=terms, paged=True, device="cuda"
    )
    case.batch = LoraBatch(rows, 9, "cuda", fixed=True)
    described = (RANKS, case.scalings, case.coefficients)
    case.batch.update(case.adapters, *described)
    outputs = [y.clone() for y in case.ys]

    def run():
        for output, y in zip(outputs, case.ys, strict=True):
            output.copy_(y)
        operator(name).add(outputs, case.x, case.weights, case.batch)

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for seed in (1, 2):
        case.adapters[:, 0] = draw_rows(rows, len(RANKS), "zipf", np.random.default_rng(seed))
        case.batch.update(case.adapters, *described)
        graph.replay()
        for got, want in zip(outputs, case.expected(), strict=True):
            error = (got.double() - want).norm() / want.norm()
            assert error < TOLERANCE
