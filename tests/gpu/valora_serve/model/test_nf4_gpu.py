"""Products of packed weights of 4 bits on a GPU, and an engine with graphs on them."""

import pytest
import torch

from tests.bench.valora_serve.serve_models import PROCESSOR, add_adapters, llava_7b
from valora_data.contract.quantized import PackedMatrix, rounded_matrix
from valora_serve.engine.engine import Engine
from valora_serve.engine.settings import EngineSettings
from valora_serve.model.lmm import Lmm
from valora_serve.types import Mode, Request, SamplingParams

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
        engine = Engine(
            EngineSettings(policy="valora", pages=800, max_requests=16, max_tokens=256, chunk=64,
                           max_rank=64, slots=4, host_bytes=1 << 50, graphs=graphs, profile=False,
                           quantize="nf4_packed", capture="eager"),
            lmm,
        )  # fmt: skip
        names = [None, *add_adapters(engine, 2, (64, 8), seed=1, targets="language")]
        engine.warm_up()
        generator = torch.Generator().manual_seed(2)
        for number in range(9):
            ids = torch.randint(3, 32000, (5 + 20 * number,), generator=generator).tolist()
            params = SamplingParams(max_tokens=1, ignore_eos=True, logprobs=20)
            request = Request(str(number), names[number % 3], token_ids=ids, sampling=params)
            engine.add(engine.prepare(request))
        while engine.busy:
            for output in engine.step():
                assert output.error is None
                for one in output.logprobs:
                    said[graphs, output.id] = {top.token: top.logprob for top in one.top}
        assert (engine.stats().mode, engine.stats().switches) == (Mode.UNMERGED, 0)
        engine.close()
        lmm.linears.release()
    for number in map(str, range(9)):
        one, other = said[True, number], said[False, number]
        common = one.keys() & other.keys()
        assert len(common) >= 10
        assert max(abs(one[token] - other[token]) for token in common) < 0.03, number
