"""What heads read of a batch, and of its parts."""

import torch

from valora_train.model.prompts import HiddenStates

LENGTH, WIDTH = 9, 3
VISUAL = [[1, 2, 5], [0, 3], [6, 2, 3, 7, 4], []]
"""Which tokens heads read of each row, in the order of the grid."""
PROMPTS = (8, 6, 9, 2)


def states():
    generator = torch.Generator().manual_seed(4)
    return HiddenStates(
        torch.randn(len(VISUAL), LENGTH, WIDTH, generator=generator, requires_grad=True),
        PROMPTS,
        (9, 9, 9, 4),
        torch.arange(len(VISUAL) * LENGTH).view(len(VISUAL), LENGTH),
        tuple(torch.tensor(places, dtype=torch.int64) for places in VISUAL),
        tuple(torch.arange(len(places)) + 7 * row for row, places in enumerate(VISUAL)),
    )


def check(read, hidden, rows):
    """Compare with what is read row by row."""
    most = max(len(VISUAL[row]) for row in rows)
    assert read.visual.shape == (len(rows), most, WIDTH)
    for at, row in enumerate(rows):
        count = len(VISUAL[row])
        assert torch.equal(read.last[at], hidden[row, PROMPTS[row] - 1])
        assert torch.equal(read.visual[at, :count], hidden[row, VISUAL[row]])
        assert not read.visual[at, count:].any()
        assert read.real[at].tolist() == [True] * count + [False] * (most - count)
        assert read.places[at, :count].tolist() == [7 * row + i for i in range(count)]


def test_rows_have_different_numbers_of_visual_tokens():
    batch = states()
    check(batch.head_inputs(), batch.hidden, range(4))


def test_parts_read_their_own_rows():
    batch = states()
    parts = batch.split([1, 2, 1])
    for part, rows in zip(parts, ([0], [1, 2], [3]), strict=True):
        check(part.head_inputs(), batch.hidden, rows)
        assert part.prompts == tuple(PROMPTS[row] for row in rows)
        assert torch.equal(part.answers, batch.answers[rows[0] : rows[-1] + 1])


def test_gradients_reach_what_is_read_alone():
    batch = states()
    first, middle, last = batch.split([1, 2, 1])
    (3 * middle.head_inputs().visual.sum() + first.hidden[0, 0].sum()).backward()
    expected = torch.zeros(len(VISUAL), LENGTH, WIDTH)
    expected[0, 0] = 1
    for row in (1, 2):
        expected[row, VISUAL[row]] = 3
    assert torch.equal(batch.hidden.grad, expected)
    assert last.head_inputs().visual.shape == (1, 0, WIDTH)
