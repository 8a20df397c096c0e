"""Attention over paged keys and values: one seam, and the libraries behind it.

The model is transformers' own; its attention modules call `attend` through transformers' attention
interface. Which pages a token's keys and values go to, and which ones it sees, is a plan made once
a step and shared by all layers. There is no attention kernel of our own here.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

log = logging.getLogger(__name__)

NAME = "valora_paged"
"""Of our implementation in transformers' attention interface."""

WORKSPACE = 256 << 20
"""Bytes that FlashInfer works in."""

BACKENDS = ("auto", "torch", "flashinfer", "varlen", "flex")


@dataclass(frozen=True, slots=True)
class KVCache:
    """Keys and values of all layers in the page pool.

    Attributes:
        layers: For each layer keys and values, each [pages, block_size, kv_heads, head_dim],
            strided views of one memory.
        block_size: Tokens a page.
        heads: Query heads.
    """

    layers: Sequence[tuple[Tensor, Tensor]]
    block_size: int
    heads: int

    @property
    def kv_heads(self) -> int:
        """Heads of keys and values."""
        return int(self.layers[0][0].shape[2])

    @property
    def head_dim(self) -> int:
        """Width of a head."""
        return int(self.layers[0][0].shape[3])

    @property
    def dtype(self) -> torch.dtype:
        """Of keys, values and queries."""
        return self.layers[0][0].dtype

    @property
    def device(self) -> torch.device:
        """Where they lie."""
        return self.layers[0][0].device


@dataclass(frozen=True, slots=True)
class Rows:
    """Which tokens a step computes, sequence after sequence.

    Attributes:
        starts: [n + 1] int32, first row of each sequence.
        lengths: [n] int32, tokens of each sequence in the cache after this step.
        tables: For each sequence its pages in order; longer than needed is allowed.
    """

    starts: NDArray[np.int32]
    lengths: NDArray[np.int32]
    tables: Sequence[Sequence[int]]

    def places(self, block_size: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Page and place in the page of every row: ([rows], [rows])."""
        counts = np.diff(self.starts)
        first = self.lengths - counts
        position = np.arange(self.starts[-1]) + np.repeat(first - self.starts[:-1], counts)
        block = position // block_size
        if counts.max(initial=0) <= 1:
            page = [table[b] for table, b in zip(self.tables, block.tolist(), strict=True)]
            return np.asarray(page, np.int64), position % block_size
        owner = np.repeat(np.arange(len(counts)), counts)
        longest = int(block.max(initial=0)) + 1
        tables = np.zeros((len(counts), longest), np.int64)
        for row, table in enumerate(self.tables):
            held = table[:longest]
            tables[row, : len(held)] = held
        return tables[owner, block], position % block_size

    def indices(self, block_size: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Pages of all sequences one after the other, and where each one's start: CSR."""
        pages = -(-self.lengths // block_size)
        indptr = np.zeros(len(pages) + 1, np.int32)
        np.cumsum(pages, out=indptr[1:])
        flat: list[int] = []
        for table, count in zip(self.tables, pages.tolist(), strict=True):
            flat += table[:count]
        return np.asarray(flat, np.int32), indptr


class Plan(Protocol):
    """A step's attention, shared by all layers."""

    def run(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Write the rows' keys and values, and attend causally to all that their sequence has.

        Args:
            layer: Which layer's cache.
            query: [rows, heads, head_dim].
            key: [rows, kv_heads, head_dim].
            value: [rows, kv_heads, head_dim].
            scale: Of the scores.

        Returns:
            [rows, heads, head_dim].
        """


class FixedPlan(Plan, Protocol):
    """A plan in fixed buffers, for a CUDA graph."""

    def update(self, rows: Rows) -> None:
        """Describe the next step; enqueued, nothing waits."""


class Backend(Protocol):
    """A library that attends."""

    def plan(self, rows: Rows) -> Plan:
        """Plan a step of any mix of rows."""

    def decode_plan(self, sequences: int) -> FixedPlan | None:
        """A plan of exactly so many sequences of one row, or None if there is no such thing."""

    def mixed_plan(self, sequences: int, rows: int) -> FixedPlan | None:
        """A plan of at most so many sequences and rows in all, likewise.

        Rows behind those of the sequences write to page 0; what they attend to does not matter.
        """


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    plan: Plan,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """What transformers' attention modules call.

    Args:
        module: The attention module; its `layer_idx` says which cache.
        query: [1, heads, rows, head_dim].
        key: [1, kv_heads, rows, head_dim].
        value: Likewise.
        attention_mask: None, the plan knows who sees what.
        plan: Of this step.
        scaling: Of the scores; 1/√head_dim if None.

    Returns:
        [1, rows, heads, head_dim], and no weights.
    """
    if scaling is None:
        scaling = float(query.shape[-1]) ** -0.5
    layer: Any = module.layer_idx
    rows = (query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1))
    return plan.run(layer, *rows, scaling)[None], None


@cache
def register() -> str:
    """Make `attend` known to transformers; returns the name to configure."""
    from transformers import AttentionInterface

    # Where torch compiles layers, attention and its plan stay Python's.
    AttentionInterface.register(NAME, torch.compiler.disable(attend))
    return NAME


class TorchBackend:
    """Plain torch: the definition, and what runs on a CPU."""

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache

    def plan(self, rows: Rows) -> TorchPlan:
        """Plan a step of any mix of rows."""
        return TorchPlan(self._cache, rows)

    def decode_plan(self, sequences: int) -> None:
        """There is none."""
        return

    def mixed_plan(self, sequences: int, rows: int) -> TorchMixedPlan:
        """One that is not for graphs, but says what such a plan does."""
        return TorchMixedPlan(self._cache, rows)


class TorchPlan:
    """Sequences of one row are attended to together, longer ones one by one."""

    def __init__(self, cache: KVCache, rows: Rows) -> None:
        self._cache = cache
        device = cache.device
        page, place = rows.places(cache.block_size)
        self._page, self._place = (
            torch.from_numpy(page).to(device),
            torch.from_numpy(place).to(device),
        )
        counts = np.diff(rows.starts)
        self._long: list[tuple[int, int, Tensor, Tensor]] = []
        for sequence in np.flatnonzero(counts > 1).tolist():
            start, count = int(rows.starts[sequence]), int(counts[sequence])
            length = int(rows.lengths[sequence])
            table = self._table(rows.tables[sequence], length)
            seen = torch.arange(length)[None] <= torch.arange(length - count, length)[:, None]
            self._long.append((start, count, table, seen.to(device)))
        single = np.flatnonzero(counts == 1)
        self._single: tuple[Tensor, Tensor, Tensor] | None = None
        if single.size:
            longest = int(rows.lengths[single].max())
            tables = torch.zeros(len(single), -(-longest // cache.block_size), dtype=torch.int64)
            for row, sequence in enumerate(single.tolist()):
                table = self._table(rows.tables[sequence], int(rows.lengths[sequence])).cpu()
                tables[row, : len(table)] = table
            seen = torch.arange(tables.shape[1] * cache.block_size)[None] < torch.from_numpy(
                rows.lengths[single].astype(np.int64)
            ).unsqueeze(1)
            at = torch.from_numpy(rows.starts[single].astype(np.int64))
            self._single = (at.to(device), tables.to(device), seen[:, None, None].to(device))

    def _table(self, table: Sequence[int], length: int) -> Tensor:
        pages = -(-length // self._cache.block_size)
        return torch.tensor(list(table[:pages]), device=self._cache.device)

    def run(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """See `Plan`."""
        keys, values = self._cache.layers[layer]
        keys[self._page, self._place] = key
        values[self._page, self._place] = value
        out = torch.empty_like(query)
        if self._single is not None:
            at, tables, seen = self._single
            # [n, pages, block, heads, width] → [n, heads, tokens, width]
            k = keys[tables].flatten(1, 2).transpose(1, 2)
            v = values[tables].flatten(1, 2).transpose(1, 2)
            # What lies behind a sequence's end may be anything, also NaN, which a mask keeps.
            unseen = ~seen.transpose(2, 3)
            k, v = k.masked_fill(unseen, 0), v.masked_fill(unseen, 0)
            out[at] = self._sdpa(query[at][:, :, None], k, v, seen, scale)[:, :, 0]
        for start, count, table, seen in self._long:
            length = seen.shape[1]
            k = keys[table].flatten(0, 1)[:length].transpose(0, 1)[None]
            v = values[table].flatten(0, 1)[:length].transpose(0, 1)[None]
            q = query[start : start + count].transpose(0, 1)[None]
            out[start : start + count] = self._sdpa(q, k, v, seen, scale)[0].transpose(0, 1)
        return out

    def _sdpa(self, q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float) -> Tensor:
        grouped = q.shape[1] != k.shape[1]
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=seen, scale=scale, enable_gqa=grouped
        )


class TorchMixedPlan:
    """The definition of a plan in fixed buffers: rows behind the sequences' count for nothing."""

    def __init__(self, cache: KVCache, rows: int) -> None:
        self._cache, self._rows = cache, rows
        self._plan: TorchPlan | None = None
        self._used = 0

    def update(self, rows: Rows) -> None:
        """See `FixedPlan`."""
        self._plan, self._used = TorchPlan(self._cache, rows), int(rows.starts[-1])

    def run(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """See `Plan`."""
        out = torch.zeros_like(query)
        used = self._used
        if self._plan is not None and used:
            parts = (query[:used], key[:used], value[:used])
            out[:used] = self._plan.run(layer, *parts, scale)
        return out


class FlashInferBackend:
    """FlashInfer's paged kernels, which compile at their first use."""

    def __init__(self, cache: KVCache) -> None:
        import flashinfer

        self._cache = cache
        self._workspace = torch.empty(WORKSPACE, dtype=torch.uint8, device=cache.device)
        self._mixed_workspace = self._workspace
        new = torch.cuda.get_device_capability(cache.device) == (9, 0)
        self._prefill = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
            self._workspace, "NHD", backend="fa3" if new else "auto"
        )

    def plan(self, rows: Rows) -> FlashInferPlan:
        """Plan a step of any mix of rows."""
        cache = self._cache
        indices, indptr = rows.indices(cache.block_size)
        last = ((rows.lengths - 1) % cache.block_size + 1).astype(np.int32)
        host = [torch.from_numpy(part) for part in (rows.starts, indptr, last)]
        flat = _to_device(indices, cache.device)
        self._prefill.plan(
            host[0],
            host[1],
            flat,
            host[2],
            cache.heads,
            cache.kv_heads,
            cache.head_dim,
            cache.block_size,
            causal=True,
            q_data_type=cache.dtype,
            kv_data_type=cache.dtype,
        )
        counts = np.diff(rows.starts)
        owner = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
        first = rows.lengths - counts - rows.starts[:-1]
        position = (np.arange(rows.starts[-1]) + np.repeat(first, counts)).astype(np.int32)
        where = [_to_device(part, cache.device) for part in (owner, position, indptr, last)]
        return FlashInferPlan(cache, self._prefill, where[0], where[1], flat, where[2], where[3])

    def decode_plan(self, sequences: int) -> FlashInferDecodePlan:
        """A plan for CUDA graphs."""
        return FlashInferDecodePlan(self._cache, self._workspace, sequences)

    def mixed_plan(self, sequences: int, rows: int) -> FlashInferMixedPlan:
        """A plan for CUDA graphs."""
        # What split rows leave to be summed up; FlashInfer plans for 128 rows a sequence at least.
        cache = self._cache
        places = cache.heads * (-(-rows * cache.heads // cache.kv_heads // 128) + sequences + 2)
        needed = places * 128 * (cache.head_dim + 1) * 4 + (16 << 20)
        if needed > self._mixed_workspace.numel():
            self._mixed_workspace = torch.empty(needed, dtype=torch.uint8, device=cache.device)
        return FlashInferMixedPlan(cache, self._mixed_workspace, sequences, rows)


@dataclass(slots=True)
class FlashInferPlan:
    """A wrapper that was told of the step, and where the rows' keys and values go.

    Attributes:
        cache: The pages.
        wrapper: FlashInfer's.
        owner: [rows] int32, sequence of each row.
        position: [rows] int32, its place in the sequence.
        indices: [pages in use] int32.
        indptr: [n + 1] int32.
        last: [n] int32, tokens in each sequence's last page.
    """

    cache: KVCache
    wrapper: Any
    owner: Tensor
    position: Tensor
    indices: Tensor
    indptr: Tensor
    last: Tensor

    def run(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """See `Plan`."""
        import flashinfer

        pair = self.cache.layers[layer]
        flashinfer.append_paged_kv_cache(
            key, value, self.owner, self.position, pair, self.indices, self.indptr, self.last
        )
        if scale != self.cache.head_dim**-0.5:  # the wrappers were planned with this one
            query = query * (scale * self.cache.head_dim**0.5)
        out: Tensor = self.wrapper.run(query.contiguous(), pair)
        return out


class FlashInferDecodePlan(FlashInferPlan):
    """The same in fixed buffers, one row a sequence."""

    def __init__(self, cache: KVCache, workspace: Tensor, sequences: int) -> None:
        import flashinfer

        device = cache.device
        pages = int(cache.layers[0][0].shape[0])
        # A page can be in several tables (shared prefixes), but no graph is that full: see update.
        super().__init__(
            cache,
            None,
            owner=torch.arange(sequences, dtype=torch.int32, device=device),
            position=torch.zeros(sequences, dtype=torch.int32, device=device),
            indices=torch.zeros(2 * pages + sequences, dtype=torch.int32, device=device),
            indptr=torch.zeros(sequences + 1, dtype=torch.int32, device=device),
            last=torch.ones(sequences, dtype=torch.int32, device=device),
        )
        self.wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            workspace,
            "NHD",
            use_cuda_graph=True,
            use_tensor_cores=cache.heads // cache.kv_heads > 1,
            paged_kv_indptr_buffer=self.indptr,
            paged_kv_indices_buffer=self.indices,
            paged_kv_last_page_len_buffer=self.last,
        )

    def update(self, rows: Rows) -> None:
        """See `FixedPlan`.

        Raises:
            ValueError: More pages in all tables together than the buffers have room for.
        """
        cache = self.cache
        indices, indptr = rows.indices(cache.block_size)
        if len(indices) > len(self.indices):
            raise ValueError(
                f"plan: expected at most {len(self.indices)} pages, got {len(indices)}"
            )
        last = ((rows.lengths - 1) % cache.block_size + 1).astype(np.int32)
        self.position.copy_(_pinned(rows.lengths - 1), non_blocking=True)
        self.wrapper.plan(
            torch.from_numpy(indptr),
            _to_device(indices, cache.device),
            torch.from_numpy(last),
            cache.heads,
            cache.kv_heads,
            cache.head_dim,
            cache.block_size,
            q_data_type=cache.dtype,
            kv_data_type=cache.dtype,
        )


class FlashInferMixedPlan(FlashInferPlan):
    """Any mix of rows in fixed buffers; one sequence more takes the rows that only fill up."""

    def __init__(self, cache: KVCache, workspace: Tensor, sequences: int, rows: int) -> None:
        import flashinfer

        device = cache.device
        pages = int(cache.layers[0][0].shape[0])
        self._sequences, self._rows = sequences, rows
        super().__init__(
            cache,
            None,
            owner=torch.zeros(rows, dtype=torch.int32, device=device),
            position=torch.zeros(rows, dtype=torch.int32, device=device),
            indices=torch.zeros(2 * pages + sequences, dtype=torch.int32, device=device),
            indptr=torch.zeros(sequences + 2, dtype=torch.int32, device=device),
            last=torch.ones(sequences + 1, dtype=torch.int32, device=device),
        )
        self.wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
            workspace,
            "NHD",
            use_cuda_graph=True,
            qo_indptr_buf=torch.zeros(sequences + 2, dtype=torch.int32, device=device),
            paged_kv_indptr_buf=self.indptr,
            paged_kv_indices_buf=self.indices,
            paged_kv_last_page_len_buf=self.last,
            backend="fa2",
        )
        # The first plan fixes the most rows.
        full = Rows(np.array([0, rows], np.int32), np.array([rows], np.int32),
                    [[0] * -(-rows // cache.block_size)])  # fmt: skip
        self.update(full)

    def update(self, rows: Rows) -> None:
        """See `FixedPlan`.

        Raises:
            ValueError: More sequences, rows or pages than the buffers have room for.
        """
        cache, held, used = self.cache, len(rows.lengths), int(rows.starts[-1])
        if held > self._sequences or used > self._rows:
            raise ValueError(
                f"plan: expected at most {self._sequences} sequences of {self._rows} rows, "
                f"got {held} of {used}"
            )
        indices, indptr = rows.indices(cache.block_size)
        if len(indices) + self._sequences + 1 - held > len(self.indices):
            raise ValueError(
                f"plan: expected at most {len(self.indices)} pages, got {len(indices)}"
            )
        # Sequences that are not there have one page, page 0, and no rows; the last one's rows
        # fill up.
        empty = self._sequences + 1 - held
        pages = np.concatenate([indices, np.zeros(empty, np.int32)])
        ends = np.concatenate([indptr, indptr[-1] + np.arange(1, empty + 1, dtype=np.int32)])
        starts = np.concatenate([rows.starts, np.full(empty, used, np.int32)])
        lengths = np.concatenate([rows.lengths, np.ones(empty, np.int32)])
        last = ((lengths - 1) % cache.block_size + 1).astype(np.int32)
        counts = np.diff(rows.starts)
        where = np.zeros((2, self._rows), np.int32)
        where[0] = self._sequences
        where[0, :used] = np.repeat(np.arange(held, dtype=np.int32), counts)
        first = rows.lengths - counts - rows.starts[:-1]
        where[1, :used] = np.arange(used) + np.repeat(first, counts)
        both = _to_device(where, cache.device)
        self.owner.copy_(both[0])
        self.position.copy_(both[1])
        self.wrapper.plan(
            torch.from_numpy(starts.astype(np.int32)),
            torch.from_numpy(ends.astype(np.int32)),
            _to_device(pages, cache.device),
            torch.from_numpy(last),
            cache.heads,
            cache.kv_heads,
            cache.head_dim,
            cache.block_size,
            causal=True,
            q_data_type=cache.dtype,
            kv_data_type=cache.dtype,
        )


class VarlenBackend:
    """torch's own variable-length attention with a block table (newer torch, CUDA)."""

    def __init__(self, cache: KVCache) -> None:
        import inspect

        from torch.nn.attention.varlen import varlen_attn

        if "block_table" not in inspect.signature(varlen_attn).parameters:
            raise ImportError("torch's varlen_attn has no block_table")
        self._cache = cache
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

    def plan(self, rows: Rows) -> VarlenPlan:
        """Plan a step of any mix of rows."""
        cache, device = self._cache, self._cache.device
        page, place = (_to_device(part, device) for part in rows.places(cache.block_size))
        pages = -(-rows.lengths // cache.block_size)
        table = np.zeros((len(pages), int(pages.max(initial=1))), np.int32)
        for row, (held, count) in enumerate(zip(rows.tables, pages.tolist(), strict=True)):
            table[row, :count] = held[:count]
        return VarlenPlan(
            cache,
            self._attend,
            page,
            place,
            _to_device(rows.starts, device),
            int(np.diff(rows.starts).max(initial=1)),
            _to_device(rows.lengths.astype(np.int32), device),
            int(rows.lengths.max(initial=1)),
            _to_device(table, device),
        )

    def decode_plan(self, sequences: int) -> None:
        """There is none: the longest sequence is an argument on the host."""
        return

    def mixed_plan(self, sequences: int, rows: int) -> None:
        """There is none, as for decoding."""
        return


@dataclass(slots=True)
class VarlenPlan:
    """Arguments of `varlen_attn`, and where the rows' keys and values go."""

    cache: KVCache
    function: Callable[..., Any]
    page: Tensor
    place: Tensor
    starts: Tensor
    most_rows: int
    lengths: Tensor
    longest: int
    table: Tensor

    def run(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """See `Plan`."""
        keys, values = self.cache.layers[layer]
        keys[self.page, self.place] = key
        values[self.page, self.place] = value
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


class FlexBackend:
    """FlexAttention over the pages in use, gathered; it runs wherever torch compiles."""

    def __init__(self, cache: KVCache) -> None:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        self._cache = cache
        self._mask = create_block_mask
        compiles = cache.device.type == "cuda"
        self._attend = torch.compile(flex_attention, dynamic=True) if compiles else flex_attention

    def plan(self, rows: Rows) -> FlexPlan:
        """Plan a step of any mix of rows."""
        cache, device = self._cache, self._cache.device
        page, place = (_to_device(part, device) for part in rows.places(cache.block_size))
        counts = np.diff(rows.starts)
        first = rows.lengths - counts - rows.starts[:-1]
        of_row = np.repeat(np.arange(len(counts)), counts)
        at_row = np.arange(rows.starts[-1]) + np.repeat(first, counts)
        everything = Rows(
            np.concatenate([[0], np.cumsum(rows.lengths)]).astype(np.int32),
            rows.lengths,
            rows.tables,
        )
        seen_page, seen_place = (
            _to_device(part, device) for part in everything.places(cache.block_size)
        )
        of_key = np.repeat(np.arange(len(counts)), rows.lengths)
        at_key = np.arange(everything.starts[-1]) - np.repeat(everything.starts[:-1], rows.lengths)
        q_owner, q_at, k_owner, k_at = (
            _to_device(part.astype(np.int64), device) for part in (of_row, at_row, of_key, at_key)
        )

        def visible(_batch: Tensor, _head: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return (q_owner[q] == k_owner[k]) & (k_at[k] <= q_at[q])

        mask = self._mask(visible, None, None, len(of_row), len(of_key), device=str(device))
        return FlexPlan(cache, self._attend, page, place, seen_page, seen_place, mask)

    def decode_plan(self, sequences: int) -> None:
        """There is none: what is gathered has another size every step."""
        return

    def mixed_plan(self, sequences: int, rows: int) -> None:
        """There is none, as for decoding."""
        return


@dataclass(slots=True)
class FlexPlan:
    """A block mask, and where keys and values go and come from."""

    cache: KVCache
    function: Callable[..., Any]
    page: Tensor
    place: Tensor
    seen_page: Tensor
    seen_place: Tensor
    mask: Any

    def run(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """See `Plan`."""
        keys, values = self.cache.layers[layer]
        keys[self.page, self.place] = key
        values[self.page, self.place] = value
        k, v = (
            part[self.seen_page, self.seen_place].transpose(0, 1)[None] for part in (keys, values)
        )
        out: Tensor = self.function(
            query.transpose(0, 1)[None],
            k,
            v,
            block_mask=self.mask,
            scale=scale,
            enable_gqa=self.cache.heads != self.cache.kv_heads,
        )
        return out[0].transpose(0, 1)


def make_backend(name: str, cache: KVCache) -> Backend:
    """The library that attends.

    Args:
        name: One of `BACKENDS`; ``auto`` takes plain torch on a CPU, and on a GPU FlashInfer,
            torch's varlen attention or FlexAttention, the first that there is.
        cache: The pages.

    Raises:
        ValueError: The name is unknown, or the library is not installed.
    """
    makers: dict[str, Callable[[KVCache], Backend]] = {
        "torch": TorchBackend,
        "flashinfer": FlashInferBackend,
        "varlen": VarlenBackend,
        "flex": FlexBackend,
    }
    if name == "auto":
        if cache.device.type != "cuda":
            return TorchBackend(cache)
        for choice in ("flashinfer", "varlen"):
            try:
                return makers[choice](cache)
            except (ImportError, RuntimeError, ValueError, NotImplementedError) as error:
                reason = (str(error).splitlines() or [type(error).__name__])[0]
                log.info("attention: no %s here (%s)", choice, reason)
        log.warning("attention: FlexAttention without CUDA graphs; install flashinfer for speed")
        return FlexBackend(cache)
    if name not in makers:
        raise ValueError(f"attention: expected one of {BACKENDS}, got {name}")
    try:
        return makers[name](cache)
    except ImportError as error:
        raise ValueError(f"attention backend {name} is not there: {error}") from error


def _pinned(values: NDArray[Any]) -> Tensor:
    host = torch.from_numpy(np.ascontiguousarray(values))
    return host.pin_memory() if torch.cuda.is_available() else host


def _to_device(values: NDArray[Any], device: torch.device) -> Tensor:
    """Copy to the device without waiting for it."""
    if device.type != "cuda":
        return torch.from_numpy(np.ascontiguousarray(values))
    return _pinned(values).to(device, non_blocking=True)
