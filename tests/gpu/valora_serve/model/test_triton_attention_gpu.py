"""The Triton attention on a GPU: against fp64, and replayed by CUDA graphs step after step."""

import pytest
import torch

from tests.support.attention_cases import Case, image_case
from valora_serve.model.attention.triton_backend import Tiling, TritonBackend

pytestmark = pytest.mark.gpu

TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float32: 1e-5}

DECODES = [(0, 1), (63, 1), (64, 1), (65, 1), (1500, 1), (7, 1), (127, 1), (333, 1)]
MIXED = [(70, 1), (0, 190), (61, 7), (3, 1), (930, 120), (0, 1), (16, 16)]


def check(found, case, scale):
    expected = case.expected(0, scale)
    tolerance = TOLERANCE[found.dtype]
    torch.testing.assert_close(found.float(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("width", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("heads", [(8, 8), (28, 4), (8, 1), (20, 1)])
@pytest.mark.parametrize("shares", [DECODES, MIXED], ids=["decodes", "mixed"])
def test_against_the_formula(shares, heads, width, dtype):
    for block_size in (1, 16, 24):
        case = Case(shares, heads=heads, block_size=block_size, width=width, dtype=dtype,
                    device="cuda", spare=1)  # fmt: skip
        check(case.run("triton", 0, width**-0.5), case, width**-0.5)


@pytest.mark.parametrize("splits", [1, 2, 8, 32])
def test_splits(splits, monkeypatch):
    monkeypatch.setattr(Tiling, "splits", lambda _, sequences: splits)
    case = Case(DECODES, heads=(8, 2), block_size=16, width=128, dtype=torch.bfloat16,
                device="cuda")  # fmt: skip
    check(case.run("triton", 0, 0.1), case, 0.1)


@pytest.mark.parametrize(
    ("kind", "sizes", "steps"),
    [
        (
            "decode_plan",
            (3,),
            [[(900, 1), (0, 1), (70, 1)], [(0, 1)] * 3, [(12, 1), (700, 1), (3, 1)]],
        ),
        (
            "mixed_plan",
            (4, 256),
            [[(9, 1), (0, 240)], [(0, 1)], [(300, 130), (3, 1), (0, 2), (64, 9)]],
        ),
    ],
)
def test_graphs_replay_other_steps(kind, sizes, steps):
    """A graph captured with one step computes all others; nothing waits for the device."""
    first = Case([(1200, 1)] * 3, heads=(8, 2), block_size=16, width=128, dtype=torch.bfloat16,
                 device="cuda")  # fmt: skip
    plan = getattr(TritonBackend(first.cache), kind)(*sizes)
    rows = sizes[-1]
    shapes = ((rows, 8, 128), (rows, 2, 128), (rows, 2, 128))
    buffers = [torch.zeros(shape, dtype=torch.bfloat16, device="cuda") for shape in shapes]
    case = Case(steps[0], heads=(8, 2), after=first)
    plan.update(case.rows)
    plan.run(0, *buffers, 0.1)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = plan.run(0, *buffers, 0.1)
    for seed, shares in enumerate(steps):
        case = Case(shares, heads=(8, 2), seed=seed, after=first)
        used = int(case.rows.starts[-1])
        parts = [torch.cat(case.query[0])] + [
            torch.cat([part[before:] for part, (before, _) in zip(held[0], shares, strict=True)])
            for held in (case.key, case.value)
        ]
        for buffer, part in zip(buffers, parts, strict=True):
            buffer.fill_(torch.nan)[:used] = part
        torch.cuda.set_sync_debug_mode("error")
        try:
            plan.update(case.rows)
            graph.replay()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        check(out[:used], case, 0.1)


@pytest.mark.parametrize("width", [128, 256])
@pytest.mark.parametrize("heads", [(8, 4), (4, 1)])
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("backend", ["triton", "flashinfer"])
def test_images_whose_tokens_see_each_other(backend, seed, heads, width):
    if backend == "flashinfer":
        pytest.importorskip("flashinfer")
    case = image_case(
        seed, heads=heads, width=width, block_size=16, dtype=torch.bfloat16, device="cuda"
    )
    found, expected = case.run(backend, 0, 0.3), case.expected(0, 0.3)
    torch.testing.assert_close(found.float(), expected, rtol=2e-2, atol=2e-2)
