"""Backends by name: built-in ones, the choice of ``auto``, and one of another package."""

import sys
from types import SimpleNamespace

import pytest
import torch

from tests.support.engine_reference import make_engine, run
from valora_serve.errors import SettingsError
from valora_serve.model.attention.base import KVCache
from valora_serve.model.attention.flashinfer_backend import FlashInferBackend
from valora_serve.model.attention.registry import make_backend
from valora_serve.model.attention.torch_backend import TorchBackend
from valora_serve.types import Request, SamplingParams

OUTSIDE = """
import torch
from torch.nn.functional import scaled_dot_product_attention
from valora_serve.model.attention.base import AttentionBackend


class LoopBackend(AttentionBackend):
    def plan(self, rows):
        return LoopPlan(self._cache, rows)


class LoopPlan:
    def __init__(self, cache, rows):
        self.cache, self.rows = cache, rows

    def run(self, layer, query, key, value, scale):
        keys, values = self.cache.layers[layer]
        page, offset = map(torch.from_numpy, self.rows.locations(self.cache.block_size))
        keys[page, offset], values[page, offset] = key, value
        outputs = []
        for i, (table, length) in enumerate(zip(self.rows.tables, self.rows.lengths)):
            q = query[self.rows.starts[i] : self.rows.starts[i + 1]].transpose(0, 1)
            k, v = (x[list(table)].flatten(0, 1)[:length].transpose(0, 1) for x in (keys, values))
            seen = torch.ones(q.shape[1], length, dtype=torch.bool).tril(length - q.shape[1])
            out = scaled_dot_product_attention(q, k, v, seen, scale=scale, enable_gqa=True)
            outputs.append(out.transpose(0, 1))
        return torch.cat(outputs)


extension = LoopBackend
"""


@pytest.fixture
def kv_cache():
    pages = torch.zeros(4, 2, 8, 2, 16)
    return KVCache([(pages[:, 0], pages[:, 1])], block_size=8, heads=4)


def test_a_backend_of_another_package_serves_requests(installed, random_llava):
    installed("valora.attention_backends", "loop", OUTSIDE)
    answers = {}
    for name in ("torch", "loop"):
        engine = make_engine(str(random_llava), attention=name, chunk=24)
        requests = [
            Request(
                str(number), text="Where is the cat? " * (1 + number % 4),
                sampling=SamplingParams(max_tokens=6, ignore_eos=True, logprobs=0),
            )
            for number in range(6)
        ]  # fmt: skip
        answers[name] = run(engine, requests, together=3)
        engine.close()
    for key, expected in answers["torch"].items():
        found = answers["loop"][key]
        assert found.tokens == expected.tokens and len(found.tokens) == 6
        for one, other in zip(found.logprobs, expected.logprobs, strict=True):
            assert one.chosen.logprob == pytest.approx(other.chosen.logprob, abs=1e-5)


def refuse(*_):
    """FlashInfer raises this where its kernels are of another version."""
    raise RuntimeError("jit-cache version (0.6.9) does not match\nand more")


@pytest.mark.parametrize(
    ("name", "patched", "said"),
    [
        ("nothing", (), "unknown attention backend 'nothing': choose one of flashinfer, torch, t"),
        ("flashinfer", (), "'flashinfer' needs a CUDA GPU: choose 'torch' on a C"),
        ("flashinfer", (FlashInferBackend, "gpu_only", False), "'flashinfer' is not installed .*f"),
        (
            "flashinfer",
            (FlashInferBackend, "gpu_only", False),
            r"\(it computes heads of 64, 128 or 256 elements in 16 bits, and this model's ha",
        ),
        ("torch", (TorchBackend, "__init__", refuse), r"'torch' cannot be used \(jit-cache vers"),
    ],
)
def test_backends_that_cannot_be_used(kv_cache, monkeypatch, name, patched, said):
    library = SimpleNamespace() if "computes" in said else None
    monkeypatch.setitem(sys.modules, "flashinfer", library)
    if patched:
        monkeypatch.setattr(*patched)
    with pytest.raises(SettingsError, match=said):
        make_backend(name, kv_cache)


@pytest.mark.parametrize("nvcc", [False, True])
@pytest.mark.parametrize("packages", [(), ("flashinfer",), ("flashinfer", "flashinfer_jit_cache")])
def test_flashinfer_is_taken_where_its_kernels_can_be_had(monkeypatch, nvcc, packages):
    """Without a CUDA toolkit it can be installed, but its first step would fail."""
    place = "valora_serve.model.attention.flashinfer_backend"
    monkeypatch.setattr(f"{place}.find_spec", lambda name: name in packages or None)
    monkeypatch.setattr(f"{place}.missing_tools", lambda: [] if nvcc else ["nvcc"])
    told = FlashInferBackend.unsuitable(SimpleNamespace(device=torch.device("cuda")))
    if not packages:
        assert told == "flashinfer is not installed"
    elif nvcc or "flashinfer_jit_cache" in packages:
        assert told is None
    else:
        assert told.startswith("flashinfer compiles its kernels with nvcc, not found here")
        assert "valora-serve --check" in told
