"""Kernels compiled together on a GPU are those that captures launch."""

import threading
import time
from importlib.util import find_spec

import numpy as np
import pytest
import torch

from tests.bench.valora_serve.serve_models import PROCESSOR, add_adapters, llava_7b
from tests.support.engine_reference import capture, run
from valora_kernels import atmm_kernels, project_kernels
from valora_serve.engine.engine import Engine
from valora_serve.engine.settings import EngineSettings
from valora_serve.model.attention.flashinfer_backend import FlashInferBackend
from valora_serve.model.attention.triton_backend import TritonBackend
from valora_serve.model.lmm import Lmm
from valora_serve.types import Request, SamplingParams

pytestmark = pytest.mark.gpu

KERNELS = (
    atmm_kernels.shrink_kernel,
    atmm_kernels.expand_kernel,
    atmm_kernels.fused_kernel,
    project_kernels.base_kernel,
    project_kernels.many_rows_kernel,
)


def compiled():
    """Number of compiled variants of the kernels in this process."""
    return sum(len(held[0]) for kernel in KERNELS for held in kernel.device_caches.values())


def test_captures_compile_nothing_more(caplog):
    lmm = Lmm("llava-7b", llava_7b("cuda", layers=2, width=640), PROCESSOR, torch.device("cuda", 0))
    settings = EngineSettings(
        policy="valora", pages=800, max_requests=32, max_tokens=1024, max_rank=16, slots=8,
        profile=False, capture="eager",
    )  # fmt: skip
    engine = Engine(settings, lmm)
    add_adapters(engine, 3, (16, 8), seed=1)
    first, rest = engine.runner.preparations((0, 1, 2))
    before, began = compiled(), time.perf_counter()
    engine.runner.compile_together([*first, *rest])
    together = compiled()
    print(f"{together - before} kernels in {time.perf_counter() - began:.1f} s")
    assert "one after the other" not in caplog.text
    assert together > before
    capture(engine.runner)
    assert compiled() == together
    lmm.linears.release()
    engine.close()


@pytest.mark.skipif(find_spec("flashinfer") is None, reason="needs FlashInfer")
def test_flashinfer_takes_over_from_the_triton_kernels(monkeypatch):
    """Prompts whose last tokens are single rows, eagerly and from graphs of both backends."""
    release = threading.Event()
    compile_ = FlashInferBackend.compile

    def later(backend):
        assert release.wait(300)
        compile_(backend)

    monkeypatch.setattr(FlashInferBackend, "compile", later)
    monkeypatch.setattr("valora_serve.engine.warm_up.PATIENCE", 0.01)
    lmm = Lmm("llava-7b", llava_7b("cuda", layers=2, width=640), PROCESSOR, torch.device("cuda", 0))
    settings = EngineSettings(
        policy="slora", pages=800, max_requests=32, max_tokens=1024, max_rank=16, slots=8,
        profile=False, prefix_cache=False,
    )  # fmt: skip
    engine = Engine(settings, lmm)
    names = add_adapters(engine, 3, (16, 8), seed=1)
    engine.warm_up()
    draw = np.random.default_rng(3)
    asked = [
        Request(
            str(n), names[n] if n < len(names) else None,
            token_ids=draw.integers(10, 2000, 50 + 90 * n).tolist(),
            sampling=SamplingParams(max_tokens=20, ignore_eos=True, prompt_logprobs=1),
        )
        for n in range(4)
    ]  # fmt: skip

    def scores():
        found = run(engine, asked, together=4)
        prompts = [found[request.id].prompt for request in asked]
        return [torch.from_numpy(prompt.logprobs) for prompt in prompts]

    assert engine.runner.provisional
    assert isinstance(engine.runner.backend, TritonBackend)
    before = scores()
    while engine.prepare_next():
        pass
    torch.testing.assert_close(scores(), before, rtol=0, atol=0.02)
    release.set()
    engine.runner._wait_on.wait(300)
    during = scores()
    while engine.prepare_next():
        pass
    after = scores()
    assert isinstance(engine.runner.backend, FlashInferBackend)
    assert not engine.runner._decode_graphs.stale and not engine.runner._prompt_graphs.stale
    for found in (during, after):
        torch.testing.assert_close(found, before, rtol=0, atol=0.02)
    lmm.linears.release()
    engine.close()
