"""Attention with torch's FlexAttention, which runs wherever torch compiles."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from valora_serve.model.attention.base import AttentionBackend, KVCache, Rows, to_device

if TYPE_CHECKING:
    from collections.abc import Callable

log = logging.getLogger(__name__)


class FlexBackend(AttentionBackend):
    """FlexAttention over the pages in use, which are gathered first.

    There are no CUDA graphs: what is gathered has another size in every step.
    """

    auto_rank = 30

    def __init__(self, cache: KVCache) -> None:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        super().__init__(cache)
        self._mask = create_block_mask
        compiles = cache.device.type == "cuda"
        self._attend = torch.compile(flex_attention, dynamic=True) if compiles else flex_attention
        if compiles:
            log.warning("FlexAttention runs without CUDA graphs: install flashinfer for speed")

    def plan(self, rows: Rows) -> FlexPlan:
        """Plan a step with any mix of prefilling and decoding rows."""
        cache, device = self._cache, self._cache.device
        page, offset = (to_device(part, device) for part in rows.locations(cache.block_size))
        everything = Rows(
            np.concatenate([[0], np.cumsum(rows.lengths)]).astype(np.int32),
            rows.lengths,
            rows.tables,
        )
        seen_page, seen_offset = (
            to_device(part, device) for part in everything.locations(cache.block_size)
        )
        q_owner, q_at, k_owner, k_at = (
            to_device(part.astype(np.int64), device)
            for part in (rows.owners, rows.positions, everything.owners, everything.positions)
        )

        def visible(_batch: Tensor, _head: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return (q_owner[q] == k_owner[k]) & (k_at[k] <= q_at[q])

        mask = self._mask(visible, None, None, len(q_owner), len(k_owner), device=str(device))
        return FlexPlan(
            cache,
            self._attend,
            page,
            offset,
            seen_page,
            seen_offset,
            mask,
            (q_owner, q_at),
            (k_owner, k_at),
            len(rows.lengths),
        )


@dataclass(slots=True)
class FlexPlan:
    """A block mask, and the locations of keys and values.

    Attributes:
        cache: The KV cache.
        function: torch's `flex_attention`, compiled on a GPU.
        page: [rows] int64, page that each row's keys and values are written to.
        offset: [rows] int64, offset in that page.
        seen_page: [tokens] int64, page of every token of all sequences.
        seen_offset: [tokens] int64, offset in that page.
        mask: Block mask of [rows, tokens].
        row_of: Sequence and position of each row, [rows] int64 each.
        token_of: Sequence and position of each token, [tokens] int64 each.
        sequences: Number of sequences.
    """

    cache: KVCache
    function: Callable[..., Any]
    page: Tensor
    offset: Tensor
    seen_page: Tensor
    seen_offset: Tensor
    mask: Any
    row_of: tuple[Tensor, Tensor]
    token_of: tuple[Tensor, Tensor]
    sequences: int

    def run(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Write keys and values, and attend, as `AttentionPlan.run` defines."""
        keys, values = self.cache.layers[layer]
        keys[self.page, self.offset] = key
        values[self.page, self.offset] = value
        k, v = (part[self.seen_page, self.seen_offset] for part in (keys, values))
        # All sequences share a product, in which the weight of a masked token is 0: times NaN or
        # infinity, that would be NaN in every other sequence.
        broken = ~(k.isfinite().all(-1).all(-1) & v.isfinite().all(-1).all(-1))
        k, v = (part.masked_fill(broken[:, None, None], 0).transpose(0, 1)[None] for part in (k, v))
        out: Tensor = self.function(
            query.transpose(0, 1)[None],
            k,
            v,
            block_mask=self.mask,
            scale=scale,
            enable_gqa=self.cache.heads != self.cache.kv_heads,
        )
        return out[0].transpose(0, 1).masked_fill(self._sees(broken)[:, None, None], torch.nan)

    def _sees(self, tokens: Tensor) -> Tensor:
        """Return which rows see one of some tokens: [tokens] bool → [rows] bool."""
        owner, at = self.token_of
        never = torch.iinfo(at.dtype).max
        first = at.new_full((self.sequences,), never)
        first = first.scatter_reduce(0, owner, at.masked_fill(~tokens, never), "amin")
        return first[self.row_of[0]] <= self.row_of[1]
