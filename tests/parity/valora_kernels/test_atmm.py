"""The LoRA operator against row-by-row arithmetic; on the CPU in Triton's interpreter."""

from itertools import product

import numpy as np
import pytest
import torch

from tests.bench.valora_kernels.operators.static import TILING as STATIC
from tests.support.cases import others_slow
from tests.support.lora_cases import DEVICE, assert_near, make_case, needs_triton
from valora_kernels import launching
from valora_kernels.atmm import atmm, launch
from valora_kernels.launching import start
from valora_kernels.metadata import LoraBatch
from valora_kernels.reference import atmm_reference
from valora_kernels.tiling import Tiling

pytest.importorskip("triton")
pytestmark = needs_triton

TILINGS = {
    "shrink-expand": Tiling("shrink_expand", 16, 32, 32, 32, 16),
    "unsplit": Tiling("shrink_expand", 32, 64, 32, 128, 32),
    "gathered": Tiling("shrink_expand", 16, 32, 32, 32, 32, gather=True, loop=2),
    "static": STATIC,
    "fused": Tiling("fused", 16, 32, 32, parts=2),
    "fused-large": Tiling("fused", 32, 64, 64),
}
NAMES = ["shrink_expand", "fused"]
DTYPES = [torch.float16, torch.float32]


def some(fast, *every):
    """All combinations, of which those that are not among `fast` are slow."""
    return others_slow(list(fast), list(product(*every)))


def in_turn(every):
    """Each tiling with one of the others, in turn."""
    return [(name, every[n % len(every)]) for n, name in enumerate(TILINGS)]


def check(case, tiling):
    want = case.expected()
    got = [y.clone() for y in case.ys]
    launch(tiling, got, case.x, case.weights, case.batch)
    for one, other in zip(got, want, strict=True):
        assert_near(one, other)
    poisoned = [torch.full_like(y, float("nan")) for y in case.ys]
    launch(tiling, poisoned, case.x, case.weights, case.batch, add=False)
    for one, other in zip(poisoned, case.expected(add=False), strict=True):
        assert_near(one, other)


@pytest.mark.parametrize(("tiling", "dtype"), some(in_turn(DTYPES), TILINGS, DTYPES))
def test_mixed_ranks_with_base_only_rows(tiling, dtype):
    check(make_case(7, [8, 24, 40], 72, (64,), dtype=dtype), TILINGS[tiling])


@pytest.mark.parametrize(
    ("tiling", "paged"),
    some(product(("shrink-expand", "gathered", "fused"), [True]), TILINGS, [False, True]),
)
def test_three_projections_of_different_widths_and_two_terms(tiling, paged):
    case = make_case(5, [8, 16], 72, (64, 24, 40), dtype=torch.float16, terms=2, paged=paged)
    check(case, TILINGS[tiling])


POPULARITIES = ["distinct", "identical", "zipf", "skewed", "none"]


@pytest.mark.parametrize(
    ("name", "popularity"),
    some(((NAMES[n % 2], one) for n, one in enumerate(POPULARITIES)), NAMES, POPULARITIES),
)
def test_popularity(name, popularity):
    case = make_case(33, [16, 8, 24, 16], 40, (48,), dtype=torch.float16, popularity=popularity)
    check(case, Tiling(name, 16, 64, 64, 64, 32))


@pytest.mark.parametrize(
    ("name", "rows"), some([*product(NAMES, [0, 1]), (NAMES[0], 133)], NAMES, [0, 1, 133])
)
def test_row_counts(name, rows):
    case = make_case(rows, [8, 16, 32], 32, (32,), dtype=torch.float32, popularity="zipf")
    check(case, Tiling(name, 32, 32, 32, 32, 32))


@pytest.mark.parametrize("name", NAMES)
def test_large_ranks(name):
    case = make_case(9, [256, 8, 136], 64, (40, 24), dtype=torch.float16, terms=2)
    check(case, Tiling(name, 16, 64, 64, 64, 64))


def test_reference_is_the_formula():
    for paged in (False, True):
        case = make_case(
            23, [8, 20, 3], 31, (17, 5), dtype=torch.float32, terms=2, paged=paged, device="cpu"
        )
        want = case.expected()
        atmm_reference(case.ys, case.x, case.weights, case.batch)
        for one, other in zip(case.ys, want, strict=True):
            assert_near(one, other)


def test_a_tiling_that_does_not_fit_is_replaced(monkeypatch, caplog):
    from triton.runtime.errors import OutOfResources

    from valora_kernels import atmm as module

    case = make_case(19, [8, 16, 64], 64, (64, 32), dtype=torch.float16)
    tried = []
    small = module.default_tiling(module.shape_of(case.weights, case.batch))

    def fits_only_small(tiling, *args, **options):
        tried.append(tiling)
        if tiling != small:
            raise OutOfResources(300_000, 232_448, "shared memory")
        launch(tiling, *args, **options)

    monkeypatch.setattr(module, "use_triton", lambda _: True)
    monkeypatch.setattr(module, "launch", fits_only_small)
    large = Tiling("fused", 128, 128, 128, 0)
    monkeypatch.setattr(module, "choose", lambda *_: large)
    monkeypatch.setattr(module, "_instead", {})
    want = case.expected()
    with caplog.at_level("WARNING"):
        atmm(case.ys, case.x, case.weights, case.batch)
    for one, other in zip(case.ys, want, strict=True):
        assert_near(one, other)
    atmm(case.ys, case.x, case.weights, case.batch)
    assert tried == [large, small, small]
    assert "does not fit" in caplog.text


def test_next_batch_reuses_the_same_buffers():
    """A captured graph relies on it: addresses stay, contents change, also if others tile anew."""
    case = make_case(12, [8, 16, 24], 32, (32,), dtype=torch.float32)
    case.batch = LoraBatch(12, 3, DEVICE, fixed=True)
    tiling = Tiling("shrink_expand", 16, 32, 32, 32, 16, gather=True)
    later = Tiling("shrink_expand", 32, 32, 32, 32, 32)  # of a table that changed
    places = set()
    for adapters in ([0] * 12, [2, 1, 0, -1] * 3, [-1] * 12, [1] * 11 + [2]):
        case.batch.update(adapters, case.ranks, case.scalings)
        case.adapters = torch.tensor(adapters)[:, None].numpy()
        want = case.expected()
        got = [y.clone() for y in case.ys]
        launch(tiling, got, case.x, case.weights, case.batch)
        places.add(case.batch.tiles(16).records.data_ptr())
        assert_near(got[0], want[0])
        got = [y.clone() for y in case.ys]
        launch(later, got, case.x, case.weights, case.batch)
        assert_near(got[0], want[0])
    assert len(places) == 1


@pytest.mark.parametrize(
    ("terms", "loop", "gather", "split"),
    others_slow([(1, 1, False, 16)], [(1, 1, False, 32), (2, 2, True, 16), (1, 1, False, 16)]),
)
def test_few_programs_take_the_tiles_of_many_adapters_in_turns(
    monkeypatch, terms, loop, gather, split
):
    """Two tiles at once; the mixes have 7 tiles, 2, none, and 1 beside rows without an adapter."""
    monkeypatch.setattr(launching, "TURNS_FROM", 0)
    monkeypatch.setattr(launching, "SHRINK_TURNS_FROM", 0)
    started = []

    def noted(kernel, programs, *given, **options):
        started.append(("BR" in options, programs, options["TURNS"]))
        start(kernel, programs, *given, **options)

    monkeypatch.setattr(launching, "start", noted)
    case = make_case(12, [8] * 7, 32, (32, 64), dtype=torch.float32, terms=terms)
    case.batch = LoraBatch(12, 12, DEVICE, fixed=True)
    tiling = Tiling("shrink_expand", 16, 32, 16, split, 16, loop=loop, gather=gather)
    mixes = [[*range(7), *[-1] * 5], [3] * 7 + [5] * 5, [-1] * 12, [6, -1] * 6]
    for mix in mixes:
        own = np.array(mix)[:, None]
        case.adapters = np.concatenate([own, np.zeros_like(own)], axis=1) if terms == 2 else own
        case.batch.update(case.adapters, case.ranks, case.scalings, case.coefficients)
        check(case, tiling)
    groups = -(-32 // (32 * loop)) + -(-64 // (32 * loop))
    shrinks = 2 * len(case.ys) * terms * (32 // split)
    assert set(started) == {(True, shrinks, True), (False, 2 * groups, True)}


def test_without_a_gpu_the_reference_runs(caplog):
    launching._warn_no_gpu.cache_clear()
    case = make_case(5, [8, 16], 32, (16,), dtype=torch.float32, device="cpu")
    want = case.expected()
    with caplog.at_level("WARNING"):
        atmm(case.ys, case.x, case.weights, case.batch)
        atmm([torch.zeros_like(case.ys[0])], case.x, case.weights, case.batch)
    assert_near(case.ys[0], want[0])
    assert caplog.text.count("reference") == 1


def bad_call(name):
    case = make_case(6, [8, 16], 32, (16, 24), dtype=torch.float16, device="cpu")
    x, ys, weights, batch = case.x, case.ys, case.weights, case.batch
    if name == "projections":
        ys = ys[:1]
    elif name == "width of x":
        x = x[:, :24].contiguous()
    elif name == "rows of x":
        x = x[:5]
    elif name == "width of y":
        ys = [ys[0], ys[0]]
    elif name == "dtype of x":
        x = x.float()
    elif name == "dtype of y":
        ys = [ys[0], ys[1].float()]
    elif name == "integers":
        x = x.to(torch.int32)
    elif name == "columns apart":
        x = torch.randn(32, 6).half().T
    elif name == "unaligned rows":
        ys = [torch.randn(6, 19).half()[:, :16], ys[1]]
    elif name == "rank above the weights'":
        batch.update([0] * 6, [32, 16], [1.0, 1.0])
    elif name == "adapter above the weights'":
        batch.update([2] * 6, [8, 16, 8], [1.0] * 3)
    return ys, x, weights, batch


@pytest.mark.parametrize(
    "name",
    [
        "projections", "width of x", "rows of x", "width of y", "dtype of x", "dtype of y",
        "integers", "columns apart", "unaligned rows", "rank above the weights'",
        "adapter above the weights'",
    ],
)  # fmt: skip
def test_bad_input_is_refused_before_any_launch(name):
    ys, x, weights, batch = bad_call(name)
    before = [y.clone() for y in ys]
    with pytest.raises(ValueError, match=r"expected .* got "):
        atmm(ys, x, weights, batch, tiling=Tiling("shrink_expand"))
    assert all(torch.equal(a, b) for a, b in zip(ys, before, strict=True))


def test_tensors_of_different_devices_are_refused():
    case = make_case(6, [8, 16], 32, (16,), dtype=torch.float16, device="cpu")
    with pytest.raises(ValueError, match="expected cpu, got meta"):
        atmm(case.ys, case.x.to("meta"), case.weights, case.batch)


OVERFLOWS = [(1, float("inf")), (2, float("nan")), (2, 6e4)]


@pytest.mark.parametrize(("tiling", "overflow"), some(in_turn(OVERFLOWS), TILINGS, OVERFLOWS))
def test_rows_that_overflow_leave_the_others_alone(tiling, overflow):
    """Not a bit of a row depends on another: neither x nor h of a masked row is ever multiplied."""
    tiling, (terms, value) = TILINGS[tiling], overflow
    case = make_case(
        20, [8, 24], 72, (64, 24), dtype=torch.float16, terms=terms, popularity="uniform"
    )
    want = [y.clone() for y in case.ys]
    launch(tiling, want, case.x, case.weights, case.batch)
    sick = torch.from_numpy(case.adapters[:, 0] == 1)
    sick[3] = True
    x = case.x.clone()
    x[sick, ::3] = value
    for y in case.ys:
        y[sick] = float("nan")
    launch(tiling, case.ys, x, case.weights, case.batch)
    for got, other in zip(case.ys, want, strict=True):
        assert torch.equal(got[~sick], other[~sick])
        assert not bool(got[sick].isfinite().all())


@pytest.mark.parametrize("terms", [1, 2])
def test_rows_that_overflow_leave_the_others_alone_in_the_reference(terms):
    case = make_case(
        40, [8, 24, 16], 72, (64, 24), dtype=torch.float16, terms=terms, popularity="uniform"
    )
    want = [y.clone() for y in case.ys]
    atmm_reference(want, case.x, case.weights, case.batch)
    sick = torch.from_numpy(case.adapters[:, 0] == 1)
    x = case.x.clone()
    x[sick] = float("inf")
    atmm_reference(case.ys, x, case.weights, case.batch)
    for got, other in zip(case.ys, want, strict=True):
        assert torch.equal(got[~sick], other[~sick])
