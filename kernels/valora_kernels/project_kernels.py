"""Triton kernels of a whole projection: y = x·Wᵀ + h·Bᵀ in one pass over y.

The expansion is a few more steps of the base product's sum, so y is neither read again nor rounded
twice. h comes from `shrink_kernel` with `BY_ROW`.
"""

# Triton's functions have no types that a checker could use.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from valora_kernels.atmm_kernels import _row_starts


@triton.jit
def _start(bias, n, inside, BM: tl.constexpr, BN: tl.constexpr):
    """Where the sum of a tile starts: at the bias, or at zero."""
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    if bias is not None:
        acc += tl.load(bias + n, mask=inside, other=0.0).to(tl.float32)[None, :]
    return acc


@triton.jit
def _add_adapters(
    acc, h, b, b_table, slot_of_row, counts, lists, block, rows, count_rows, n, inside,
    projection, places, slots, max_rank, width, base, CAPACITY: tl.constexpr,
    RANKS: tl.constexpr, PAGED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Acc + h Bᵀ for every adapter of a block of rows; each sees its own rows' h only."""
    slot = tl.load(slot_of_row + rows, mask=rows < count_rows, other=-1)
    r = tl.arange(0, RANKS)
    at = h + (tl.cast(projection, tl.int64) * places + rows)[:, None] * RANKS + r[None, :]
    hidden = tl.load(at, mask=(slot >= 0)[:, None], other=0.0)
    for i in tl.range(0, tl.load(counts + block), num_stages=1):
        adapter = tl.load(lists + (block * CAPACITY + i) * 2)
        rank = tl.load(lists + (block * CAPACITY + i) * 2 + 1)
        starts = _row_starts(
            b_table, adapter, projection, r, r < rank, slots, max_rank, width, base, PAGED
        )  # fmt: skip
        b_mask = (r < rank)[:, None] & inside[None, :]
        b_tile = tl.load(b + starts[:, None] + n[None, :], mask=b_mask, other=0.0)
        mine = tl.where((slot == adapter)[:, None] & (r < rank)[None, :], hidden, 0.0)
        acc = tl.dot(mine.to(b_tile.dtype), b_tile, acc, input_precision=PRECISION)
    return acc


@triton.jit
def _rows_of_b(
    b_table, lists, i, r, count, slots, max_rank, width, base, projection,
    TOGETHER: tl.constexpr, PAGED: tl.constexpr,
):  # fmt: skip
    """From list place i on: adapters [TOGETHER], their ranks, first elements of their Bᵀ rows."""
    j = i + tl.arange(0, TOGETHER)
    adapter = tl.load(lists + j * 2, mask=j < count, other=-1)
    rank = tl.load(lists + j * 2 + 1, mask=j < count, other=0)
    if PAGED:
        slot = (projection * slots + adapter)[:, None].to(tl.int64) * max_rank
        real = r[None, :] < rank[:, None]
        starts = tl.multiple_of(tl.load(b_table + slot + r[None, :], mask=real, other=0), [8, 8])
    else:
        starts = base + (adapter[:, None].to(tl.int64) * max_rank + r[None, :]) * width
    return adapter, rank, starts


@triton.jit
def _add_adapters_together(
    acc, h, b, b_table, slot, count, lists, rows, n, inside, projection, places, slots, max_rank,
    width, base, BM: tl.constexpr, BN: tl.constexpr, RANKS: tl.constexpr,
    TOGETHER: tl.constexpr, PAGED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Acc + h Bᵀ, TOGETHER adapters in one product, with zeros where a row is not theirs."""
    r = tl.arange(0, RANKS)
    h_row = h + (tl.cast(projection, tl.int64) * places + rows)[:, None, None] * RANKS
    for i in tl.range(0, count, TOGETHER, num_stages=1):
        adapter, rank, starts = _rows_of_b(
            b_table, lists, i, r, count, slots, max_rank, width, base, projection, TOGETHER, PAGED
        )  # fmt: skip
        b_mask = (r[None, :] < rank[:, None])[:, :, None] & inside[None, None, :]
        b_tile = tl.load(b + starts[:, :, None] + n[None, None, :], mask=b_mask, other=0.0)
        whole = tl.cdiv(rank, 8) * 8  # h is zero there, and 16 bytes load at once
        mine = (slot[:, None] == adapter[None, :])[:, :, None] & (slot >= 0)[:, None, None]
        mine = mine & (r[None, :] < whole[:, None])[None, :, :]
        hidden = tl.load(h_row + r[None, None, :], mask=mine, other=0.0)
        acc = tl.dot(
            tl.reshape(hidden, (BM, TOGETHER * RANKS)),
            tl.reshape(b_tile, (TOGETHER * RANKS, BN)),
            acc,
            input_precision=PRECISION,
        )
    return acc


@triton.jit
def _prefetch(pointers):
    """Ask for cache lines without waiting for them."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [pointers],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit(do_not_specialize=["places", "slots", "max_rank", "count_rows", "projection"])
def few_rows_kernel(
    y, y_stride, x, x_stride, w, w_stride, bias, h, b, b_table, slot_of_row, counts, lists,
    projection, before, places, slots, max_rank, count_rows, n8, k8,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, TOGETHER: tl.constexpr,
    RANKS: tl.constexpr, EVEN_K: tl.constexpr, PAGED: tl.constexpr, STAGES: tl.constexpr,
    PDL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Few rows (a decode step): the grid goes over the outputs, W streams by once.

    It starts while the shrink still runs: x is ready, because the shrink lets it start only after
    waiting for all that came before; h is ready after `gdc_wait`.
    """
    if PDL:
        gdc_launch_dependents()
    N = n8 * 8
    K = k8 * 8
    m = tl.arange(0, BM)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    there = (m < count_rows)[:, None]
    inside = n < N
    count = tl.load(counts)
    base = tl.cast(before, tl.int64) * 8 * slots * max_rank
    if PDL:  # B's part of these columns comes to the cache meanwhile
        r = tl.arange(0, RANKS)
        for i in tl.range(0, count, TOGETHER, num_stages=1):
            _, rank, starts = _rows_of_b(
                b_table, lists, i, r, count, slots, max_rank, N, base, projection, TOGETHER, PAGED
            )  # fmt: skip
            real = r[None, :] < rank[:, None]
            _prefetch(b + tl.where(real, starts, 0) + tl.program_id(0) * BN)
    x_at = x + m[:, None].to(tl.int64) * (x_stride * 8) + k[None, :]
    w_at = w + n[:, None].to(tl.int64) * (w_stride * 8) + k[None, :]
    acc = _start(bias, n, inside, BM, BN)
    for i in tl.range(0, K, BK, num_stages=STAGES):
        x_mask = there if EVEN_K else there & (k[None, :] + i < K)
        w_mask = inside[:, None] if EVEN_K else inside[:, None] & (k[None, :] + i < K)
        x_tile = tl.load(x_at + i, mask=x_mask, other=0.0)
        w_tile = tl.load(w_at + i, mask=w_mask, other=0.0)
        acc = tl.dot(x_tile, tl.trans(w_tile), acc, input_precision=PRECISION)
    if PDL:
        gdc_wait()
    slot = tl.load(slot_of_row + m, mask=m < count_rows, other=-1)
    acc = _add_adapters_together(
        acc, h, b, b_table, slot, count, lists, m, n, inside, projection, places, slots, max_rank,
        N, base, BM, BN, RANKS, TOGETHER, PAGED, PRECISION,
    )  # fmt: skip
    y_at = y + m[:, None].to(tl.int64) * (y_stride * 8) + n[None, :]
    tl.store(y_at, acc.to(y.dtype.element_ty), mask=there & inside[None, :])


@triton.jit(do_not_specialize=["places", "slots", "max_rank", "M", "projection"])
def many_rows_kernel(
    y_desc, x_desc, w_desc, bias, h, b, b_table, slot_of_row, counts, lists,
    projection, before, places, slots, max_rank, M, n8, k8,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
    PROGRAMS: tl.constexpr, CAPACITY: tl.constexpr, RANKS: tl.constexpr, PAGED: tl.constexpr,
    HALVES: tl.constexpr, PDL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Many rows (a prefill): persistent programs, tiles through the bulk copy engine.

    Like `few_rows_kernel` it starts while the shrink still runs.
    """
    if PDL:
        gdc_launch_dependents()
    N = n8 * 8
    K = k8 * 8
    down = tl.cdiv(M, BM)
    across = tl.cdiv(N, BN)
    for tile in tl.range(tl.program_id(0), down * across, PROGRAMS):
        # A group of row blocks goes over all columns before the next, so W stays in the cache.
        first = tile // (GROUP * across) * GROUP
        size = tl.minimum(down - first, GROUP)
        block = first + tile % (GROUP * across) % size
        column = tile % (GROUP * across) // size * BN
        n = column + tl.arange(0, BN)
        acc = _start(bias, n, n < N, BM, BN)
        for k in range(0, K, BK):
            x_tile = x_desc.load([block * BM, k])
            w_tile = w_desc.load([column, k])
            acc = tl.dot(x_tile, tl.trans(w_tile), acc, input_precision=PRECISION)
        if PDL:
            gdc_wait()
        acc = _add_adapters(
            acc, h, b, b_table, slot_of_row, counts, lists, block, block * BM + tl.arange(0, BM),
            M, n, n < N, projection, places, slots, max_rank, N,
            tl.cast(before, tl.int64) * 8 * slots * max_rank,
            CAPACITY, RANKS, PAGED, PRECISION,
        )  # fmt: skip
        if HALVES:
            # Two stores of half the width need half the staging memory, which buys a load stage.
            pair = tl.permute(tl.reshape(acc, (BM, 2, BN // 2)), (0, 2, 1))
            left, right = tl.split(pair)
            y_desc.store([block * BM, column], left.to(y_desc.dtype))
            y_desc.store([block * BM, column + BN // 2], right.to(y_desc.dtype))
        else:
            y_desc.store([block * BM, column], acc.to(y_desc.dtype))
