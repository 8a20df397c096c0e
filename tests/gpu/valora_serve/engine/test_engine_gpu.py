"""The engine on a GPU in bf16: graphs, paged kernels and all modes against an fp32 reference."""

from dataclasses import replace

import pytest
import torch

from tests.bench.valora_serve.serve_models import PROCESSOR, add_adapters, llava_7b
from valora_serve.engine.engine import Engine
from valora_serve.engine.settings import EngineSettings
from valora_serve.model.lmm import Lmm
from valora_serve.types import Mode, Request, SamplingParams

pytestmark = pytest.mark.gpu

LIMITS = (1.5, 6)
"""Root mean square and largest error of log probabilities, as multiples of the root mean square
that torch in bf16 has with merged weights. Of thousands of normal errors the largest is beyond four
times that, and mixture mode also rounds the merged adapter."""


class Forced:
    """Serves first come, first served, in modes that are told."""

    def __init__(self, inner, modes):
        self.inner, self.modes, self.step = inner, modes, 0

    def decide(self, view):
        decision = self.inner.decide(view)
        mode = self.modes[self.step % len(self.modes)]
        self.step += 1
        able = view.resident if view.switchable is None else view.switchable
        merged = min(able, default=None)
        if mode is Mode.UNMERGED or merged is None:
            return replace(decision, mode=Mode.UNMERGED, merged=None)
        return replace(decision, mode=Mode.MIXTURE, merged=merged)

    def finished(self, request_id):
        self.inner.finished(request_id)


def reference_logprobs(engine, adapters, applied, prompt, generated, dtype=torch.float32):
    """Log probabilities of the generated tokens [tokens], computed in `dtype`.

    Adapters are merged in fp32 with their weights `applied`, and then rounded.
    """
    lmm = engine.lmm
    weights = {}
    for module, (group, index) in lmm.linears.group_of.items():
        weights[module] = group.matrix(index).float()
        for name, weight in applied:
            if module in adapters[name]:
                pair = adapters[name][module]
                delta = pair.b.float() @ pair.a.float() * (pair.scaling * weight)
                weights[module] = weights[module] + delta.to(weights[module].device)
        weights[module] = weights[module].to(dtype)
    ids = torch.tensor(prompt + generated, device=engine.device)
    text = lmm.model.model.language_model
    x = text.embed_tokens.weight[ids].to(dtype)
    length = len(ids)
    cos, sin = text.rotary_emb(x[None], torch.arange(length, device=x.device)[None])
    mask = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()

    def norm(module, h):
        h = h.float()
        scale = torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + module.variance_epsilon)
        return module.weight * (h * scale).to(dtype)

    def rotate(h):
        half = h.shape[-1] // 2
        turned = torch.cat([-h[..., half:], h[..., :half]], -1)
        return h * cos[0].to(dtype) + turned * sin[0].to(dtype)

    for number, layer in enumerate(text.layers):
        w = {m.rpartition(".")[2]: v for m, v in weights.items() if f"layers.{number}." in m
             and "vision" not in m}  # fmt: skip
        h = norm(layer.input_layernorm, x)
        q, k, v = (
            (h @ w[p].T).view(length, -1, lmm.head_dim).transpose(0, 1)
            for p in ("q_proj", "k_proj", "v_proj")
        )
        scores = rotate(q) @ rotate(k).transpose(1, 2) * lmm.head_dim**-0.5
        attended = scores.masked_fill(~mask, float("-inf")).float().softmax(-1).to(dtype) @ v
        x = x + attended.transpose(0, 1).flatten(1) @ w["o_proj"].T
        h = norm(layer.post_attention_layernorm, x)
        x = (
            x
            + (torch.nn.functional.silu(h @ w["gate_proj"].T) * (h @ w["up_proj"].T))
            @ w["down_proj"].T
        )
    logits = (norm(text.norm, x) @ lmm.model.lm_head.weight.to(dtype).T).float()
    scores = logits.log_softmax(-1)
    at = range(len(prompt) - 1, length - 1)
    return torch.stack([scores[i, token] for i, token in zip(at, generated, strict=True)])


@pytest.fixture(scope="module")
def lmm():
    device = torch.device("cuda", 0)
    return Lmm("small", llava_7b(device, layers=2, width=1024), PROCESSOR, device)


@pytest.fixture
def closed(lmm):
    """Engines to close after a test, also one that failed: others have the same model."""
    engines = []
    yield engines
    for engine in engines:
        engine.merge_state.switch(Mode.UNMERGED, None)
        lmm.linears.release()
        engine.close()


@pytest.mark.parametrize("targets", ["attention", "all"])
@pytest.mark.parametrize(
    "attention", ["flashinfer", "flashinfer-prompts", "triton", "triton-prompts"]
)
@pytest.mark.parametrize(
    ("modes", "weights"),
    [
        ((Mode.UNMERGED,), (1.0,)),
        ((Mode.MIXTURE,), (1.0,)),
        ((Mode.UNMERGED, Mode.MIXTURE, Mode.MIXTURE), (1.0,)),
        ((Mode.UNMERGED,), (0.7, -0.5)),
        ((Mode.MIXTURE,), (-0.5,)),
    ],
    ids=["unmerged", "mixture", "switching", "pairs", "strengths"],
)
def test_every_mode_matches_fp32(lmm, closed, modes, weights, attention, targets, monkeypatch):
    attention, _, prompts_too = attention.partition("-")
    if attention == "flashinfer":
        pytest.importorskip("flashinfer")
    engine = Engine(
        EngineSettings(policy="valora", pages=800, max_requests=32, max_tokens=256, chunk=64,
                       max_rank=64, slots=4, attention=attention, host_bytes=1 << 50,
                       prompt_graphs=bool(prompts_too)),
        lmm,
    )  # fmt: skip
    closed.append(engine)
    from tests.bench.valora_serve import serve_models

    kept = {}
    pack = engine.memory.pack

    def remember(adapter):
        kept[adapter.folder.name] = adapter.modules
        return pack(adapter)

    monkeypatch.setattr(engine.memory, "pack", remember)
    if prompts_too:  # adapters that come while it serves drop all graphs
        engine.warm_up()
    if weights != (1.0,) and targets == "all":
        targets = "language"  # the tower's adapters have no weights
    names = add_adapters(engine, 3, (64, 8, 32), seed=1, targets=targets)
    assert serve_models and list(kept) == names
    engine.policy = Forced(engine.policy, modes)
    engine.warm_up()
    g = torch.Generator().manual_seed(2)
    prompts, said, likely = {}, {}, {}
    for i in range(22):
        length = [5, 90, 200, 33][i % 4]
        name = [None, *names][i % 4 if i < 12 else (i * i) % 4]
        ids = torch.randint(3, 32000, (length,), generator=g).tolist()
        own = [] if name is None else [name, *(other for other in names if other != name)]
        # Every third request has its adapter as it is.
        applied = tuple(zip(own, weights if i % 3 else (1.0,), strict=False))
        prompts[str(i)] = (applied, ids)
        params = SamplingParams(max_tokens=6 + i, ignore_eos=True, logprobs=1)
        asked = Request(str(i), name, applied, token_ids=ids, sampling=params)
        engine.add(engine.prepare(asked))
    while engine.busy:
        for output in engine.step():
            assert output.error is None
            said.setdefault(output.id, []).extend(output.token_ids)
            likely.setdefault(output.id, []).extend(p.chosen.logprob for p in output.logprobs)
    engine.merge_state.switch(Mode.UNMERGED, None)  # the reference shall see pristine weights
    errors, rounding = [], []
    for key, (applied, ids) in prompts.items():
        given = (engine, kept, applied, ids, said[key])
        exact = reference_logprobs(*given)
        assert len(exact) == len(likely[key]) == 6 + int(key)
        errors.append(torch.tensor(likely[key], device=exact.device) - exact)
        rounding.append(reference_logprobs(*given, torch.bfloat16) - exact)
    error, unit = torch.cat(errors), torch.cat(rounding).square().mean().sqrt()
    found = (error.square().mean().sqrt() / unit, error.abs().max() / unit)
    print(f"{attention} {prompts_too} {[str(m) for m in modes]}: {unit:.4f} × {found}")
    assert all(one <= limit for one, limit in zip(found, LIMITS, strict=True))
    assert engine.pool.free + engine.adapters.budget.idle_pages == engine.memory.pages - 1
