"""Attention in plain torch: the definition of the result, and the backend of a CPU."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from valora_serve.model.attention.base import AttentionBackend, KVCache, Rows


class TorchBackend(AttentionBackend):
    """Plain torch: slow on a GPU, but defined everywhere."""

    auto_rank = 0

    @classmethod
    def unsuitable(cls, cache: KVCache) -> str | None:
        return "plain torch is for CPUs" if cache.device.type == "cuda" else None

    def plan(self, rows: Rows) -> TorchPlan:
        return TorchPlan(self._cache, rows)

    def mixed_plan(self, sequences: int, rows: int) -> TorchMixedPlan | None:
        """A plan with the interface of one for CUDA graphs, to test that interface on a CPU."""
        del sequences, rows
        # A graph would replay the tensors of the first step: there is no such plan on a GPU.
        return None if self._cache.device.type == "cuda" else TorchMixedPlan(self._cache)


class TorchPlan:
    """Attends to all sequences of one row together, and to longer ones one by one."""

    def __init__(self, cache: KVCache, rows: Rows) -> None:
        self._cache = cache
        device, counts = cache.device, np.diff(rows.starts)
        self._at = tuple(torch.from_numpy(p).to(device) for p in rows.locations(cache.block_size))
        self._long: list[tuple[slice, Tensor, Tensor]] = []
        for sequence in np.flatnonzero(counts > 1).tolist():
            start, count = int(rows.starts[sequence]), int(counts[sequence])
            length = int(rows.lengths[sequence])
            table = rows.tables[sequence][: -(-length // cache.block_size)]
            seen = torch.arange(length)[None] <= torch.arange(length - count, length)[:, None]
            if rows.seen is not None:
                ends = torch.from_numpy(rows.seen[start : start + count])
                seen = torch.arange(length)[None] < ends[:, None]
            pages = torch.tensor(list(table), device=device)
            self._long.append((slice(start, start + count), pages, seen.to(device)))
        single = np.flatnonzero(counts == 1)
        self._single: tuple[Tensor, Tensor, Tensor] | None = None
        if single.size:
            lengths = torch.from_numpy(rows.lengths[single].astype(np.int64))
            pages = -(-lengths // cache.block_size)
            tables = torch.zeros(len(single), int(pages.max()), dtype=torch.int64)
            for row, (sequence, count) in enumerate(
                zip(single.tolist(), pages.tolist(), strict=True)
            ):
                tables[row, :count] = torch.tensor(list(rows.tables[sequence][:count]))
            seen = torch.arange(tables.shape[1] * cache.block_size)[None] < lengths[:, None]
            at = torch.from_numpy(rows.starts[single].astype(np.int64))
            self._single = (at.to(device), tables.to(device), seen[:, None, None].to(device))

    def run(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        keys, values = self._cache.layers[layer]
        keys[self._at], values[self._at] = key, value
        out = torch.empty_like(query)
        if self._single is not None:
            at, tables, seen = self._single
            # [n, pages, block, heads, width] → [n, heads, tokens, width]
            k = keys[tables].flatten(1, 2).transpose(1, 2)
            v = values[tables].flatten(1, 2).transpose(1, 2)
            # Memory behind a sequence's end may hold anything, also NaN, which masking the scores
            # would not remove.
            unseen = ~seen.transpose(2, 3)
            k, v = k.masked_fill(unseen, 0), v.masked_fill(unseen, 0)
            out[at] = _sdpa(query[at][:, :, None], k, v, seen, scale)[:, :, 0]
        for own, table, seen in self._long:
            k, v = (part[table].flatten(0, 1)[: seen.shape[1]] for part in (keys, values))
            q, k, v = (part.transpose(0, 1)[None] for part in (query[own], k, v))
            out[own] = _sdpa(q, k, v, seen, scale)[0].transpose(0, 1)
        return out


class TorchMixedPlan:
    """Defines what a plan in fixed buffers computes: the output of padding rows is zero."""

    max_pages: int | None = None

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache

    def update(self, rows: Rows) -> None:
        self._plan, self._used = TorchPlan(self._cache, rows), int(rows.starts[-1])

    def run(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        out = torch.zeros_like(query)
        used = self._used
        out[:used] = self._plan.run(layer, query[:used], key[:used], value[:used], scale)
        return out


def _sdpa(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float) -> Tensor:
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale, enable_gqa=grouped)
