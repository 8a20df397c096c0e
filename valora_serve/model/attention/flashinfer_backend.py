"""Attention with FlashInfer's paged kernels, which support CUDA graphs.

A prefill kernel computes tiles of 128 rows, also where a sequence has one. On an H200 with 150
decoding sequences of 750 tokens and two prompts of 660, attention of a layer took 0.46 ms where the
decoding rows had a decode kernel, 0.60 ms with FlashAttention 3 for all rows, and 0.85 ms with 2 in
a graph. So the rows of a mixed step are split. In a graph the decode kernel computes as many
sequences as any step may have (512: 0.09 ms on an H100); steps with few decoding rows leave it out.
"""

from __future__ import annotations

import builtins
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from functools import cached_property
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from valora_serve.model.attention.base import (
    AttentionBackend,
    KVCache,
    Rows,
    pinned,
    send_together,
    to_device,
)
from valora_serve.model.attention.triton_backend import (
    TritonBackend,
    TritonDecodePlan,
    TritonMixedPlan,
)
from valora_serve.toolkit import find_own_programs, missing_tools

WIDTHS, DTYPES = (64, 128, 256), (torch.bfloat16, torch.float16)  # its kernels do not compile else
WORKSPACE_BYTES = 256 << 20  # of the buffer that FlashInfer's kernels share

# Decoding rows from which on a captured step of few sequences has `crowded_plan`, and sequences of
# a plan for which a crowd has another row.
#
# FlashAttention 3 computes tiles of 128 rows, also for a sequence that decodes one. The decode
# kernel computes as many sequences as the plan may have, so that its time grows with these. Where
# heads share keys and values, it is slower than our own kernel, whose tiles hold a head's group. On
# an H200 the other plan is faster from 13, 22 and 45 decoding rows on, with 64, 256 and 512
# sequences; where four heads share keys and values, from 10, 10 and 22 on (`bench_attention`).
CROWD = 12
SEQUENCES_PER_CROWD_ROW = 16


class FlashInferBackend(AttentionBackend):
    """FlashInfer's paged kernels, which are compiled at their first use."""

    auto_rank = 10
    stand_in = "triton"
    gpu_only = True

    def __init__(self, cache: KVCache) -> None:
        import flashinfer

        if cache.head_dim not in WIDTHS or cache.dtype not in DTYPES:
            raise RuntimeError(
                f"it computes heads of 64, 128 or 256 elements in 16 bits, and this model's have "
                f"{cache.head_dim} in {str(cache.dtype).removeprefix('torch.')}"
            )
        super().__init__(cache)
        self._library = flashinfer
        self._shares_keys = cache.heads > cache.kv_heads  # several query heads a head of keys
        find_largest_at_once()
        find_own_programs()  # it asks ninja, also where its kernels are compiled already
        self._workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=cache.device)
        self._mixed_workspace = self._workspace
        self._hopper = torch.cuda.get_device_capability(cache.device) == (9, 0)
        self._prompts = self._prefill_wrapper("fa3" if self._hopper else "auto")
        self._decode = self._decode_wrapper()
        self._mixed_decodes: dict[int, tuple[Wrapper, Tokens]] = {}
        if self._hopper:  # elsewhere FlashAttention 2 keeps 128 rows of each: 2 MB with 32 heads
            self.max_mixed = 512

    @classmethod
    def unsuitable(cls, cache: KVCache) -> str | None:
        if not find_spec("flashinfer"):
            return "flashinfer is not installed"
        missing = missing_tools()
        if missing and not find_spec("flashinfer_jit_cache"):
            return (
                f"flashinfer compiles its kernels with {', '.join(missing)}, not found here: "
                "`valora-serve --check` says what to install"
            )
        return None

    def _prefill_wrapper(self, kernel: str, **options: Any) -> Wrapper:
        made = self._library.BatchPrefillWithPagedKVCacheWrapper(
            self._mixed_workspace if options else self._workspace, "NHD", backend=kernel, **options
        )
        return Wrapper(made, self._cache, causal=True)

    def _decode_wrapper(self, **options: Any) -> Wrapper:
        made = self._library.BatchDecodeWithPagedKVCacheWrapper(
            self._workspace, "NHD", use_tensor_cores=self._shares_keys, **options
        )
        return Wrapper(made, self._cache)

    def _fixed_decode(self, sequences: int, tables: Tensor) -> tuple[Wrapper, Tokens]:
        """A decode wrapper, and the buffers of fixed size and address that describe its step."""
        tokens = Tokens.empty(sequences, sequences, tables)
        wrapper = self._decode_wrapper(
            use_cuda_graph=True,
            paged_kv_indptr_buffer=tokens.indptr,
            paged_kv_indices_buffer=tokens.indices,
            paged_kv_last_page_len_buffer=tokens.last,
        )
        return wrapper, tokens

    def compile(self) -> None:
        """Compile the libraries side by side; FlashAttention 3 takes more than a minute."""
        cache = self._cache
        starts, last = np.array([0, 1], np.int32), np.ones(1, np.int32)
        tokens = Tokens.empty(1, 1, torch.zeros(1, dtype=torch.int32, device=cache.device))
        tokens.indptr[1] = 1
        row = torch.zeros(1, cache.kv_heads, cache.head_dim, dtype=cache.dtype, device=cache.device)
        jobs = (
            lambda: self._decode.plan(starts, tokens.indices, last),
            lambda: self._prompts.plan(starts, starts, tokens.indices, last),
            lambda: tokens.write(row, row, cache.layers[0]),  # to page 0, which no sequence has
        )
        side_by_side(jobs, cache.device)

    def plan(self, rows: Rows) -> FlashInferPlan | TritonDecodePlan | TritonMixedPlan:
        if rows.seen is not None:
            # FlashAttention 3 takes no mask, and that of 2 is a bit for each row and token, made
            # on the host; our own kernel reads a number for each row, from the same pages.
            return self._own.plan(rows)
        cache, decoding = self._cache, rows.decoding
        indices, indptr = rows.indices(cache.block_size)
        last = last_lengths(rows.lengths, cache.block_size)
        written = np.stack([rows.owners, rows.positions]).astype(np.int32)
        sent = send_together([written, indices, indptr, last], cache.device)
        flat = sent[1]
        cut = int(indptr[decoding])
        if decoding:
            self._decode.plan(indptr[: decoding + 1], flat[:cut], last[:decoding])
        if decoding < len(last):
            starts = rows.starts[decoding:] - decoding
            self._prompts.plan(starts, indptr[decoding:] - cut, flat[cut:], last[decoding:])
        return FlashInferPlan(cache, Tokens(*sent), decoding, self._decode, self._prompts)

    def decode_plan(self, sequences: int) -> FlashInferDecodePlan:
        tables = self._table_buffer(sequences, sequences)
        return FlashInferDecodePlan(self._cache, *self._fixed_decode(sequences, tables))

    def mixed_plan(self, sequences: int, rows: int) -> FlashInferMixedPlan:
        return self._mixed_plan(sequences, rows, None)

    @cached_property
    def _own(self) -> TritonBackend:
        return TritonBackend(self._cache)

    def crowd(self, sequences: int) -> int | None:
        """Rows that decode from which on `crowded_plan` is faster; None except on Hopper GPUs."""
        if not self._hopper:
            return None
        limit = CROWD + sequences // SEQUENCES_PER_CROWD_ROW
        return limit // 2 if self._shares_keys else limit

    def crowded_plan(self, sequences: int, rows: int) -> FlashInferMixedPlan | TritonMixedPlan:
        """A plan with the decode kernel, or our own kernels where heads share keys and values."""
        if self._shares_keys:
            return self._own.mixed_plan(sequences, rows)
        # Plans of all numbers of rows take turns with it: a wrapper has 8 MB of its own.
        if sequences not in self._mixed_decodes:
            tables = self._table_buffer(sequences, rows)
            self._mixed_decodes[sequences] = self._fixed_decode(sequences, tables)
        return self._mixed_plan(sequences, rows, self._mixed_decodes[sequences])

    def _mixed_plan(
        self, sequences: int, rows: int, decode: tuple[Wrapper, Tokens] | None
    ) -> FlashInferMixedPlan:
        cache = self._cache
        tables = self._table_buffer(sequences, rows)
        if not self._hopper:
            # FlashInfer keeps partial sums of split rows there, planned in tiles of 128 rows, at
            # least one tile per sequence.
            tiles = cache.heads * (-(-rows * cache.heads // cache.kv_heads // 128) + sequences + 2)
            needed = tiles * 128 * (cache.head_dim + 1) * 4 + (16 << 20)
            if needed > self._mixed_workspace.numel():
                self._mixed_workspace = torch.empty(needed, dtype=torch.uint8, device=cache.device)
        tokens = Tokens.empty(rows, sequences + 1, tables)
        prompts = self._prefill_wrapper(
            "fa3" if self._hopper else "fa2",
            use_cuda_graph=True,
            qo_indptr_buf=torch.zeros_like(tokens.indptr),
            paged_kv_indptr_buf=tokens.indptr,
            paged_kv_indices_buf=tokens.indices,
            paged_kv_last_page_len_buf=tokens.last,
        )
        return FlashInferMixedPlan(cache, tokens, decode, prompts)


def side_by_side(jobs: Sequence[Callable[[], None]], device: torch.device) -> None:
    """Run jobs of a GPU in daemon threads, and raise the first error once all have ended."""
    ends: list[Future[None]] = [Future() for _ in jobs]

    def run(job: Callable[[], None], end: Future[None]) -> None:
        try:
            with torch.accelerator.device_index(device.index):  # a thread begins with GPU 0
                job()
            end.set_result(None)
        except BaseException as error:  # noqa: BLE001 - raised below
            end.set_exception(error)

    for pair in zip(jobs, ends, strict=True):
        threading.Thread(target=run, args=pair, daemon=True).start()
    for end in wait(ends).done:
        end.result()


def find_largest_at_once() -> None:
    """Let FlashInfer's `plan` ask torch for a tensor's maximum, as Python's `max` took 2 ms."""
    for name in ("flashinfer.prefill", "flashinfer.decode"):
        vars(import_module(name)).setdefault("max", largest)


def largest(*values: Any, **options: Any) -> Any:
    """Python's `max`, which takes the elements of a tensor together."""
    if len(values) == 1 and isinstance(values[0], Tensor):
        return values[0].max()
    return builtins.max(*values, **options)


def last_lengths(lengths: NDArray[np.int32], block_size: int) -> NDArray[np.int32]:
    """Tokens in the last page of sequences of these lengths: [n] int32."""
    found: NDArray[np.int32] = ((lengths - 1) % block_size + 1).astype(np.int32)
    return found


class Wrapper:
    """A wrapper of FlashInfer whose steps are planned while the device still runs earlier ones.

    FlashInfer copies each plan from one page-locked buffer, without waiting. So `plan` waits for
    the copy before, which leaves the host one step ahead of the device.
    """

    def __init__(self, wrapper: Any, cache: KVCache, **options: Any) -> None:
        self._wrapper = wrapper
        self._shape = (cache.heads, cache.kv_heads, cache.head_dim, cache.block_size)
        self._options = options | {"q_data_type": cache.dtype, "kv_data_type": cache.dtype}
        self._copied = torch.cuda.Event()

    def plan(self, *parts: NDArray[np.int32] | Tensor) -> None:
        """Plan the next step of FlashInfer's `parts`.

        First rows (of a prefill wrapper alone), starts in the pages, pages, tokens in last pages.
        """
        given = [part if isinstance(part, Tensor) else torch.from_numpy(part) for part in parts]
        self._copied.synchronize()
        self._wrapper.plan(*given, *self._shape, **self._options)
        self._copied.record()

    def run(self, query: Tensor, pages: tuple[Tensor, Tensor], out: Tensor, scale: float) -> None:
        """Attend as planned: [rows, heads, head_dim] → `out`, of the same shape."""
        # `plan` was told no scale, so that this factor is one of 1 / √head_dim; a query that is
        # multiplied by it instead is rounded once more, which shows where scores are large.
        self._wrapper.run(query, pages, q_scale=scale * query.shape[-1] ** 0.5, out=out)


class Tokens(NamedTuple):
    """Where a step's keys and values are written to."""

    written: Tensor  # [2, rows] int32, each row's sequence, and index of its token in that sequence
    indices: Tensor  # [pages in use] int32, of all sequences, one sequence after the other
    indptr: Tensor  # [n + 1] int32, start of each sequence in `indices`
    last: Tensor  # [n] int32, tokens in each sequence's last page

    @classmethod
    def empty(cls, rows: int, sequences: int, tables: Tensor) -> Tokens:
        """Buffers for steps of so many rows and sequences, with a buffer for their pages."""
        zeros = tables.new_zeros
        return cls(zeros(2, rows), tables, zeros(sequences + 1), tables.new_ones(sequences))

    def write(self, key: Tensor, value: Tensor, pages: tuple[Tensor, Tensor]) -> None:
        """Write keys and values of all rows, [rows, kv_heads, head_dim], to a layer's pages."""
        import flashinfer

        own = (self.indices, self.indptr, self.last)
        flashinfer.append_paged_kv_cache(key, value, *self.written, pages, *own)


class FlashInferPlan:
    """The attention of a step: its first `decoding` rows have `decode`, others `prompts`."""

    def __init__(
        self,
        cache: KVCache,
        tokens: Tokens,
        decoding: int,
        decode: Wrapper | None,
        prompts: Wrapper | None,
    ) -> None:
        self._cache, self._tokens, self._decoding = cache, tokens, decoding
        self._decode, self._prompts = decode, prompts

    def run(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        cache = self._cache
        pair = cache.layers[layer]
        self._tokens.write(key, value, pair)
        query = query.contiguous()
        out = torch.empty_like(query)
        self._attend(query, pair, out, scale)
        return out

    def _attend(
        self, query: Tensor, pages: tuple[Tensor, Tensor], out: Tensor, scale: float
    ) -> None:
        cut = self._decoding
        if cut and self._decode is not None:
            self._decode.run(query[:cut], pages, out[:cut], scale)
        if cut < len(query) and self._prompts is not None:
            self._prompts.run(query[cut:], pages, out[cut:], scale)


class FlashInferDecodePlan(FlashInferPlan):
    """A plan in fixed buffers, with one row per sequence."""

    def __init__(self, cache: KVCache, wrapper: Wrapper, tokens: Tokens) -> None:
        count = len(tokens.last)
        self.max_pages: int | None = len(tokens.indices) - count  # rows that pad a step have one
        tokens.written[0] = torch.arange(count, device=cache.device)
        super().__init__(cache, tokens, count, wrapper, None)

    def update(self, rows: Rows) -> None:
        cache = self._cache
        indices, indptr = rows.indices(cache.block_size)
        last = last_lengths(rows.lengths, cache.block_size)
        self._tokens.written[1].copy_(pinned(rows.lengths - 1), non_blocking=True)
        assert self._decode is not None
        self._decode.plan(indptr, to_device(indices, cache.device), last)


class FlashInferMixedPlan(FlashInferPlan):
    """A plan in fixed buffers for any mix of rows; one extra sequence takes the padding rows."""

    def __init__(
        self,
        cache: KVCache,
        tokens: Tokens,
        decode: tuple[Wrapper, Tokens] | None,
        prompts: Wrapper,
    ) -> None:
        wrapper, own = decode or (None, None)
        super().__init__(cache, tokens, 0 if own is None else len(own.last), wrapper, prompts)
        self._rows, self._sequences = tokens.written.shape[1], len(tokens.last) - 1
        pages = min(len(one.indices) for one in (tokens, own) if one is not None)
        self.max_pages: int | None = pages - self._sequences - 1  # unused sequences have one
        # The first plan fixes the largest number of rows.
        full = Rows(np.array([0, self._rows], np.int32), np.array([self._rows], np.int32),
                    [[0] * -(-self._rows // cache.block_size)])  # fmt: skip
        self.update(full)

    def _attend(
        self, query: Tensor, pages: tuple[Tensor, Tensor], out: Tensor, scale: float
    ) -> None:
        # How many rows decode is not known when this is captured: the first kernel writes as many
        # as may, and the second one those of prompts among them anew.
        cut = self._decoding
        if self._decode is not None:
            self._decode.run(query[:cut], pages, out[:cut], scale)
        assert self._prompts is not None
        self._prompts.run(query, pages, out, scale)

    def update(self, rows: Rows) -> None:
        cache, held, used = self._cache, len(rows.lengths), int(rows.starts[-1])
        indices, indptr = rows.indices(cache.block_size)
        # Unused sequences get one page, page 0, and no rows; the last one owns the padding rows.
        empty = self._sequences + 1 - held
        pages = np.concatenate([indices, np.zeros(empty, np.int32)])
        ends = np.concatenate([indptr, indptr[-1] + np.arange(1, empty + 1, dtype=np.int32)])
        starts = np.concatenate([rows.starts, np.full(empty, used, np.int32)])
        lengths = np.concatenate([rows.lengths, np.ones(empty, np.int32)])
        last = last_lengths(lengths, cache.block_size)
        append = np.zeros((2, self._rows), np.int32)  # sequence and position of every row
        append[0] = self._sequences
        append[0, :used] = rows.owners
        append[1, :used] = rows.positions
        self._tokens.written.copy_(pinned(append), non_blocking=True)
        flat = to_device(pages, cache.device)
        if self._decode is not None:
            # The others attend to one token each, of the pages that follow.
            decoding, limit = rows.decoding, self._decoding
            ones = np.arange(1, limit + 1 - decoding, dtype=np.int32)
            own = np.concatenate([ends[: decoding + 1], ends[decoding] + ones])
            lasts = np.concatenate([last[:decoding], np.ones_like(ones)])
            self._decode.plan(own, flat[: int(own[-1])], lasts)
            starts = np.maximum(starts, decoding)  # decoding sequences have no rows
        assert self._prompts is not None
        self._prompts.plan(starts.astype(np.int32), ends.astype(np.int32), flat, last)
