"""NaN on a GPU, in bf16 and with CUDA graphs: memory that held it, and requests that compute it."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.bench.valora_serve.serve_models import PROCESSOR, add_adapters, llava_7b
from tests.support.engine_reference import run
from valora_data.models.base import ModelPart
from valora_serve.catalogue.adapters import Adapter, LoraPair
from valora_serve.catalogue.store import ResolvedModel, Staged
from valora_serve.engine.engine import Engine
from valora_serve.engine.settings import EngineSettings
from valora_serve.model.lmm import Lmm
from valora_serve.types import Mode, Request, SamplingParams, ServedModel

pytestmark = pytest.mark.gpu

BACKENDS = ["flashinfer", "flashinfer-prompts"]


@pytest.fixture(scope="module")
def lmm():
    device = torch.device("cuda", 0)
    return Lmm("small", llava_7b(device, layers=2, width=1024, vision=False), PROCESSOR, device)


def add_overflowing(engine):
    """An adapter of all projections whose activations overflow in every step."""
    generator = torch.Generator().manual_seed(77)
    pairs = {}
    for path, (out, width) in engine.lmm.targets.linears.items():
        if path.rpartition(".")[2] in ("gate_proj", "up_proj", "down_proj"):
            a = torch.randn(8, width, generator=generator) * width**-0.5
            b = torch.randn(out, 8, generator=generator) * 1e15
            pairs[path] = LoraPair(a.bfloat16(), b.bfloat16(), 1.0)
    parts = frozenset([ModelPart.LANGUAGE])
    adapter = Adapter(Path("bad"), pairs, 8, 1.0, parts, "ba" * 32, "")
    packed = engine.memory.pack(adapter)
    light = replace(adapter, modules={})
    model = ServedModel("bad", "adapter", "bad", engine.lmm.base, "bad", rank=8)
    staged = Staged(None, (ResolvedModel(model, light),), {light.content: light}, Path("bad"))
    engine.registry.register((staged, {light.content: packed}, {light.content: "it overflows"}, {}))


def make(lmm, backend, *, poison=None, **settings):
    """An engine with four adapters on the device, so that all runs make the same steps."""
    attention, _, prompts_too = backend.partition("-")
    if attention == "flashinfer":
        pytest.importorskip("flashinfer")
    engine = Engine(
        EngineSettings(
            pages=900, max_requests=32, max_tokens=256, chunk=64, max_rank=64, slots=8,
            attention=attention, host_bytes=1 << 50, prompt_graphs=bool(prompts_too),
            profile=False, prefix_cache=False,
            capture="eager",  # a graph that is captured later rounds in another order
            **settings,
        ),
        lmm,
    )  # fmt: skip
    names = add_adapters(engine, 3, (64, 8, 32), seed=1)
    add_overflowing(engine)
    engine.warm_up()
    if poison is not None:
        # All pages, also page 0, to which rows that pad a graph write.
        engine.memory.storage[: engine.memory.pages * engine.memory.page.elements] = poison
    for key in engine.registry.ranks:
        assert engine.adapters.load(key)
        while not engine.adapters.ready(key):
            pass
    return engine, names


def requests(names, count, start=0):
    draw = torch.Generator().manual_seed(3 + start)
    found = []
    for i in range(count):
        ids = torch.randint(3, 32000, ([5, 90, 200, 33][i % 4],), generator=draw).tolist()
        params = SamplingParams(
            max_tokens=6 + i % 7, ignore_eos=True, logprobs=2,
            temperature=0.0 if i % 5 else 0.8, seed=i,
        )  # fmt: skip
        name = names[i % len(names)]
        found.append(Request(f"{start}-{i}", name, token_ids=ids, sampling=params))
    return found


def serve(engine, asked):
    """Tokens, log probabilities and error of every request."""
    return {
        key: (got.tokens, [one.chosen.logprob for one in got.logprobs], got.error)
        for key, got in run(engine, asked).items()
    }


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_memory_that_is_not_finite_changes_no_bit(lmm, backend, value):
    """Pages are shared by keys, values and adapters, and hold what their last owner left."""
    answers = []
    for poison in (None, value):
        engine, names = make(lmm, backend, poison=poison, policy="unmerge_only")
        answers.append(serve(engine, requests([None, *names], 24)))
        lmm.linears.release()
        engine.close()
    assert all(error is None for _, _, error in answers[0].values())
    assert answers[0] == answers[1]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("policy", ["unmerge_only", "valora", "cost", "merge_only"])
def test_requests_that_overflow_fail_alone(lmm, backend, policy):
    engine, names = make(lmm, backend, policy=policy)
    before = serve(engine, requests([None, *names], 16))
    bad = requests(["bad"], 40, start=1)
    good = requests([None, *names], 40, start=2)
    mixed = [one for pair in zip(bad, good, strict=True) for one in pair]
    found = serve(engine, mixed)
    for one in bad:
        tokens, _, error = found[one.id]
        assert getattr(error, "code", "") == "non_finite_output"
        assert tokens == []
    assert all(found[one.id][2] is None for one in good)
    assert engine.stats().non_finite == 40
    assert engine.stats().quarantined == {}
    if policy == "unmerge_only":  # others switch as they like, and each mode rounds its own way
        assert serve(engine, requests([None, *names], 16)) == before
    lmm.linears.release()
    engine.close()


def test_a_captured_step_says_which_rows_are_finite(lmm):
    """Greedy decoding replays a graph; the sampled rows of the same steps do not come from it."""
    engine, names = make(lmm, "flashinfer", policy="unmerge_only")
    asked = requests(["bad", None, *names], 20)
    found = serve(engine, asked)
    for one in asked:
        assert (found[one.id][2] is not None) == (one.model == "bad")
    lmm.linears.release()
    engine.close()


def test_merged_weights_are_checked_once(lmm):
    engine, names = make(lmm, "flashinfer", policy="merge_only")
    key = engine.registry.key(engine.store.adapters()[names[0]])
    engine.adapters.load(key)
    while not engine.adapters.ready(key):
        pass
    assert engine.merge_state.switch(Mode.MERGED, key)
    assert engine.adapters.proven == {key}
    # Engines before it may have made other layers mergeable, too.
    (weights,) = [
        memory
        for memory in engine.lmm.linears.merged
        if any(name.endswith("q_proj") for name in memory.shapes)
    ]
    assert weights.is_finite()
    weights.live[12345] = torch.inf
    assert not weights.is_finite()
    engine.merge_state.switch(Mode.UNMERGED, None)
    assert weights.is_finite()
    lmm.linears.release()
    engine.close()
