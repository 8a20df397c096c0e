"""The Triton kernel that merges one adapter into all adapted weights of a model."""

# Triton's functions have no types that a checker could use.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["rank", "slot"])
def merge_kernel(
    live, pristine, a, b, a_rows, b_rows, tiles, matrices, scaling, slot, rank,
    SLOT_RANKS: tl.constexpr, PAGED: tl.constexpr, BO: tl.constexpr, BI: tl.constexpr,
    BR: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Live = pristine + scaling · B · A, one tile of one matrix a program.

    Args:
        live: Flat memory of the weights that the model reads.
        pristine: Flat memory of the base weights, laid out alike.
        a: Where offsets of rows of A count from.
        b: Where offsets of rows of Bᵀ count from.
        a_rows: [matrices, SLOT_RANKS] int64, place of every row of the adapter's A; if PAGED.
        b_rows: Likewise of Bᵀ.
        tiles: [programs, 2] int32, matrix and tile number within it.
        matrices: [matrices, 7] int64: first element, outputs and inputs of the matrix; start of its
            A and elements a slot; the same of its Bᵀ.
        scaling: The adapter's.
        slot: Where the adapter lies.
        rank: The adapter's.
        SLOT_RANKS: Row length of `a_rows` and `b_rows`.
        PAGED: Whether `a_rows` and `b_rows` say where rows are.
        BO: Outputs a tile.
        BI: Inputs a tile.
        BR: Ranks at a time.
        PRECISION: Of products of fp32 weights.
    """
    program = tl.program_id(0)
    matrix = tl.load(tiles + 2 * program).to(tl.int64)
    tile = tl.load(tiles + 2 * program + 1)
    start = tl.multiple_of(tl.load(matrices + 7 * matrix), 8)
    outputs = tl.multiple_of(tl.load(matrices + 7 * matrix + 1).to(tl.int32), 8)
    inputs = tl.multiple_of(tl.load(matrices + 7 * matrix + 2).to(tl.int32), 8)
    a_start = tl.load(matrices + 7 * matrix + 3) + slot * tl.load(matrices + 7 * matrix + 4)
    b_start = tl.load(matrices + 7 * matrix + 5) + slot * tl.load(matrices + 7 * matrix + 6)
    across = tl.cdiv(inputs, BI)
    o = tile // across * BO + tl.arange(0, BO)
    i = tile % across * BI + tl.arange(0, BI)
    inside = (o < outputs)[:, None] & (i < inputs)[None, :]
    place = start + o.to(tl.int64)[:, None] * inputs + i[None, :]
    weight = tl.load(pristine + place, mask=inside, other=0.0, eviction_policy="evict_first")
    delta = tl.zeros((BO, BI), dtype=tl.float32)
    for first in tl.range(0, rank, BR, num_stages=1):
        r = first + tl.arange(0, BR)
        real = (r < rank)[:, None]
        if PAGED:
            a_at = a_start + tl.load(a_rows + matrix * SLOT_RANKS + r, mask=r < rank, other=0)
            b_at = b_start + tl.load(b_rows + matrix * SLOT_RANKS + r, mask=r < rank, other=0)
        else:
            a_at = a_start + r * inputs
            b_at = b_start + r * outputs
        a_at = tl.multiple_of(a_at, 8)
        b_at = tl.multiple_of(b_at, 8)
        a_tile = tl.load(
            a + a_at[:, None] + i[None, :], mask=real & (i < inputs)[None, :], other=0.0
        )
        b_tile = tl.load(
            b + b_at[:, None] + o[None, :], mask=real & (o < outputs)[None, :], other=0.0
        )
        delta = tl.dot(tl.trans(b_tile), a_tile, delta, input_precision=PRECISION)
    merged = weight.to(tl.float32) + scaling * delta
    tl.store(live + place, merged.to(weight.dtype), mask=inside, eviction_policy="evict_first")
