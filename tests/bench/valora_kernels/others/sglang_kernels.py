"""SGLang's chunked SGMV kernels (`csgmv`, its default), called as its backend does."""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tests.bench.valora_kernels.others.registry import b_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from valora_kernels.timing import Inputs, KernelWorkload

PLACES = (
    "sglang.kernels.ops.lora.dense", "sglang.kernels.ops.gemm", "sglang.srt.lora.triton_ops",
)  # fmt: skip
"""Packages of the kernels, newest releases first."""


def kernels() -> tuple[Any, Any]:
    """The functions that launch the shrink and the expand."""
    for place in PLACES:
        try:
            shrink = import_module(f"{place}.chunked_sgmv_shrink")
            expand = import_module(f"{place}.chunked_sgmv_expand")
        except ModuleNotFoundError as error:
            if error.name != place and not f"{place}.".startswith(f"{error.name}."):
                raise  # a package that SGLang needs
            last = error
        else:
            return shrink.chunked_sgmv_lora_shrink_forward, expand.chunked_sgmv_lora_expand_forward
    raise last


def chunk_of(rows: int) -> int:
    """Rows of a segment, as its backend chooses with `max_lora_chunk_size=128`."""
    return 128 if rows >= 256 else 32 if rows >= 64 else 16


def operators(work: KernelWorkload) -> dict[str, Callable[[Inputs], object]]:
    """The pair of kernels on segments of one adapter each."""
    shrink, expand = kernels()
    device, slots, rank = work.sets[0].x.device, len(work.ranks), max(work.ranks)
    order = np.argsort(work.rows_of, kind="stable")
    chunk = chunk_of(len(order))
    starts, owners = [0], []
    for slot, count in zip(*np.unique(work.rows_of, return_counts=True), strict=True):
        for done in range(0, count, chunk):
            starts.append(starts[-1] + min(chunk, count - done))
            owners.append(slot)

    def on_device(values: Any, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.tensor(np.asarray(values), dtype=dtype, device=device)

    batch = SimpleNamespace(
        use_cuda_graph=False, bs=len(order), num_segments=len(owners), max_len=chunk,
        seg_indptr=on_device(starts), weight_indices=on_device(owners),
        lora_ranks=on_device(work.ranks), scalings=on_device(work.scalings, torch.float32),
        permutation=on_device(order), seg_lens=None,
    )  # fmt: skip
    widths = work.sets[0].weights.out_features
    offsets = on_device(np.cumsum([0, *widths]))
    kept: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}
    for s in work.sets:
        b = []
        for p in range(len(widths)):
            b.append(b_of(s, p).transpose(1, 2))
        a = torch.zeros(slots, len(widths) * rank, s.x.shape[1], dtype=s.x.dtype, device=device)
        for slot, own in enumerate(work.ranks):  # projections follow each other at its own rank
            mine = s.weights.a.view(len(widths), slots, rank, -1)[:, slot, :own]
            a[slot, : len(widths) * own] = mine.flatten(0, 1)
        y = s.ys[0] if len(s.ys) == 1 else torch.cat(s.ys, dim=1)
        kept[id(s)] = a, torch.cat(b, dim=1).contiguous(), y

    def sglang(s: Inputs) -> torch.Tensor:
        a, b, y = kept[id(s)]
        hidden = shrink(s.x, a, batch, len(widths))
        return expand(hidden, b, batch, offsets, max(widths), y)

    return {"sglang": sglang}
