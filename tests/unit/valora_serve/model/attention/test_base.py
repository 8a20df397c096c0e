"""Every backend that runs on a CPU, against dense attention computed row by row in fp64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.attention_cases import Case, check_steps
from tests.support.cases import others_slow
from tests.support.lora_cases import DEVICE

pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered")

BACKENDS = (
    "torch",
    pytest.param(
        "triton", marks=pytest.mark.skipif(DEVICE == "cuda", reason="tests/gpu runs it on a GPU")
    ),
)

MIXES = {
    "decodes": [(8, 1), (0, 1), (3, 1), (30, 1)],
    "mixed": [(11, 1), (0, 6), (4, 7), (3, 1), (16, 16), (15, 1)],
}


@pytest.mark.parametrize("backend", BACKENDS)
def test_writes_exactly_the_rows_of_the_step(backend):
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


@given(
    shares=st.lists(
        st.tuples(st.integers(0, 20), st.integers(1, 6) | st.just(1)), min_size=1, max_size=6
    ),
    heads=st.sampled_from([(1, 1), (4, 4), (4, 2), (6, 1)]),
    block_size=st.sampled_from([1, 2, 3, 8, 16]),
    seed=st.integers(0, 99),
)
@settings(max_examples=60, deadline=None)
def test_outputs_and_locations_are_those_of_the_formula_and_the_tables(
    shares, heads, block_size, seed
):
    """For the kernels of Triton see `test_triton_backend.py`."""
    case = Case(shares, heads=heads, block_size=block_size, seed=seed, spare=seed % 3)
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
    for layer, scale in ((1, 0.35), (0, 1.3)):
        found = case.run("torch", layer, scale)
        torch.testing.assert_close(found, case.expected(layer, scale), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mix", others_slow(["decodes"], ["decodes", "mixed"]))
def test_a_sequence_that_is_not_finite_leaves_the_others_alone(backend, mix):
    """Its neighbours' output is the same to the bit, and its own shows that something is wrong."""
    expected = Case(MIXES[mix], heads=(4, 2), seed=3).run(backend, 0, 0.35)
    bad = len(MIXES[mix]) - 1
    for what, value in (("query", torch.nan), ("key", torch.inf), ("key", torch.nan),
                        ("value", torch.inf)):  # fmt: skip
        sick = Case(MIXES[mix], heads=(4, 2), seed=3)
        # The newest token of the last sequence.
        getattr(sick, what)[0][bad][-1, 0, 2] = value
        found = sick.run(backend, 0, 0.35)
        owner = torch.from_numpy(sick.rows.owners) == bad
        assert torch.equal(found[~owner], expected[~owner])
        if what != "key" or value != torch.inf:
            assert not bool(found[owner][-1].isfinite().all())


SHAPES = [((4, 2), 16, 4), ((2, 2), 24, 16), ((6, 1), 8, 1)]
TORCH = [("torch", seed, shape) for shape in SHAPES for seed in range(8)]
TRITON = [("triton", seed, shape) for shape in SHAPES for seed in range(3)]


@pytest.mark.parametrize(
    ("backend", "seed", "shape"), others_slow([*TORCH, TRITON[0]], [*TORCH, *TRITON])
)
def test_images_whose_tokens_see_each_other(backend, seed, shape):
    """In prompts that are computed in random steps."""
    if backend == "triton" and DEVICE == "cuda":
        pytest.skip("tests/gpu runs it on a GPU")
    heads, width, size = shape
    check_steps(backend, seed, heads=heads, width=width, block_size=size, dtype=torch.float32)
