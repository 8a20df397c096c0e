"""Backends on a CPU against dense attention, row by row in fp64; and the choice of one by name."""

import sys
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.attention_cases import Case, image_case
from tests.support.cases import others_slow
from tests.support.engine_reference import make_engine, run, tokens
from tests.support.lora_cases import DEVICE
from valora_serve.errors import SettingsError
from valora_serve.model.attention.flashinfer_backend import FlashInferBackend
from valora_serve.model.attention.registry import make_backend
from valora_serve.model.attention.torch_backend import TorchBackend
from valora_serve.types import Request, SamplingParams

pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered")

BACKENDS = (
    "torch",
    pytest.param(
        "triton", marks=pytest.mark.skipif(DEVICE == "cuda", reason="tests/gpu runs it on a GPU")
    ),
)

MIXES = {
    "decodes": [(8, 1), (0, 1), (3, 1), (30, 1)],
    "mixed": [(11, 1), (0, 6), (4, 7), (3, 1), (16, 16), (15, 1)],
}


@pytest.mark.parametrize("backend", BACKENDS)
def test_writes_exactly_the_rows_of_the_step(backend):
    case = Case([(5, 1), (0, 6), (2, 3)], block_size=4)
    case.run(backend, 0, 1.0)
    keys, values = case.cache.layers[0]
    for row, (before, now) in enumerate(case.shares):
        for at in range(before + now):
            place = case.tables[row][at // 4], at % 4
            assert torch.equal(keys[place], case.key[0][row][at])
            assert torch.equal(values[place], case.value[0][row][at])
    for pages in (keys, values):
        held = pages.isnan().all(-1).all(-1).logical_not().nonzero().tolist()
        assert {*map(tuple, held)} == case.written()
    assert bool(case.cache.layers[1][0].isnan().any())  # the other layer's was left alone


@given(
    shares=st.lists(
        st.tuples(st.integers(0, 20), st.integers(1, 6) | st.just(1)), min_size=1, max_size=6
    ),
    heads=st.sampled_from([(1, 1), (4, 4), (4, 2), (6, 1)]),
    block_size=st.sampled_from([1, 2, 3, 8, 16]),
    seed=st.integers(0, 99),
)
@settings(max_examples=60, deadline=None)
def test_outputs_and_locations_are_those_of_the_formula_and_the_tables(
    shares, heads, block_size, seed
):
    """For the kernels of Triton see `test_triton_backend.py`."""
    case = Case(shares, heads=heads, block_size=block_size, seed=seed, spare=seed % 3)
    page, offset = case.rows.locations(block_size)
    wanted = [
        (case.tables[row][at // block_size], at % block_size)
        for row, (before, now) in enumerate(shares)
        for at in range(before, before + now)
    ]
    assert list(zip(page.tolist(), offset.tolist(), strict=True)) == wanted
    indices, indptr = case.rows.indices(block_size)
    for row, (before, now) in enumerate(shares):
        pages = -(-(before + now) // block_size)
        held = indices[indptr[row] : indptr[row + 1]].tolist()
        assert held == case.tables[row][:pages]
    for layer, scale in ((1, 0.35), (0, 1.3)):
        found = case.run("torch", layer, scale)
        torch.testing.assert_close(found, case.expected(layer, scale), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mix", others_slow(["decodes"], ["decodes", "mixed"]))
def test_a_sequence_that_is_not_finite_leaves_the_others_alone(backend, mix):
    """Its neighbours' output is the same to the bit, and its own shows that something is wrong."""
    expected = Case(MIXES[mix], heads=(4, 2), seed=3).run(backend, 0, 0.35)
    bad = len(MIXES[mix]) - 1
    for what, value in (("query", torch.nan), ("key", torch.inf), ("key", torch.nan),
                        ("value", torch.inf)):  # fmt: skip
        sick = Case(MIXES[mix], heads=(4, 2), seed=3)
        # The newest token of the last sequence.
        getattr(sick, what)[0][bad][-1, 0, 2] = value
        found = sick.run(backend, 0, 0.35)
        owner = torch.from_numpy(sick.rows.owners) == bad
        assert torch.equal(found[~owner], expected[~owner])
        if what != "key" or value != torch.inf:
            assert not bool(found[owner][-1].isfinite().all())


SHAPES = [((4, 2), 16, 4), ((2, 2), 24, 16), ((6, 1), 8, 1)]
TORCH = [("torch", seed, shape) for shape in SHAPES for seed in range(8)]
TRITON = [("triton", seed, shape) for shape in SHAPES for seed in range(3)]


@pytest.mark.parametrize(
    ("backend", "seed", "shape"), others_slow([*TORCH, TRITON[0]], [*TORCH, *TRITON])
)
def test_images_whose_tokens_see_each_other(backend, seed, shape):
    if backend == "triton" and DEVICE == "cuda":
        pytest.skip("tests/gpu runs it on a GPU")
    heads, width, size = shape
    case = image_case(seed, heads=heads, width=width, block_size=size)
    expected = case.expected(0, 0.3)
    torch.testing.assert_close(case.run(backend, 0, 0.3), expected, rtol=1e-5, atol=1e-5)


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
def test_backends_that_cannot_be_used(monkeypatch, name, patched, said):
    library = SimpleNamespace() if "computes" in said else None
    monkeypatch.setitem(sys.modules, "flashinfer", library)
    if patched:
        monkeypatch.setattr(*patched)
    with pytest.raises(SettingsError, match=said):
        make_backend(name, Case([(0, 1)]).cache)


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
