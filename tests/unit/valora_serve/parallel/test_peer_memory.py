"""Which tensors go through memory that GPUs share, and how they are gathered by a sum."""

import pytest
import torch

from valora_serve.parallel import peer_memory
from valora_serve.parallel.peer_memory import LIMIT, PeerMemory


@pytest.fixture
def memory():
    buffers = {dtype: torch.zeros(LIMIT // 4, dtype=dtype) for dtype in (torch.float32,)}
    return PeerMemory("group", 1, 3, buffers)


@pytest.mark.parametrize(
    ("values", "taken"),
    [
        (torch.ones(3, 4), True),
        (torch.ones(LIMIT // 4), True),
        (torch.ones(LIMIT // 4 + 4), False),  # too long
        (torch.ones(3, 5), False),  # 60 bytes
        (torch.ones(0, 4), False),
        (torch.ones(4, 8).T, False),
        (torch.ones(33)[1:], False),  # begins in the middle of 16 bytes
        (torch.ones(36)[4:], True),
        (torch.ones(4, 4, dtype=torch.float16), False),
        (torch.ones(4, 4, dtype=torch.float64), False),
    ],
)
def test_takes_short_aligned_tensors_only(memory, values, taken):
    assert memory.takes(values) is taken


def test_gathers_by_a_sum_with_zeros(memory, monkeypatch):
    others = torch.arange(24.0).view(3, 2, 4)

    def all_reduce(self, values):
        assert values[0].eq(0).all() and values[2].eq(0).all()
        values[0], values[2] = others[0], others[2]

    monkeypatch.setattr(peer_memory.PeerMemory, "all_reduce", all_reduce)
    assert memory.gather(others[1]).equal(others)


def test_what_is_too_long_together_is_not_gathered(memory):
    assert memory.gather(torch.ones(LIMIT // 8)) is None
