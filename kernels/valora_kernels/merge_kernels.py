"""The Triton kernel that merges one adapter into all adapted weights of a model."""

# Triton's functions have no types that a checker could use.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["rank"])
def merge_kernel(
    live, pristine, a, b, a_rows, b_rows, tiles, matrices, scaling, rank,
    SLOT_RANKS: tl.constexpr, BO: tl.constexpr, BI: tl.constexpr, BR: tl.constexpr,
    SPAN: tl.constexpr, STAGES: tl.constexpr, MORE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Set live = pristine + scaling · B · A; each program computes one strip of one matrix.

    `live` and `pristine` are flat and laid out alike; rows of A and Bᵀ count from `a` and `b`.

    - `a_rows`: [matrices, SLOT_RANKS] int64, offset of every row of the adapter's A.
    - `b_rows`: [matrices, SLOT_RANKS] int64, offset of every row of the adapter's Bᵀ.
    - `tiles`: [programs, 2] int32, matrix of each program and number of its strip within it.
    - `matrices`: [matrices, 5] int64: first element, outputs and inputs of the matrix; what is
      added to the offsets of its A and of its Bᵀ.
    - `BO, BI, BR`: Outputs and inputs per tile, and rank rows that are multiplied at a time.
    - `SPAN`: Inputs per strip.
    - `MORE`: Whether the rank is above BR.
    """
    program = tl.program_id(0)
    matrix = tl.load(tiles + 2 * program).to(tl.int64)
    tile = tl.load(tiles + 2 * program + 1)
    start = tl.multiple_of(tl.load(matrices + 5 * matrix), 8)
    outputs = tl.multiple_of(tl.load(matrices + 5 * matrix + 1).to(tl.int32), 8)
    inputs = tl.multiple_of(tl.load(matrices + 5 * matrix + 2).to(tl.int32), 8)
    a_start = tl.load(matrices + 5 * matrix + 3)
    b_start = tl.load(matrices + 5 * matrix + 4)
    # A strip of BO rows is SPAN columns long; the next columns load while these are computed.
    across = tl.cdiv(inputs, SPAN)
    o = tile // across * BO + tl.arange(0, BO)
    begin = tile % across * SPAN
    row_at = start + o.to(tl.int64)[:, None] * inputs
    r = tl.arange(0, BR)
    b_at = _rank_rows(b_rows, b_start, matrix, r, rank, SLOT_RANKS)
    b_tile = tl.load(
        b + b_at[:, None] + o[None, :], mask=(r < rank)[:, None] & (o < outputs)[None, :], other=0.0
    )
    a_at = _rank_rows(a_rows, a_start, matrix, r, rank, SLOT_RANKS)
    for first in tl.range(begin, tl.minimum(begin + SPAN, inputs), BI, num_stages=STAGES):
        i = first + tl.arange(0, BI)
        inside = (o < outputs)[:, None] & (i < inputs)[None, :]
        place = row_at + i[None, :]
        weight = tl.load(pristine + place, mask=inside, other=0.0)
        a_mask = (r < rank)[:, None] & (i < inputs)[None, :]
        a_tile = tl.load(a + a_at[:, None] + i[None, :], mask=a_mask, other=0.0)
        delta = tl.dot(tl.trans(b_tile), a_tile, input_precision=PRECISION)
        if MORE:  # a loop in here keeps the outer one from loading ahead
            for block in tl.range(1, tl.cdiv(rank, BR), num_stages=1):
                more = block * BR + r
                at = _rank_rows(b_rows, b_start, matrix, more, rank, SLOT_RANKS)
                b_mask = (more < rank)[:, None] & (o < outputs)[None, :]
                b_more = tl.load(b + at[:, None] + o[None, :], mask=b_mask, other=0.0)
                at = _rank_rows(a_rows, a_start, matrix, more, rank, SLOT_RANKS)
                a_mask = (more < rank)[:, None] & (i < inputs)[None, :]
                a_more = tl.load(a + at[:, None] + i[None, :], mask=a_mask, other=0.0)
                delta = tl.dot(tl.trans(b_more), a_more, delta, input_precision=PRECISION)
        merged = weight.to(tl.float32) + scaling * delta
        tl.store(live + place, merged.to(weight.dtype), mask=inside)


@triton.jit
def _rank_rows(table, start, matrix, r, rank, SLOT_RANKS: tl.constexpr):
    """First elements of rank rows `r` of one matrix of the adapter."""
    at = start + tl.load(table + matrix * SLOT_RANKS + r, mask=r < rank, other=0)
    return tl.multiple_of(at, 8)
