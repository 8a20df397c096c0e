"""Every backend that runs on a CPU, against dense attention computed row by row in fp64."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from valora_serve.model.attention.base import KVCache, Rows
from valora_serve.model.attention.registry import make_backend

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:flex_attention called without"),
]

WIDTH = 8
BACKENDS = ("torch", "flex")


class Case:
    """Sequences with random keys and values, some of them in the cache already.

    Pages are handed out in a random order, and memory that no sequence has written is NaN.

    Args:
        shares: For each sequence, its number of tokens in the cache and in this step.
        heads: Number of query heads, and of heads of keys and values.
        block_size: Tokens per page.
        seed: Seed of values and pages.
        spare: Pages in every table beyond those needed.
    """

    def __init__(
        self,
        shares: list[tuple[int, int]],
        *,
        heads: tuple[int, int] = (4, 4),
        block_size: int = 4,
        seed: int = 0,
        spare: int = 0,
    ) -> None:
        draw = np.random.default_rng(seed)
        generator = torch.Generator().manual_seed(seed)
        lengths = [before + now for before, now in shares]
        needed = [-(-length // block_size) + spare for length in lengths]
        pages = sum(needed) + 3
        order = draw.permutation(pages).tolist()
        self.tables = [[order.pop() for _ in range(count)] for count in needed]
        storage = torch.full((pages, 2, 2, block_size, heads[1], WIDTH), torch.nan)
        layers = [(storage[:, layer, 0], storage[:, layer, 1]) for layer in range(2)]
        self.cache = KVCache(layers, block_size, heads[0])
        counts = [now for _, now in shares]
        self.rows = Rows(
            np.concatenate([[0], np.cumsum(counts)]).astype(np.int32),
            np.array(lengths, np.int32),
            self.tables,
        )
        self.shares = shares

        def random(length: int, count: int) -> torch.Tensor:
            return torch.randn(length, count, WIDTH, generator=generator)

        # [layer][sequence]
        self.query = [[random(now, heads[0]) for now in counts] for _ in "ab"]
        self.key = [[random(length, heads[1]) for length in lengths] for _ in "ab"]
        self.value = [[random(length, heads[1]) for length in lengths] for _ in "ab"]
        for layer, (keys, values) in enumerate(layers):
            for row, (before, _) in enumerate(shares):
                for at in range(before):
                    place = self.tables[row][at // block_size], at % block_size
                    keys[place] = self.key[layer][row][at]
                    values[place] = self.value[layer][row][at]

    def run(self, backend: str, layer: int, scale: float) -> torch.Tensor:
        """Output of a backend: [rows, heads, width]."""
        plan = make_backend(backend, self.cache).plan(self.rows)
        key, value = (
            torch.cat([part[before:] for part, (before, _) in zip(parts, self.shares, strict=True)])
            for parts in (self.key[layer], self.value[layer])
        )
        return plan.run(layer, torch.cat(self.query[layer]), key, value, scale)

    def expected(self, layer: int, scale: float) -> torch.Tensor:
        """Output by the formula: [rows, heads, width]."""
        rows = []
        for row, (before, now) in enumerate(self.shares):
            group = self.query[layer][row].shape[1] // self.key[layer][row].shape[1]
            key = self.key[layer][row].double().repeat_interleave(group, 1)
            value = self.value[layer][row].double().repeat_interleave(group, 1)
            for at in range(now):
                seen = before + at + 1
                query = self.query[layer][row][at].double()
                scores = torch.einsum("hd,khd->hk", query, key[:seen]) * scale
                rows.append(torch.einsum("hk,khd->hd", scores.softmax(-1), value[:seen]))
        return torch.stack(rows).float()


MIXES = {
    "prompts": [(0, 9), (0, 1), (0, 4), (0, 17)],
    "decodes": [(8, 1), (0, 1), (3, 1), (30, 1)],
    "mixed": [(11, 1), (0, 6), (4, 7), (3, 1), (16, 16), (15, 1)],
    "one": [(5, 1)],
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_against_the_formula(
    backend: str, mix: str, heads: tuple[int, int], block_size: int
) -> None:
    case = Case(MIXES[mix], heads=heads, block_size=block_size, seed=len(mix), spare=2)
    for layer, scale in ((1, 0.35), (0, 1.3)):
        found = case.run(backend, layer, scale)
        torch.testing.assert_close(found, case.expected(layer, scale), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_writes_exactly_the_rows_of_the_step(backend: str) -> None:
    case = Case([(5, 1), (0, 6), (2, 3)], block_size=4)
    case.run(backend, 0, 1.0)
    keys, values = case.cache.layers[0]
    written = set()
    for row, (before, now) in enumerate(case.shares):
        for at in range(before + now):
            place = case.tables[row][at // 4], at % 4
            written.add(place)
            assert torch.equal(keys[place], case.key[0][row][at])
            assert torch.equal(values[place], case.value[0][row][at])
    for page in range(keys.shape[0]):
        for at in range(4):
            if (page, at) not in written:
                assert bool(keys[page, at].isnan().all())
                assert bool(values[page, at].isnan().all())
    assert bool(case.cache.layers[1][0].isnan().any())  # the other layer's was left alone


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_shared_prefix_is_read_by_both(backend: str) -> None:
    alone = Case([(8, 1), (8, 5)], block_size=4, seed=1)
    for layer in range(2):
        for part, held in zip((alone.key, alone.value), alone.cache.layers[layer], strict=True):
            part[layer][1][:8] = part[layer][0][:8]
            for block in range(2):
                held[alone.tables[1][block]] = torch.nan
    alone.tables[1][:2] = alone.tables[0][:2]
    found = alone.run(backend, 0, 0.5)
    torch.testing.assert_close(found, alone.expected(0, 0.5), rtol=1e-5, atol=1e-5)


@given(
    shares=st.lists(
        st.tuples(st.integers(0, 20), st.integers(1, 6) | st.just(1)), min_size=1, max_size=6
    ),
    block_size=st.sampled_from([1, 2, 3, 8]),
    seed=st.integers(0, 99),
)
@settings(max_examples=60, deadline=None)
def test_locations_are_those_of_the_tables(
    shares: list[tuple[int, int]], block_size: int, seed: int
) -> None:
    case = Case(shares, heads=(1, 1), block_size=block_size, seed=seed, spare=seed % 3)
    page, offset = case.rows.locations(block_size)
    wanted = [
        (case.tables[row][at // block_size], at % block_size)
        for row, (before, now) in enumerate(shares)
        for at in range(before, before + now)
    ]
    assert list(zip(page.tolist(), offset.tolist(), strict=True)) == wanted
    indices, indptr = case.rows.indices(block_size)
    for row, (before, now) in enumerate(shares):
        pages = -(-(before + now) // block_size)
        held = indices[indptr[row] : indptr[row + 1]].tolist()
        assert held == case.tables[row][:pages]
    found = case.run("torch", 0, 0.7)
    torch.testing.assert_close(found, case.expected(0, 0.7), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mix", ["prompts", "decodes", "mixed"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("what", ["query", "key", "value"])
def test_a_sequence_that_is_not_finite_leaves_the_others_alone(
    backend: str, mix: str, value: float, what: str
) -> None:
    """Its neighbours' output is the same to the bit, and its own shows that something is wrong."""
    clean = Case(MIXES[mix], heads=(4, 2), seed=3)
    expected = clean.run(backend, 0, 0.35)
    sick = Case(MIXES[mix], heads=(4, 2), seed=3)
    bad = len(MIXES[mix]) - 1
    # The newest token of the last sequence.
    getattr(sick, what)[0][bad][-1, 0, 2] = value
    found = sick.run(backend, 0, 0.35)
    owner = torch.from_numpy(sick.rows.owners) == bad
    assert torch.equal(found[~owner], expected[~owner])
    if what != "key" or value != torch.inf:
        assert not bool(found[owner][-1].isfinite().all())
