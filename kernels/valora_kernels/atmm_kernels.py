"""The Triton kernels of the LoRA operator (VaLoRA §4.3): shrink h = scale · x Aᵀ, expand y += h Bᵀ.

Weights are read before `gdc_wait` and activations after it (programmatic dependent launch), because
a preceding kernel may write activations but never weights. Every program waits, so that the end of
a grid implies the end of all grids before it.
"""

# Triton decides branches on constants (`if P > 1:`) at compile time, so they are not merged with
# branches on values; its functions have no types that a checker could use.
# ruff: noqa: PLR0915, SIM102, SIM108
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def _row_starts(table, adapter, projection, r, real, slots, max_rank):
    """First elements of rank rows `r` of one matrix of an adapter; `real` masks existing rows."""
    slot = projection * slots + adapter
    found = tl.load(table + slot.to(tl.int64) * max_rank + r, mask=real, other=0)
    return tl.multiple_of(found, 8)


@triton.jit
def _load_h(
    part, places, place, valid, rank, projection, term, rank_block,
    P: tl.constexpr, TERMS: tl.constexpr, BM: tl.constexpr, BR: tl.constexpr,
    SPLITS: tl.constexpr, RANKS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Load h [BM, BR] in fp32: the sum over the parts of the input width."""
    r = rank_block * BR + tl.arange(0, BR)
    layer = tl.cast(projection * TERMS + term, tl.int64)
    at = part + (layer * places + place)[:, None] * RANKS + r[None, :]
    # Ranks rounded up are zero there, and a mask in steps of 8 lets loads be 16 bytes wide.
    present = valid[:, None] & (r < tl.cdiv(rank, 8) * 8)[None, :]
    # Several parts are loaded at once, because a loop would wait for each. With the parts on the
    # middle axis a thread holds all parts of its elements. A single part goes through the sum too:
    # it fixes the layout; otherwise h is loaded in the tensor cores' layout, two bytes at a time.
    step = tl.cast(places, tl.int64) * (P * TERMS * RANKS)
    h = tl.zeros((BM, BR), dtype=tl.float32)
    for first in tl.static_range(0, SPLITS, CHUNK):
        i = first + tl.arange(0, CHUNK)
        parts = tl.load(
            at[:, None, :] + (i * step)[None, :, None],
            mask=present[:, None, :] & (i < SPLITS)[None, :, None],
            other=0.0,
            cache_modifier=".cg",  # another SM has just written it
        )
        h += tl.sum(parts.to(tl.float32), axis=1)
    return h


@triton.jit
def _shrink_tile(
    x, x_stride, a, a_table, records, rows, scale, part, h_out, counters,
    places, slots, max_rank, K, tile, projection, term, rank_block, split,
    P: tl.constexpr, TERMS: tl.constexpr, BM: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr,
    K_SPLIT: tl.constexpr, SPLITS: tl.constexpr, RANKS: tl.constexpr, EVEN_K: tl.constexpr,
    GATHER: tl.constexpr, CHUNK: tl.constexpr, BY_ROW: tl.constexpr, PDL: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Shrink a tile by a block of ranks and a part of the width; GATHER: the last sums in order."""
    rank = tl.load(records + tile * 4 + 2 * term + 1)
    if rank > rank_block * BR:
        adapter = tl.load(records + tile * 4 + 2 * term)
        place = tile * BM + tl.arange(0, BM)
        r = rank_block * BR + tl.arange(0, BR)
        real = r < rank
        row = tl.load(rows + place)
        valid = row >= 0
        factor = tl.load(scale + term * places + place)
        starts = _row_starts(a_table, adapter, projection, r, real, slots, max_rank)
        k = split * K_SPLIT + tl.arange(0, BK)
        a_at = a + starts[:, None] + k[None, :]
        x_at = x + row.to(tl.int64)[:, None] * x_stride + k[None, :]
        if K_SPLIT == BK:
            a_mask = real[:, None] if EVEN_K else real[:, None] & (k[None, :] < K)
            x_mask = valid[:, None] if EVEN_K else valid[:, None] & (k[None, :] < K)
            a_tile = tl.load(a_at, mask=a_mask, other=0.0)
            if PDL:
                gdc_wait()
            x_tile = tl.load(x_at, mask=x_mask, other=0.0)
            h = tl.dot(x_tile, tl.trans(a_tile), input_precision=PRECISION)
        else:
            if PDL:
                gdc_wait()
            h = tl.zeros((BM, BR), dtype=tl.float32)
            for i in range(0, K_SPLIT, BK):
                a_mask = real[:, None] if EVEN_K else real[:, None] & (k[None, :] + i < K)
                x_mask = valid[:, None] if EVEN_K else valid[:, None] & (k[None, :] + i < K)
                a_tile = tl.load(a_at + i, mask=a_mask, other=0.0)
                x_tile = tl.load(x_at + i, mask=x_mask, other=0.0)
                h = tl.dot(x_tile, tl.trans(a_tile), h, input_precision=PRECISION)
        h = h * factor[:, None]
        layer = projection * TERMS + term
        if SPLITS > 1:
            layers = (split * P * TERMS + layer).to(tl.int64)
            part_at = part + (layers * places + place)[:, None] * RANKS + r[None, :]
            tl.store(part_at, h, mask=valid[:, None])
        where = row if BY_ROW else place
        h_at = h_out + (layer.to(tl.int64) * places + where)[:, None] * RANKS + r[None, :]
        if SPLITS == 1:
            tl.store(h_at, h.to(h_out.dtype.element_ty), mask=valid[:, None])
        if GATHER:
            tl.debug_barrier()  # all threads have stored before one of them says so
            counter = counters + (tile * P * TERMS + layer) * (RANKS // BR) + rank_block
            if tl.atomic_add(counter, 1, sem="acq_rel") == SPLITS - 1:
                tl.store(counter, 0)  # for the next call
                total = _load_h(
                    part, places, place, valid, rank, projection, term, rank_block,
                    P, TERMS, BM, BR, SPLITS, RANKS, CHUNK,
                )  # fmt: skip
                tl.store(h_at, total.to(h_out.dtype.element_ty), mask=valid[:, None])
    elif PDL:
        gdc_wait()


@triton.jit
def _output(block, y0, y1, y2, s0, s1, s2, n0, n1, n2, P: tl.constexpr, BN: tl.constexpr):
    """The projection of an output block, its first column, and that projection's y and sizes."""
    projection = 0
    first = block * BN
    y = y0
    stride = s0
    width = n0
    if P > 1:
        if first >= tl.cdiv(n0, BN) * BN:
            first -= tl.cdiv(n0, BN) * BN
            projection = 1
            y = y1
            stride = s1
            width = n1
            if P > 2:
                if first >= tl.cdiv(n1, BN) * BN:
                    first -= tl.cdiv(n1, BN) * BN
                    projection = 2
                    y = y2
                    stride = s2
                    width = n2
    return projection, first, y, stride, width


@triton.jit
def _more_ranks(
    delta, part, b, b_table, adapter, rank, n, inside, place, valid, projection, term,
    begin, places, slots, max_rank,
    P: tl.constexpr, TERMS: tl.constexpr, BM: tl.constexpr, ER: tl.constexpr,
    SPLITS: tl.constexpr, RANKS: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return delta + h Bᵀ over one term's rank blocks from `begin` on."""
    # Not pipelined: nearly always one turn, and its buffers would cost occupancy.
    for rank_block in tl.range(begin, tl.cdiv(rank, ER), num_stages=1):
        r = rank_block * ER + tl.arange(0, ER)
        starts = _row_starts(b_table, adapter, projection, r, r < rank, slots, max_rank)
        b_mask = (r < rank)[:, None] & inside[None, :]
        b_tile = tl.load(b + starts[:, None] + n[None, :], mask=b_mask, other=0.0)
        h = _load_h(
            part, places, place, valid, rank, projection, term, rank_block,
            P, TERMS, BM, ER, SPLITS, RANKS, CHUNK,
        )  # fmt: skip
        delta = tl.dot(h.to(b_tile.dtype), b_tile, delta, input_precision=PRECISION)
    return delta


@triton.jit(do_not_specialize=["places", "slots", "max_rank"])
def shrink_kernel(
    x, x_stride, a, a_table, records, rows, scale, ends, part, h_out, counters,
    places, slots, max_rank, k8,
    P: tl.constexpr, TERMS: tl.constexpr, BM: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr,
    K_SPLIT: tl.constexpr, SPLITS: tl.constexpr, RANKS: tl.constexpr, EVEN_K: tl.constexpr,
    GATHER: tl.constexpr, CHUNK: tl.constexpr, BY_ROW: tl.constexpr,
    BESIDE: tl.constexpr, TURNS: tl.constexpr, PDL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute h = scale · x Aᵀ. Grid: tiles × P × TERMS × rank blocks × SPLITS, the last fastest.

    With BY_ROW h is in the order of the rows, and the next kernel, which reads x too, may start
    only when everything before this kernel is done. With BESIDE the kernel before is `base_kernel`,
    which lets this one start once x is ready. Then only the last program waits for it, so that the
    end of this grid still implies the end of that one. With TURNS programs take tiles in turns.
    """
    if PDL:
        if BY_ROW:
            gdc_wait()
        gdc_launch_dependents()
    item = tl.program_id(0)
    split = item % SPLITS
    item = item // SPLITS
    rank_block = item % (RANKS // BR)
    item = item // (RANKS // BR)
    tile = item // (P * TERMS)
    if TURNS:
        each = P * TERMS * (RANKS // BR) * SPLITS
        for mine in tl.range(tile, tl.load(ends), tl.num_programs(0) // each, num_stages=1):
            _shrink_tile(
                x, x_stride * 8, a, a_table, records, rows, scale, part, h_out, counters,
                places, slots, max_rank, k8 * 8,
                mine, item // TERMS % P, item % TERMS, rank_block, split,
                P, TERMS, BM, BR, BK, K_SPLIT, SPLITS, RANKS, EVEN_K, GATHER, CHUNK, BY_ROW,
                PDL and not BESIDE, PRECISION,
            )  # fmt: skip
        if PDL and not BESIDE:
            gdc_wait()  # also where there is no tile
    else:
        _shrink_tile(
            x, x_stride * 8, a, a_table, records, rows, scale, part, h_out, counters,
            places, slots, max_rank, k8 * 8,
            tile, item // TERMS % P, item % TERMS, rank_block, split,
            P, TERMS, BM, BR, BK, K_SPLIT, SPLITS, RANKS, EVEN_K, GATHER, CHUNK, BY_ROW,
            PDL and not BESIDE, PRECISION,
        )  # fmt: skip
    if PDL and BESIDE:
        if tl.program_id(0) == tl.num_programs(0) - 1:
            gdc_wait()


@triton.jit
def _expand_tile(
    y0, y1, y2, s0, s1, s2, n0, n1, n2, b, b_table, records, rows, part,
    places, slots, max_rank, tile, group,
    P: tl.constexpr, TERMS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, ER: tl.constexpr,
    SPLITS: tl.constexpr, RANKS: tl.constexpr, PDL: tl.constexpr,
    ADD: tl.constexpr, LOOP: tl.constexpr, STAGES: tl.constexpr, CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute y += Σ_t h_t B_tᵀ of one tile of rows and one group of output blocks."""
    rank = tl.load(records + tile * 4 + 1)
    if ADD:
        busy = rank > 0
    else:
        busy = tl.load(rows + tile * BM) >= 0
    if busy:
        adapter = tl.load(records + tile * 4)
        projection, first, y, stride, width = _output(
            group, y0, y1, y2, s0, s1, s2, n0, n1, n2, P, BN * LOOP
        )
        stride = stride * 8
        place = tile * BM + tl.arange(0, BM)
        row = tl.load(rows + place)
        valid = row >= 0
        r = tl.arange(0, ER)
        starts = _row_starts(b_table, adapter, projection, r, r < rank, slots, max_rank)
        n = first + tl.arange(0, BN)
        if LOOP == 1:
            b_mask = (r < rank)[:, None] & (n < width)[None, :]
            b_tile = tl.load(b + starts[:, None] + n[None, :], mask=b_mask, other=0.0)
        if PDL:
            gdc_wait()
        h = _load_h(
            part, places, place, valid, rank, projection, 0, 0,
            P, TERMS, BM, ER, SPLITS, RANKS, CHUNK,
        ).to(b.dtype.element_ty)  # fmt: skip
        y_row = y + row.to(tl.int64)[:, None] * stride
        for i in tl.range(0, LOOP, num_stages=STAGES):
            n = first + i * BN + tl.arange(0, BN)
            inside = n < width
            if LOOP > 1:
                b_mask = (r < rank)[:, None] & inside[None, :]
                b_tile = tl.load(b + starts[:, None] + n[None, :], mask=b_mask, other=0.0)
            y_at = y_row + n[None, :]
            y_mask = valid[:, None] & inside[None, :]
            if ADD:
                y_tile = tl.load(y_at, mask=y_mask, other=0.0)
            delta = tl.dot(h, b_tile, input_precision=PRECISION)
            if RANKS > ER:
                delta = _more_ranks(
                    delta, part, b, b_table, adapter, rank, n, inside, place, valid, projection, 0,
                    1, places, slots, max_rank,
                    P, TERMS, BM, ER, SPLITS, RANKS, CHUNK, PRECISION,
                )  # fmt: skip
            if TERMS > 1:
                delta = _more_ranks(
                    delta, part, b, b_table, tl.load(records + tile * 4 + 2),
                    tl.load(records + tile * 4 + 3), n, inside, place, valid, projection, 1,
                    0, places, slots, max_rank,
                    P, TERMS, BM, ER, SPLITS, RANKS, CHUNK, PRECISION,
                )  # fmt: skip
            if ADD:
                delta += y_tile.to(tl.float32)
            tl.store(y_at, delta.to(y.dtype.element_ty), mask=y_mask)
    elif PDL:
        gdc_wait()


@triton.jit(do_not_specialize=["places", "slots", "max_rank", "groups"])
def expand_kernel(
    y0, y1, y2, s0, s1, s2, n0, n1, n2, b, b_table, records, rows, ends, part,
    places, slots, max_rank, groups,
    P: tl.constexpr, TERMS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, ER: tl.constexpr,
    SPLITS: tl.constexpr, RANKS: tl.constexpr, PDL: tl.constexpr,
    ADD: tl.constexpr, LOOP: tl.constexpr, STAGES: tl.constexpr, CHUNK: tl.constexpr,
    TURNS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute y += Σ_t h_t B_tᵀ, rounded once. Grid: tiles × groups of LOOP output blocks.

    Without ADD y is overwritten, also with zeros. With TURNS programs take tiles in turns.
    """
    if PDL:
        gdc_launch_dependents()
    tile = tl.program_id(0) // groups
    group = tl.program_id(0) % groups
    n0 = n0 * 8
    n1 = n1 * 8
    n2 = n2 * 8
    if TURNS:
        end = tl.load(ends) if ADD else tl.load(ends + 1)
        for mine in tl.range(tile, end, tl.num_programs(0) // groups, num_stages=1):
            _expand_tile(
                y0, y1, y2, s0, s1, s2, n0, n1, n2, b, b_table, records, rows, part,
                places, slots, max_rank, mine, group,
                P, TERMS, BM, BN, ER, SPLITS, RANKS, PDL, ADD, LOOP, STAGES, CHUNK,
                PRECISION,
            )  # fmt: skip
        if PDL:
            gdc_wait()  # also where there is no tile
    else:
        _expand_tile(
            y0, y1, y2, s0, s1, s2, n0, n1, n2, b, b_table, records, rows, part,
            places, slots, max_rank, tile, group,
            P, TERMS, BM, BN, ER, SPLITS, RANKS, PDL, ADD, LOOP, STAGES, CHUNK, PRECISION,
        )  # fmt: skip


@triton.jit(do_not_specialize=["places", "slots", "max_rank"])
def fused_kernel(
    y0, y1, y2, s0, s1, s2, n0, n1, n2, x, x_stride, a, a_table, b, b_table,
    records, rows, scale, places, slots, max_rank, k8,
    P: tl.constexpr, TERMS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    PARTS: tl.constexpr, RANKS: tl.constexpr, EVEN_K: tl.constexpr,
    PDL: tl.constexpr, ADD: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute y += Σ_t scale_t · (x A_tᵀ) B_tᵀ, or y = without ADD. Grid: tiles × P × PARTS."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    K = k8 * 8
    x_stride = x_stride * 8
    item = tl.program_id(0)
    share = item % PARTS
    item = item // PARTS
    projection = item % P
    tile = item // P
    rank = tl.load(records + tile * 4 + 1)
    if ADD:
        busy = rank > 0
    else:
        busy = tl.load(rows + tile * BM) >= 0
    if busy:
        adapter = tl.load(records + tile * 4)
        place = tile * BM + tl.arange(0, BM)
        row = tl.load(rows + place)
        valid = row >= 0
        r = tl.arange(0, RANKS)
        k = tl.arange(0, BK)
        starts = _row_starts(a_table, adapter, projection, r, r < rank, slots, max_rank)
        a_at = a + starts[:, None] + k[None, :]
        x_at = x + row.to(tl.int64)[:, None] * x_stride + k[None, :]
        h = tl.zeros((BM, RANKS), dtype=tl.float32)
        if TERMS > 1:
            adapter2 = tl.load(records + tile * 4 + 2)
            rank2 = tl.load(records + tile * 4 + 3)
            starts2 = _row_starts(a_table, adapter2, projection, r, r < rank2, slots, max_rank)
            a2_at = a + starts2[:, None] + k[None, :]
            h2 = tl.zeros((BM, RANKS), dtype=tl.float32)
        for i in tl.range(0, K, BK, num_stages=STAGES):
            a_mask = (r < rank)[:, None] if EVEN_K else (r < rank)[:, None] & (k[None, :] + i < K)
            x_mask = valid[:, None] if EVEN_K else valid[:, None] & (k[None, :] + i < K)
            x_tile = tl.load(x_at + i, mask=x_mask, other=0.0)
            a_tile = tl.load(a_at + i, mask=a_mask, other=0.0)
            h = tl.dot(x_tile, tl.trans(a_tile), h, input_precision=PRECISION)
            if TERMS > 1:
                a2_mask = (r < rank2)[:, None] & (k[None, :] + i < K)
                a2_tile = tl.load(a2_at + i, mask=a2_mask, other=0.0)
                h2 = tl.dot(x_tile, tl.trans(a2_tile), h2, input_precision=PRECISION)
        left = (h * tl.load(scale + place)[:, None]).to(x.dtype.element_ty)
        _, _, y, stride, width = _output(
            _first_block(projection, n0 * 8, n1 * 8, P, BN),
            y0, y1, y2, s0, s1, s2, n0 * 8, n1 * 8, n2 * 8, P, BN,
        )  # fmt: skip
        stride = stride * 8
        starts = _row_starts(b_table, adapter, projection, r, r < rank, slots, max_rank)
        if TERMS > 1:
            left2 = (h2 * tl.load(scale + places + place)[:, None]).to(x.dtype.element_ty)
            starts2 = _row_starts(b_table, adapter2, projection, r, r < rank2, slots, max_rank)
        blocks = tl.cdiv(tl.cdiv(width, BN), PARTS)
        begin = share * blocks * BN
        end = tl.minimum(width, begin + blocks * BN)
        for first in tl.range(begin, end, BN, num_stages=STAGES):
            n = first + tl.arange(0, BN)
            inside = n < width
            b_mask = (r < rank)[:, None] & inside[None, :]
            b_tile = tl.load(b + starts[:, None] + n[None, :], mask=b_mask, other=0.0)
            y_at = y + row.to(tl.int64)[:, None] * stride + n[None, :]
            y_mask = valid[:, None] & inside[None, :]
            if ADD:
                y_tile = tl.load(y_at, mask=y_mask, other=0.0)
            delta = tl.dot(left, b_tile, input_precision=PRECISION)
            if TERMS > 1:
                b2_mask = (r < rank2)[:, None] & inside[None, :]
                b2_tile = tl.load(b + starts2[:, None] + n[None, :], mask=b2_mask, other=0.0)
                delta = tl.dot(left2, b2_tile, delta, input_precision=PRECISION)
            if ADD:
                delta += y_tile.to(tl.float32)
            tl.store(y_at, delta.to(y.dtype.element_ty), mask=y_mask)


@triton.jit
def _first_block(projection, n0, n1, P: tl.constexpr, BN: tl.constexpr):
    block = projection * 0
    if P > 1:
        if projection > 0:
            block = tl.cdiv(n0, BN)
        if P > 2:
            if projection > 1:
                block += tl.cdiv(n1, BN)
    return block
