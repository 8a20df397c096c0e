"""Engines on quantized base models: what graphs and eager steps answer for the same questions."""

import torch

from tests.bench.valora_serve.serve_models import add_adapters
from valora_serve.engine.engine import Engine
from valora_serve.engine.settings import EngineSettings
from valora_serve.types import Mode, Request, SamplingParams

QUESTIONS = 9


def first_logprobs(lmm, quantize, graphs):
    """Log-probabilities of the likeliest first tokens, by question; no adapter is ever merged.

    A third of the questions ask the base model, the others two adapters on all language layers.

    Args:
        lmm: The base model, whose linears are released afterwards.
        quantize: How it is quantized.
        graphs: Whether steps replay CUDA graphs.
    """
    engine = Engine(
        EngineSettings(policy="valora", pages=800, max_requests=16, max_tokens=256, chunk=64,
                       max_rank=64, slots=4, host_bytes=1 << 50, graphs=graphs, profile=False,
                       quantize=quantize, capture="eager"),
        lmm,
    )  # fmt: skip
    names = [None, *add_adapters(engine, 2, (64, 8), seed=1, targets="language")]
    engine.warm_up()
    generator = torch.Generator().manual_seed(2)
    for number in range(QUESTIONS):
        ids = torch.randint(3, 32000, (5 + 20 * number,), generator=generator).tolist()
        params = SamplingParams(max_tokens=1, ignore_eos=True, logprobs=20)
        request = Request(str(number), names[number % 3], token_ids=ids, sampling=params)
        engine.add(engine.prepare(request))
    found = {}
    while engine.busy:
        for output in engine.step():
            assert output.error is None
            for one in output.logprobs:
                found[int(output.id)] = {top.token: top.logprob for top in one.top}
    if quantize != "none":
        assert (engine.stats().mode, engine.stats().switches) == (Mode.UNMERGED, 0)
    engine.close()
    lmm.linears.release()
    return [found[number] for number in range(QUESTIONS)]


def distance(some, others):
    """Root mean square of the differences between log-probabilities of common tokens."""
    differences = [
        one[token] - other[token]
        for one, other in zip(some, others, strict=True)
        for token in one.keys() & other.keys()
    ]
    return (sum(number**2 for number in differences) / len(differences)) ** 0.5


def assert_close(some, others, most):
    """Check that likely tokens are the same ones, about as likely."""
    for one, other in zip(some, others, strict=True):
        common = one.keys() & other.keys()
        assert len(common) >= 10
        assert max(abs(one[token] - other[token]) for token in common) < most
