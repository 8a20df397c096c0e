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

HEADS, KV_HEADS, WIDTH, PAGE = 8, 2, 128, 16


@pytest.mark.parametrize(
    ("kind", "sizes", "chunks"),
    [
        ("plan", (), [64, 64, 64, 8, 1, 300, 2]),
        ("mixed_plan", (3, 64), [64, 64, 64, 8, 1, 40, 64]),
        ("decode_plan", (1,), [1] * 40),
    ],
)
def test_chunks_of_a_sequence(kind, sizes, chunks):
    """All steps of a sequence are enqueued while the GPU is busy with something else."""
    length = sum(chunks)
    query = torch.randn(length, HEADS, WIDTH, dtype=torch.bfloat16, device="cuda")
    key, value = torch.randn(2, length, KV_HEADS, WIDTH, dtype=torch.bfloat16, device="cuda")
    pages = 1 + -(-length // PAGE)
    # What no sequence has written is multiplied by 0; page 0 is for rows that pad a step.
    keys, values = torch.zeros(2, pages, PAGE, KV_HEADS, WIDTH, dtype=torch.bfloat16, device="cuda")
    backend = make_backend("flashinfer", KVCache([(keys, values)], PAGE, HEADS))
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
