"""Products of packed weights of 4 bits on a GPU, and an engine with graphs on them."""

import pytest
import torch

from tests.bench.valora_serve.serve_models import PROCESSOR, llava_7b
from tests.support.rounded_engines import assert_close, first_logprobs
from valora_data.contract.quantized import PackedMatrix, rounded_matrix
from valora_serve.model.lmm import Lmm

pytestmark = pytest.mark.gpu
pytest.importorskip("bitsandbytes")


@pytest.mark.parametrize("rows", [1, 2, 7, 64, 300, 2000])
@pytest.mark.parametrize(("outputs", "inputs"), [(4096, 4096), (4096, 11008), (128, 96)])
def test_products_are_those_of_the_rounded_numbers(rows, outputs, inputs):
    x = torch.randn(rows, inputs, device="cuda", dtype=torch.bfloat16)
    weights = [torch.randn(outputs, inputs, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    packed = PackedMatrix(weights, torch.bfloat16)
    matrix = packed.matrix()
    assert torch.equal(matrix, torch.cat([rounded_matrix(weight) for weight in weights]))
    bias = torch.randn(3 * outputs, device="cuda", dtype=torch.bfloat16)
    expected = x.float() @ matrix.float().T + bias.float()
    found = packed.multiply(x, bias).float()
    assert float((found - expected).norm() / expected.norm()) < 4e-3
    if rows > 1:
        x[0] = torch.nan
        beside = packed.multiply(x, bias)
        assert not bool(beside[0].isfinite().any())
        assert torch.equal(beside[1:].float(), found[1:])


def test_an_engine_serves_adapters_on_4_bits():
    """Graphs and eager steps agree, and memory is what 4 bits take."""
    device = torch.device("cuda", 0)
    said = {}
    for graphs in (True, False):
        model = llava_7b(device, layers=2, width=1024)
        lmm = Lmm("small", model, PROCESSOR, device, "nf4", packed=True)
        groups = [group for group in lmm.linears.groups.values() if group.spec.part == "text"]
        numbers = sum(g.spec.in_features * sum(g.spec.out_features) for g in groups)
        assert sum(weight.nbytes for g in groups for weight in g.weights) * 2 == numbers
        said[graphs] = first_logprobs(lmm, "nf4_packed", graphs)
    assert_close(said[True], said[False], 0.03)
