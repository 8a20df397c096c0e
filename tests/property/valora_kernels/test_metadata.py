"""Every row with an adapter is in exactly one tile, and a tile has rows of the same adapters."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.bench.valora_kernels.operators.base import row_terms
from valora_kernels.metadata import NONE, Blocks, LoraBatch, Tiles, group_rows, tile_capacity

CPU = torch.device("cpu")


def written(table, grouping):
    """A table, whose memory was in use before, with what it says of a batch."""
    table.buffer.fill_(77)
    table.refresh(grouping)
    return table


@st.composite
def batches(draw):
    slots = draw(st.integers(1, 6))
    terms = draw(st.integers(1, 2))
    rows = draw(st.one_of(st.integers(0, 5), st.integers(0, 70)))
    seed = draw(st.integers(0, 2**31))
    rng = np.random.default_rng(seed)
    adapters = rng.integers(-1, slots, (rows, terms))
    if draw(st.booleans()):
        adapters = np.minimum(adapters, draw(st.integers(-1, slots - 1)))
    coefficients = rng.choice([-1, 1], (rows, terms))
    ranks = [int(r) for r in rng.choice([8, 16, 20, 64, 256], slots)]
    return adapters, coefficients, ranks, [0.25 * (i + 1) for i in range(slots)]


def total_of(adapters, coefficients, scalings):
    """The factor of each adapter of each row, without adapters that cancel out."""
    found = []
    for slots, factors in zip(adapters, coefficients, strict=True):
        row = {}
        for slot, factor in zip(slots, factors, strict=True):
            if slot != NONE:
                row[int(slot)] = row.get(int(slot), 0.0) + float(factor) * scalings[slot]
        found.append({slot: factor for slot, factor in row.items() if factor})
    return found


@settings(max_examples=150, deadline=None)
@given(batches(), st.sampled_from([1, 16, 32, 128]))
def test_tiles_say_what_each_row_asked_for(batch, block):
    adapters, coefficients, ranks, scalings = batch
    grouping = group_rows(adapters, ranks, scalings, coefficients)
    capacity = tile_capacity(len(adapters), grouping.segments, block)
    tiles = written(Tiles(block, capacity, CPU), grouping)
    records, listed, scale = (part.numpy() for part in (tiles.records, tiles.rows, tiles.scale))
    want = total_of(adapters, coefficients, scalings)
    seen = {}
    for t in range(tiles.total):
        rows = listed[t * block : (t + 1) * block]
        assert rows[0] != NONE
        for i, row in enumerate(rows):
            if row == NONE:
                assert np.all(rows[i:] == NONE)
                assert not scale[:, t * block + i].any()
                continue
            terms = {}
            for term in range(2):
                slot, rank = records[t, 2 * term : 2 * term + 2]
                if slot != NONE:
                    assert rank == ranks[slot]
                    terms[int(slot)] = float(scale[term, t * block + i])
                else:
                    assert rank == 0
            assert int(row) not in seen
            assert bool(terms) == (t < tiles.count)
            seen[int(row)] = terms
    assert sorted(seen) == list(range(len(adapters)))
    assert [seen[row] for row in range(len(adapters))] == want
    assert np.all(records[tiles.count :, 1::2] == 0)
    assert np.all(listed[tiles.total * block :] == NONE)


@settings(max_examples=150, deadline=None)
@given(batches(), st.integers(0, 2**31), st.sampled_from([1, 2, 40]))
def test_runs_are_as_good_as_their_rows(batch, seed, longest):
    adapters, coefficients, ranks, scalings = batch
    counts = np.random.default_rng(seed).integers(1, longest + 1, len(adapters))
    padding = seed % 5
    size = int(counts.sum()) + padding
    got = group_rows(adapters, ranks, scalings, coefficients, counts, size)
    rows, factors = (np.repeat(part, counts, axis=0) for part in (adapters, coefficients))
    rows = np.concatenate([rows, np.full((padding, rows.shape[1]), NONE)])
    factors = np.concatenate([factors, np.ones((padding, rows.shape[1]))])
    want = group_rows(rows, ranks, scalings, factors)
    assert (got.rows, got.terms, got.segments) == (want.rows, want.terms, want.segments)
    for name in ("order", "starts", "adapters", "ranks", "scale", "base"):
        one, other = getattr(got, name), getattr(want, name)
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)


@settings(max_examples=150, deadline=None)
@given(batches(), st.integers(0, 2**31), st.sampled_from([1, 16, 64]))
def test_blocks_list_the_adapters_of_their_rows(batch, seed, block):
    adapters, _, ranks, scalings = batch
    own = adapters[:4, :1] if seed % 2 else adapters[:, :1]
    if seed % 3 == 0:  # a run without an adapter before the only one that has one
        own[:1] = own[2:] = NONE
    counts = np.random.default_rng(seed).integers(1, 99 if seed % 2 else 9, len(own))
    grouping = group_rows(own, ranks, scalings, counts=counts)
    slots = np.repeat(own[:, 0], counts)
    room = len(slots) + 3
    found = written(Blocks(block, room, len(ranks), CPU), grouping)
    assert found.slot_of_row.tolist() == [*slots, NONE, NONE, NONE]
    for at in range(len(found.counts)):
        here = np.unique(slots[at * block : (at + 1) * block])
        want = [[slot, ranks[slot]] for slot in here if slot != NONE]
        listed = found.lists[at, : found.counts[at]].tolist()
        assert sorted(listed) == want
        assert not found.lists[at, found.counts[at] :].any()


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 400), st.integers(1, 40), st.sampled_from([1, 16, 64]), st.integers(0, 2**31))
def test_capacity_is_enough_and_no_more(rows, slots, block, seed):
    rng = np.random.default_rng(seed)
    adapters = rng.integers(-1, slots, rows)
    grouping = group_rows(adapters, [8] * slots, [1.0] * slots)
    written(Tiles(block, tile_capacity(rows, slots, block), CPU), grouping)
    # The worst case: all segments but one have a single row.
    segments = min(rows, slots + 1)
    worst = np.maximum(np.arange(rows) - (rows - segments), 0) - 1
    grouping = group_rows(worst, [8] * slots, [1.0] * slots)
    tiles = written(Tiles(block, tile_capacity(rows, slots, block), CPU), grouping)
    slack = tile_capacity(rows, slots, block) - tiles.total
    assert 0 <= slack <= 1


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 200), st.integers(1, 20))
def test_effective_adapters(rows, slots):
    even = group_rows(np.arange(rows * slots) % slots, [8] * slots, [1.0] * slots)
    assert even.effective_adapters == pytest.approx(slots)
    one = group_rows(np.zeros(rows, np.int64), [8] * slots, [1.0] * slots)
    assert one.effective_adapters == 1


@pytest.mark.parametrize(
    ("adapters", "ranks", "scalings", "coefficients"),
    [
        ([2], [8, 8], [1.0, 1.0], None),
        ([-2], [8, 8], [1.0, 1.0], None),
        ([0], [0, 8], [1.0, 1.0], None),
        ([0], [8, 8], [1.0], None),
        ([0], [-8], [1.0], None),
        ([[0, 0, 0]], [8], [1.0], None),
        ([0, 0], [8], [1.0], [1]),
    ],
)
def test_bad_batches_are_refused(adapters, ranks, scalings, coefficients):
    with pytest.raises(ValueError, match=r"expected .* got "):
        group_rows(adapters, ranks, scalings, coefficients)


@pytest.mark.parametrize("counts", [[1], [2, 0], [1, -1], [[1, 1]]])
def test_bad_lengths_of_runs_are_refused(counts):
    with pytest.raises(ValueError, match="counts: expected 2 numbers of rows from 1 on, got "):
        group_rows([0, 0], [8], [1.0], None, counts)


@pytest.mark.parametrize("fixed", [False, True])
def test_tables_follow_the_batch(fixed):
    batch = LoraBatch(6, 3, "cpu", fixed=fixed)
    ranks, scalings = [8, 16, 24], [0.5, 1.0, 2.0]
    batch.update([0, 1], ranks, scalings, counts=[2, 3])
    tiles, blocks, terms = batch.tiles(4), batch.blocks(4), row_terms(batch)
    for counts in ([3, 1], [1, 5], [1, 5]):
        batch.update([2, 1], ranks, scalings, counts=counts)
        if not fixed:  # graphs read what `update` has written, other calls ask for it
            tiles, blocks, terms = batch.tiles(4), batch.blocks(4), row_terms(batch)
        slots = np.repeat([2, 1], counts)
        rows = sum(counts)
        assert blocks.slot_of_row[:rows].tolist() == slots.tolist()
        assert terms.adapters[0, :rows].tolist() == slots.tolist()
        assert terms.scale[0, :rows].tolist() == [scalings[slot] for slot in slots]
        assert tiles.ends.tolist() == [tiles.count, tiles.total]
        owners = np.repeat(tiles.records[: tiles.total, 0].numpy(), 4)
        listed = tiles.rows[: 4 * tiles.total].numpy()
        assert dict(zip(listed[listed >= 0], owners[listed >= 0], strict=True)) == dict(
            enumerate(slots)
        )


def test_batches_beyond_the_captured_size_are_refused():
    batch = LoraBatch(4, 2, "cpu", fixed=True)
    batch.update([0, 1, 1, 0], [8, 8, 8], [1.0] * 3)
    batch.tiles(16)
    with pytest.raises(ValueError, match="expected at most 4 rows, got 5"):
        batch.update([0] * 5, [8] * 3, [1.0] * 3)
    with pytest.raises(ValueError, match="expected at most 2 segments, got 3"):
        batch.update([0, 1, 2, 0], [8] * 3, [1.0] * 3)
    with pytest.raises(ValueError, match="expected one term"):
        batch.update([[0, 1]] * 4, [8] * 3, [1.0] * 3)
