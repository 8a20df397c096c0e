"""Backends by name: built-in ones, the choice of ``auto``, and one of another package."""

import sys
from types import SimpleNamespace

import pytest
import torch

from tests.support.engine_reference import make_engine, run, tokens
from valora_serve.errors import SettingsError
from valora_serve.model.attention.base import KVCache
from valora_serve.model.attention.flashinfer_backend import FlashInferBackend
from valora_serve.model.attention.registry import make_backend
from valora_serve.model.attention.torch_backend import TorchBackend
from valora_serve.types import Request, SamplingParams

OUTSIDE = """
from valora_serve.model.attention.base import AttentionBackend
from valora_serve.model.attention.torch_backend import TorchBackend


class Counting(AttentionBackend):
    plans = 0

    def plan(self, rows):
        Counting.plans += 1
        return TorchBackend(self._cache).plan(rows)


extension = Counting
"""


@pytest.fixture
def kv_cache():
    pages = torch.zeros(4, 2, 8, 2, 16)
    return KVCache([(pages[:, 0], pages[:, 1])], block_size=8, heads=4)


def test_a_backend_of_another_package_serves_requests(installed, random_llava):
    module = installed("valora.attention_backends", "counting", OUTSIDE)
    sampling = SamplingParams(max_tokens=6, ignore_eos=True)
    requests = [
        Request(str(n), text="Where is the cat? " * (1 + n), sampling=sampling) for n in range(4)
    ]
    own, other = (
        make_engine(str(random_llava), attention=name, chunk=24) for name in ("torch", "counting")
    )
    expected = tokens(run(own, requests, together=3))
    assert tokens(run(other, requests, together=3)) == expected
    assert sys.modules[module].extension.plans > 6


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
