"""Attention with torch's variable-length kernels and a block table, in newer torch on CUDA."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from valora_serve.model.attention.base import AttentionBackend, KVCache, Rows, to_device

if TYPE_CHECKING:
    from collections.abc import Callable


class VarlenBackend(AttentionBackend):
    """torch's `varlen_attn`, without CUDA graphs: the longest length is an argument on the host.

    Args:
        cache: The KV cache.

    Raises:
        ImportError: This torch has no `varlen_attn`, or one without a block table.
        RuntimeError: No kernel takes pages of this size.
    """

    auto_rank = 20
    gpu_only = True

    def __init__(self, cache: KVCache) -> None:
        import inspect

        from torch.nn.attention.varlen import varlen_attn

        if "block_table" not in inspect.signature(varlen_attn).parameters:
            raise ImportError("torch's varlen_attn has no block_table")
        super().__init__(cache)
        self._attend = varlen_attn
        probe = Rows(np.array([0, 1], np.int32), np.array([1], np.int32), [[0]])
        kept = [part[0].clone() for part in cache.layers[0]]
        width = (cache.heads, cache.kv_heads, cache.kv_heads)
        q, k, v = (
            torch.zeros(1, n, cache.head_dim, dtype=cache.dtype, device=cache.device) for n in width
        )
        self.plan(probe).run(0, q, k, v, 1.0)  # raises where no kernel takes pages of this size
        for part, old in zip(cache.layers[0], kept, strict=True):
            part[0] = old

    @classmethod
    def unsuitable(cls, cache: KVCache) -> str | None:
        """The kernels need a GPU."""
        return None if cache.device.type == "cuda" else "varlen_attn needs a CUDA GPU"

    def plan(self, rows: Rows) -> VarlenPlan:
        """Plan a step with any mix of prefilling and decoding rows."""
        cache, device = self._cache, self._cache.device
        page, offset = (to_device(part, device) for part in rows.locations(cache.block_size))
        pages = -(-rows.lengths // cache.block_size)
        table = np.zeros((len(pages), int(pages.max(initial=1))), np.int32)
        for row, (held, count) in enumerate(zip(rows.tables, pages.tolist(), strict=True)):
            table[row, :count] = held[:count]
        return VarlenPlan(
            cache,
            self._attend,
            page,
            offset,
            to_device(rows.starts, device),
            int(np.diff(rows.starts).max(initial=1)),
            to_device(rows.lengths.astype(np.int32), device),
            int(rows.lengths.max(initial=1)),
            to_device(table, device),
        )


@dataclass(slots=True)
class VarlenPlan:
    """Arguments of `varlen_attn`, and the locations of the rows' keys and values.

    Attributes:
        cache: The KV cache.
        function: torch's `varlen_attn`.
        page: [rows] int64, page of each row's keys and values.
        offset: [rows] int64, offset in that page.
        starts: [n + 1] int32, first row of each sequence.
        most_rows: Largest number of rows of a sequence.
        lengths: [n] int32, tokens of each sequence in the KV cache.
        longest: Largest of `lengths`.
        table: [n, pages] int32, page table of each sequence.
    """

    cache: KVCache
    function: Callable[..., Any]
    page: Tensor
    offset: Tensor
    starts: Tensor
    most_rows: int
    lengths: Tensor
    longest: int
    table: Tensor

    def run(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Write keys and values, and attend, as `AttentionPlan.run` defines."""
        keys, values = self.cache.layers[layer]
        keys[self.page, self.offset] = key
        values[self.page, self.offset] = value
        out: Tensor = self.function(
            query.contiguous(),
            keys,
            values,
            self.starts,
            None,
            self.most_rows,
            self.longest,
            scale=scale,
            window_size=(-1, 0),
            enable_gqa=self.cache.heads != self.cache.kv_heads,
            seqused_k=self.lengths,
            block_table=self.table,
        )
        return out
