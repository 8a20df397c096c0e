"""Merging: one rounding, no drift, one pass from any state; on the CPU in Triton's interpreter."""

import hashlib
import weakref

import pytest
import torch

from tests.support.lora_cases import DEVICE, needs_triton, paged_weights, write_adapter
from valora_kernels.merge import MergeableWeights, MergeTiling
from valora_kernels.weights import LoraWeights

SHAPES = {"q": (40, 72), "k": (24, 72), "o": (72, 40)}
RANKS = (24, 8)
SCALINGS = (0.7, 1.9)
Adapters = list[dict[str, tuple[torch.Tensor, torch.Tensor]]]


def make(dtype, paged=False):
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=generator).to(dtype).to(DEVICE)

    linears = {
        n: torch.nn.Linear(i, o, bias=False).to(DEVICE, dtype) for n, (o, i) in SHAPES.items()
    }
    base = {name: linear.weight.detach().clone() for name, linear in linears.items()}
    merged = MergeableWeights(SHAPES, dtype=dtype, device=DEVICE)
    for name, linear in linears.items():
        linear.weight = torch.nn.Parameter(merged.set(name, linear.weight), requires_grad=False)
    merged.keep()

    def room(in_features, out_features):
        if paged:
            return paged_weights(2, 24, in_features, out_features, dtype, DEVICE, generator)
        return LoraWeights.contiguous(2, 24, in_features, out_features, dtype=dtype, device=DEVICE)

    inputs, output = room(72, (40, 24)), room(40, (72,))
    adapters = []
    for slot, r in enumerate(RANKS):
        mine = {n: (normal(r, i), normal(o, r)) for n, (o, i) in SHAPES.items()}
        write_adapter(inputs, slot, [mine["q"][0], mine["k"][0]], [mine["q"][1], mine["k"][1]])
        write_adapter(output, slot, [mine["o"][0]], [mine["o"][1]])
        adapters.append(mine)
    merged.bind({"q": (inputs, 0), "k": (inputs, 1), "o": (output, 0)})
    return merged, linears, base, adapters


TILING = MergeTiling(32, 32, 64, 16, 4)


@pytest.mark.parametrize(
    "tiling",
    [pytest.param(TILING, marks=needs_triton, id="kernel"), pytest.param(None, id="default")],
)
@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_every_weight_is_rounded_once(dtype, paged, tiling):
    merged, linears, base, adapters = make(dtype, paged)
    for slot in (0, 1, 0):  # from adapter to adapter without an unmerge
        merged.merge(slot, RANKS[slot], SCALINGS[slot], tiling=tiling)
        for name, linear in linears.items():
            a, b = adapters[slot][name]
            exact = base[name].double() + SCALINGS[slot] * (b.double() @ a.double())
            # fp32 sums may fall on the other side of a rounding boundary, and no further.
            unit = torch.finfo(dtype).eps * (1 if dtype == torch.float16 else 8)
            assert ((linear.weight.double() - exact).abs() <= unit * (exact.abs() + 1)).all()
            once = (exact.float().to(dtype) == linear.weight).double().mean()
            assert once > 0.99 or dtype == torch.float32


@needs_triton
def test_a_thousand_switches_leave_no_trace():
    merged, linears, base, _ = make(torch.float16)

    def digest():
        return hashlib.sha256(merged.live.cpu().numpy().tobytes()).hexdigest()

    before = digest()
    for turn in range(1000):
        merged.live.add_(0.125 * (turn % 7))  # whatever a merge wrote
        merged.unmerge()
    merged.merge(1, 8, 1.0, tiling=TILING)
    assert digest() != before
    merged.unmerge()
    assert digest() == before
    assert all(torch.equal(linears[name].weight, base[name]) for name in linears)


def test_weights_can_go_before_the_pristine_copy_is_made():
    """Base, live and pristine weights together may not fit into the memory."""
    merged = MergeableWeights({"q": (4, 8)}, dtype=torch.float32, device="cpu")
    weight = torch.arange(32.0).view(4, 8)
    gone = weakref.ref(weight)
    merged.set("q", weight)
    assert "pristine" not in vars(merged)
    del weight
    assert gone() is None
    merged.keep()
    assert torch.equal(merged.pristine[:32], torch.arange(32.0))
    with pytest.raises(RuntimeError, match="q: the pristine weights are taken"):
        merged.set("q", torch.zeros(4, 8))


def test_bad_input_is_refused():
    merged, _, _, _ = make(torch.float32)
    for slot, rank in ((2, 8), (-1, 8), (0, 25), (0, 0)):
        with pytest.raises(ValueError, match=r"expected .* got "):
            merged.merge(slot, rank, 1.0)
    with pytest.raises(ValueError, match=r"expected .* got "):
        merged.set("q", torch.zeros(8, 8))
    weights = LoraWeights.contiguous(1, 8, 72, (24,), dtype=torch.float32, device=DEVICE)
    for sources in ({"v": (weights, 0)}, {"q": (weights, 0)}):
        with pytest.raises(ValueError, match="expected"):
            merged.bind(sources)
    half = LoraWeights.contiguous(1, 8, 72, (24,), dtype=torch.float16, device=DEVICE)
    with pytest.raises(ValueError, match=r"expected torch\.float32"):
        merged.bind({"k": (half, 0)})
    with pytest.raises(ValueError, match="expected at least one matrix"):
        MergeableWeights({}, dtype=torch.float32, device="cpu")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_weights_that_are_not_finite_are_found(value):
    merged, linears, base, _ = make(torch.float16)
    assert merged.is_finite()
    linears["o"].weight[71, 39] = value
    assert not merged.is_finite()
    merged.unmerge()
    assert merged.is_finite()
    assert all(torch.equal(linears[name].weight, base[name]) for name in linears)


def test_a_product_that_overflows_is_found():
    """A, B and the base weights are finite, and so is everything but one element of B·A."""
    merged, _, _, adapters = make(torch.float16)
    merged.merge(0, 24, 1.0)
    assert merged.is_finite()
    merged.merge(0, 24, 3e4)
    assert not merged.is_finite()
    merged.merge(1, 8, 1.0)
    assert merged.is_finite()
    assert adapters
