"""Kernels compiled together on a GPU are those that captures launch."""

import time

import pytest
import torch

from tests.bench.valora_serve.serve_models import PROCESSOR, add_adapters, llava_7b
from valora_kernels import atmm_kernels, project_kernels
from valora_serve.engine.engine import Engine
from valora_serve.engine.settings import EngineSettings
from valora_serve.model.lmm import Lmm

pytestmark = pytest.mark.gpu

KERNELS = (
    atmm_kernels.shrink_kernel,
    atmm_kernels.expand_kernel,
    atmm_kernels.fused_kernel,
    project_kernels.base_kernel,
    project_kernels.many_rows_kernel,
)


def compiled() -> int:
    """Number of compiled variants of the kernels in this process."""
    return sum(len(held[0]) for kernel in KERNELS for held in kernel.device_caches.values())


def test_captures_compile_nothing_more(caplog: pytest.LogCaptureFixture) -> None:
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
    engine.runner.capture()
    assert compiled() == together
    lmm.linears.release()
    engine.close()
