"""Triton kernels of causal attention over paged keys and values, split along long sequences.

A tile holds some rows of one sequence with all query heads that share a head of keys and values.
What changes from step to step is read from device memory, so that CUDA graphs can replay.
"""

# Triton's functions have no types that a checker could use.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# `if` over a compile-time constant is compiled away; joined with a run-time condition it is not.
# ruff: noqa: PLR0915, SIM102
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def append_kernel(
    keys, values, page_stride, token_stride, key, key_row, key_head, value, value_row, value_head,
    pages, offsets, H: tl.constexpr, D: tl.constexpr, HP: tl.constexpr, DP: tl.constexpr,
):  # fmt: skip
    """Write the keys and values of a step to the cache; each program writes one row.

    `keys`, `values` of a layer are [pages, tokens, H, D], `key`, `value` [rows, H, D]; `_row` and
    `_head` are strides. `pages` [rows] int32 is below 0 for rows that are not written, `offsets`
    [rows] int32 the token within the page. HP and DP are H and D, rounded up to powers of two.
    """
    row = tl.program_id(0).to(tl.int64)
    page = tl.load(pages + row).to(tl.int64)
    if page < 0:
        return
    h, d = tl.arange(0, HP)[:, None], tl.arange(0, DP)[None, :]
    inside = (h < H) & (d < D)
    target = page * page_stride + tl.load(offsets + row) * token_stride + h * D + d
    k = tl.load(key + row * key_row + h * key_head + d, mask=inside)
    v = tl.load(value + row * value_row + h * value_head + d, mask=inside)
    tl.store(keys + target, k, mask=inside)
    tl.store(values + target, v, mask=inside)


@triton.jit(do_not_specialize=["rows"])
def attention_kernel(
    out, partial, sums, query, query_row, query_head, key, key_row, key_head, value, value_row,
    value_head, keys, values, page_stride, token_stride, tiles, indices, ends, rows, scale,
    G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, PAGE: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, SPLITS: tl.constexpr, FUSED: tl.constexpr, PRECISION: tl.constexpr,
    SEEN: tl.constexpr,
):  # fmt: skip
    """Attend causally from one tile of rows, for one head of keys and values and one split.

    `query` is [rows, heads, D], `key` and `value` [rows, heads / G, D], `keys` and `values` as of
    `append_kernel`, with PAGE tokens a page. `out` [rows, heads, D] is written if SPLITS is 1,
    else `partial` [SPLITS, rows, heads, D] and `sums` [SPLITS, rows, heads], both float32: outputs
    of splits and binary logarithms of their sums of weights. `tiles` [programs, 4] int32: first
    page of the sequence in `indices` (int32), first row of the tile, its rows (0 if it is empty),
    position of the first one. `scale` has the factor log2(e). A tile has room for BM rows times G;
    BN tokens are read at a time. FUSED: tiles have one row, whose key and value are written here.
    SEEN: a row sees `ends` [rows] int32 tokens of its sequence, not those up to its own.
    """
    head, split = tl.program_id(1), tl.program_id(2)
    tile = tiles + 4 * tl.program_id(0)
    first_page, row = tl.load(tile), tl.load(tile + 1).to(tl.int64)
    count, position = tl.load(tile + 2), tl.load(tile + 3)
    if count == 0:
        return
    cached = position + count
    if FUSED:
        cached = position  # the row's own key is taken from `key`
    m = tl.arange(0, BM)
    own, of_group = m // G, m % G
    live = own < count
    if SEEN:
        limits = tl.load(ends + row + own, mask=live, other=0)
        cached = tl.max(limits, 0)
    span = tl.cdiv(tl.cdiv(cached, BN), SPLITS) * BN
    begin = split * span
    end = tl.minimum(begin + span, cached)
    if (split > 0) & (begin >= end):
        return

    d = tl.arange(0, DP)
    wide = d < D
    q_at = (row + own) * query_row + (head * G + of_group) * query_head
    q = tl.load(query + q_at[:, None] + d[None, :], mask=live[:, None] & wide[None, :], other=0.0)
    top = tl.full([BM], float("-inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, DP], tl.float32)
    for start in range(begin, end, BN):
        n = start + tl.arange(0, BN)
        # Memory behind a sequence's end may hold anything, also NaN: it is not read.
        inside = n < end
        page = tl.load(indices + first_page + n // PAGE, mask=inside, other=0).to(tl.int64)
        at = page * page_stride + (n % PAGE) * token_stride + head * D
        k = tl.load(
            keys + at[None, :] + d[:, None], mask=inside[None, :] & wide[:, None], other=0.0
        )
        scores = tl.dot(q, k, input_precision=PRECISION) * scale
        if SEEN:
            seen = inside[None, :] & (n[None, :] < limits[:, None])
        else:
            seen = inside[None, :] & (n[None, :] <= position + own[:, None])
        scores = tl.where(seen, scores, float("-inf"))
        above = tl.maximum(top, tl.max(scores, 1))
        base = tl.where(above == float("-inf"), 0.0, above)
        weights, kept = tl.exp2(scores - base[:, None]), tl.exp2(top - base)
        v = tl.load(
            values + at[:, None] + d[None, :], mask=inside[:, None] & wide[None, :], other=0.0
        )
        added = tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
        top, total, acc = above, total * kept + tl.sum(weights, 1), acc * kept[:, None] + added
    if FUSED:
        if split == 0:
            new_key = tl.load(key + row * key_row + head * key_head + d, mask=wide, other=0.0)
            new_value = tl.load(
                value + row * value_row + head * value_head + d, mask=wide, other=0.0
            )
            page = tl.load(indices + first_page + position // PAGE).to(tl.int64)
            target = page * page_stride + (position % PAGE) * token_stride + head * D + d
            tl.store(keys + target, new_key, mask=wide)
            tl.store(values + target, new_value, mask=wide)
            top, total, acc = _with_own(q, new_key, new_value, top, total, acc, scale)
    found = acc / total[:, None]
    heads = tl.num_programs(1) * G
    o_at = (row + own) * heads + head * G + of_group
    mask = live[:, None] & wide[None, :]
    if SPLITS == 1:
        tl.store(out + o_at[:, None] * D + d[None, :], found.to(out.dtype.element_ty), mask=mask)
    else:
        o_at += split.to(tl.int64) * rows * heads
        tl.store(partial + o_at[:, None] * D + d[None, :], found, mask=mask)
        tl.store(sums + o_at, top + tl.log2(total), mask=live)


@triton.jit
def _with_own(q, key, value, top, total, acc, scale):
    """Add the key and value of the tile's own row to the running softmax."""
    score = tl.sum(q.to(tl.float32) * key.to(tl.float32)[None, :], 1) * scale
    above = tl.maximum(top, score)
    base = tl.where(above == float("-inf"), 0.0, above)
    weight, kept = tl.exp2(score - base), tl.exp2(top - base)
    added = weight[:, None] * value.to(tl.float32)[None, :]
    return above, total * kept + weight, acc * kept[:, None] + added


@triton.jit(do_not_specialize=["rows"])
def combine_kernel(
    out, partial, sums, tiles, rows, D: tl.constexpr, DP: tl.constexpr, BN: tl.constexpr,
    SPLITS: tl.constexpr, FUSED: tl.constexpr,
):  # fmt: skip
    """Combine the splits of one row and one query head; arguments as of `attention_kernel`."""
    tile = tiles + 4 * tl.program_id(0)
    row, count = tl.load(tile + 1).to(tl.int64), tl.load(tile + 2)
    if count == 0:
        return
    cached = tl.load(tile + 3) + count
    if FUSED:
        cached -= 1
    blocks = tl.cdiv(cached, BN)
    used = tl.maximum(tl.cdiv(blocks, tl.maximum(tl.cdiv(blocks, SPLITS), 1)), 1)
    heads = tl.num_programs(1)
    split, d = tl.arange(0, SPLITS), tl.arange(0, DP)
    held, wide = split < used, d < D
    at = (split.to(tl.int64) * rows + row) * heads + tl.program_id(1)
    part = tl.load(sums + at, mask=held, other=float("-inf"))
    weights = tl.exp2(part - tl.max(part, 0))
    values = tl.load(
        partial + at[:, None] * D + d[None, :], mask=held[:, None] & wide[None, :], other=0.0
    )
    found = tl.sum(values * weights[:, None], 0) / tl.sum(weights, 0)
    o_at = (row * heads + tl.program_id(1)) * D + d
    tl.store(out + o_at, found.to(out.dtype.element_ty), mask=wide)
