"""Attention with our own Triton kernels: CUDA graphs where FlashInfer is not installed."""

from __future__ import annotations

from math import log2

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from valora_kernels.launching import power_of_two, precision_of
from valora_serve.errors import SettingsError
from valora_serve.model.attention.base import AttentionBackend, KVCache, Rows, pinned, to_device

LOG2E = log2(np.e)

PROGRAMS_PER_PROCESSOR = 2  # of a decode step, by which its sequences are split
MAX_SPLITS = 32  # programs that share the tokens of a sequence


class TritonBackend(AttentionBackend):
    """Paged attention in Triton: one launch in a decode step, two where sequences are split."""

    auto_rank = 15

    def __init__(self, cache: KVCache) -> None:
        from triton import knobs

        super().__init__(cache)
        if cache.device.type != "cuda" and not knobs.runtime.interpret:
            raise SettingsError(
                "attention backend 'triton' needs a CUDA GPU: choose 'torch' on a CPU"
            )
        self._tiling = Tiling(cache)

    def plan(self, rows: Rows) -> TritonDecodePlan | TritonMixedPlan:
        pages = int((-(-rows.lengths // self._cache.block_size)).sum())
        used, sequences = int(rows.starts[-1]), len(rows.lengths)
        decode = used == sequences and bool((np.diff(rows.starts) == 1).all())
        kind: type[TritonDecodePlan | TritonMixedPlan]
        kind = TritonDecodePlan if decode else TritonMixedPlan
        tables = torch.empty(pages, dtype=torch.int32, device=self._cache.device)
        plan = kind(self._cache, self._tiling, sequences, used, tables)
        plan.update(rows)
        return plan

    def decode_plan(self, sequences: int) -> TritonDecodePlan:
        tables = self._table_buffer(sequences, sequences)
        return TritonDecodePlan(self._cache, self._tiling, sequences, sequences, tables)

    def mixed_plan(self, sequences: int, rows: int) -> TritonMixedPlan:
        tables = self._table_buffer(sequences, rows)
        return TritonMixedPlan(self._cache, self._tiling, sequences, rows, tables)


class Tiling:
    """Sizes of tiles, and how the kernels are launched, for one KV cache."""

    def __init__(self, cache: KVCache) -> None:
        self.group = cache.heads // cache.kv_heads  # query heads that share keys and values
        self.width = max(16, power_of_two(cache.head_dim))
        # Rows times `group` in a tile of a sequence with few rows, and with many.
        self.small = max(16, power_of_two(self.group))
        self.large = max(64, self.small)
        self.tokens = 64 if self.width <= 128 else 32  # of the cache per iteration
        self._kv_heads = cache.kv_heads
        self._processors = self._stages = 1
        if cache.device.type == "cuda":
            found = torch.cuda.get_device_properties(cache.device)
            room = int(getattr(found, "shared_memory_per_block_optin", 96 << 10)) - (16 << 10)
            iteration = 2 * self.tokens * self.width * cache.dtype.itemsize
            self._processors = int(found.multi_processor_count)
            self._stages = max(1, min(3, room // iteration))

    def splits(self, sequences: int) -> int:
        """Programs that share the tokens of a sequence in a decode step; a power of two."""
        wanted = PROGRAMS_PER_PROCESSOR * self._processors
        return min(power_of_two(-(-wanted // (sequences * self._kv_heads))), MAX_SPLITS)

    def options(self, room: int) -> dict[str, int]:
        """Warps and stages of a launch whose tiles have so much room."""
        return {"num_warps": 4 if room <= 64 else 8, "num_stages": self._stages}


class TritonPlan:
    """A plan in fixed buffers (`tables`: [pages] int32); steps copy what changes in two pieces."""

    def __init__(
        self, cache: KVCache, tiling: Tiling, sequences: int, tables: Tensor, *sizes: int
    ) -> None:
        self._cache, self._tiling, self._tables = cache, tiling, tables
        # A decoding row that pads a step has a page.
        self.max_pages: int | None = len(tables) - sequences
        self._buffer = torch.zeros(sum(sizes), dtype=torch.int32, device=cache.device)
        self._parts = self._buffer.split(sizes)

    def _send(self, indices: NDArray[np.int32], *parts: NDArray[np.int32]) -> None:
        flat = np.concatenate([part.reshape(-1) for part in parts])
        self._buffer.copy_(pinned(flat), non_blocking=True)
        self._tables[: len(indices)].copy_(pinned(indices), non_blocking=True)

    def _attend(
        self,
        out: Tensor,
        tensors: tuple[Tensor, Tensor, Tensor],
        layer: int,
        scale: float,
        tiles: Tensor,
        room: int,
        partial: Tensor | None = None,
        sums: Tensor | None = None,
        *,
        splits: int = 1,
        fused: bool = False,
        seen: Tensor | None = None,
    ) -> None:
        from valora_kernels import attention_kernels as k

        cache, tiling = self._cache, self._tiling
        keys, values = cache.layers[layer]
        strides = [part for one in tensors for part in (one, one.stride(0), one.stride(1))]
        k.attention_kernel[(len(tiles) // 4, cache.kv_heads, splits)](
            out, partial, sums, *strides,
            keys, values, keys.stride(0), keys.stride(1), tiles, self._tables, seen, len(out),
            scale * LOG2E,
            G=tiling.group, D=cache.head_dim, DP=tiling.width, PAGE=cache.block_size, BM=room,
            BN=tiling.tokens, SPLITS=splits, FUSED=fused, PRECISION=precision_of(out),
            SEEN=seen is not None,
            **tiling.options(room),
        )  # fmt: skip


class TritonDecodePlan(TritonPlan):
    """One row per sequence: its key and value are written by the kernel that reads the others."""

    def __init__(
        self, cache: KVCache, tiling: Tiling, sequences: int, rows: int, tables: Tensor
    ) -> None:
        super().__init__(cache, tiling, sequences, tables, 4 * sequences)
        self._sequences = sequences
        self._splits = tiling.splits(sequences)
        self._partial = self._sums = None
        if self._splits > 1:
            like = torch.empty(0, dtype=torch.float32, device=cache.device)
            self._sums = like.new_empty(self._splits, rows, cache.heads)
            self._partial = like.new_empty(*self._sums.shape, cache.head_dim)

    def update(self, rows: Rows) -> None:
        indices, indptr = rows.indices(self._cache.block_size)
        tiles, held = np.zeros((self._sequences, 4), np.int32), len(rows.lengths)
        tiles[:held, 0] = indptr[:-1]
        tiles[:held, 1] = np.arange(held)
        tiles[:held, 2] = 1
        tiles[:held, 3] = rows.lengths - 1
        self._send(indices, tiles)

    def run(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        from valora_kernels import attention_kernels as k

        tensors = dense(query), dense(key), dense(value)
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        tiles, tiling, cache = self._parts[0], self._tiling, self._cache
        self._attend(
            out, tensors, layer, scale, tiles, tiling.small, self._partial, self._sums,
            splits=self._splits, fused=True,
        )  # fmt: skip
        if self._splits > 1:
            k.combine_kernel[(len(tiles) // 4, cache.heads)](
                out, self._partial, self._sums, tiles, len(out),
                D=cache.head_dim, DP=tiling.width, BN=tiling.tokens, SPLITS=self._splits,
                FUSED=True, num_warps=4,
            )  # fmt: skip
        return out


class TritonMixedPlan(TritonPlan):
    """Any mix of rows: sequences with few rows have small tiles, the others large ones."""

    _seen: Tensor | None = None  # see `Rows.seen`; steps with it have a plan of their own

    def __init__(
        self, cache: KVCache, tiling: Tiling, sequences: int, rows: int, tables: Tensor
    ) -> None:
        few, many = tiling.small // tiling.group, tiling.large // tiling.group
        self._few, self._many = few, many  # rows of a tile
        large = rows // many + min(sequences, rows // (few + 1))
        super().__init__(cache, tiling, sequences, tables, 4 * sequences, 4 * large, rows, rows)

    def update(self, rows: Rows) -> None:
        indices, indptr = rows.indices(self._cache.block_size)
        if rows.seen is not None:
            self._seen = to_device(rows.seen, self._cache.device)
        counts = np.diff(rows.starts)
        parts = []
        for size, which, room in (
            (len(self._parts[0]), np.flatnonzero(counts <= self._few), self._few),
            (len(self._parts[1]), np.flatnonzero(counts > self._few), self._many),
        ):
            each = -(-counts[which] // room)
            owner = np.repeat(which, each)
            ends = np.cumsum(each)
            first = (np.arange(len(owner)) - np.repeat(ends - each, each)) * room
            tiles = np.zeros((size // 4, 4), np.int32)
            held = tiles[: len(owner)]
            held[:, 0] = indptr[owner]
            held[:, 1] = rows.starts[owner] + first
            held[:, 2] = np.minimum(counts[owner] - first, room)
            held[:, 3] = rows.lengths[owner] - counts[owner] + first
            parts.append(tiles)
        places = np.full((2, len(self._parts[2])), -1, np.int32)
        places[:, : rows.starts[-1]] = rows.locations(self._cache.block_size)
        self._send(indices, *parts, places)

    def run(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        from valora_kernels import attention_kernels as k

        cache, tiling = self._cache, self._tiling
        tensors = dense(query), dense(key), dense(value)
        _, key, value = tensors
        keys, values = cache.layers[layer]
        k.append_kernel[(len(key),)](
            keys, values, keys.stride(0), keys.stride(1), key, key.stride(0), key.stride(1),
            value, value.stride(0), value.stride(1), self._parts[2], self._parts[3],
            H=cache.kv_heads, D=cache.head_dim, HP=power_of_two(cache.kv_heads), DP=tiling.width,
        )  # fmt: skip
        out = torch.zeros(query.shape, dtype=query.dtype, device=query.device)
        for tiles, room in zip(self._parts[:2], (tiling.small, tiling.large), strict=True):
            if len(tiles):
                self._attend(out, tensors, layer, scale, tiles, room, seen=self._seen)
        return out


def dense(rows: Tensor) -> Tensor:
    """The same [rows, heads, width] with neighbouring elements, which the kernels rely on."""
    return rows if rows.stride(-1) == 1 else rows.contiguous()
