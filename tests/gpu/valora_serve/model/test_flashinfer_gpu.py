"""FlashInfer on a GPU that is behind: steps are planned before earlier ones have begun."""

import numpy as np
import pytest
import torch
from torch.nn.functional import pad, scaled_dot_product_attention

from valora_serve.model.attention.base import KVCache, Rows
from valora_serve.model.attention.registry import make_backend

pytestmark = pytest.mark.gpu
pytest.importorskip("flashinfer")

BEHIND = 400_000_000
"""Clock cycles that the GPU is busy with before the steps: about 0.2 s."""

HEADS, WIDTH, PAGE = 8, 128, 16


@pytest.mark.parametrize(
    ("kind", "kv_heads", "sizes", "chunks"),
    [
        ("plan", 2, (), [64, 64, 64, 8, 1, 300, 2]),
        ("mixed_plan", 2, (3, 64), [64, 64, 64, 8, 1, 40, 64]),
        ("crowded_plan", 2, (3, 64), [64, 64, 64, 8, 1, 40, 64]),
        ("crowded_plan", 8, (3, 64), [64, 64, 64, 8, 1, 40, 64]),
        ("decode_plan", 2, (1,), [1] * 40),
    ],
)
def test_chunks_of_a_sequence(kind, kv_heads, sizes, chunks):
    """All steps of a sequence are enqueued while the GPU is busy with something else."""
    length = sum(chunks)
    query = torch.randn(length, HEADS, WIDTH, dtype=torch.bfloat16, device="cuda")
    key, value = torch.randn(2, length, kv_heads, WIDTH, dtype=torch.bfloat16, device="cuda")
    pages = 1 + -(-length // PAGE)
    # What no sequence has written is multiplied by 0; page 0 is for rows that pad a step.
    keys, values = torch.zeros(2, pages, PAGE, kv_heads, WIDTH, dtype=torch.bfloat16, device="cuda")
    backend = make_backend("flashinfer", KVCache([(keys, values)], PAGE, HEADS))
    if kind == "crowded_plan" and backend.crowd(3) is None:
        pytest.skip(f"{kind}: not on this GPU")
    fixed = getattr(backend, kind)(*sizes) if sizes else None
    table = [*range(1, pages)]
    found = []
    for repeat in range(2):  # the first one compiles kernels, which waits for the GPU
        found.clear()
        torch.cuda._sleep(BEHIND * repeat)
        start = 0
        for count in chunks:
            end = start + count
            rows = Rows(np.array([0, count], np.int32), np.array([end], np.int32), [table])
            padding = 0
            if fixed is not None:
                fixed.update(rows)
                padding = sizes[-1] - count
            plan = backend.plan(rows) if fixed is None else fixed
            parts = [pad(x[start:end], (0, 0, 0, 0, 0, padding)) for x in (query, key, value)]
            found.append(plan.run(0, *parts, WIDTH**-0.5)[:count])
            start = end
    expected = scaled_dot_product_attention(
        *(x.transpose(0, 1)[None].float() for x in (query, key, value)),
        is_causal=True, enable_gqa=True,
    )[0].transpose(0, 1)  # fmt: skip
    torch.testing.assert_close(torch.cat(found).float(), expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 8), (8, 2)])
@pytest.mark.parametrize("kind", ["plan", "mixed_plan", "crowded_plan"])
def test_mixes_of_decoding_and_prompts(heads, kv_heads, kind):
    """Any mix of rows, also where a graph that was captured with another mix computes it."""
    g = np.random.default_rng(0)
    pages, most = 600, 512
    cache = [torch.randn(2, pages, PAGE, kv_heads, WIDTH, dtype=torch.bfloat16, device="cuda")
             for _ in range(2)]  # fmt: skip
    cache[1].copy_(cache[0])
    mine, other = (KVCache([(one[0], one[1])], PAGE, heads) for one in cache)
    backend, reference = make_backend("flashinfer", mine), make_backend("torch", other)
    if kind == "crowded_plan" and backend.crowd(64) is None:
        pytest.skip(f"{kind}: not on this GPU")
    plan = None if kind == "plan" else getattr(backend, kind)(64, most)
    shape = (most, heads, WIDTH)
    query = torch.zeros(shape, dtype=torch.bfloat16, device="cuda")
    key, value = torch.zeros(2, most, kv_heads, WIDTH, dtype=torch.bfloat16, device="cuda")
    if plan is not None:
        plan.run(0, query, key, value, WIDTH**-0.5)  # compiles kernels
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = plan.run(0, query, key, value, WIDTH**-0.5)
    for decoding, prompts in [(0, 3), (20, 2), (63, 1), (40, 0), (1, 1), (0, 1), (5, 30)]:
        counts = np.array([1] * decoding + g.integers(1, 400 // max(prompts, 1), prompts).tolist())
        lengths = (counts + g.integers(0, 120, len(counts))).astype(np.int32)
        starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        free, tables = 1 + g.permutation(pages - 1), []
        for length in lengths.tolist():
            needed = -(-length // PAGE)
            tables.append(free[:needed].tolist())
            free = free[needed:]
        rows, used = Rows(starts, lengths, tables), int(starts[-1])
        for held in (query, key, value):
            held[:used] = torch.randn_like(held[:used])
        parts = [held[:used] for held in (query, key, value)]
        expected = reference.plan(rows).run(0, *parts, WIDTH**-0.5)
        if plan is None:
            found = backend.plan(rows).run(0, *parts, WIDTH**-0.5)
        else:
            plan.update(rows)
            graph.replay()
            found = out[:used]
        torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)
        torch.testing.assert_close(cache[0][:, 1:], cache[1][:, 1:])  # page 0 takes padding
