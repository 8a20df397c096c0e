"""Label heads: losses in closed form, pooling, calibration; the serving side says the same."""

import math

import pytest
import torch
from torch.nn import functional as F

from valora_data.contract.heads import read_head, write_head
from valora_serve.model.heads import HeadRequest, launch_heads
from valora_train.model.prompts import HeadInputs
from valora_train.settings import HeadSettings
from valora_train.tasks.classification import POOLINGS, ChoiceTargets, LabelHeadModule

LABELS = ("cat", "dog", "eel")
WIDTH = 6


def reads(count=5, tokens=4, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return HeadInputs(
        torch.randn(count, WIDTH, generator=generator),
        torch.randn(count, tokens, WIDTH, generator=generator),
        torch.ones(count, tokens, dtype=torch.bool),
        torch.tensor([0, 0, 5, 15])[:tokens].expand(count, tokens),
    )


def random_head(poolings=POOLINGS, seed=1):
    head = LabelHeadModule(WIDTH, LABELS, "classification", poolings)
    generator = torch.Generator().manual_seed(seed)
    for parameter in head.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator))
    return head


def loss(logits, label, shares, **settings):
    targets = ChoiceTargets(torch.tensor(label), torch.as_tensor(shares))
    return random_head().loss(logits, targets, HeadSettings(**settings))


def test_soft_and_hard_labels_in_closed_form():
    first = [[2.0, 0.5, -1.0], [0.0, 1.0, 3.0]]
    second = [[0.3, -0.5, 1.5], [2.0, 1.0, -3.0]]
    share, heat = 0.4, 3.0

    def log_softmax(row):
        total = math.log(sum(math.exp(v) for v in row))
        return [v - total for v in row]

    def expected(logits):
        hard = [-log_softmax(row)[at] for row, at in zip(logits, (0, 2), strict=True)]
        powers = [p ** (1 / heat) for p in (0.7, 0.2, 0.1)]
        teacher = [p / sum(powers) for p in powers]
        student = log_softmax([v / heat for v in logits[0]])
        apart = sum(p * (math.log(p) - q) for p, q in zip(teacher, student, strict=True))
        return ((1 - share) * hard[0] + share * heat**2 * apart + hard[1]) / 2

    logits = torch.tensor([first, second]).transpose(0, 1)
    shares = [[0.7, 0.2, 0.1], [0.0, 0.0, 0.0]]
    found = float(loss(logits, [0, 2], shares, soft=share, temperature=heat))
    assert found == pytest.approx((expected(first) + expected(second)) / 2)
    # A student that says exactly what the teacher does has no loss: softmax is not taken twice.
    shares = torch.tensor([[0.6, 0.3, 0.1]])
    assert float(loss(shares.log()[:, None], [0], shares, soft=1.0)) == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("pooling", POOLINGS)
def test_the_server_says_the_same(tmp_path, pooling):
    head, read = random_head(), reads()
    head.chosen.fill_(head.poolings.index(pooling))
    head.temperature.fill_(1.7)
    write_head(tmp_path / "head.safetensors", head.stored())
    served = read_head(tmp_path / "head.safetensors", WIDTH)
    ours = (head(read)[:, int(head.chosen)] / 1.7).softmax(-1)
    visual = torch.tensor([False, *[True] * 4, False])
    for row in range(5):
        before = torch.zeros(1, WIDTH)  # a token, then the image, and the prompt's last token
        hidden = torch.cat([before, read.visual[row], read.last[row : row + 1]])
        asked = [HeadRequest(served, hidden, visual, places=read.places[row])]
        (result,) = launch_heads(asked).read()
        said = [result.confidences[label] for label in LABELS]
        assert said == pytest.approx(ours[row].tolist(), abs=1e-5)
    again = LabelHeadModule.of(served)
    assert again.pooling == pooling
    assert again.labels == LABELS
    expected = head(read)[:, int(head.chosen)] / 1.7
    assert torch.allclose(again(read)[:, 0] / again.temperature, expected)
    # Padding is not pooled.
    read = reads(count=2, tokens=4)
    longer = HeadInputs(
        read.last,
        torch.cat([read.visual, torch.full((2, 3, WIDTH), 50.0)], dim=1),
        torch.cat([read.real, torch.zeros(2, 3, dtype=torch.bool)], dim=1),
        torch.cat([read.places, torch.zeros(2, 3, dtype=torch.int64)], dim=1),
    )
    assert torch.allclose(head(longer), head(read), atol=1e-6)


def test_the_pooling_with_the_most_hits_on_validation_is_chosen():
    head = random_head(("last", "visual_mean", "attention"))
    truth = torch.tensor([0, 1, 2, 0])
    right = F.one_hot(truth, 3).float() * 5
    wrong = right.roll(1, dims=-1)
    logits = torch.stack([wrong, right, torch.cat([right[:3], wrong[3:]])], dim=1)
    head.calibrate(logits, truth)
    assert head.pooling == "visual_mean"
    # Of equal hits the likelier; a sample without a known truth does not count.
    both = torch.stack([right, right * 2, wrong], dim=1)
    head.calibrate(both, torch.tensor([0, 1, 2, -1]))
    assert head.pooling == "visual_mean"
    # Calibration finds the temperature.
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(4000, 3, generator=generator)
    truth = torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0]
    head = random_head(["last"])
    head.calibrate(logits[:, None] * 2.5, truth)
    assert float(head.temperature) == pytest.approx(2.5, rel=0.1)
