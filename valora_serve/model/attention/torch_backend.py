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

    def mixed_plan(self, sequences: int, rows: int) -> TorchPlan | None:
        """A plan with the interface of one for CUDA graphs, to test that interface on a CPU."""
        # A graph would replay the tensors of the first step: there is no such plan on a GPU.
        return None if self._cache.device.type == "cuda" else TorchPlan(self._cache)


class TorchPlan:
    """Attends to one sequence after the other; the output of rows that pad a step is zero."""

    max_pages: int | None = None

    def __init__(self, cache: KVCache, rows: Rows | None = None) -> None:
        self._cache = cache
        if rows is not None:
            self.update(rows)

    def update(self, rows: Rows) -> None:
        device, size, counts = self._cache.device, self._cache.block_size, np.diff(rows.starts)
        self._at = tuple(torch.from_numpy(part).to(device) for part in rows.locations(size))
        pages, indptr = (torch.from_numpy(part) for part in rows.indices(size))
        self._tables = pages.to(device).split(indptr.diff().tolist())
        ends = torch.from_numpy(rows.positions + 1 if rows.seen is None else rows.seen).to(device)
        self._seen = [
            torch.arange(length, device=device) < own[:, None] if len(own) > 1 else None
            for length, own in zip(rows.lengths.tolist(), ends.split(counts.tolist()), strict=True)
        ]
        self._counts, self._lengths = counts.tolist(), rows.lengths.tolist()

    def run(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        keys, values = self._cache.layers[layer]
        used = len(self._at[0])
        keys[self._at], values[self._at] = key[:used], value[:used]
        found = []
        for rows, table, length, seen in zip(
            query[:used].split(self._counts), self._tables, self._lengths, self._seen, strict=True
        ):
            held = (part[table].flatten(0, 1)[:length] for part in (keys, values))
            q, k, v = (part.transpose(0, 1)[None] for part in (rows, *held))
            grouped = q.shape[1] != k.shape[1]
            y = F.scaled_dot_product_attention(q, k, v, seen, scale=scale, enable_gqa=grouped)
            found.append(y[0].transpose(0, 1))
        return torch.cat([*found, torch.zeros_like(query[used:])])
