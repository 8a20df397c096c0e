"""Products of 8 bits, and of packed 4 bits, on a GPU; and engines with graphs on them."""

from importlib.util import find_spec

import pytest
import torch

from tests.bench.valora_serve.serve_models import PROCESSOR, llava_7b
from tests.support.quantized_engines import assert_close, distance, first_logprobs
from valora_data.contract.quantized import PackedMatrix, quantized_matrix
from valora_serve.model.lmm import Lmm
from valora_serve.model.quantized_linears import multiply, round_rows

pytestmark = pytest.mark.gpu

multiplies = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9),
    reason="needs compute capability 8.9",
)
packs = pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="needs bitsandbytes")


@multiplies
@pytest.mark.parametrize("rows", [1, 7, 64, 1000])
@pytest.mark.parametrize(("outputs", "inputs"), [(4096, 4096), (12288, 4096), (4096, 11008)])
def test_products_of_8_bits(rows, outputs, inputs):
    x = torch.randn(rows, inputs, device="cuda", dtype=torch.bfloat16)
    weight, scales = round_rows(torch.randn(outputs, inputs, device="cuda") * 0.02)
    quantized, scale = round_rows(x)
    expected = (quantized.float() * scale) @ (weight.float() * scales).T
    found = multiply(x, weight, scales).float()
    assert float((found - expected).norm() / expected.norm()) < 4e-3
    broken = x.clone()
    broken[0] = torch.nan
    beside = multiply(broken, weight, scales)
    assert not bool(beside[0].isfinite().any())
    assert torch.equal(beside[1:].float(), found[1:])


@multiplies
def test_an_engine_serves_adapters_on_8_bits():
    """Graphs and eager steps round alike, and stay close to the answers of unquantized weights.

    They use other attention kernels, and what differs in the last bit of bf16 is rounded to other
    numbers of 8 bits: on one H200, another attention backend changes eager steps by up to 0.12.
    """
    device = torch.device("cuda", 0)
    said = {}
    for name, fp8, graphs in (
        ("plain", False, True),
        ("graphs", True, True),
        ("eager", True, False),
    ):
        lmm = Lmm("small", llava_7b(device, layers=2, width=1024), PROCESSOR, device, fp8=fp8)
        said[name] = first_logprobs(lmm, "fp8" if fp8 else "none", graphs)
    assert_close(said["graphs"], said["plain"], 0.3)
    rounding = distance(said["eager"], said["plain"])
    assert distance(said["graphs"], said["plain"]) < 1.25 * rounding
    assert distance(said["graphs"], said["eager"]) < 0.75 * rounding  # they share their weights


@packs
@pytest.mark.parametrize("rows", [1, 2, 7, 64, 300, 2000])
@pytest.mark.parametrize(("outputs", "inputs"), [(4096, 4096), (4096, 11008), (128, 96)])
def test_products_of_packed_weights(rows, outputs, inputs):
    x = torch.randn(rows, inputs, device="cuda", dtype=torch.bfloat16)
    weights = [torch.randn(outputs, inputs, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    packed = PackedMatrix(weights, torch.bfloat16)
    matrix = packed.matrix()
    assert torch.equal(matrix, torch.cat([quantized_matrix(weight) for weight in weights]))
    bias = torch.randn(3 * outputs, device="cuda", dtype=torch.bfloat16)
    expected = x.float() @ matrix.float().T + bias.float()
    found = packed.multiply(x, bias).float()
    assert float((found - expected).norm() / expected.norm()) < 4e-3
    if rows > 1:
        x[0] = torch.nan
        beside = packed.multiply(x, bias)
        assert not bool(beside[0].isfinite().any())
        assert torch.equal(beside[1:].float(), found[1:])


@packs
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
