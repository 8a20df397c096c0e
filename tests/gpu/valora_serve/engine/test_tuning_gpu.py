"""Tilings measured by an idle engine on a GPU that is said to have none."""

import threading
import time

import pytest
import torch

from tests.bench.valora_serve.serve_models import PROCESSOR, add_adapters, llava_7b
from tests.support.engine_reference import run
from valora_kernels import lookup
from valora_kernels.gpus import gpu_of
from valora_kernels.lookup import table_of
from valora_serve.engine import tuning as module
from valora_serve.engine.engine import Engine
from valora_serve.engine.settings import EngineSettings
from valora_serve.engine.tuning import read_table
from valora_serve.model.lmm import Lmm
from valora_serve.types import Request, SamplingParams

pytestmark = pytest.mark.gpu

TOLERANCE = 0.03
"""Of a log probability: other tilings round in another order."""


def logprobs(engine, names):
    """Log probability of each first token of 12 requests, with adapters and without."""
    asked, generator = [], torch.Generator().manual_seed(2)
    for i in range(12):
        ids = torch.randint(3, 32000, (17 + 20 * (i % 3),), generator=generator).tolist()
        params = SamplingParams(max_tokens=4, ignore_eos=True, logprobs=1)
        name = [None, *names][i % (1 + len(names))]
        asked.append(Request(str(i), name, token_ids=ids, sampling=params))
    return {key: got.logprobs[0].chosen.logprob for key, got in run(engine, asked).items()}


def test_an_idle_engine_measures_and_adopts(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "is_measured", lambda _: False)
    monkeypatch.setattr(module, "H200", gpu_of(torch.device("cuda", 0)))
    monkeypatch.setattr("valora_kernels.tune.ROWS", (4, 64, 256))  # also where LoRA is first
    monkeypatch.setattr("valora_kernels.tune.ADAPTERS", (1, 4))
    monkeypatch.setattr(lookup, "_tables", {})
    lmm = Lmm("llava-7b", llava_7b("cuda", layers=2, width=512), PROCESSOR, torch.device("cuda", 0))
    settings = EngineSettings(
        policy="slora", pages=800, max_requests=8, max_tokens=256, max_rank=16, slots=4,
        tiling_folder=str(tmp_path), capture="eager",
    )  # fmt: skip
    engine = Engine(settings, lmm)
    names = add_adapters(engine, 3, (16, 8), seed=1)
    engine.warm_up()
    news = threading.Event()
    engine.tuning.tuner.compiler.on_news = news.set
    shipped = table_of(engine.runner._lora.gpu)
    before, longest, start = logprobs(engine, names), 0.0, time.perf_counter()
    while not engine.tuning.adopted:
        began = time.perf_counter()
        if not engine.tune():
            assert news.wait(120)
            news.clear()
        else:
            torch.cuda.synchronize()
            longest = max(longest, time.perf_counter() - began)
    measured, wanted = engine.tuning.progress
    print(f"{measured} of {wanted} shapes in {time.perf_counter() - start:.0f} s, longest piece "
          f"{longest:.2f} s")  # fmt: skip
    assert 0 < measured <= wanted
    assert not engine.tuning.tuner.skipped
    table = table_of(engine.runner._lora.gpu)
    assert table is not shipped
    kept = read_table(next(tmp_path.glob("*.json")), table.gpu).entries
    assert len(kept) == measured
    # A GPU without a table of its own has the other shapes of one like it.
    assert kept.items() <= table.entries.items()
    after = logprobs(engine, names)
    assert after.keys() == before.keys()
    assert all(abs(after[key] - before[key]) <= TOLERANCE for key in before)
    lmm.linears.release()
    engine.close()
