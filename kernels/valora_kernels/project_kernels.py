"""Triton kernels of a whole projection, y = x·Wᵀ + LoRA."""

# Triton decides branches on constants (`if P > 1:`) at compile time, so they are not merged with
# branches on values; its functions have no types that a checker could use.
# ruff: noqa: SIM102
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from valora_kernels.atmm_kernels import _output, _row_starts


@triton.jit
def _add_bias(acc, bias, n, inside):
    return acc + tl.load(bias + n, mask=inside, other=0.0).to(tl.float32)[None, :]


@triton.jit
def _add_adapters(
    acc, h, b, b_table, slot_of_row, counts, lists, block, rows, count_rows, n, inside,
    projection, places, slots, max_rank, CAPACITY: tl.constexpr, RANKS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Return acc + h Bᵀ for every adapter of a block of rows, each on the rows that have it."""
    slot = tl.load(slot_of_row + rows, mask=rows < count_rows, other=-1)
    r = tl.arange(0, RANKS)
    at = h + (tl.cast(projection, tl.int64) * places + rows)[:, None] * RANKS + r[None, :]
    hidden = tl.load(at, mask=(slot >= 0)[:, None], other=0.0)
    for i in tl.range(0, tl.load(counts + block), num_stages=1):
        adapter = tl.load(lists + (block * CAPACITY + i) * 2)
        rank = tl.load(lists + (block * CAPACITY + i) * 2 + 1)
        starts = _row_starts(b_table, adapter, projection, r, r < rank, slots, max_rank)
        b_mask = (r < rank)[:, None] & inside[None, :]
        b_tile = tl.load(b + starts[:, None] + n[None, :], mask=b_mask, other=0.0)
        mine = tl.where((slot == adapter)[:, None] & (r < rank)[None, :], hidden, 0.0)
        acc = tl.dot(mine.to(b_tile.dtype), b_tile, acc, input_precision=PRECISION)
    return acc


@triton.jit
def _prefetch(pointers):
    """Prefetch cache lines into L2 without waiting for them."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [pointers],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit(do_not_specialize=["count_rows", "down"])
def base_kernel(
    y0, y1, y2, s0, s1, s2, n0, n1, n2, x, x_stride, w, w_stride, at1, at2, bias0, bias1, bias2,
    count_rows, down, k8,
    P: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EVEN_K: tl.constexpr,
    STAGES: tl.constexpr, AHEAD: tl.constexpr, PDL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute x·Wᵀ + bias of up to three projections. Grid: output × row blocks, rows fastest.

    The next kernel starts as soon as x is ready: a shrink of the same x uses what this one leaves.
    AHEAD steps of W are prefetched before x is ready. The second and third W begin `at1` and `at2`
    behind the first, with rows `w_stride` apart; strides, widths and offsets are in steps of 8.
    """
    K = k8 * 8
    item = tl.program_id(0)
    projection, first, y, stride, width = _output(
        item // down, y0, y1, y2, s0, s1, s2, n0 * 8, n1 * 8, n2 * 8, P, BN
    )
    which = tl.zeros((BN,), dtype=tl.int32) + projection
    begin = tl.cast(0, tl.int64)
    if P > 1:
        if projection == 1:
            begin = tl.cast(at1, tl.int64)
        if P > 2:
            if projection == 2:
                begin = tl.cast(at2, tl.int64)
    m = item % down * BM + tl.arange(0, BM)
    n = first + tl.arange(0, BN)
    k = tl.arange(0, BK)
    there = (m < count_rows)[:, None]
    inside = n < width
    w_row = w + begin * 8 + tl.where(inside, n, 0).to(tl.int64) * (w_stride * 8)
    if PDL:
        line = tl.arange(0, BK // 64) * 64
        for i in range(0, AHEAD * BK, BK):
            _prefetch(w_row[:, None] + tl.where(line[None, :] + i < K, line[None, :] + i, 0))
        gdc_wait()
        gdc_launch_dependents()
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    if bias0 is not None:
        acc = _add_bias(acc, bias0, n, inside & (which == 0))
    if bias1 is not None:
        acc = _add_bias(acc, bias1, n, inside & (which == 1))
    if bias2 is not None:
        acc = _add_bias(acc, bias2, n, inside & (which == 2))
    x_at = x + m[:, None].to(tl.int64) * (x_stride * 8) + k[None, :]
    w_at = w_row[:, None] + k[None, :]
    for i in tl.range(0, K, BK, num_stages=STAGES):
        x_mask = there if EVEN_K else there & (k[None, :] + i < K)
        w_mask = inside[:, None] if EVEN_K else inside[:, None] & (k[None, :] + i < K)
        x_tile = tl.load(x_at + i, mask=x_mask, other=0.0)
        w_tile = tl.load(w_at + i, mask=w_mask, other=0.0)
        acc = tl.dot(x_tile, tl.trans(w_tile), acc, input_precision=PRECISION)
    y_at = y + m[:, None].to(tl.int64) * (stride * 8) + n[None, :]
    tl.store(y_at, acc.to(y.dtype.element_ty), mask=there & inside[None, :])


@triton.jit(do_not_specialize=["places", "slots", "max_rank", "M", "projection"])
def many_rows_kernel(
    y_desc, x_desc, w_desc, bias, h, b, b_table, slot_of_row, counts, lists,
    projection, places, slots, max_rank, M, n8, k8,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
    PROGRAMS: tl.constexpr, CAPACITY: tl.constexpr, RANKS: tl.constexpr, PDL: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute a projection of many rows (a prefill): h·Bᵀ is a few more steps of the sum.

    Programs are persistent, and tiles are loaded by the bulk copy engine (TMA). The kernel starts
    while the shrink still runs: x is ready, because the shrink lets it start only after waiting for
    all kernels before; h is ready after `gdc_wait`.
    """
    if PDL:
        gdc_launch_dependents()
    N = n8 * 8
    K = k8 * 8
    down = tl.cdiv(M, BM)
    across = tl.cdiv(N, BN)
    for tile in tl.range(tl.program_id(0), down * across, PROGRAMS):
        # A group of row blocks visits all columns before the next group, so W stays in the cache.
        first = tile // (GROUP * across) * GROUP
        size = tl.minimum(down - first, GROUP)
        block = first + tile % (GROUP * across) % size
        column = tile % (GROUP * across) // size * BN
        n = column + tl.arange(0, BN)
        acc = tl.zeros((BM, BN), dtype=tl.float32)
        if bias is not None:
            acc = _add_bias(acc, bias, n, n < N)
        for k in range(0, K, BK):
            x_tile = x_desc.load([block * BM, k])
            w_tile = w_desc.load([column, k])
            acc = tl.dot(x_tile, tl.trans(w_tile), acc, input_precision=PRECISION)
        if PDL:
            gdc_wait()
        acc = _add_adapters(
            acc, h, b, b_table, slot_of_row, counts, lists, block, block * BM + tl.arange(0, BM),
            M, n, n < N, projection, places, slots, max_rank, CAPACITY, RANKS, PRECISION,
        )  # fmt: skip
        y_desc.store([block * BM, column], acc.to(y_desc.dtype))
