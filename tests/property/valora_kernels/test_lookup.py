"""For every shape look-up returns a tiling that can run."""

from hypothesis import given, settings
from hypothesis import strategies as st

from valora_kernels.arrangements import default_tiling, fits
from valora_kernels.gpus import H200
from valora_kernels.lookup import TilingTable, table_of
from valora_kernels.tiling import Shape, Tiling

shapes = st.builds(
    Shape,
    in_features=st.integers(1, 4000).map(lambda n: 8 * n),
    out_features=st.integers(1, 8000).map(lambda n: 8 * n),
    projections=st.integers(1, 3),
    rank=st.sampled_from([16, 32, 64, 128, 256]),
    rows=st.integers(0, 20000),
    adapters=st.floats(1, 500),
    first=st.booleans(),
)


def power_of_two(value):
    return value > 0 and value & (value - 1) == 0


def check(tiling, shape):
    for size in (tiling.rows, tiling.outputs, tiling.inputs, tiling.ranks, tiling.warps):
        assert power_of_two(size)
    assert fits(tiling, shape, H200)
    if tiling.arrangement == "shrink_expand":
        assert tiling.split % tiling.inputs == 0
        assert tiling.split >= tiling.inputs
        assert -(-shape.in_features // tiling.split) <= 64
    else:
        assert tiling.rows >= 16


@settings(max_examples=300, deadline=None)
@given(shapes)
def test_shipped_table_always_answers(shape):
    check(table_of(H200).look_up(shape), shape)


@settings(max_examples=300, deadline=None)
@given(shapes)
def test_rules_always_answer(shape):
    check(default_tiling(shape), shape)


@settings(max_examples=100, deadline=None)
@given(st.lists(shapes, min_size=1, max_size=30, unique=True), st.data())
def test_measured_shapes_are_found_exactly(known, data):
    tilings = [Tiling("shrink_expand", outputs=2 ** (4 + i % 4)) for i in range(len(known))]
    table = TilingTable(H200, zip(known, tilings, strict=True))
    place = data.draw(st.integers(0, len(known) - 1))
    assert table.look_up(known[place]) == tilings[place]
