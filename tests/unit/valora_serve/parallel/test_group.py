"""Which tensors go through memory that GPUs share, and how they are gathered by a sum."""

import pytest
import torch

from valora_serve.parallel.group import LIMIT, Group, PeerMemory, signal_all


@pytest.fixture
def memory():
    return PeerMemory("group", torch.zeros(LIMIT, dtype=torch.uint8))


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
        assert values[:, :4].eq(0).all() and values[:, 8:].eq(0).all()
        values[:, :4], values[:, 8:] = others[0], others[2]

    monkeypatch.setattr(PeerMemory, "all_reduce", all_reduce)
    found = Group(1, 3, torch.device("cpu"), memory).gather(others[1])
    assert found.equal(torch.cat(tuple(others), dim=1))


BLOCKS = 3


def waiting_sums(pads, rank, count):
    """What torch's kernel does with the signals of `count` sums; yields where it waits.

    `sync_remote_blocks` of torch's CUDASymmetricMemory-inl.h, at the begin and the end of a sum:
    each thread of a block signals to one process, its own included, and waits for its signal.
    """
    size = len(pads)

    def thread(block, target):
        theirs, mine = block * size + rank, block * size + target
        for _ in range(2 * count):
            while pads[target][theirs] != 0:
                yield
            pads[target][theirs] = 1
            yield
            while pads[rank][mine] != 1:
                yield
            pads[rank][mine] = 0
            yield

    threads = [thread(block, target) for block in range(BLOCKS) for target in range(size)]
    while threads:
        threads = [one for one in threads if next(one, "ended") is None]
        yield


@pytest.mark.parametrize(("size", "rank"), [(2, 0), (2, 1), (3, 1), (4, 0)])
def test_sums_that_wait_for_an_ended_process_go_on(size, rank):
    # Memory for signals is longer than what the kernel uses, and no multiple of the processes.
    pads = [torch.zeros(BLOCKS * size + 5, dtype=torch.int32) for _ in range(size)]
    sums = waiting_sums(pads, rank, 20)
    for _ in range(50):
        next(sums)
    assert next(sums, "ended") is None  # the others never come
    for done in range(1000):
        if done % 3:  # the kernel runs on between two writes
            signal_all(pads, rank)
        if next(sums, "ended") == "ended":
            return
    pytest.fail("the sums still wait")
