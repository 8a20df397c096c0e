"""The kernels on a GPU: bf16, the shipped table, CUDA graphs, no synchronisation."""

import hashlib
import shutil
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.lora_cases import assert_near, make_case
from valora_kernels.atmm import atmm, launch
from valora_kernels.gpus import gpu_of
from valora_kernels.lookup import choose, table_of
from valora_kernels.merge import MergeableWeights
from valora_kernels.metadata import LoraBatch
from valora_kernels.project import add_projection, linear
from valora_kernels.tiling import ProjectTiling, Shape, Tiling
from valora_kernels.weights import LoraWeights

pytestmark = pytest.mark.gpu

TILINGS = [
    pytest.param(None, id="table"),
    pytest.param(Tiling("shrink_expand", 16, 64, 128, 512, 64), id="shrink-expand"),
    pytest.param(Tiling("shrink_expand", 64, 128, 64, 4096, 64, stages=4), id="large"),
    pytest.param(Tiling("shrink_expand", 16, 64, 128, 256, 16, gather=True, loop=4), id="gathered"),
    pytest.param(
        Tiling("shrink_expand", 64, 128, 64, 512, 64, gather=True, loop=2), id="large-gathered"
    ),
    pytest.param(Tiling("fused", 32, 64, 64, parts=2), id="fused"),
]
MIXED = [64, 8, 32, 16, 64, 48]


@contextmanager
def no_synchronisation():
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def check(case, tiling):
    want = case.expected()
    got = [y.clone() for y in case.ys]
    atmm(got, case.x, case.weights, case.batch, tiling=tiling)
    for one, other in zip(got, want, strict=True):
        assert_near(one, other)


@pytest.mark.parametrize("tiling", TILINGS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [0, 1, 7, 133])
def test_row_counts(tiling, dtype, rows):
    check(make_case(rows, MIXED, 512, (768,), dtype=dtype, device="cuda"), tiling)


@pytest.mark.parametrize("tiling", TILINGS)
@pytest.mark.parametrize("popularity", ["distinct", "identical", "zipf", "skewed", "none"])
def test_popularity(tiling, popularity):
    case = make_case(
        200, MIXED, 1024, (1024,), dtype=torch.bfloat16, popularity=popularity, device="cuda"
    )
    check(case, tiling)


@pytest.mark.parametrize("tiling", TILINGS)
@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("terms", [1, 2])
def test_three_projections_of_odd_widths(tiling, paged, terms):
    case = make_case(
        37, MIXED, 1096, (1000, 264, 520), dtype=torch.bfloat16, terms=terms, paged=paged,
        device="cuda",
    )  # fmt: skip
    check(case, tiling)


@pytest.mark.parametrize("tiling", TILINGS)
def test_ranks_up_to_256(tiling):
    case = make_case(
        50, [256, 8, 128, 136], 1024, (512,), dtype=torch.bfloat16, terms=2, device="cuda"
    )
    check(case, tiling)


@pytest.mark.parametrize(("rows", "slots"), [(1, 1), (64, 16), (64, 64), (700, 4)])
def test_model_width(rows, slots):
    ranks = [MIXED[i % len(MIXED)] for i in range(slots)]
    case = make_case(rows, ranks, 4096, (4096,), dtype=torch.bfloat16, device="cuda")
    check(case, None)


@pytest.mark.parametrize("tiling", TILINGS)
def test_one_graph_expands_the_tiles_of_any_mix_in_turns(tiling):
    """A prompt beside room for many more adapters than have rows, and all of them."""
    case = make_case(600, [16] * 128, 512, (11008, 4096), dtype=torch.bfloat16, device="cuda")
    case.batch = LoraBatch(600, 129, "cuda", fixed=True)
    case.batch.update(case.adapters, case.ranks, case.scalings)
    got = [torch.empty_like(y) for y in case.ys]
    atmm(got, case.x, case.weights, case.batch, tiling=tiling)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        atmm(got, case.x, case.weights, case.batch, tiling=tiling)
    rng = np.random.default_rng(1)
    for mix in (np.full(600, 5), rng.integers(-1, 128, 600), np.full(600, -1),
                np.where(np.arange(600) < 500, 9, rng.integers(0, 128, 600))):  # fmt: skip
        case.adapters = mix[:, None]
        case.batch.update(case.adapters, case.ranks, case.scalings)
        want = case.expected()
        for one, y in zip(got, case.ys, strict=True):
            one.copy_(y)
        graph.replay()
        for one, other in zip(got, want, strict=True):
            assert_near(one, other)


@pytest.mark.parametrize("tiling", TILINGS)
def test_one_graph_serves_any_mix(tiling):
    rows = 48
    case = make_case(rows, MIXED, 512, (512, 256), dtype=torch.bfloat16, terms=2, device="cuda")
    case.batch = LoraBatch(rows, rows, "cuda", fixed=True)
    case.batch.update(case.adapters, case.ranks, case.scalings, case.coefficients)
    out = [y.clone() for y in case.ys]
    with no_synchronisation():
        atmm(out, case.x, case.weights, case.batch, tiling=tiling)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            atmm(out, case.x, case.weights, case.batch, tiling=tiling)
    rng = np.random.default_rng(1)
    mixes = [rng.integers(-1, len(MIXED), (rows, 2)) for _ in range(4)]
    mixes += [np.full((rows, 2), -1), np.full((rows, 2), 3), np.tile([[5, 0]], (rows, 1))]
    for adapters in mixes:
        case.adapters, case.coefficients = adapters, rng.choice([-1, 1], adapters.shape)
        with no_synchronisation():
            case.batch.update(adapters, case.ranks, case.scalings, case.coefficients)
        for o, y in zip(out, case.ys, strict=True):
            o.copy_(y)
        graph.replay()
        step = [w - y.double() for w, y in zip(case.expected(), case.ys, strict=True)]
        for o, y, change in zip(out, case.ys, step, strict=True):
            assert_near(o, y.double() + 3 * change)


@pytest.mark.parametrize("rows", [1, 3, 16, 17])
@pytest.mark.parametrize("width", [(12288, 4096), (4096, 11008), (3080, 520)])
def test_a_product_without_lora(rows, width):
    g = torch.Generator("cuda").manual_seed(rows)
    x, w, bias = (
        torch.randn(shape, generator=g, device="cuda").bfloat16()
        for shape in ((rows, width[1]), width, (width[0],))
    )
    for b in (None, bias):
        want = x.double() @ w.double().T + (0 if b is None else b.double())
        assert_near(linear(x, w, b), want)


def test_results_repeat_bit_for_bit():
    case = make_case(64, MIXED, 2048, (2048,), dtype=torch.bfloat16, device="cuda")
    found = []
    for _ in range(20):
        out = [y.clone() for y in case.ys]
        atmm(out, case.x, case.weights, case.batch)
        found.append(out[0])
    assert all(torch.equal(one, found[0]) for one in found)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("rows", "tiling"),
    [
        (3, None), (64, None), (100, None), (300, None), (1100, None),
        (300, ProjectTiling(128, 256, 64, 8, 3, fold=True)),
        (64, ProjectTiling(64, 32, 128, 4, 4)), (300, ProjectTiling(64, 128, 64, 4, 4)),
    ],
)  # fmt: skip
def test_projection_total(rows, tiling, dtype):
    case = make_case(rows, MIXED, 520, (768, 264), dtype=dtype, device="cuda")
    bases = [torch.randn(n, 520, device="cuda").to(dtype) / 23 for n in (768, 264)]
    want = [
        change + case.x.double() @ base.double().T
        for change, base in zip(case.expected(add=False), bases, strict=True)
    ]
    for _ in range(3):  # the second follows the first without a gap
        out = [torch.full_like(y, float("nan")) for y in case.ys]
        add_projection(out, case.x, bases, case.weights, case.batch, tiling=tiling)
        for one, other in zip(out, want, strict=True):
            assert_near(one, other)


@pytest.mark.parametrize("rows", [0, 1, 33, 128, 300, 1500])
@pytest.mark.parametrize("popularity", ["zipf", "none"])
@pytest.mark.parametrize("terms", [1, 2])
def test_stacked_projections_of_model_width(rows, popularity, terms):
    """The engine's layout: all W in one matrix, all y in another, adapters in pages."""
    widths = (4096, 1024, 1024)
    case = make_case(
        rows, MIXED, 1024, widths, dtype=torch.bfloat16, popularity=popularity, terms=terms,
        paged=True, device="cuda",
    )  # fmt: skip
    base = torch.randn(sum(widths), 1024, device="cuda").bfloat16() / 32
    want = [
        change + case.x.double() @ part.double().T
        for change, part in zip(case.expected(add=False), base.split(widths), strict=True)
    ]
    for _ in range(3):
        out = torch.full((rows, sum(widths)), float("nan"), device="cuda", dtype=torch.bfloat16)
        ys = out.split(widths, dim=1)
        add_projection(ys, case.x, base.split(widths), case.weights, case.batch)
        for one, other in zip(ys, want, strict=True):
            assert_near(one, other)


@pytest.mark.parametrize("rows", [1, 40, 300, 1100])
@pytest.mark.parametrize("folded", [False, True])
def test_layers_follow_each_other_without_a_gap(rows, folded):
    """Kernels start before their predecessors end; each must still see what those wrote."""
    width, depth = 512, 6
    cases = [
        make_case(rows, MIXED, width, (width,), dtype=torch.bfloat16, device="cuda", seed=seed)
        for seed in range(depth)
    ]
    batch = LoraBatch(rows, len(MIXED), "cuda", fixed=True)
    batch.update(cases[0].adapters, cases[0].ranks, cases[0].scalings)
    bases = [torch.randn(width, width, device="cuda").bfloat16() / 23 for _ in cases]
    first = cases[0].x.clone()
    states = [torch.empty_like(first) for _ in range(depth + 1)]

    def forward():
        states[0].copy_(first)
        for case, base, x, y in zip(cases, bases, states, states[1:], strict=False):
            if folded:
                add_projection([y], x, [base], case.weights, batch)
            else:
                torch.mm(x, base.T, out=y)
                atmm([y], x, case.weights, batch)

    forward()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        forward()
    for turn in range(5):
        first.normal_()
        for state in states:
            state.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        for case, base, x, y in zip(cases, bases, states, states[1:], strict=False):
            case.x, case.ys = x, [torch.zeros_like(y)]
            case.adapters, case.scalings = cases[0].adapters, cases[0].scalings
            assert_near(y, case.expected()[0] + x.double() @ base.double().T)
            if turn and rows > 100:
                break  # all layers are checked row by row only once


def test_this_gpu_has_a_table():
    gpu = gpu_of(torch.device("cuda"))
    if gpu.table is None or not gpu.table.exists():
        pytest.skip(f"no table was measured for the {gpu.name}")
    shape = Shape(4096, 4096, 1, 64, 64, 16.0)
    assert choose(gpu, shape) is table_of(gpu).entries[shape]
    assert choose(gpu, replace(shape, rows=65)) in table_of(gpu).entries.values()


def test_records_agree_with_the_driver():
    gpu = gpu_of(torch.device("cuda"))
    properties = torch.cuda.get_device_properties(0)
    assert gpu.processors == properties.multi_processor_count
    assert gpu.capability == (properties.major, properties.minor)
    assert gpu.shared_memory <= properties.shared_memory_per_block_optin


def test_merge_cycles_leave_the_base_weights_alone():
    shapes = {"q": (1024, 1024), "k": (256, 1024), "o": (1024, 1024)}
    merged = MergeableWeights(shapes, dtype=torch.bfloat16, device="cuda")
    merged.pristine.normal_()
    merged.unmerge()
    weights = {
        name: LoraWeights.contiguous(2, 64, i, (o,), dtype=torch.bfloat16, device="cuda")
        for name, (o, i) in shapes.items()
    }
    for one in weights.values():
        one.a.normal_()
        one.b.normal_()
    merged.bind({name: (one, 0) for name, one in weights.items()})

    def digest():
        return hashlib.sha256(merged.live.view(torch.int16).cpu().numpy().tobytes()).hexdigest()

    before = digest()
    for turn in range(1000):
        merged.merge(turn % 2, 64, 0.5)
        merged.unmerge()
    assert digest() == before
    merged.merge(1, 24, 0.5)
    for name, one in weights.items():
        a, b = one.rows_of(0, 1, 24)
        o, i = shapes[name]
        base = merged.pristine[merged.weight(name).storage_offset() :][: o * i].view(o, i)
        once = (base.double() + 0.5 * b.double().T @ a.double()).bfloat16()
        assert (merged.weight(name) != once).double().mean() < 1e-3  # fp32 sums at a boundary
        assert_near(merged.weight(name), once.double())


def test_sanitizer_finds_nothing():
    tool = shutil.which("compute-sanitizer")
    if tool is None:
        pytest.skip("compute-sanitizer is not installed")
    root = Path(__file__).parents[3]
    script = Path(__file__).with_name("sanitize.py")
    for check_name in ("memcheck", "racecheck"):
        found = subprocess.run(
            [tool, "--tool", check_name, "--error-exitcode", "9", sys.executable, str(script)],
            cwd=root, capture_output=True, text=True, check=False, timeout=280,
        )  # fmt: skip
        assert found.returncode == 0, found.stdout[-2000:] + found.stderr[-2000:]


def test_overwriting_writes_every_row():
    case = make_case(45, MIXED, 256, (384,), dtype=torch.bfloat16, device="cuda")
    for name in ("shrink_expand", "fused"):
        out = [torch.full_like(y, float("nan")) for y in case.ys]
        tiling = Tiling(name, 16, 64, 64, 128)
        launch(tiling, out, case.x, case.weights, case.batch, add=False)
        assert_near(out[0], case.expected(add=False)[0])
