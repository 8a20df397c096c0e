"""Prefixes and adapters at decoding only on a GPU in bf16, against documents in the prompt."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.bench.valora_serve.serve_models import PROCESSOR, add_adapters, llava_7b
from tests.support.engine_reference import run
from valora_data.contract.contexts import PREFIX
from valora_serve.catalogue.contexts import Context
from valora_serve.catalogue.store import ResolvedModel, Staged
from valora_serve.engine.engine import Engine
from valora_serve.engine.settings import EngineSettings
from valora_serve.model.lmm import Lmm
from valora_serve.types import Request, SamplingParams, ServedModel

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda", 0)
TOLERANCE = 0.03
"""Of a log probability, as in `test_engine_gpu`."""
LENGTHS = (16, 37, 200, 515)
TOKENS = 6


@pytest.fixture(scope="module")
def lmm():
    return Lmm("small", llava_7b(DEVICE, layers=2, width=1024), PROCESSOR, DEVICE)


def read(engine, number, ids):
    """Register a context of a document's own keys and values; returns its name."""
    request = Request(f"read-{number}", token_ids=ids, embed=True, keep_kv=True)
    kv = run(engine, [request])[request.id].last.kv.cpu()
    assert kv.shape[3] == len(ids)
    name, content = f"doc-{number}", f"{number:064x}"
    packed = engine.memory.pack_prefix(name, content, kv[0], kv[1])
    context = Context(name, PREFIX, len(ids), len(ids), content, file=Path(name))
    late = engine.store.resolve("adapter-0")
    targets = (
        ResolvedModel(ServedModel(name, "domain", name, form=PREFIX), context=context),
        ResolvedModel(
            ServedModel(f"{name}-late", "domain", name, adapter="adapter-0", decode_only=True,
                        form=PREFIX),
            late.adapter, context=context,
        ),
    )  # fmt: skip
    engine.registry.register((Staged(None, targets[:1], {}, Path(name)), {}, {}, {content: packed}))
    engine.registry.register((Staged(None, targets[1:], {}, Path(name)), {}, {}, {content: packed}))
    return name


@pytest.mark.parametrize("attention", ["flashinfer", "flashinfer-prompts", "torch"])
@pytest.mark.parametrize("policy", ["cost", "valora", "unmerge_only"])
def test_documents_answer_as_in_the_prompt(lmm, attention, policy):
    attention, _, prompts_too = attention.partition("-")
    if attention == "flashinfer":
        pytest.importorskip("flashinfer")
    engine = Engine(
        EngineSettings(policy=policy, pages=800, max_requests=32, max_tokens=256, chunk=64,
                       max_rank=64, slots=4, attention=attention, host_bytes=1 << 50, profile=False,
                       graphs=attention == "flashinfer", prompt_graphs=bool(prompts_too)),
        lmm,
    )  # fmt: skip
    add_adapters(engine, 2, (16, 8))
    for target in (engine.store.resolve("adapter-0"),):
        late = replace(target.model, name="late", adapter="late", decode_only=True)
        staged = Staged(None, (ResolvedModel(late, target.adapter),), {}, Path("late"))
        engine.registry.register((staged, {}, {}, {}))
    if attention == "flashinfer":
        engine.warm_up()
    random = np.random.default_rng(0)
    sampling = SamplingParams(max_tokens=TOKENS, ignore_eos=True, logprobs=1)
    pairs, requests = [], []
    for number, length in enumerate(LENGTHS):
        document = random.integers(3, 32000, length).tolist()
        name = read(engine, number, document)
        for late in (False, True):
            tail = random.integers(3, 32000, 5 + 11 * number).tolist()
            short = Request(f"{number}-{late}-short", f"{name}-late" if late else name,
                            token_ids=tail, sampling=sampling)  # fmt: skip
            long = Request(f"{number}-{late}-long", "late" if late else None,
                           token_ids=document + tail, sampling=sampling)  # fmt: skip
            other = Request(f"{number}-{late}-other", "adapter-1", token_ids=tail,
                            sampling=sampling)  # fmt: skip
            pairs.append((short.id, long.id))
            requests += [short, other, long]
    found = run(engine, requests)
    assert not any(got.error for got in found.values())
    for short, long in pairs:
        steps = [found[name].logprobs for name in (short, long)]
        assert len(steps[0]) == len(steps[1]) == TOKENS
        for ours, wanted in zip(*steps, strict=True):
            assert abs(ours.chosen.logprob - wanted.chosen.logprob) < TOLERANCE, (short, long)
            if ours.chosen.token != wanted.chosen.token:
                break  # equally likely in bf16, and what follows differs
    assert engine.stats().contexts_known == 2 * len(LENGTHS)
    assert engine.stats().pages_contexts == sum(-(-length // 16) for length in LENGTHS)
    engine.merge_state.switch(engine.merge_state.mode, None)
    engine.close()
    lmm.linears.release()
