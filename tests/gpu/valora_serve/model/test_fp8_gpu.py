"""Products of 8 bits on a GPU against the rounded numbers, and an engine with graphs on them."""

import pytest
import torch

from tests.bench.valora_serve.serve_models import PROCESSOR, add_adapters, llava_7b
from valora_serve.engine.engine import Engine
from valora_serve.engine.settings import EngineSettings
from valora_serve.model.fp8_linears import multiply, round_rows
from valora_serve.model.lmm import Lmm
from valora_serve.types import Mode, Request, SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9),
        reason="needs compute capability 8.9",
    ),
]


@pytest.mark.parametrize("rows", [1, 7, 64, 1000])
@pytest.mark.parametrize(("outputs", "inputs"), [(4096, 4096), (12288, 4096), (4096, 11008)])
def test_products_are_those_of_the_rounded_numbers(rows, outputs, inputs):
    x = torch.randn(rows, inputs, device="cuda", dtype=torch.bfloat16)
    weight, scales = round_rows(torch.randn(outputs, inputs, device="cuda") * 0.02)
    rounded, scale = round_rows(x)
    expected = (rounded.float() * scale) @ (weight.float() * scales).T
    found = multiply(x, weight, scales).float()
    assert float((found - expected).norm() / expected.norm()) < 4e-3
    broken = x.clone()
    broken[0] = torch.nan
    beside = multiply(broken, weight, scales)
    assert not bool(beside[0].isfinite().any())
    assert torch.equal(beside[1:].float(), found[1:])


def test_an_engine_serves_adapters_on_8_bits():
    """Graphs and eager steps agree, and answers stay close to those of unrounded weights."""
    device = torch.device("cuda", 0)
    said = {}
    for name, fp8, graphs in (
        ("plain", False, True),
        ("graphs", True, True),
        ("eager", True, False),
    ):
        lmm = Lmm("small", llava_7b(device, layers=2, width=1024), PROCESSOR, device, fp8=fp8)
        engine = Engine(
            EngineSettings(policy="valora", pages=800, max_requests=16, max_tokens=256, chunk=64,
                           max_rank=64, slots=4, host_bytes=1 << 50, graphs=graphs,
                           quantize="fp8" if fp8 else "none", capture="eager"),
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
                    said[name, output.id] = {top.token: top.logprob for top in one.top}
        if fp8:
            assert (engine.stats().mode, engine.stats().switches) == (Mode.UNMERGED, 0)
        engine.close()
        lmm.linears.release()
    for number in map(str, range(9)):
        for name, most in (("eager", 0.02), ("plain", 0.3)):
            one, other = said["graphs", number], said[name, number]
            common = one.keys() & other.keys()
            assert len(common) >= 10
            assert max(abs(one[token] - other[token]) for token in common) < most, (name, number)
