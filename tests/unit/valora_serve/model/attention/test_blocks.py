"""Images whose tokens see each other, in prompts that are computed in random steps."""

import pytest
import torch

from tests.support.attention_cases import check_steps
from tests.support.cases import others_slow
from tests.support.lora_cases import DEVICE

SHAPES = [((4, 2), 16, 4), ((2, 2), 24, 16), ((6, 1), 8, 1)]


@pytest.mark.parametrize(("heads", "width", "block_size"), SHAPES)
@pytest.mark.parametrize("seed", range(8))
def test_torch(seed, heads, width, block_size):
    check_steps("torch", seed, heads=heads, width=width, block_size=block_size, dtype=torch.float32)


@pytest.mark.skipif(DEVICE == "cuda", reason="tests/gpu runs it on a GPU")
@pytest.mark.parametrize(
    ("seed", "shape"), others_slow([(0, SHAPES[0])], [(n, one) for one in SHAPES for n in range(3)])
)
def test_triton(seed, shape):
    heads, width, block_size = shape
    check_steps(
        "triton", seed, heads=heads, width=width, block_size=block_size, dtype=torch.float32
    )
