"""Seeds of several answers to one request."""

from hypothesis import given
from hypothesis import strategies as st

from valora_serve.server.api.requests import numbered
from valora_serve.types import Request, SamplingParams


def seeds(seed: int | None, count: int) -> list[int | None]:
    made = numbered(Request("r", sampling=SamplingParams(seed=seed)), count)
    return [one.sampling.seed for one in made]


@given(first=st.integers(-(2**63), 2**63 - 200), apart=st.integers(1, 130))
def test_no_choice_repeats_that_of_another_seed(first: int, apart: int) -> None:
    one, other = seeds(first, 128), seeds(first + apart, 128)
    assert len({*one, *other}) == 256
    assert one[:5] == seeds(first, 5)
    assert one[:1] == seeds(first, 1) == [first]
    assert all(-(2**63) <= seed < 2**63 for seed in one if seed is not None)
    assert seeds(None, 3) == [None] * 3
