"""Attention with FlashInfer's paged kernels, which support CUDA graphs."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor

from valora_serve.model.attention.base import AttentionBackend, KVCache, Rows, pinned, to_device

WORKSPACE_BYTES = 256 << 20
"""Size of the buffer that FlashInfer's kernels share."""


class FlashInferBackend(AttentionBackend):
    """FlashInfer's paged kernels, which are compiled at their first use."""

    auto_rank = 10

    def __init__(self, cache: KVCache) -> None:
        import flashinfer

        super().__init__(cache)
        self._workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=cache.device)
        self._mixed_workspace = self._workspace
        hopper = torch.cuda.get_device_capability(cache.device) == (9, 0)
        self._prefill = Wrapper(
            flashinfer.BatchPrefillWithPagedKVCacheWrapper(
                self._workspace, "NHD", backend="fa3" if hopper else "auto"
            )
        )

    @classmethod
    def unsuitable(cls, cache: KVCache) -> str | None:
        """FlashInfer needs a GPU, and to be installed."""
        if cache.device.type != "cuda":
            return "FlashInfer needs a CUDA GPU"
        return None if find_spec("flashinfer") else "flashinfer is not installed"

    def plan(self, rows: Rows) -> FlashInferPlan:
        """Plan a step with any mix of prefilling and decoding rows."""
        cache = self._cache
        indices, indptr = rows.indices(cache.block_size)
        last = ((rows.lengths - 1) % cache.block_size + 1).astype(np.int32)
        host = [torch.from_numpy(part) for part in (rows.starts, indptr, last)]
        flat = to_device(indices, cache.device)
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
        owner, position = rows.owners.astype(np.int32), rows.positions.astype(np.int32)
        sent = [to_device(part, cache.device) for part in (owner, position, indptr, last)]
        return FlashInferPlan(cache, self._prefill, sent[0], sent[1], flat, sent[2], sent[3])

    def decode_plan(self, sequences: int) -> FlashInferDecodePlan:
        """A plan for CUDA graphs of exactly `sequences` decoding rows."""
        tables = self._table_buffer(sequences, sequences)
        return FlashInferDecodePlan(self._cache, self._workspace, tables, sequences)

    def mixed_plan(self, sequences: int, rows: int) -> FlashInferMixedPlan:
        """A plan for CUDA graphs of any mix of at most `rows` rows in `sequences` sequences."""
        # FlashInfer keeps partial sums of split rows there, planned in tiles of 128 rows, at least
        # one tile per sequence.
        cache = self._cache
        tiles = cache.heads * (-(-rows * cache.heads // cache.kv_heads // 128) + sequences + 2)
        needed = tiles * 128 * (cache.head_dim + 1) * 4 + (16 << 20)
        if needed > self._mixed_workspace.numel():
            self._mixed_workspace = torch.empty(needed, dtype=torch.uint8, device=cache.device)
        tables = self._table_buffer(sequences, rows)
        return FlashInferMixedPlan(cache, self._mixed_workspace, tables, sequences, rows)


class Wrapper:
    """A wrapper of FlashInfer whose steps are planned while the device still runs earlier ones.

    FlashInfer copies each plan to the device from one page-locked buffer, and does not wait. The
    next plan overwrites that buffer: made before the copy, it would also be the plan of the step
    before it. So `plan` waits for the copy, which leaves the host one step ahead of the device.

    Args:
        wrapper: FlashInfer's prefill or decode wrapper.
    """

    def __init__(self, wrapper: Any) -> None:
        self._wrapper = wrapper
        self._copied = torch.cuda.Event()

    def plan(self, *args: Any, **options: Any) -> None:
        """Plan the next step; arguments are FlashInfer's."""
        self._copied.synchronize()
        self._wrapper.plan(*args, **options)
        self._copied.record()

    def run(self, query: Tensor, pages: tuple[Tensor, Tensor]) -> Tensor:
        """Attend as planned: [rows, heads, head_dim] → [rows, heads, head_dim]."""
        out: Tensor = self._wrapper.run(query, pages)
        return out


@dataclass(slots=True)
class FlashInferPlan:
    """A FlashInfer wrapper with its step planned, and the page table to append keys and values.

    Attributes:
        cache: The KV cache.
        wrapper: The `Wrapper` of FlashInfer's prefill or decode wrapper.
        owner: [rows] int32, index of each row's sequence.
        position: [rows] int32, index of each row's token in its sequence.
        indices: [pages in use] int32, pages of all sequences, one sequence after the other.
        indptr: [n + 1] int32, start of each sequence in `indices`.
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
        """Write keys and values, and attend, as `AttentionPlan.run` defines."""
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
    """A plan in fixed buffers, with one row per sequence."""

    def __init__(self, cache: KVCache, workspace: Tensor, tables: Tensor, sequences: int) -> None:
        import flashinfer

        device = cache.device
        self.max_pages: int | None = len(tables) - sequences  # rows that pad a step have one
        super().__init__(
            cache,
            None,
            owner=torch.arange(sequences, dtype=torch.int32, device=device),
            position=torch.zeros(sequences, dtype=torch.int32, device=device),
            indices=tables,
            indptr=torch.zeros(sequences + 1, dtype=torch.int32, device=device),
            last=torch.ones(sequences, dtype=torch.int32, device=device),
        )
        self.wrapper = Wrapper(
            flashinfer.BatchDecodeWithPagedKVCacheWrapper(
                workspace,
                "NHD",
                use_cuda_graph=True,
                use_tensor_cores=cache.heads // cache.kv_heads > 1,
                paged_kv_indptr_buffer=self.indptr,
                paged_kv_indices_buffer=self.indices,
                paged_kv_last_page_len_buffer=self.last,
            )
        )

    def update(self, rows: Rows) -> None:
        """Describe the next step.

        Raises:
            ValueError: The page tables together are longer than the buffers.
        """
        cache = self.cache
        indices, indptr = rows.indices(cache.block_size)
        if len(indices) > len(self.indices):
            raise ValueError(
                f"plan: expected at most {len(self.indices)} pages, got {len(indices)}"
            )
        last = ((rows.lengths - 1) % cache.block_size + 1).astype(np.int32)
        self.position.copy_(pinned(rows.lengths - 1), non_blocking=True)
        self.wrapper.plan(
            torch.from_numpy(indptr),
            to_device(indices, cache.device),
            torch.from_numpy(last),
            cache.heads,
            cache.kv_heads,
            cache.head_dim,
            cache.block_size,
            q_data_type=cache.dtype,
            kv_data_type=cache.dtype,
        )


class FlashInferMixedPlan(FlashInferPlan):
    """A plan in fixed buffers for any mix of rows; one extra sequence takes the padding rows."""

    def __init__(
        self, cache: KVCache, workspace: Tensor, tables: Tensor, sequences: int, rows: int
    ) -> None:
        import flashinfer

        device = cache.device
        self.max_pages: int | None = len(tables) - sequences - 1  # unused sequences have one
        self._sequences, self._rows = sequences, rows
        super().__init__(
            cache,
            None,
            owner=torch.zeros(rows, dtype=torch.int32, device=device),
            position=torch.zeros(rows, dtype=torch.int32, device=device),
            indices=tables,
            indptr=torch.zeros(sequences + 2, dtype=torch.int32, device=device),
            last=torch.ones(sequences + 1, dtype=torch.int32, device=device),
        )
        self.wrapper = Wrapper(
            flashinfer.BatchPrefillWithPagedKVCacheWrapper(
                workspace,
                "NHD",
                use_cuda_graph=True,
                qo_indptr_buf=torch.zeros(sequences + 2, dtype=torch.int32, device=device),
                paged_kv_indptr_buf=self.indptr,
                paged_kv_indices_buf=self.indices,
                paged_kv_last_page_len_buf=self.last,
                backend="fa2",
            )
        )
        # The first plan fixes the largest number of rows.
        full = Rows(np.array([0, rows], np.int32), np.array([rows], np.int32),
                    [[0] * -(-rows // cache.block_size)])  # fmt: skip
        self.update(full)

    def update(self, rows: Rows) -> None:
        """Describe the next step.

        Raises:
            ValueError: The step has more sequences, rows or pages than the buffers hold.
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
        # Unused sequences get one page, page 0, and no rows; the last one owns the padding rows.
        empty = self._sequences + 1 - held
        pages = np.concatenate([indices, np.zeros(empty, np.int32)])
        ends = np.concatenate([indptr, indptr[-1] + np.arange(1, empty + 1, dtype=np.int32)])
        starts = np.concatenate([rows.starts, np.full(empty, used, np.int32)])
        lengths = np.concatenate([rows.lengths, np.ones(empty, np.int32)])
        last = ((lengths - 1) % cache.block_size + 1).astype(np.int32)
        append = np.zeros((2, self._rows), np.int32)  # owner and position of every row
        append[0] = self._sequences
        append[0, :used] = rows.owners
        append[1, :used] = rows.positions
        sent = to_device(append, cache.device)
        self.owner.copy_(sent[0])
        self.position.copy_(sent[1])
        self.wrapper.plan(
            torch.from_numpy(starts.astype(np.int32)),
            torch.from_numpy(ends.astype(np.int32)),
            to_device(pages, cache.device),
            torch.from_numpy(last),
            cache.heads,
            cache.kv_heads,
            cache.head_dim,
            cache.block_size,
            causal=True,
            q_data_type=cache.dtype,
            kv_data_type=cache.dtype,
        )
