"""Base projection and LoRA together, against row-by-row arithmetic."""

from dataclasses import replace
from itertools import product

import pytest
import torch

from tests.support.cases import others_slow
from tests.support.lora_cases import DEVICE, assert_near, make_case, needs_triton
from valora_kernels import atmm as atmm_module
from valora_kernels import project
from valora_kernels.arrangements import ALL, default_tiling
from valora_kernels.atmm import launch, shape_of
from valora_kernels.gpus import generic
from valora_kernels.lookup import TilingTable, using
from valora_kernels.metadata import LoraBatch
from valora_kernels.project import add_projection, linear
from valora_kernels.reference import atmm_reference
from valora_kernels.search import call_of
from valora_kernels.tiling import ProjectTiling, Tiling
from valora_kernels.timing import KernelWorkload, spread

pytest.importorskip("triton")
pytestmark = needs_triton

TILINGS = {
    "beside": ProjectTiling(64, 32, 32, 4, 2),
    "beside-tiles": ProjectTiling(16, 16, 64, 4, 2),
    "folded": ProjectTiling(16, 32, 32, 4, 2, fold=True),
    "separate": None,
}
INPUTS = [*product([torch.float16, torch.float32], ["uniform", "distinct", "skewed", "none"])]
WIDTHS = (64, 24)


@pytest.mark.parametrize(
    ("tiling", "inputs"),
    others_slow(
        [(name, INPUTS[(3 * n + more) % 8]) for n, name in enumerate(TILINGS) for more in (0, 5)],
        product(TILINGS, INPUTS),
    ),
)
def test_projection(tiling, inputs):
    dtype, popularity = inputs
    case = make_case(37, [8, 16, 24], 72, WIDTHS, dtype=dtype, popularity=popularity)
    bases = [torch.randn(n, 72, device=DEVICE).to(dtype) / 8 for n in WIDTHS]
    bias = torch.randn(WIDTHS[0], device=DEVICE).to(dtype)  # of the first projection only
    want = [
        change + case.x.double() @ base.double().T
        for change, base in zip(case.expected(add=False), bases, strict=True)
    ]
    want[0] += bias.double()
    out = [torch.full_like(y, float("nan")) for y in case.ys]
    add_projection(
        out, case.x, bases, case.weights, case.batch, biases=[bias, None], tiling=TILINGS[tiling]
    )
    for one, other in zip(out, want, strict=True):
        assert_near(one, other)


@pytest.mark.parametrize("apart", ["nothing", "y", "W"])
def test_stacked_projections_are_one_product(apart):
    """Slices of one y and one W give what separate tensors give."""
    case = make_case(9, [8, 16], 72, WIDTHS, dtype=torch.float32, device="cpu")
    base = torch.randn(sum(WIDTHS), 72)
    out = torch.full((9, sum(WIDTHS)), float("nan"))
    bases, ys = list(base.split(WIDTHS)), list(out.split(WIDTHS, dim=1))
    if apart == "W":
        bases[1] = bases[1].clone()
    if apart == "y":
        ys[1] = ys[1].clone()
    add_projection(ys, case.x, bases, case.weights, case.batch)
    for one, change, w in zip(ys, case.expected(add=False), bases, strict=True):
        assert_near(one, change + case.x.double() @ w.double().T)


def test_a_tiling_of_lora_that_comes_first_is_replaced_if_it_does_not_fit(monkeypatch):
    from triton.runtime.errors import OutOfResources

    case = make_case(37, [8, 16, 24], 72, WIDTHS, dtype=torch.float16)
    known = generic("of this test", processors=20, shared_memory=88 << 10, capability=(8, 0))
    case.batch.gpu = gpu = replace(known, lora_first_rows=37)
    monkeypatch.setattr(project, "use_triton", lambda _: True)
    monkeypatch.setattr(atmm_module, "_instead", {})
    large, tried = Tiling("shrink_expand", 16, 16, 32, 32, 16), []

    def fits_only_small(tiling, *given, **options):
        tried.append(tiling)
        if tiling == large:
            raise OutOfResources(300_000, 232_448, "shared memory")
        launch(tiling, *given, **options)

    monkeypatch.setattr(atmm_module, "launch", fits_only_small)
    shape = shape_of(case.weights, case.batch, first=True)
    bases = [torch.randn(n, 72, device=DEVICE).half() / 8 for n in WIDTHS]
    for _ in range(2):
        out = [torch.full_like(y, float("nan")) for y in case.ys]
        with using(TilingTable(gpu, [(shape, large)])):
            add_projection(out, case.x, bases, case.weights, case.batch)
        for one, change, base in zip(out, case.expected(add=False), bases, strict=True):
            assert_near(one, change + case.x.double() @ base.double().T)
    small = default_tiling(shape)
    assert tried == [large, small, small]


@pytest.mark.parametrize(("popularity", "times"), [("uniform", 1), ("none", 0)])
def test_lora_comes_first_with_tilings_measured_for_that(monkeypatch, popularity, times):
    case = make_case(37, [8, 16, 24], 72, WIDTHS, dtype=torch.float16, popularity=popularity)
    known = generic("of this test", processors=20, shared_memory=88 << 10, capability=(8, 0))
    case.batch.gpu = gpu = replace(known, lora_first_rows=37)
    monkeypatch.setattr(project, "use_triton", lambda _: True)
    monkeypatch.setattr(atmm_module, "use_triton", lambda _: True)
    launched = []

    def noted(tiling, *given, **options):
        if not options["add"]:
            launched.append(tiling)
        launch(tiling, *given, **options)

    monkeypatch.setattr(atmm_module, "launch", noted)
    first, other = (Tiling("shrink_expand", 16, 16, 32, 32, ranks) for ranks in (16, 32))
    shapes = [shape_of(case.weights, case.batch, first=way) for way in (True, False)]
    bases = [torch.randn(n, 72, device=DEVICE).half() / 8 for n in WIDTHS]
    out = [torch.full_like(y, float("nan")) for y in case.ys]
    with using(TilingTable(gpu, zip(shapes, (first, other), strict=True))):
        add_projection(out, case.x, bases, case.weights, case.batch)
    changes = case.expected(add=False)
    for one, change, base in zip(out, changes, bases, strict=True):
        assert_near(one, change + case.x.double() @ base.double().T)
    assert launched == [first] * times


def test_the_search_times_lora_first_with_the_base_product():
    work = KernelWorkload(
        spread(24, 3), [16] * 3, 64, WIDTHS, dtype=torch.float32, device=DEVICE,
        cold=1, max_copies=2, first=True,
    )  # fmt: skip
    one, other = work.sets
    assert one.base is not None
    assert one.y is not None
    want = [torch.zeros_like(y) for y in one.ys]
    atmm_reference(want, one.x, one.weights, work.batch)
    before = other.ys[1].clone()
    call_of(ALL, Tiling("shrink_expand", 16, 16, 32, 32, 16), work, one)()
    assert_near(one.y, torch.cat(want, 1).double() + one.x.double() @ one.base.double().T)
    assert torch.equal(one.y, torch.cat(list(one.ys), 1))
    assert torch.equal(other.ys[1], before)


@pytest.mark.parametrize("tiling", ["beside-tiles", "folded"])
def test_paged_adapters_and_changing_batches(tiling):
    case = make_case(21, [8, 16, 24], 40, WIDTHS, dtype=torch.float32, paged=True)
    case.batch = LoraBatch(21, 3, DEVICE, fixed=True)
    bases = [torch.randn(n, 40, device=DEVICE) / 6 for n in WIDTHS]
    for adapters in ([2, 1, 0] * 7, [-1] * 21, [1] * 20 + [2]):
        case.batch.update(adapters, case.ranks, case.scalings)
        case.adapters = torch.tensor(adapters)[:, None].numpy()
        out = [torch.full_like(y, float("nan")) for y in case.ys]
        add_projection(out, case.x, bases, case.weights, case.batch, tiling=TILINGS[tiling])
        changes = case.expected(add=False)
        for one, change, base in zip(out, changes, bases, strict=True):
            assert_near(one, change + case.x.double() @ base.double().T)


@pytest.mark.parametrize("bias", [False, True])
def test_a_product_without_lora(bias):
    x, w = torch.randn(5, 72), torch.randn(48, 72)
    b = torch.randn(48) if bias else None
    want = x.double() @ w.double().T + (0 if b is None else b.double())
    assert_near(linear(x, w, b), want)


def test_bad_base_weights_are_refused():
    case = make_case(5, [8], 32, (16,), dtype=torch.float16, device="cpu")
    for bases in ([], [torch.zeros(16, 24).half()], [torch.zeros(16, 32)]):
        with pytest.raises(ValueError, match=r"expected .* got "):
            add_projection(case.ys, case.x, bases, case.weights, case.batch)
    base = [torch.zeros(16, 32).half()]
    for biases in ([torch.zeros(8).half()], [torch.zeros(16)], [None, None]):
        with pytest.raises(ValueError, match=r"expected .* got "):
            add_projection(case.ys, case.x, base, case.weights, case.batch, biases=biases)
    two = make_case(5, [8, 16], 32, (16,), dtype=torch.float16, terms=2, device="cpu")
    with pytest.raises(ValueError, match="folding expected one term a row, got 2"):
        add_projection(
            two.ys, two.x, [torch.zeros(16, 32).half()], two.weights, two.batch,
            tiling=ProjectTiling(16, 32, 32, 4, 2, fold=True),
        )  # fmt: skip
