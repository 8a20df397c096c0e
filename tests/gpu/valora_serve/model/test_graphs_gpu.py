"""What CUDA graphs take of a GPU's memory."""

import pytest
import torch

from tests.bench.valora_serve.serve_models import PROCESSOR, add_adapters, llava_7b
from valora_serve.engine.engine import Engine
from valora_serve.engine.settings import EngineSettings
from valora_serve.model.lmm import Lmm
from valora_serve.model.work import GraphRecorder

pytestmark = pytest.mark.gpu


def test_captures_share_their_memory():
    """Forty functions with 64 MB of intermediate results need it once before captures, once in."""
    device = torch.device("cuda", 0)
    recorder, x = GraphRecorder(device), torch.ones(16 << 20, device=device)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved(device)
    held = [recorder.record(lambda: ((x + 1).sum(0, keepdim=True),)) for _ in range(40)]
    assert torch.cuda.memory_reserved(device) - before <= 4 * x.nbytes
    for replay, (total,) in held:
        replay()
        assert total.item() == 2 * len(x)


def test_an_engine_keeps_within_its_share():
    """With all graphs, and adapters of all linears, which have a pristine copy of the weights."""
    lmm = Lmm("llava-7b", llava_7b("cuda", layers=8), PROCESSOR, torch.device("cuda", 0))
    settings = EngineSettings(
        policy="cost", memory=0.8, max_requests=512, max_tokens=8192, max_rank=64, slots=16,
        profile=False, capture="eager",
    )  # fmt: skip
    engine = Engine(settings, lmm)
    add_adapters(engine, 16, (64,), targets="language")
    engine.warm_up()
    free, total = torch.cuda.mem_get_info()
    print(f"{(total - free) / total:.3f} of the memory in use, {engine.memory.pages} pages; torch "
          f"holds {torch.cuda.memory_allocated() / 1e9:.2f} GB of "
          f"{torch.cuda.memory_reserved() / 1e9:.2f}")  # fmt: skip
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    assert (total - free) / total <= settings.memory
    lmm.linears.release()
    engine.close()
